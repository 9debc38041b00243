"""The start-up summary: what is in force, where it came from, once, and to the loggers as well."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from acclight import Trainer, seed_everything
from acclight.startup import in_force
from acclight.strategies import DDPStrategy, FSDP2Strategy
from acclight.strategies.resolve import resolve_strategy
from tests.distributed import RankChecks, run_command
from tests.scenarios import Scalar, quiet_trainer

on_two_ranks = RankChecks(world_size=2, timeout=120.0)
ROOT = Path(__file__).resolve().parent.parent


def loader(samples: int = 16, size: int = 2) -> DataLoader[Any]:
    return DataLoader(torch.ones(samples), batch_size=size)  # type: ignore[arg-type]


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    (text,) = (one.getMessage() for one in caplog.records if one.getMessage().startswith("fit: "))
    return text.splitlines()


def test_a_plain_start(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("acclight.seed.given", None)
    quiet_trainer(max_steps=1).fit(Scalar(), loader())
    assert said(caplog) == [
        "fit: strategy single, 1 process on 1 machine, cpu, precision 32-true",
        "  effective batch 2 x 1 process x accumulation 1 = 2, no validation",
    ]


def test_arguments_are_named_as_such(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    seed_everything(42)
    trainer = quiet_trainer(
        strategy=DDPStrategy({"bucket_cap_mb": 3}, gradient_as_bucket_view=True), max_steps=1, precision="bf16-mixed",
        accumulate_grad_batches=4, gradient_clip_val=0.5, logger="csv", default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(Scalar(), loader(), loader(2))
    folder = tmp_path / "acclight_logs" / "version_0"
    counts = (
        "effective batch 2 x 1 process x accumulation 4 [argument] = 8, gradients clipped by norm at 0.5 [argument]"
    )
    assert said(caplog) == [
        "fit: strategy ddp [argument], 1 process on 1 machine, cpu, precision bf16-mixed [argument]",
        "  bucket_cap_mb=3 [argument], gradient_as_bucket_view=True [argument]",
        f"  {counts}, seed 42 [seed_everything], validation every epoch",
        f"  logs: CSVLogger in {folder}",
    ]
    assert json.loads((folder / "configuration.json").read_text()) == {
        "strategy": "ddp", "strategy.bucket_cap_mb": 3, "strategy.gradient_as_bucket_view": True, "processes": 1, "machines": 1,
        "device": "cpu", "precision": "bf16-mixed", "accumulate_grad_batches": 4, "batch_size": 2, "effective_batch_size": 8,
        "gradient_clip_val": 0.5, "gradient_clip_algorithm": "norm", "seed": 42,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("interval", "phrase"),
    [(1, "every step"), (1.0, "every epoch"), (2, "every 2 steps"), (0.5, "every 4 steps")],
)
def test_a_number_of_steps_is_told_from_a_fraction_of_an_epoch(
    interval: float, phrase: str, caplog: pytest.LogCaptureFixture
) -> None:
    quiet_trainer(max_steps=1, val_check_interval=interval).fit(Scalar(), loader(), loader(2))
    assert said(caplog)[1].endswith(f", validation {phrase}")


def test_the_model_follows_in_the_same_place(caplog: pytest.LogCaptureFixture) -> None:
    quiet_trainer(max_steps=1, enable_model_summary=True).fit(Scalar(), loader())
    texts = [one.getMessage() for one in caplog.records]
    fit = next(number for number, text in enumerate(texts) if text.startswith("fit: "))
    assert "Scalar: 1 parameters, 1 trainable" in texts[fit + 1]


def test_the_batch_size_of_a_batch_sampler_counts() -> None:
    data = torch.ones(8)
    batches = DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 4, drop_last=False))  # type: ignore[arg-type]
    trainer = quiet_trainer(max_steps=1, accumulate_grad_batches=2)
    trainer.fit(Scalar(), batches)
    settings = in_force(trainer, resumed=False)
    assert (settings["batch_size"].value, settings["effective_batch_size"].value) == (4, 8)
    trainer = quiet_trainer(max_steps=1)
    trainer.fit(Scalar(), [torch.ones(3)])
    assert "batch_size" not in in_force(trainer, resumed=False)


def test_a_file_and_the_launcher_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fsdp.yaml").write_text("fsdp_config: {fsdp_reshard_after_forward: false, fsdp_offload_params: true}\n")
    # Accelerate's plugins leave variables behind where they are made by hand.
    for name in [name for name in os.environ if name.startswith("FSDP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING", "true")
    strategy = resolve_strategy(FSDP2Strategy(tmp_path / "fsdp.yaml", cpu_offload=False))
    assert dict(strategy.field_sources) == {
        "reshard_after_forward": "fsdp.yaml", "cpu_offload": "argument", "activation_checkpointing": "launcher",
    }  # fmt: skip
    from_launcher = resolve_strategy("auto")
    assert set(from_launcher.field_sources.values()) == {"launcher"}


@on_two_ranks
def test_two_ranks(tmp_path: Path) -> None:
    trainer = quiet_trainer(strategy="ddp", max_steps=1, accumulate_grad_batches=2)
    trainer.fit(Scalar(), loader())
    settings = in_force(trainer, resumed=False)
    assert str(settings["processes"]) == "2 [launcher]"
    assert settings["effective_batch_size"].value == 2 * 2 * 2


def test_under_accelerate_launch(tmp_path: Path) -> None:
    """Rank 0 alone says it; what the launch file sets to what it is anyway is left out."""
    (tmp_path / "launch.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: bf16\nnum_machines: 1\n"
        "num_processes: 2\nfsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: true, "
        "fsdp_cpu_ram_efficient_loading: false, fsdp_activation_checkpointing: true}\n"
    )
    (tmp_path / "train.py").write_text(
        "import torch\nfrom acclight.strategies import FSDP2Strategy\nfrom tests.scenarios import Scalar, quiet_trainer\n"
        "from tests.test_startup import loader\n"
        "strategy = FSDP2Strategy(reshard_after_forward=False)\n"
        "quiet_trainer(strategy=strategy, max_steps=1).fit(Scalar(), loader())\n"
    )
    launch = [str(Path(sys.executable).parent / "accelerate"), "launch", "--main_process_port", "0"]
    done = run_command(
        [*launch, "--config_file", "launch.yaml", "train.py"], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stdout
    text = done.stdout[done.stdout.index("fit: ") :].splitlines()
    assert text[:3] == [
        "fit: strategy fsdp2 [argument], 2 processes on 1 machine [launcher], cpu, precision bf16-mixed [launcher]",
        "  reshard_after_forward=False [argument], activation_checkpointing=True [launcher]",
        "  effective batch 2 x 2 processes x accumulation 1 = 4, no validation",
    ]
    assert done.stdout.count("fit: ") == 1
    assert len(re.findall("reshard_after_forward=False of the script's strategy wins over True", done.stdout)) == 1


def test_what_the_script_gave_is_known() -> None:
    assert dict(Trainer(max_steps=3, logger=False).given_arguments) == {"max_steps": 3, "logger": False}
