"""The ready-made callbacks on two ranks: the same decisions everywhere, whole counts, one copy of everything."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from acclight import Callback, Trainer, TrainModule, checkpoint
from acclight.callbacks import ModelCheckpoint, ModelSummary, ThroughputMonitor
from acclight.loggers import CSVLogger, TensorBoardLogger
from tests.distributed import RankChecks

# Of the process that runs a check; the one that collects the tests has none.
RANK = int(os.environ.get("RANK", "0"))

on_two_ranks = RankChecks(world_size=2, timeout=120)


class Net(TrainModule):
    """Its validation metric is another on each rank: the rank's number plus the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.second = nn.Linear(5, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        output: Tensor = self.second(self.first(batch))
        return output.square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        # Odd epochs are better on rank 0 and worse on rank 1; over both ranks they are better by 1.
        self.log("val", float(self.global_rank * 10 * (self.current_epoch + 1)) - 8.0 * self.current_epoch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def loader(samples: int = 16) -> DataLoader[Any]:
    return DataLoader(torch.ones(samples, 3).unbind(), batch_size=2)  # type: ignore[arg-type]


def trainer(root: Path, strategy: str, *callbacks: Callback, **arguments: Any) -> Trainer:
    settings: dict[str, Any] = {
        "max_epochs": 2, "logger": False, "default_root_dir": root, "enable_progress_bar": False,
        "enable_model_summary": False, "num_sanity_val_steps": 0,
    }  # fmt: skip
    return Trainer(strategy=strategy, callbacks=list(callbacks), **(settings | arguments))


def same_on_all_ranks(value: Any) -> bool:
    values: list[Any] = [None, None]
    dist.all_gather_object(values, value)
    return bool(values[0] == values[1])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@on_two_ranks
def test_ranks_agree_on_what_is_best(tmp_path: Path, strategy: str) -> None:
    callback = ModelCheckpoint(tmp_path / "ckpt", monitor="val", mode="min", filename="{epoch}-{val:.1f}")
    run = trainer(tmp_path, strategy, callback)
    run.fit(Net(), loader(), loader())
    # Means over the ranks: (0 + 10) / 2 = 5 and (-8 + 12) / 2 = 2.
    assert callback.best_model_score == pytest.approx(2.0)
    assert Path(callback.best_model_path).name == "epoch=1-val=2.0"
    assert same_on_all_ranks((callback.best_model_path, callback.best_k_models, callback.state_dict()))
    run.core.barrier()
    assert [path.name for path in (tmp_path / "ckpt").iterdir()] == ["epoch=1-val=2.0"]
    assert checkpoint.verify(callback.best_model_path) == []


@on_two_ranks
def test_clock_of_rank_0_decides(tmp_path: Path) -> None:
    steps: list[int] = []

    class Seen(Callback):
        def on_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: Path) -> None:
            steps.append(trainer.global_step)

    # Only rank 1 thinks at once that an hour has passed; only rank 0's opinion counts.
    interval = timedelta(hours=1) if RANK == 0 else timedelta(0)
    callback = ModelCheckpoint(tmp_path / "ckpt", train_time_interval=interval)
    trainer(tmp_path, "ddp", callback, Seen(), log_every_n_steps=1).fit(Net(), loader())
    assert steps == [8], "the last step alone"


@on_two_ranks
def test_folder_of_rank_0_is_everybodys(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path / f"rank{RANK}")
    run = trainer(tmp_path, "ddp", callback)
    run.fit(Net(), loader())
    run.core.barrier()
    assert [path.name for path in tmp_path.iterdir()] == ["rank0"]
    assert same_on_all_ranks(callback.last_model_path)


@on_two_ranks
def test_one_run_folder_and_one_copy_of_every_row(tmp_path: Path) -> None:
    run = trainer(
        tmp_path, "ddp", ThroughputMonitor(lambda batch: batch.shape[0] * (1 + RANK)), log_every_n_steps=4,
        logger=[TensorBoardLogger(tmp_path), CSVLogger(tmp_path)],
    )  # fmt: skip
    run.fit(Net(), loader(), loader())
    run.core.barrier()
    assert [path.name for path in (tmp_path / "acclight_logs").iterdir()] == ["version_0"]
    assert same_on_all_ranks(str(run.log_dir))
    lines = (tmp_path / "acclight_logs" / "version_0" / "metrics.csv").read_text().splitlines()
    assert len(lines) == len(set(lines))
    header = lines[0].split(",")
    (row, *_) = [line.split(",") for line in lines[1:] if line.split(",")[header.index("throughput/samples_per_sec")]]
    # Two samples on rank 0 and, as the test says, four on rank 1 in each step.
    rate, steps = (float(row[header.index(f"throughput/{name}_per_sec")]) for name in ("samples", "steps"))
    assert rate == pytest.approx(6 * steps)


@pytest.mark.parametrize("strategy", ["fsdp2", "deepspeed_stage_3"])
@on_two_ranks
def test_summary_counts_sharded_parameters_in_full(tmp_path: Path, strategy: str) -> None:
    import io
    import logging

    if strategy.startswith("deepspeed"):
        pytest.importorskip("deepspeed")
    output = io.StringIO()
    handler = logging.StreamHandler(output)
    logging.getLogger("acclight").addHandler(handler)
    try:
        trainer(tmp_path, strategy, ModelSummary(), max_steps=1, enable_checkpointing=False).fit(Net(), loader())
    finally:
        logging.getLogger("acclight").removeHandler(handler)
    if RANK == 0:
        # 3 x 5 + 5, and 5 + 1.
        rows = [line.split()[:3] for line in output.getvalue().splitlines() if line.startswith(("first", "second"))]
        assert rows == [["first", "Linear", "20"], ["second", "Linear", "6"]]
        assert "Net: 26 parameters, 26 trainable" in output.getvalue()
    else:
        assert "parameters" not in output.getvalue()
