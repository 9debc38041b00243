"""BatchSizeFinder: the search, what is left of it, and what it refuses."""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from acclight import DataModule, TrainModule, seed_everything
from acclight.callbacks import BatchSizeFinder, ModelCheckpoint
from tests.distributed import ROOT, RankChecks, run_command
from tests.scenarios import quiet_trainer, whole

on_two_ranks = RankChecks(world_size=2, timeout=120.0)


@pytest.mark.parametrize(
    ("mode", "first", "capacity", "most", "tried", "found"),
    [
        ("power", 2, 10, None, [2, 4, 8, 16], 8),
        ("binsearch", 2, 10, None, [2, 4, 8, 16, 12, 10, 11], 10),
        ("power", 16, 3, None, [16, 8, 4, 2], 2),
        ("binsearch", 16, 3, None, [16, 8, 4, 2, 3], 3),
        ("power", 2, 100, 11, [2, 4, 8, 11], 11),
        ("power", 32, 100, 11, [11], 11),
        ("binsearch", 2, 1, None, [2, 1], 1),
    ],
)
def test_the_search(mode: str, first: int, capacity: int, most: int | None, tried: list[int], found: int) -> None:
    seen: list[int] = []

    def fits(size: int) -> bool:
        seen.append(size)
        return size <= capacity

    assert BatchSizeFinder(mode, init_val=first).search(fits, most=most) == found
    assert seen == tried


def test_the_search_has_bounds() -> None:
    assert BatchSizeFinder(max_trials=3).search(lambda size: True) == 8
    assert BatchSizeFinder(init_val=3).search(lambda size: size <= 9, multiple_of=4) == 8
    with pytest.raises(RuntimeError, match="the smallest batch size that was tried, 1, runs out of memory"):
        BatchSizeFinder().search(lambda size: False)


class Data(DataModule):
    def __init__(self, batch_size: int = 2) -> None:
        self.batch_size = batch_size
        self.setups = 0

    def setup(self, stage: str) -> None:
        self.setups += 1

    def train_dataloader(self) -> Any:
        values = torch.linspace(-1.0, 1.0, 48).reshape(48, 1)
        return DataLoader(TensorDataset(values), batch_size=self.batch_size, shuffle=True)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0]


class Net(TrainModule):
    """Runs out of memory above 8 samples; what is random in it comes from every global generator."""

    def __init__(self, batch_size: int | None = None) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.seen: list[int] = []
        if batch_size is not None:
            self.save_hyperparameters()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if len(batch) > 8:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        self.seen.append(len(batch))
        noise = random.random() + float(np.random.rand())
        loss = (self.net(batch) - batch - noise).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def train_dataloader(self) -> Any:
        values = torch.linspace(-1.0, 1.0, 48)
        return DataLoader(values.reshape(48, 1), batch_size=self.hparams.batch_size)  # type: ignore[arg-type]


class Steady(Net):
    """With a learning rate that does not hang on the end of the training."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(strategy: Any, finder: BatchSizeFinder | None, batch_size: int) -> dict[str, Any]:
    """Everything that a search could have left its mark on."""
    seed_everything(3)
    data, net = Data(batch_size), Net()
    callbacks = [] if finder is None else [finder]
    trainer = quiet_trainer(strategy=strategy, max_epochs=2, accumulate_grad_batches=2, callbacks=callbacks)
    trainer.fit(net, datamodule=data)
    return {
        "weights": {name: whole(trainer, name) for name, _ in net.named_parameters()},
        "buffers": {name: value.clone() for name, value in net.named_buffers()},
        "steps": trainer.global_step,
        "seen": net.seen,
        "setups": data.setups,
        "size": data.batch_size,
        "metrics": dict(trainer.callback_metrics),
        "random": (torch.rand(3), random.random(), float(np.random.rand())),
    }


def check_nothing_is_left(strategy: Any) -> None:
    finder = BatchSizeFinder()
    found, plain = trained(strategy, finder, 2), trained(strategy, None, 8)
    assert finder.optimal_batch_size == 8
    torch.testing.assert_close(found, plain, rtol=0.0, atol=0.0)


def test_nothing_is_left_of_the_search() -> None:
    check_nothing_is_left("single")


@on_two_ranks
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "deepspeed_stage_1", "deepspeed_stage_2"])
def test_nothing_is_left_of_the_search_on_two_ranks(strategy: str) -> None:
    check_nothing_is_left(strategy)


@on_two_ranks
def test_split_batches_counts_for_all_ranks() -> None:
    finder, data = BatchSizeFinder("binsearch", init_val=4), Data()
    config = {"split_batches": True}
    net = Net()
    quiet_trainer(strategy="ddp", max_epochs=1, callbacks=finder, accelerator_config=config).fit(net, datamodule=data)
    assert data.batch_size == 16  # 8 on each rank
    assert net.seen == [8, 8, 8]


def test_a_hyper_parameter_of_the_module_holds_the_size() -> None:
    net = Net(batch_size=4)
    quiet_trainer(strategy="single", max_steps=1, callbacks=BatchSizeFinder(init_val=4)).fit(net)
    assert net.hparams.batch_size == 8
    assert net.seen == [8]


def test_a_resumed_fit_takes_the_size_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fit(max_steps: int, data: Data, ckpt_path: str | None) -> BatchSizeFinder:
        callbacks = [finder := BatchSizeFinder(), ModelCheckpoint(tmp_path, every_n_train_steps=2, save_last=True)]
        quiet_trainer(strategy="single", max_steps=max_steps, callbacks=callbacks).fit(
            Steady(), datamodule=data, ckpt_path=ckpt_path
        )
        return finder

    fit(2, Data(), "auto")
    assert "batch_size=16 runs out of memory" in caplog.text
    caplog.clear()
    data = Data()
    assert fit(4, data, "auto").optimal_batch_size == data.batch_size == 8
    assert "batch_size=16" not in caplog.text


def test_a_second_fit_does_not_search_again(caplog: pytest.LogCaptureFixture) -> None:
    trainer = quiet_trainer(strategy="single", max_epochs=1, callbacks=BatchSizeFinder())
    trainer.fit(net := Steady(), datamodule=(data := Data()))
    caplog.clear()
    trainer.max_epochs = 2
    trainer.fit(net, datamodule=data)
    assert trainer.global_step == 12
    assert "batch_size" not in caplog.text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"mode": "log"}, "mode='log': use 'power' or 'binsearch'"),
        ({"steps_per_trial": 0}, "steps_per_trial=0: give a whole number, 1 or more"),
        ({"init_val": 2.5}, "init_val=2.5: give a whole number, 1 or more"),
        ({"max_trials": 0}, "max_trials=0: give a whole number, 1 or more"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        BatchSizeFinder(**arguments)


def test_zero_3_is_refused_with_what_can() -> None:
    trainer = quiet_trainer(strategy="deepspeed_stage_3", max_steps=1, callbacks=BatchSizeFinder())
    with pytest.raises(ValueError, match=r"'deepspeed_stage_1', 'deepspeed_stage_2' or 'fsdp2'"):
        trainer.fit(Net(), datamodule=Data())


def test_what_cannot_be_searched_is_said() -> None:
    class Fixed(Data):
        def train_dataloader(self) -> Any:
            return DataLoader(torch.ones(8, 1), batch_size=4)  # type: ignore[arg-type]

    class Batches(Data):
        def train_dataloader(self) -> Any:
            return [torch.ones(2, 1)]

    def fit(*data: Any, name: str = "batch_size", **named: Any) -> None:
        finder = BatchSizeFinder(batch_arg_name=name)
        quiet_trainer(strategy="single", max_steps=1, callbacks=finder).fit(Net(batch_size=2), *data, **named)

    with pytest.raises(ValueError, match="neither Net nor Data has an attribute or a hyper-parameter 'size'"):
        fit(datamodule=Data(), name="size")
    with pytest.raises(ValueError, match="set batch_size=2, but train_dataloader gave a DataLoader with batch_size=4"):
        fit(datamodule=Fixed())
    with pytest.raises(ValueError, match="needs a DataLoader with a batch_size; train_dataloader gave a list"):
        fit(datamodule=Batches())
    with pytest.raises(ValueError, match="cannot change the batch size of a loader that was given to fit"):
        fit(DataLoader(torch.ones(8, 1), batch_size=2))  # type: ignore[arg-type]


def test_another_error_of_a_trial_is_the_users_own() -> None:
    class Broken(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if len(batch) == 4:
                raise KeyError("mine")
            return super().training_step(batch, batch_idx)

    data = Data()
    with pytest.raises(KeyError, match="mine"):
        quiet_trainer(strategy="single", max_steps=1, callbacks=BatchSizeFinder()).fit(Broken(), datamodule=data)
    assert data.batch_size == 2


REAL_MEMORY = """
import resource
import torch
from torch import nn
from torch.utils.data import DataLoader
from acclight import Trainer, TrainModule
from acclight.callbacks import BatchSizeFinder

class Wide(TrainModule):
    batch_size = 2
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2**20))
    def training_step(self, batch, batch_idx):
        return (self.weight * batch).tanh().square().mean()  # 4 MiB a sample and operation
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
    def train_dataloader(self):
        return DataLoader(torch.ones(4096, 1), batch_size=self.batch_size)

finder = BatchSizeFinder(steps_per_trial=1)
trainer = Trainer(strategy="single", max_steps=2, callbacks=finder, logger=False, enable_checkpointing=False,
                  enable_progress_bar=False, enable_model_summary=False)
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, ((pages * 4096 + 2**30,) * 2))
trainer.fit(module := Wide())
print("found", finder.optimal_batch_size, trainer.global_step)
"""


def test_memory_that_really_runs_out(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(REAL_MEMORY)
    done = run_command([sys.executable, "script.py"], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, timeout=120.0)
    assert done.returncode == 0, done.stdout
    tried = re.findall(r"batch_size=(\d+) (fits|runs out of memory)", done.stdout)
    # Of 1 GiB a sample takes 4 MiB at least (what tanh keeps), and surely not more than 32.
    found = 2 ** (len(tried) - 1)
    assert 32 <= found <= 256
    assert tried == [(str(2**n), "fits") for n in range(1, len(tried))] + [(str(2 * found), "runs out of memory")]
    assert f"found {found} 2" in done.stdout


ONE_RANK = """
import sys
import torch
from acclight.callbacks import BatchSizeFinder
from acclight.loops import batch_size
from tests.scenarios import quiet_trainer
from tests.test_batch_size_finder import Data, Net

class Uneven(Net):
    def training_step(self, batch, batch_idx):
        if self.trainer.global_rank == 1 and len(batch) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().training_step(batch, batch_idx)

batch_size._PATIENCE_SECONDS = 2.0
quiet_trainer(strategy=sys.argv[1], max_steps=1, callbacks=BatchSizeFinder()).fit(Uneven(), datamodule=Data())
"""


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_a_rank_that_runs_out_alone_ends_the_job(strategy: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(ONE_RANK)
    torchrun = Path(sys.executable).parent / "torchrun"
    command = [
        torchrun,
        "--nproc-per-node",
        "2",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "localhost:0",
        "script.py",
        strategy,
    ]
    done = run_command(command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, timeout=60.0)
    assert done.returncode == 1, done.stdout
    assert "batch_size=4 rank 1 ran out of memory (OutOfMemoryError: CUDA out of memory" in done.stdout
