"""Callbacks that decide by a metric of training steps, as `self.log` makes it in training_step when nothing else is said."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from acclight.callbacks import EarlyStopping, ModelCheckpoint
from tests.distributed import RankChecks
from tests.scenarios import Scalar, quiet_trainer, repeated

on_two_ranks = RankChecks(world_size=2, timeout=90.0)


def losses_of(steps: int, xs: tuple[float, ...], lr: float) -> list[float]:
    """The loss of each step, the mean over the ranks: rank r has batches of the value xs[r]."""
    w, losses = 0.0, []
    for _ in range(steps):
        losses.append(sum((w - x) ** 2 / 2 for x in xs) / len(xs))
        w -= lr * (w - sum(xs) / len(xs))
    return losses


def batches(world: int) -> DataLoader[Any]:
    """8 batches for each rank: of 4 in one process; of 4 on rank 0 and of 8 on rank 1."""
    return repeated([4.0] * 8, 1) if world == 1 else DataLoader(torch.tensor([4.0, 8.0] * 8), batch_size=1)


def check_scores(folder: Path, world: int, validates: bool, interval: float) -> None:
    callback = ModelCheckpoint(folder, monitor="loss", save_top_k=-1)
    trainer = quiet_trainer(
        strategy="single" if world == 1 else "ddp", max_epochs=2, callbacks=callback, val_check_interval=interval
    )
    assert trainer.log_every_n_steps == 50
    trainer.fit(Scalar(lr=0.25), batches(world), batches(world) if validates else None)
    losses = losses_of(16, (4.0,) if world == 1 else (4.0, 8.0), 0.25)
    saved = {int(path[-8:]): score for path, score in callback.best_k_models.items()}
    due = [8, 16] if interval == 1.0 else [4, 8, 12, 16]
    # The loss of the very last step before the save, which has led to the weights that are saved.
    assert saved == pytest.approx({step: losses[step - 1] for step in due}, rel=1e-5)


@pytest.mark.parametrize(("validates", "interval"), [(False, 1.0), (True, 1.0), (True, 0.5)])
def test_scores_in_one_process(tmp_path: Path, validates: bool, interval: float) -> None:
    check_scores(tmp_path, 1, validates, interval)


@on_two_ranks
@pytest.mark.parametrize(("validates", "interval"), [(False, 1.0), (True, 1.0), (True, 0.5)])
def test_scores_on_two_ranks(tmp_path: Path, validates: bool, interval: float) -> None:
    check_scores(tmp_path, 2, validates, interval)


def check_early_stopping(world: int) -> None:
    callback = EarlyStopping("loss", check_on_train_epoch_end=True, patience=1, min_delta=1.0)
    trainer = quiet_trainer(strategy="single" if world == 1 else "ddp", max_epochs=5, callbacks=callback)
    trainer.fit(Scalar(lr=0.25), batches(world), batches(world))
    losses = losses_of(16, (4.0,) if world == 1 else (4.0, 8.0), 0.25)
    # The second epoch is better by less than 1.
    assert 0.0 < losses[7] - losses[15] < 1.0
    assert trainer.global_step == 16
    assert callback.best_score == pytest.approx(losses[7], rel=1e-5)


def test_early_stopping_in_one_process() -> None:
    check_early_stopping(1)


@on_two_ranks
def test_early_stopping_on_two_ranks() -> None:
    check_early_stopping(2)


class Stream(IterableDataset[torch.Tensor]):
    """8 samples, without a length."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.full((8,), 4.0)


@pytest.mark.parametrize("every", [50, 4, 3])
@pytest.mark.parametrize("validates", [True, False])
@pytest.mark.parametrize("make", [lambda: ModelCheckpoint(monitor="loss"), lambda: EarlyStopping("loss", patience=99)])
def test_a_loader_of_unknown_length_has_the_value_later(tmp_path: Path, make: Any, validates: bool, every: int) -> None:
    callback = make()
    trainer = quiet_trainer(
        strategy="single", max_epochs=2, callbacks=callback, log_every_n_steps=every, default_root_dir=tmp_path
    )
    trainer.fit(Scalar(lr=0.25), DataLoader(Stream(), batch_size=1), batches(1) if validates else None)
    assert trainer.global_step == 16
    if every == 4 and isinstance(callback, ModelCheckpoint):
        assert callback.best_model_score == pytest.approx(losses_of(16, (4.0,), 0.25)[15], rel=1e-5)


@pytest.mark.parametrize("make", [lambda: ModelCheckpoint(monitor="los"), lambda: EarlyStopping("los")])
def test_a_missing_name_is_told_with_those_of_steps(tmp_path: Path, make: Any) -> None:
    trainer = quiet_trainer(strategy="single", max_epochs=1, callbacks=make(), default_root_dir=tmp_path)
    with pytest.raises(ValueError, match=r"'los' was not logged; did you mean 'loss'\? \(logged: loss\)"):
        trainer.fit(Scalar(), DataLoader(Stream(), batch_size=1))
