"""OnExceptionCheckpoint: what is saved, where, and when nothing is."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from acclight import Callback, Trainer, TrainModule, checkpoint
from acclight.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from tests.distributed import RankChecks
from tests.scenarios import DISTRIBUTED, Scalar, quiet_trainer, repeated

on_two_ranks = RankChecks(world_size=2, timeout=60.0)


class Fails(Scalar):
    """Raises in the step with this batch, of an epoch of the values 1, 2, 3, 4."""

    def __init__(self, at: float, error: type[BaseException] = RuntimeError) -> None:
        super().__init__()
        self.at, self.error = at, error

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if float(batch) == self.at:
            raise self.error("boom")
        return super().training_step(batch, batch_idx)


DATA = [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_the_last_whole_step_is_saved_and_trained_on_from(tmp_path: Path, error: type[BaseException]) -> None:
    folder = tmp_path / "saved"
    settings: dict[str, Any] = {"strategy": "single", "accumulate_grad_batches": 2, "max_epochs": 1}
    callbacks: list[Callback] = [OnExceptionCheckpoint(folder)]
    with pytest.raises(error, match="boom"):
        # In the middle of the second window.
        quiet_trainer(callbacks=callbacks, **settings).fit(Fails(4.0, error), repeated(DATA, 1))
    assert [path.name for path in folder.iterdir()] == ["on_exception-step-00000001"]
    assert checkpoint.verify(folder / "on_exception-step-00000001") == []
    # Half of the way to the mean of 1 and 2, then half of the way to that of 3 and 4.
    assert checkpoint.load_weights(folder / "on_exception-step-00000001")["w"].tolist() == [0.75]
    module = Scalar()
    trainer = quiet_trainer(callbacks=callbacks, **settings)
    trainer.fit(module, repeated(DATA, 1), ckpt_path="auto")
    assert [float(batch) for batch in module.batches] == [3.0, 4.0]
    assert float(module.w.detach()) == 2.125


def test_it_lies_beside_the_others_by_default(tmp_path: Path) -> None:
    callbacks: list[Callback] = [OnExceptionCheckpoint(), ModelCheckpoint(tmp_path / "own", every_n_train_steps=1)]
    settings: dict[str, Any] = {"strategy": "single", "max_epochs": 1, "default_root_dir": tmp_path}
    with pytest.raises(RuntimeError, match="boom"):
        quiet_trainer(callbacks=callbacks, **settings).fit(Fails(3.0), repeated(DATA, 1))
    assert {path.name for path in (tmp_path / "own").iterdir()} == {"step-00000002", "on_exception-step-00000002"}
    with pytest.raises(RuntimeError, match="boom"):
        quiet_trainer(callbacks=OnExceptionCheckpoint(filename="last"), **settings).fit(Fails(2.0), repeated(DATA, 1))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["last-step-00000001"]
    # The same step once more: it is there already.
    with pytest.raises(RuntimeError, match="boom"):
        quiet_trainer(callbacks=OnExceptionCheckpoint(filename="last"), **settings).fit(Fails(2.0), repeated(DATA, 1))


class StopsInTheStep(Scalar):
    def configure_optimizers(self) -> Any:
        class Fails(torch.optim.SGD):
            steps = 0

            def step(self, closure: Any = None) -> Any:
                super().step(closure)
                self.steps += 1
                if self.steps == 2:
                    raise RuntimeError("boom")

        return Fails(self.parameters(), lr=0.5)


class StopsAfterItsStep(Scalar):
    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        if batch_idx == 1:
            raise RuntimeError("boom")


@pytest.mark.parametrize("module", [StopsInTheStep(), StopsAfterItsStep()], ids=["automatic", "manual"])
def test_a_step_that_is_half_done_is_not_saved(module: Scalar, tmp_path: Path) -> None:
    trainer = quiet_trainer(strategy="single", max_epochs=1, callbacks=OnExceptionCheckpoint(tmp_path / "saved"))
    with (
        pytest.raises(RuntimeError, match="boom"),
        pytest.warns(UserWarning, match="saves nothing: the exception came while parameters were changed"),
    ):
        trainer.fit(module, repeated(DATA, 1))
    assert not (tmp_path / "saved").exists()


class StopsIn(Callback):
    def __init__(self, hook: str) -> None:
        setattr(self, hook, self.stop)

    def stop(self, *_: Any) -> None:
        raise RuntimeError("boom")


@pytest.mark.parametrize(
    ("hook", "step"),
    [
        ("on_step", 1),
        ("on_validation_end", 1),
        ("on_train_epoch_end", 4),
        ("on_fit_start", None),
        ("on_train_start", None),
    ],
)
def test_where_the_exception_comes_from(hook: str, step: int | None, tmp_path: Path) -> None:
    trainer = quiet_trainer(
        strategy="single", max_epochs=1, val_check_interval=1, num_sanity_val_steps=0,
        callbacks=[StopsIn(hook), OnExceptionCheckpoint(tmp_path / "saved")],
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="boom"):
        trainer.fit(Scalar(), repeated(DATA, 1), repeated([1.0], 1))
    found = [path.name for path in (tmp_path / "saved").glob("*")]
    assert found == ([] if step is None else [f"on_exception-step-{step:08d}"])


@on_two_ranks
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_several_processes_save_nothing_and_say_so(strategy: str, tmp_path: Path) -> None:
    trainer = quiet_trainer(strategy=strategy, max_epochs=1, callbacks=OnExceptionCheckpoint(tmp_path / "saved"))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with pytest.raises(RuntimeError, match="boom"):
            trainer.fit(Fails(3.0), repeated(DATA, 2))
    said = [str(w.message) for w in seen if "saves nothing with 2 processes" in str(w.message)]
    assert len(said) == (1 if trainer.global_rank == 0 else 0)
    assert not (tmp_path / "saved").exists()


def test_a_name_is_not_a_path() -> None:
    for name in ("", "a/b", ".."):
        with pytest.raises(ValueError, match="give a plain name, without folders"):
            OnExceptionCheckpoint(filename=name)


def test_other_runs_than_fit_save_nothing(tmp_path: Path) -> None:
    class FailsToo(Scalar):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            raise RuntimeError("boom")

    module: TrainModule = FailsToo()
    trainer: Trainer = quiet_trainer(
        strategy="single", max_epochs=1, callbacks=OnExceptionCheckpoint(tmp_path / "saved")
    )
    trainer.fit(module, repeated(DATA, 1))
    with pytest.raises(RuntimeError, match="boom"):
        trainer.validate(module, repeated([1.0], 1))
    assert not (tmp_path / "saved").exists()
