"""overfit_batches and reload_dataloaders_every_n_epochs: which loaders a fit reads, and in which order."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from acclight import Callback, DataModule, Trainer, TrainModule
from acclight.callbacks.monitor import Monitor
from tests.distributed import RankChecks
from tests.scenarios import Scalar, quiet_trainer

on_two_ranks = RankChecks(world_size=2, timeout=90.0)


class Seeing(Scalar):
    """Keeps the batches of validation too."""

    def __init__(self) -> None:
        super().__init__(0.01)
        self.validated: list[list[float]] = []

    @property
    def trained(self) -> list[list[float]]:
        return [batch.tolist() for batch in self.batches]

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.validated.append(batch.tolist())


def shuffled(start: int, **arguments: Any) -> DataLoader[Any]:
    return DataLoader(torch.arange(float(start), start + 10.0), batch_size=2, shuffle=True, **arguments)


@pytest.mark.parametrize("amount", [2, 0.4])
def test_overfitting_trains_on_the_same_first_batches(amount: int | float) -> None:
    module = Seeing()
    trainer = quiet_trainer(strategy="single", overfit_batches=amount, max_epochs=3, num_sanity_val_steps=0)
    loader = shuffled(0)
    with pytest.warns(UserWarning, match="shuffling of the (training|validation) loader is turned off") as warned:
        trainer.fit(module, loader, shuffled(100))
    assert len([w for w in warned if "turned off" in str(w.message)]) == 2
    assert module.trained == 3 * [[0.0, 1.0], [2.0, 3.0]]
    assert module.validated == 3 * [[100.0, 101.0], [102.0, 103.0]]
    assert trainer.estimated_stepping_batches == trainer.global_step == 6
    assert type(loader.sampler).__name__ == "RandomSampler"


@on_two_ranks
def test_overfitting_on_two_ranks_shares_the_first_batches() -> None:
    rank = int(os.environ["RANK"])
    module = Seeing()
    quiet_trainer(strategy="ddp", overfit_batches=2, max_epochs=2).fit(module, shuffled(0))
    # Rounds of 4 samples, 2 for each rank.
    assert module.trained == 2 * [[0.0 + 2 * rank, 1.0 + 2 * rank], [4.0 + 2 * rank, 5.0 + 2 * rank]]


def test_the_names_in_errors() -> None:
    class Stream(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Any:
            return iter(torch.zeros(3))

    with pytest.raises(ValueError, match=r"overfit_batches=0.5: a fraction needs a loader with a length"):
        quiet_trainer(strategy="single", overfit_batches=0.5, max_epochs=1).fit(Scalar(), DataLoader(Stream()))
    for value in (-1, 1.5, True):
        with pytest.raises(ValueError, match="overfit_batches="):
            quiet_trainer(overfit_batches=value)
    with pytest.raises(ValueError, match="reload_dataloaders_every_n_epochs=-1"):
        quiet_trainer(reload_dataloaders_every_n_epochs=-1)


class Changing(DataModule):
    """Loaders that depend on the epoch in which they are asked for: e + 2 batches of the number e, shuffled or not."""

    def __init__(self, workers: int = 0) -> None:
        self.workers = workers
        self.asked: list[tuple[str, int]] = []

    def loader(self, name: str, length: int) -> DataLoader[Any]:
        assert self.trainer is not None
        epoch = self.trainer.current_epoch
        self.asked.append((name, epoch))
        values = 100 * epoch + torch.arange(float(epoch + length))
        kept = self.workers > 0
        return DataLoader(values, shuffle=True, num_workers=self.workers, persistent_workers=kept)

    def train_dataloader(self) -> Any:
        return self.loader("train", 2)

    def val_dataloader(self) -> Any:
        return self.loader("val", 1)


class Children(Callback):
    """How many worker processes there are at the end of each epoch."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.counts.append(len(multiprocessing.active_children()))


def test_loaders_are_made_again_every_other_epoch() -> None:
    module, data, children = Seeing(), Changing(workers=1), Children()
    trainer = quiet_trainer(
        strategy="single", max_epochs=5, reload_dataloaders_every_n_epochs=2, num_sanity_val_steps=0, callbacks=children
    )
    trainer.fit(module, datamodule=data)
    assert data.asked == [(name, epoch) for epoch in (0, 2, 4) for name in ("train", "val")]
    # 2, 2, 4, 4 and 6 batches.
    assert [int(x // 100) for [x] in module.trained] == [0] * 4 + [2] * 8 + [4] * 6
    assert [int(x // 100) for [x] in module.validated] == [0] * 2 + [2] * 6 + [4] * 5
    assert children.counts == [2] * 5  # one for training, one for validation, none of the former loaders
    assert multiprocessing.active_children() == []
    assert trainer.global_step == 18


def test_loaders_that_were_given_stay() -> None:
    module, data = Seeing(), Changing()
    trainer = quiet_trainer(strategy="single", max_epochs=2, reload_dataloaders_every_n_epochs=1)
    trainer.fit(module, shuffled(0), shuffled(100))
    assert sorted(x for batch in module.trained[:5] for x in batch) == list(range(10))
    assert data.asked == []


@pytest.mark.parametrize("step", [4, 9, 12, 14])  # the ends of epochs 1 and 3, and the middles of 3 and 4
def test_a_resume_asks_for_the_loaders_of_the_interrupted_run(tmp_path: Path, step: int) -> None:
    class Saving(Callback):
        def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
            if trainer.global_step == step:
                trainer.save_checkpoint(tmp_path / "middle")

        def on_step(self, trainer: Trainer, module: TrainModule) -> None:
            if trainer.global_step == step and step in (9, 14):
                trainer.save_checkpoint(tmp_path / "middle")

    class SavingLast(Saving):
        """After everything else of the epoch."""

        runs_last = True

    arguments: dict[str, Any] = {
        "strategy": "single", "max_epochs": 5, "reload_dataloaders_every_n_epochs": 2, "num_sanity_val_steps": 0,
    }  # fmt: skip
    whole, rest, data = Seeing(), Seeing(), Changing()
    quiet_trainer(callbacks=SavingLast(), **arguments).fit(whole, datamodule=Changing())
    torch.manual_seed(99)
    quiet_trainer(**arguments).fit(rest, datamodule=data, ckpt_path=tmp_path / "middle")
    assert rest.trained == whole.trained[step:]
    assert rest.w.item() == whole.w.item()
    first = {4: 2, 9: 2, 12: 4, 14: 4}[step]
    assert data.asked == [(name, epoch) for epoch in range(first, 5, 2) for name in ("train", "val")]


@on_two_ranks
def test_every_rank_asks_again() -> None:
    data, module = Changing(), Seeing()
    trainer = quiet_trainer(strategy="ddp", max_epochs=3, reload_dataloaders_every_n_epochs=1, num_sanity_val_steps=0)
    trainer.fit(module, datamodule=data)
    assert data.asked == [(name, epoch) for epoch in (0, 1, 2) for name in ("train", "val")]
    assert [int(x // 100) for [x] in module.trained] == [0, 1, 1, 2, 2]


class Fewer(DataModule):
    """Two validation loaders in the first epoch, one afterwards."""

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(4))

    def val_dataloader(self) -> Any:
        assert self.trainer is not None
        loaders = [DataLoader(torch.full((2,), value)) for value in (1.0, 3.0)]
        return loaders if self.trainer.current_epoch == 0 else loaders[:1]


class LogsPerLoader(Scalar):
    """A validation of two loaders logs a name, too, that training logs on its steps."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.log("both", 7.0)
        return self.loss(batch)

    def validation_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("v", batch.mean(), prog_bar=True)
        if self.current_epoch == 0:
            self.log("both", 5.0, add_dataloader_idx=False)
            self.log("once", 5.0, add_dataloader_idx=False)


class Shows(Callback):
    """What stands after each validation, and what a monitor of the second loader reads."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []
        self.watched: list[float | None] = []
        self.monitor = Monitor("v/dataloader_idx_1", "min")

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.seen.append({name: float(value) for name, value in trainer.callback_metrics.items()})
        self.watched.append(self.monitor.value(trainer))


def drops_what_is_not_logged_again(strategy: str) -> None:
    shows = Shows()
    trainer = quiet_trainer(
        strategy=strategy, max_epochs=2, reload_dataloaders_every_n_epochs=1, num_sanity_val_steps=0,
        log_every_n_steps=1, callbacks=shows,
    )  # fmt: skip
    trainer.fit(LogsPerLoader(), datamodule=Fewer())
    first = {"v/dataloader_idx_0": 1.0, "v/dataloader_idx_1": 3.0, "both": 5.0, "once": 5.0}
    assert shows.seen == [first, {"v": 1.0, "both": 7.0}]
    assert shows.watched == [3.0, None]
    assert trainer.logged_metrics == {"v": 1.0, "both": 7.0}
    assert trainer.progress_bar_metrics == {"v": 1.0}
    watch = Monitor("v", "min")
    assert watch.value(trainer) == 1.0
    trainer.forget_metrics()
    assert watch.value(trainer) is None


def test_values_of_a_loader_that_is_gone_do_not_stand_for_the_newest_validation() -> None:
    drops_what_is_not_logged_again("single")


@on_two_ranks
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "deepspeed_stage_3"])
def test_values_of_a_loader_that_is_gone_are_dropped_on_every_rank(strategy: str) -> None:
    drops_what_is_not_logged_again(strategy)
