"""TrackerLogger and `Trainer(logger=...)`: down to Accelerate's trackers, and read back from the stores of those here."""

from __future__ import annotations

import importlib.util
import json
import sqlite3
import struct
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.state import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from acclight import Callback, Trainer, TrainModule, checkpoint
from acclight.loggers import CSVLogger, Logger, TensorBoardLogger, TrackerLogger
from tests.distributed import RankChecks, run_command
from tests.scenarios import Scalar, quiet_trainer, repeated
from tests.tracked_fit import LOSSES, SaveAt, fit

on_two_ranks = RankChecks(world_size=2, timeout=120.0)


class Diary(GeneralTracker):
    """Writes down what is asked of it."""

    name = "diary"
    requires_logging_directory = False

    def __init__(self, project: str = "", **arguments: Any) -> None:
        super().__init__()
        self.project, self.arguments = project, arguments
        self.done: list[Any] = []
        made.append(self)

    @property
    def tracker(self) -> list[Any]:
        return self.done

    def start(self) -> None:
        self.done.append("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.done.append(dict(values))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.done.append((step, dict(values)))

    def finish(self) -> None:
        self.done.append("finish")


class DiaryInFolder(Diary):
    name = "diary_in_folder"
    requires_logging_directory = True

    def __init__(self, project: str, logging_dir: str, **arguments: Any) -> None:
        super().__init__(project, logging_dir=logging_dir, **arguments)


made: list[Diary] = []


@pytest.fixture(autouse=True)
def _diaries_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    made.clear()
    for one in (Diary, DiaryInFolder):
        monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, one.name, one)


def rows(diary: Diary) -> list[Any]:
    return [one for one in diary.done if isinstance(one, tuple)]


# --- names ------------------------------------------------------------------------------------------------------------


def test_an_unknown_name_gives_the_nearest() -> None:
    with pytest.raises(ValueError, match="logger='wandp' is unknown; did you mean 'wandb'"):
        Trainer(logger="wandp")
    with pytest.raises(ValueError, match=r"logger='zzz' is unknown\. Known are: aim, clearml, comet_ml"):
        Trainer(logger=["csv", "zzz"])
    with pytest.raises(TypeError, match="logger=3: give True"):
        Trainer(logger=[3])  # type: ignore[list-item]


@pytest.mark.parametrize("name", ["wandb", "mlflow", "comet_ml", "dvclive"])
def test_one_that_is_not_installed_is_told_before_training(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("acclight.loggers.tracker.get_available_trackers", lambda: ["tensorboard"])
    with pytest.raises(ImportError, match=f"logger='{name}' needs the package {name}.*`pip install {name}`"):
        Trainer(logger=name)


def test_names_and_loggers_in_one_list(tmp_path: Path) -> None:
    own = CSVLogger(tmp_path, "own")
    trainer = Trainer(logger=["tensorboard", "diary", own, Diary()], default_root_dir=tmp_path)
    assert [type(one) for one in trainer.loggers] == [TensorBoardLogger, TrackerLogger, CSVLogger, TrackerLogger]
    assert trainer.loggers[2] is own
    assert trainer.log_dir == tmp_path / "acclight_logs" / "version_0"


def test_arguments_reach_the_tracker(tmp_path: Path) -> None:
    fit(TrackerLogger("diary", project="p", colour="red"), 1)
    fit(TrackerLogger("diary_in_folder", logging_dir=tmp_path / "there"), 1)
    fit("diary_in_folder", 1)
    assert (made[0].project, made[0].arguments) == ("p", {"colour": "red"})
    assert made[1].arguments == {"logging_dir": str(tmp_path / "there")}
    assert (made[2].project, made[2].arguments) == ("acclight_logs", {"logging_dir": str(Path.cwd())})
    with pytest.raises(ValueError, match="give colour to the tracker object itself"):
        TrackerLogger(Diary(), colour="red")


# --- what a tracker is told -------------------------------------------------------------------------------------------


def test_a_run_from_start_to_end() -> None:
    fit("diary", 3)
    start, values, *written, finish = made[0].done
    assert (start, finish) == ("start", "finish")
    assert {name: value for name, value in values.items() if not name.startswith("trainer/")} == {
        "lr": 0.5, "layers": "[3, 5]",
    }  # fmt: skip
    assert values["trainer/strategy"] == "single"
    assert values["trainer/effective_batch_size"] == 1
    assert written == [(step, {"epoch": 0, "loss": LOSSES[step]}) for step in (1, 2, 3)]


def test_a_later_fit_opens_the_run_again_and_sends_nothing_twice() -> None:
    diary = Diary()
    trainer = fit(diary, 2)
    trainer.max_steps = 3
    trainer.fit(trainer.module, repeated([1.0] * 6, 1))
    words = ["values" if isinstance(one, dict) else one for one in diary.done]
    epoch = {"epoch": 0}
    assert words == [
        "start", "values", *((step, {**epoch, "loss": LOSSES[step]}) for step in (1, 2)), "finish",
        "start", (3, {**epoch, "loss": LOSSES[3]}), "finish",
    ]  # fmt: skip


def test_it_is_closed_after_an_exception() -> None:
    class Stops(Callback):
        def on_step(self, trainer: Trainer, module: TrainModule) -> None:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        fit("diary", 3, Stops())
    assert made[0].done[-1] == "finish"
    assert made[0].done.count("finish") == 1


def test_it_is_closed_once_after_ctrl_c() -> None:
    class Interrupts(Callback):
        def on_step(self, trainer: Trainer, module: TrainModule) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit("diary", 3, Interrupts())
    assert made[0].done[-1] == "finish"
    assert made[0].done.count("finish") == 1


def test_it_works_without_a_trainer_and_leaves_accelerate_alone(tmp_path: Path) -> None:
    logger = TrackerLogger("tensorboard", project="alone", logging_dir=tmp_path)
    logger.log_metrics({"a": torch.tensor(0.5)}, 7)  # type: ignore[dict-item]
    logger.finalize("success")
    assert scalars(tmp_path / "alone", "a") == [(7, 0.5)]
    assert PartialState._shared_state == {}


@on_two_ranks
def test_only_rank_0_writes(tmp_path: Path) -> None:
    trainer = quiet_trainer(strategy="ddp", max_steps=2, log_every_n_steps=1, logger=Diary())
    trainer.fit(Scalar(), repeated([1.0, 1.0], 2))
    (diary,) = made
    assert [step for step, _ in rows(diary)] == ([1, 2] if trainer.is_global_zero else [])
    assert ("start" in diary.done) is trainer.is_global_zero
    made.clear()


class WandbRun:
    """What of W&B's run is used."""

    def __init__(self, name: str) -> None:
        self.id = name
        self.metrics: list[Any] = []
        self.ended: list[int] = []

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.metrics.append((name, step_metric))

    def finish(self, exit_code: int = 0) -> None:
        self.ended.append(exit_code)


class Wandb(Diary):
    name = "wandb"

    def start(self) -> None:
        super().start()
        self.run = WandbRun(self.arguments.get("id", "first"))

    @property
    def tracker(self) -> Any:
        return self.run


def test_wandb_is_told_of_its_run_its_axis_and_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "wandb", Wandb)
    monkeypatch.setattr("acclight.loggers.tracker.get_available_trackers", lambda: ["wandb"])
    monkeypatch.setenv("WANDB_PROJECT", "from the shell")
    fit(TrackerLogger("wandb", mode="offline"), 2, SaveAt(1, str(tmp_path / "saved")))
    quiet_trainer(max_steps=2, logger="wandb", default_root_dir=tmp_path).fit(Scalar(), repeated([1.0] * 6, 1))
    first, elsewhere = made
    assert (first.project, first.arguments) == ("from the shell", {"mode": "offline"})
    assert elsewhere.arguments == {"dir": str(tmp_path)}
    assert first.tracker.metrics == [("global_step", None), ("*", "global_step")]
    # W&B's own step only grows, so that the x axis is a metric.
    assert rows(first) == [(None, {"epoch": 0, "loss": LOSSES[step], "global_step": step}) for step in (1, 2)]

    class Stops(Callback):
        def on_step(self, trainer: Trainer, module: TrainModule) -> None:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        fit("wandb", 3, Stops(), ckpt_path=tmp_path / "saved")
    assert made[2].arguments == {"id": "first", "resume": "allow"}
    assert [one for one in made[2].done if isinstance(one, dict)] == [], "the run has its hyper-parameters"
    assert made[2].tracker.ended == [1]


# --- a logger that fails ----------------------------------------------------------------------------------------------


def test_a_tracker_that_fails_does_not_stop_training_and_says_so_once() -> None:
    class Breaks(Diary):
        def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
            super().log(values, step)
            raise ConnectionError("the network is gone")

    diary = Breaks()
    with pytest.warns(UserWarning, match="the network is gone") as said:
        trainer = fit([diary, "diary"], 4)
    (told,) = (str(one.message) for one in said if "network" in str(one.message))
    assert told.startswith(
        "TrackerLogger 'diary' failed in log_metrics with ConnectionError: the network is gone; training"
    )
    assert trainer.global_step == 4
    assert len(rows(diary)) == len(rows(made[1])) == 4
    assert diary.done[-1] == "finish"


def test_a_tracker_that_cannot_start_is_asked_once_a_run() -> None:
    class Refuses(Diary):
        def start(self) -> None:
            super().start()
            raise ConnectionError("no network")

    diary = Refuses()
    with pytest.warns(UserWarning, match="failed in save with ConnectionError: no network"):
        fit(diary, 3)
    assert diary.done == ["start"]
    with pytest.warns(UserWarning, match="no network"):
        fit(diary, 1)
    assert diary.done == ["start", "start"]


def test_a_logger_of_the_users_that_fails_does_not_stop_training_either() -> None:
    class Breaks(Logger):
        def log_metrics(self, metrics: Any, step: int) -> None:
            raise OSError("disk full")

        def finalize(self, status: str) -> None:
            raise OSError("still full")

    with pytest.warns(UserWarning, match="Breaks failed in log_metrics with OSError: disk full") as said:
        assert fit(Breaks(), 3).global_step == 3
    assert len([one for one in said if "full" in str(one.message)]) == 1


# --- Accelerate's TensorBoard tracker -----------------------------------------------------------------------------------


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(name)]


def test_resuming_goes_on_in_the_run_and_sends_the_same_hyperparameters_once(tmp_path: Path) -> None:
    def logger() -> TrackerLogger:
        return TrackerLogger("tensorboard", project="halves", logging_dir=tmp_path, flush_secs=1)

    fit(logger(), 4, SaveAt(2, str(tmp_path / "saved")))
    fit(logger(), 6, ckpt_path=tmp_path / "saved")
    assert scalars(tmp_path / "halves", "loss") == TWO_FITS
    (file,) = (tmp_path / "halves").glob("*/hparams.yml")
    sent = yaml.safe_load(file.read_text())
    assert (sent["lr"], sent["trainer/precision"]) == (0.5, "32-true")
    document = checkpoint.verify(tmp_path / "saved") or json.loads((tmp_path / "saved" / "trainer.json").read_text())
    assert document["loggers"]["TrackerLogger/tensorboard/halves"]["run"] == str(tmp_path / "halves")


# --- trackers that are really installed -----------------------------------------------------------------------------------


def tracked(name: str, folder: Path, module: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """The two fits of tests/tracked_fit.py in a process of their own: trackers leave threads and patches behind."""
    if importlib.util.find_spec(module or name) is None:
        pytest.skip(f"{name} is not installed")
    root = str(Path(__file__).resolve().parent.parent)
    done = run_command(
        [sys.executable, "-m", "tests.tracked_fit", name], cwd=folder, timeout=200.0, env={"PYTHONPATH": root, **env}
    )
    assert done.returncode == 0, done.stdout
    assert "failed in" not in done.stdout
    return done


#: Steps 3 and 4 are done by both.
TWO_FITS = [(step, LOSSES[step]) for step in (1, 2, 3, 4, 3, 4, 5, 6)]


def test_mlflow(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/mlflow.db"
    tracked("mlflow", tmp_path, MLFLOW_TRACKING_URI=store)
    from mlflow import MlflowClient  # type: ignore[import-not-found]

    client = MlflowClient(store)
    (run,) = client.search_runs([client.get_experiment_by_name("halves").experiment_id])
    history = client.get_metric_history(run.info.run_id, "loss")
    assert sorted((point.step, point.value) for point in history) == sorted(TWO_FITS)
    assert run.info.status == "FINISHED"
    assert (run.data.params["lr"], run.data.params["trainer/strategy"]) == ("0.5", "single")


def test_trackio(tmp_path: Path) -> None:
    tracked("trackio", tmp_path, TRACKIO_DIR=str(tmp_path))
    store = sqlite3.connect(tmp_path / "halves.db")
    found = store.execute("select step, json_extract(cast(metrics as text), '$.loss') from metrics").fetchall()
    assert sorted(found) == sorted(TWO_FITS)
    assert len(store.execute("select distinct run_name from metrics").fetchall()) == 1
    (config,) = (json.loads(text) for (text,) in store.execute("select config from configs"))
    assert (config["lr"], config["trainer/strategy"]) == (0.5, "single")
    store.close()


def test_dvclive(tmp_path: Path) -> None:
    tracked("dvclive", tmp_path)
    lines = (tmp_path / "dvclive" / "plots" / "metrics" / "loss.tsv").read_text().splitlines()[1:]
    assert [(int(step), float(value)) for step, value in (line.split("\t") for line in lines)] == TWO_FITS
    assert yaml.safe_load((tmp_path / "dvclive" / "params.yaml").read_text())["lr"] == 0.5


def test_comet(tmp_path: Path) -> None:
    tracked("comet_ml", tmp_path, COMET_OFFLINE_DIRECTORY=str(tmp_path))
    archives = sorted(tmp_path.glob("*.zip"), key=lambda path: path.stat().st_mtime)
    assert len({path.name.partition("-")[0] for path in archives}) == 1, "one experiment's key"
    found, parameters = [], {}
    for path in archives:
        with zipfile.ZipFile(path) as archive:
            payloads = [json.loads(line)["payload"] for line in archive.read("messages.json").splitlines()]
        metrics = [one["metric"] for one in payloads if "metric" in one]
        found += [(one["step"], one["metricValue"]) for one in metrics if one["metricName"] == "loss"]
        parameters |= {one["param"]["paramName"]: one["param"]["paramValue"] for one in payloads if one.get("param")}
    assert found == TWO_FITS
    assert (parameters["lr"], parameters["trainer/strategy"]) == (0.5, "single")


def test_clearml(tmp_path: Path) -> None:
    tracked("clearml", tmp_path, CLEARML_OFFLINE_MODE="1", CLEARML_CACHE_DIR=str(tmp_path))
    (file,) = tmp_path.glob("offline/*/metrics.jsonl")
    events = [event for line in file.read_text().splitlines() for event in json.loads(line)]
    found = [(event["iter"], event["value"]) for event in events if event.get("metric") == "loss"]
    assert sorted(found) == sorted(TWO_FITS)


def test_wandb(tmp_path: Path) -> None:
    tracked("wandb", tmp_path)
    from wandb.proto import wandb_internal_pb2  # type: ignore[import-not-found]

    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert len({path.name for path in files}) == 1, "one run's id"
    found, config = [], {}
    for path in files:
        for data in leveldb_records(path):
            record = wandb_internal_pb2.Record.FromString(data)
            for entry in (*record.config.update, *record.run.config.update):
                config["/".join(entry.nested_key) or entry.key] = json.loads(entry.value_json)
            row = {one.key or one.nested_key[0]: json.loads(one.value_json) for one in record.history.item}
            if "loss" in row:
                found.append((row["global_step"], row["loss"]))
    assert found == TWO_FITS
    assert (config["lr"], config["trainer/strategy"]) == (0.5, "single")


def test_swanlab(tmp_path: Path) -> None:
    """Its store has no reader; that nothing failed, and that both fits have the run's id."""
    tracked("swanlab", tmp_path)
    assert len({path.name for path in tmp_path.glob("swanlog/run-*/*.swanlab")}) == 1


def leveldb_records(path: Path) -> Iterator[bytes]:
    """The records of a LevelDB log after a header of 7 bytes: blocks of 32 KiB with pieces of (crc, length, kind, data)."""
    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            yield whole
            whole = b""
