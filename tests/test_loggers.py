"""Loggers: what they write, read back with csv and with TensorBoard's own reader."""

from __future__ import annotations

import csv
import errno
import json
import math
import os
import subprocess
import sys
import threading
from argparse import Namespace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning_utilities.core.rank_zero import rank_zero_only

from acclight import Trainer
from acclight.loggers import CSVLogger, Logger, TensorBoardLogger
from tests.distributed import RankChecks
from tests.scenarios import Scalar, repeated

on_two_ranks = RankChecks(world_size=2, timeout=120.0)


class Colour(Enum):
    RED = "red"


@pytest.fixture
def other_rank() -> Any:
    """This process plays a rank that does not write."""
    before = getattr(rank_zero_only, "rank", None)
    rank_zero_only.rank = 1  # type: ignore[attr-defined]
    yield
    rank_zero_only.rank = before  # type: ignore[attr-defined]


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


# --- the run folder ---------------------------------------------------------------------------------------------------


def test_versions_count_up_and_are_decided_once(tmp_path: Path) -> None:
    first = CSVLogger(tmp_path)
    assert first.next_version() == 0
    assert first.version is None
    assert first.log_dir == tmp_path / "acclight_logs" / "version_0"
    assert not (tmp_path / "acclight_logs").exists(), "deciding creates nothing"
    first.log_metrics({"a": 1.0}, 1)
    assert first.log_dir == tmp_path / "acclight_logs" / "version_0", "its own folder does not move it on"
    (tmp_path / "acclight_logs" / "version_9").mkdir()
    (tmp_path / "acclight_logs" / "version_9b").mkdir()
    (tmp_path / "acclight_logs" / "version_12").write_text("a file, not a run")
    assert TensorBoardLogger(tmp_path).log_dir == tmp_path / "acclight_logs" / "version_10"


@pytest.mark.parametrize(
    ("name", "version", "expected"),
    [("exp", 3, "exp/version_3"), ("exp", "lr-1e-3", "exp/lr-1e-3"), ("", None, "version_0"), ("", "run", "run")],
)
def test_names_of_folders(tmp_path: Path, name: str, version: int | str | None, expected: str) -> None:
    logger = CSVLogger(tmp_path, name, version)
    logger.log_metrics({"a": 1.0}, 1)
    assert (tmp_path / expected / "metrics.csv").exists()


def test_two_loggers_of_one_run_share_its_folder(tmp_path: Path) -> None:
    loggers: list[Any] = [TensorBoardLogger(tmp_path), CSVLogger(tmp_path)]
    for logger in loggers:
        logger.version = logger.next_version()
    for logger in loggers:
        logger.log_metrics({"a": 1.0}, 1)
        logger.finalize("success")
    assert [path.name for path in (tmp_path / "acclight_logs").iterdir()] == ["version_0"]


def test_base_logger_writes_nothing_and_names_what_is_missing() -> None:
    logger = Logger()
    assert logger.log_dir is None
    logger.log_hyperparams({"a": 1})
    logger.finalize("success")
    with pytest.raises(NotImplementedError, match="Logger does not define `log_metrics`"):
        logger.log_metrics({"a": 1.0}, 1)


# --- CSV --------------------------------------------------------------------------------------------------------------


def test_csv_gains_columns_and_keeps_every_row(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, version=0)
    for step in range(1, 101):
        values = {"loss": step / 3}
        if step % 10 == 0:
            values[f"at_{step}"] = float(step)
        logger.log_metrics(values, step)
    folder = logger.log_dir
    table = rows(folder)
    assert [int(row["step"]) for row in table] == list(range(1, 101))
    assert [float(row["loss"]) for row in table] == [step / 3 for step in range(1, 101)]
    assert list(table[0]) == ["step", "loss", *(f"at_{step}" for step in range(10, 101, 10))]
    for column in (10, 100):
        cells = {int(row["step"]): row[f"at_{column}"] for row in table}
        assert cells == {step: repr(float(step)) if step == column else "" for step in range(1, 101)}
    assert [path.name for path in folder.iterdir()] == ["metrics.csv"], "no temporary file is left"


def test_csv_numbers_come_back_exactly(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "third": 1 / 3, "tiny": 5e-324, "huge": 1.7976931348623157e308, "int": 2**53 + 1,
        "nan": math.nan, "inf": -math.inf, "numpy": np.float32(0.1), "double": np.float64(0.1),
        "tensor": torch.tensor(0.1, dtype=torch.float64),
    }  # fmt: skip
    logger = CSVLogger(tmp_path, version=0)
    logger.log_metrics(values, 7)
    (row,) = rows(logger.log_dir)
    assert row["step"] == "7"
    for name in ("third", "tiny", "huge", "inf"):
        assert float(row[name]) == values[name]
    assert int(row["int"]) == 2**53 + 1
    assert math.isnan(float(row["nan"]))
    assert float(row["numpy"]) == float(np.float32(0.1))
    assert float(row["tensor"]) == float(row["double"]) == 0.1


def test_csv_names_with_commas_quotes_and_line_ends(tmp_path: Path) -> None:
    odd = 'a,"b"\nc'
    logger = CSVLogger(tmp_path, version=0)
    logger.log_metrics({odd: 1.5}, 1)
    logger.log_metrics({"later": 2.5, odd: 3.5}, 2)
    table = rows(logger.log_dir)
    assert [row[odd] for row in table] == ["1.5", "3.5"]
    assert [row["later"] for row in table] == ["", "2.5"]


def test_csv_epoch_stands_next_to_the_step(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, version=0)
    logger.log_metrics({"b": 1.0, "a": 2.0, "epoch": 0}, 1)
    assert list(rows(logger.log_dir)[0]) == ["step", "epoch", "b", "a"]


def test_csv_row_is_on_disk_at_once_and_survives_a_kill(tmp_path: Path) -> None:
    script = (
        "import os, signal; from acclight.loggers import CSVLogger\n"
        f"logger = CSVLogger({str(tmp_path)!r}, version=0)\n"
        "for step in (1, 2, 3): logger.log_metrics({'a': step / 2}, step)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], timeout=120, check=False)
    assert done.returncode == -9
    assert [row["a"] for row in rows(tmp_path / "acclight_logs" / "version_0")] == ["0.5", "1.0", "1.5"]


def test_csv_goes_on_with_an_existing_run(tmp_path: Path) -> None:
    first = CSVLogger(tmp_path, version=0)
    first.log_metrics({"a": 1.0}, 1)
    first.finalize("failed")
    second = CSVLogger(tmp_path, version=0)
    second.log_metrics({"a": 2.0}, 2)
    second.log_metrics({"b": 3.0}, 3)
    second.finalize("success")
    second.log_metrics({"c": 4.0}, 4)
    assert [list(row.values()) for row in rows(second.log_dir)] == [
        ["1", "1.0", "", ""],
        ["2", "2.0", "", ""],
        ["3", "", "3.0", ""],
        ["4", "", "", "4.0"],
    ]


@pytest.mark.parametrize("cut", [1, 3, 6])
def test_csv_drops_a_row_that_was_cut_off_and_says_so(tmp_path: Path, cut: int) -> None:
    logger = CSVLogger(tmp_path, version=0)
    logger.log_metrics({"a": 0.25}, 1)
    logger.log_metrics({"a": 0.75}, 2)
    logger.finalize("failed")
    file = logger.log_dir / "metrics.csv"
    os.truncate(file, file.stat().st_size - cut)
    again = CSVLogger(tmp_path, version=0)
    with pytest.warns(UserWarning, match="the last row was cut off"):
        again.log_metrics({"a": 1.5}, 3)
    assert [(row["step"], row["a"]) for row in rows(again.log_dir)] == [("1", "0.25"), ("3", "1.5")]


def test_csv_whose_header_was_cut_off_begins_anew(tmp_path: Path) -> None:
    folder = tmp_path / "acclight_logs" / "version_0"
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text("step,los")
    logger = CSVLogger(tmp_path, version=0)
    with pytest.warns(UserWarning, match="cut off"):
        logger.log_metrics({"loss": 1.0}, 1)
    assert rows(folder) == [{"step": "1", "loss": "1.0"}]


def test_csv_refuses_a_file_that_is_not_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "acclight_logs" / "version_0"
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text("time,value\n1,2\n")
    with pytest.raises(ValueError, match=r"metrics\.csv was not written by CSVLogger"):
        CSVLogger(tmp_path, version=0).log_metrics({"a": 1.0}, 1)
    assert (folder / "metrics.csv").read_text() == "time,value\n1,2\n"


def test_csv_refuses_values_that_are_no_number(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, version=0)
    for bad in ("text", None, torch.zeros(2), [1.0]):
        with pytest.raises(TypeError, match="metric 'x' is"):
            logger.log_metrics({"x": bad}, 1)  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="a metric named 'step'"):
        logger.log_metrics({"step": 1.0}, 1)


def test_csv_error_names_the_file(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, version=0)
    logger.log_metrics({"a": 1.0}, 1)

    class Full:
        def write(self, text: str) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    logger.experiment._file = Full()
    with pytest.raises(OSError, match=r"No space left on device: '.*metrics\.csv'"):
        logger.log_metrics({"a": 2.0}, 2)


def test_csv_widening_that_fails_leaves_the_table_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = CSVLogger(tmp_path, version=0)
    logger.log_metrics({"a": 1.0}, 1)

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match=r"metrics\.csv"):
            logger.log_metrics({"b": 2.0}, 2)
    assert rows(logger.log_dir) == [{"step": "1", "a": "1.0"}]
    again = CSVLogger(tmp_path, version=0)
    again.log_metrics({"b": 2.0}, 2)
    assert [row["a"] for row in rows(again.log_dir)] == ["1.0", ""]


# --- hyper-parameters -------------------------------------------------------------------------------------------------

HPARAMS: dict[str, Any] = {
    "lr": 0.1, "steps": 3, "flag": True, "none": None, "name": "x|y", "path": Path("/data/set"), "colour": Colour.RED,
    "scalar": np.float64(0.5), "tensor": torch.tensor(2), "space": Namespace(depth=2), "list": [1, (2, Path("p"))],
    "kind": torch.nn.ReLU, "net": {"width": 8, "act": {"slope": 0.2}},
}  # fmt: skip


def test_csv_hyperparameters_are_plain_json(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, version=0)
    logger.log_hyperparams(HPARAMS)
    logger.log_hyperparams(Namespace(lr=0.2))
    assert json.loads((logger.log_dir / "hparams.json").read_text()) == {
        "lr": 0.2, "steps": 3, "flag": True, "none": None, "name": "x|y", "path": "/data/set", "colour": "red",
        "scalar": 0.5, "tensor": 2, "space": {"depth": 2}, "list": [1, [2, "p"]],
        "kind": "torch.nn.modules.activation.ReLU", "net": {"width": 8, "act": {"slope": 0.2}},
    }  # fmt: skip
    assert [path.name for path in logger.log_dir.iterdir()] == ["hparams.json"]


def test_hyperparameters_that_are_objects_become_text(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, version=0)
    logger.log_hyperparams({"loss": torch.nn.MSELoss(), "f": math.sqrt, "big": torch.zeros(2), "set": {3, 1}})
    assert json.loads((logger.log_dir / "hparams.json").read_text()) == {
        "loss": "MSELoss()", "f": "math.sqrt", "big": "tensor([0., 0.])", "set": [1, 3]
    }  # fmt: skip


# --- TensorBoard ------------------------------------------------------------------------------------------------------


def test_tensorboard_scalars_at_the_optimizer_step(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, version=0)
    logger.log_metrics({"loss": 0.5, "epoch": 0}, 10)
    logger.log_metrics({"loss": torch.tensor(0.25), "epoch": 1}, 20)  # type: ignore[dict-item]
    logger.save()
    read = events(logger.log_dir)
    assert [(event.step, event.value) for event in read.Scalars("loss")] == [(10, 0.5), (20, 0.25)]
    assert [(event.step, event.value) for event in read.Scalars("epoch")] == [(10, 0.0), (20, 1.0)]
    logger.finalize("success")


def test_tensorboard_goes_on_with_an_existing_run(tmp_path: Path) -> None:
    for steps in ((1, 2, 3), (3, 4)):
        logger = TensorBoardLogger(tmp_path, version="run")
        for step in steps:
            logger.log_metrics({"loss": float(step)}, step)
        logger.finalize("success")
    read = events(tmp_path / "acclight_logs" / "run")
    assert [event.step for event in read.Scalars("loss")] == [1, 2, 3, 3, 4]


def test_tensorboard_can_be_used_again_after_its_end(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, version=0)
    logger.log_metrics({"loss": 1.0}, 1)
    logger.finalize("success")
    logger.log_metrics({"test": 2.0}, 1)
    logger.finalize("success")
    read = events(logger.log_dir)
    assert read.Scalars("loss")[0].value == 1.0
    assert read.Scalars("test")[0].value == 2.0


def test_tensorboard_hyperparameters_as_text_and_in_the_hparams_tab(tmp_path: Path) -> None:
    from tensorboard.plugins.hparams.metadata import (
        parse_session_end_info_plugin_data,
        parse_session_start_info_plugin_data,
    )

    logger = TensorBoardLogger(tmp_path, version=0)
    logger.log_hyperparams(HPARAMS)
    logger.log_metrics({"loss": 1.0}, 1)
    logger.finalize("success")
    read = events(logger.log_dir)
    (text,) = read.Tensors("hparams/text_summary")
    lines = text.tensor_proto.string_val[0].decode().splitlines()
    assert lines[:3] == ["| name | value |", "| --- | --- |", "| lr | 0.1 |"]
    assert "| net/act/slope | 0.2 |" in lines
    assert r"| name | x\|y |" in lines
    plugin = read.PluginTagToContent("hparams")
    start = parse_session_start_info_plugin_data(plugin["_hparams_/session_start_info"])
    assert start.hparams["lr"].number_value == 0.1
    assert start.hparams["colour"].string_value == "red"
    assert start.hparams["net/width"].number_value == 8
    # 1 is STATUS_SUCCESS in TensorBoard's api.proto.
    assert parse_session_end_info_plugin_data(plugin["_hparams_/session_end_info"]).status == 1
    assert len(list(logger.log_dir.iterdir())) == 1, "one event file"


def test_tensorboard_run_that_failed_is_not_marked_as_a_success(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, version=0)
    logger.log_hyperparams({"lr": 0.1})
    logger.finalize("failed")
    assert "_hparams_/session_end_info" not in events(logger.log_dir).PluginTagToContent("hparams")


def test_tensorboard_end_leaves_no_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    logger = TensorBoardLogger(tmp_path, version=0)
    logger.log_metrics({"a": 1.0}, 1)
    logger.finalize("interrupted")
    assert threading.active_count() == before


# --- other ranks, imports ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_other_ranks_write_nothing(tmp_path: Path, other_rank: None, kind: type[CSVLogger | TensorBoardLogger]) -> None:
    logger = kind(tmp_path, version=0)
    logger.log_metrics({"a": 1.0}, 1)
    logger.log_hyperparams({"lr": 0.1})
    logger.experiment.add_histogram("weights", torch.zeros(3), 1)
    logger.save()
    logger.finalize("success")
    assert list(tmp_path.iterdir()) == []


def test_importing_the_loggers_does_not_import_tensorboard() -> None:
    script = "import sys, acclight.loggers as l; l.CSVLogger; print('tensorboard' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "False"


# --- the run that a fit resumes -----------------------------------------------------------------------------------------


def resumable(logger: Any, root: Path, epochs: int, ckpt_path: Any = "auto") -> Trainer:
    """A fit of two steps an epoch, with each step logged and a checkpoint after each epoch."""
    batches = 2 * int(os.environ.get("WORLD_SIZE", "1"))
    switches = {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(max_epochs=epochs, logger=logger, log_every_n_steps=1, default_root_dir=root, **switches)
    trainer.fit(Scalar(), repeated([1.0], batches), ckpt_path=ckpt_path)
    return trainer


def steps_in(file: Path) -> list[int]:
    return [int(row["step"]) for row in csv.DictReader(file.open()) if row["loss"]]


LOGGERS = {
    "True": lambda root: True,
    "csv": lambda root: "csv",
    "CSVLogger": CSVLogger,
    "TensorBoardLogger": TensorBoardLogger,
    "several": lambda root: [TensorBoardLogger(root, "other"), CSVLogger(root)],
}


@pytest.mark.parametrize("ckpt_path", ["auto", "last", "a path"])
@pytest.mark.parametrize("name", LOGGERS)
def test_a_resumed_fit_goes_on_in_its_run(name: str, ckpt_path: str, tmp_path: Path) -> None:
    first = resumable(LOGGERS[name](tmp_path), tmp_path, 1)
    assert first.loggers[0].version == 0
    saved = first.checkpoint_callback.last_model_path
    again = resumable(LOGGERS[name](tmp_path), tmp_path, 2, saved if ckpt_path == "a path" else ckpt_path)
    assert again.global_step == 4
    assert [one.version for one in again.loggers] == [0] * len(again.loggers)
    assert again.log_dir == first.log_dir
    assert set(tmp_path.rglob("version_*")) == {one.log_dir for one in again.loggers}
    assert Path(again.checkpoint_callback.last_model_path) == Path(saved).with_name("step-00000004")
    if name != "TensorBoardLogger":
        assert steps_in(tmp_path / "acclight_logs" / "version_0" / "metrics.csv") == [1, 2, 3, 4]
    if name in ("True", "TensorBoardLogger"):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(tmp_path / "acclight_logs" / "version_0"))
        # Files of one second are read in any order.
        assert sorted(event.step for event in events.Reload().Scalars("loss")) == [1, 2, 3, 4]


def said_of_intervals(recwarn: pytest.WarningsRecorder) -> list[str]:
    return [str(one.message) for one in recwarn if "log_every_n_steps" in str(one.message)]


def test_a_training_too_short_to_log_its_steps_is_warned_of(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    switches = {"enable_progress_bar": False, "enable_checkpointing": False, "default_root_dir": tmp_path}
    trainer = Trainer(max_epochs=3, logger="csv", log_every_n_steps=10, **switches)
    trainer.fit(Scalar(), repeated([1.0], 3))
    (said,) = said_of_intervals(recwarn)
    assert said.startswith("training ends at step 9, before the next of every log_every_n_steps=10 steps")
    assert not list(tmp_path.rglob("metrics.csv"))


def test_nothing_is_said_where_steps_are_logged_or_nobody_reads_them(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    switches = {"enable_progress_bar": False, "enable_checkpointing": False, "default_root_dir": tmp_path}
    logs = Trainer(max_epochs=5, logger="csv", log_every_n_steps=10, **switches)
    logs.fit(Scalar(), repeated([1.0], 3))
    assert steps_in(logs.log_dir / "metrics.csv") == [10]
    Trainer(max_epochs=3, logger=False, log_every_n_steps=10, **switches).fit(Scalar(), repeated([1.0], 3))
    Trainer(fast_dev_run=True, **switches).fit(Scalar(), repeated([1.0], 3))
    assert said_of_intervals(recwarn) == []


def test_which_runs_are_new_ones(tmp_path: Path) -> None:
    first = resumable(CSVLogger(tmp_path), tmp_path, 1)
    saved = first.checkpoint_callback.last_model_path
    assert resumable(CSVLogger(tmp_path), tmp_path, 1, None).logger.version == 1, "nothing is resumed"
    assert resumable(CSVLogger(tmp_path, version="own"), tmp_path, 2, saved).logger.version == "own"
    other = resumable(CSVLogger(tmp_path / "other"), tmp_path, 2, saved)
    assert other.log_dir == tmp_path / "other" / "acclight_logs" / "version_0"
    assert steps_in(first.log_dir / "metrics.csv") == [1, 2]
    # The one that was given goes on too, when a later fit does not give it.
    again = resumable(
        CSVLogger(tmp_path), tmp_path, 3, tmp_path / "acclight_logs" / "own" / "checkpoints" / "step-00000004"
    )
    assert again.log_dir == tmp_path / "acclight_logs" / "own"


@on_two_ranks
def test_both_ranks_go_back_to_the_run_that_is_resumed(tmp_path: Path) -> None:
    resumable("csv", tmp_path, 1)
    trainer = resumable("csv", tmp_path, 2)
    assert trainer.log_dir == tmp_path / "acclight_logs" / "version_0"
    folder = trainer.log_dir / "checkpoints"
    assert trainer.checkpoint_callback.last_model_path == str(folder / "step-00000004")
    trainer.core.barrier()
    assert [one.name for one in (tmp_path / "acclight_logs").iterdir()] == ["version_0"]
    assert steps_in(trainer.log_dir / "metrics.csv") == [1, 2, 3, 4]
