"""Counts, intervals, limits, schedulers and clipping of the fit loop, by values worked out by hand."""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from acclight import Callback, LossSum, Trainer, TrainModule
from acclight.callbacks import ModelCheckpoint
from tests.distributed import RankChecks
from tests.scenarios import DISTRIBUTED, Recorder, Scalar, Vector, quiet_trainer, repeated, whole

on_two_ranks = RankChecks(world_size=2, timeout=90.0)
EVERYWHERE = ["single", *DISTRIBUTED]


class Ragged(TrainModule):
    """w = 0; a sample is a list of token values padded by nan; the loss of a token is (w - x)^2 / 2."""

    def __init__(self, form: str = "count_items") -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))
        if form != "count_items":
            self.count_items = super().count_items  # type: ignore[method-assign]
        self.form = form

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        tokens = batch[~batch.isnan()]
        losses = (self.w - tokens) ** 2 / 2
        if self.form == "loss_sum":
            return LossSum(losses.sum(), len(tokens))
        return losses.mean() if len(tokens) else (self.w * 0.0).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class RaggedCounted(Ragged):
    def count_items(self, batch: Tensor) -> Tensor:
        return (~batch.isnan()).sum()


def padded(*rows: list[float]) -> DataLoader[Any]:
    return DataLoader(torch.tensor([row + [math.nan] * (4 - len(row)) for row in rows]), batch_size=1)


# --- accumulation ----------------------------------------------------------------------------------------------------


def test_tokens_weigh_the_same_in_one_process() -> None:
    module = RaggedCounted()
    trainer = quiet_trainer(strategy="single", max_steps=1, accumulate_grad_batches=4)
    trainer.fit(module, padded([1], [2, 2], [3, 3, 3], [4, 4, 4, 4]))
    # (1 + 2*2 + 3*3 + 4*4) / 10 = 3.0; lr 0.1.
    assert float(module.w.detach()) == pytest.approx(0.300, abs=1e-6)


@on_two_ranks
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_tokens_weigh_the_same_over_ranks(strategy: str) -> None:
    trainer = quiet_trainer(strategy=strategy, max_steps=1, accumulate_grad_batches=2)
    # Rank 0 reads rows 0 and 2, rank 1 rows 1 and 3.
    trainer.fit(RaggedCounted(), padded([1], [3, 3, 3], [2, 2], [4, 4, 4, 4]))
    assert float(whole(trainer, "w")) == pytest.approx(0.300, abs=1e-6)


@on_two_ranks
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_a_loss_sum_weighs_the_same_over_ranks(strategy: str) -> None:
    trainer = quiet_trainer(strategy=strategy, max_steps=1, accumulate_grad_batches=2)
    trainer.fit(Ragged("loss_sum"), padded([1], [3, 3, 3], [2, 2], [4, 4, 4, 4]))
    assert float(whole(trainer, "w")) == pytest.approx(0.300, abs=1e-6)


@on_two_ranks
@pytest.mark.parametrize("form", ["count_items", "loss_sum"])
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_tokens_of_a_short_window_weigh_the_same_over_ranks(strategy: str, form: str) -> None:
    module = RaggedCounted() if form == "count_items" else Ragged(form)
    trainer = quiet_trainer(strategy=strategy, max_epochs=1, accumulate_grad_batches=2)
    trainer.fit(module, padded([1], [3, 3, 3], [], [4, 4, 4, 4], [5], [6, 6, 6]))
    # 8 tokens of 26 together: w = 0.325; then the short window's 4 tokens of 23.
    assert trainer.global_step == 2
    assert float(whole(trainer, "w")) == pytest.approx(0.325 - 0.1 * (0.325 - 23 / 4), abs=1e-6)


class OwnDict(dict[str, Any]):
    pass


class ReturnsOwnDict(Scalar):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return OwnDict(loss=self.loss(batch))


@on_two_ranks
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_a_loss_in_a_dict_of_the_users_own_class(strategy: str) -> None:
    trainer = quiet_trainer(strategy=strategy, max_steps=1)
    trainer.fit(ReturnsOwnDict(lr=0.5), DataLoader(torch.tensor([1.0, 3.0]), batch_size=1))
    assert float(whole(trainer, "w")) == pytest.approx(1.0)


@pytest.mark.parametrize("form", ["count_items", "loss_sum"])
def test_a_micro_batch_without_items_does_not_spoil_the_window(form: str) -> None:
    module = RaggedCounted() if form == "count_items" else Ragged("loss_sum")
    trainer = quiet_trainer(strategy="single", max_steps=1, accumulate_grad_batches=3)
    trainer.fit(module, padded([1], [], [3]))
    assert float(module.w.detach()) == pytest.approx(0.2, abs=1e-6)


def test_the_last_short_window_is_averaged_over_what_it_holds() -> None:
    module = Scalar(lr=0.5)
    trainer = quiet_trainer(strategy="single", max_epochs=1, accumulate_grad_batches=2)
    trainer.fit(module, repeated([1.0, 1.0, 1.0, 1.0, 3.0], 1))
    assert trainer.global_step == 3
    assert float(module.w.detach()) == 1.875


@on_two_ranks
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_the_last_short_window_on_two_ranks(strategy: str) -> None:
    module = Scalar(lr=0.5)
    trainer = quiet_trainer(strategy=strategy, max_epochs=1, accumulate_grad_batches=2, log_every_n_steps=1)
    trainer.fit(module, repeated([1.0, 1.0, 1.0, 1.0, 3.0], 2))
    assert trainer.global_step == 3
    assert float(whole(trainer, "w")) == 1.875
    # The loss that logs see is the batch's own: (0.75 - 3)^2 / 2.
    assert float(trainer.callback_metrics["loss"]) == 2.53125


def epochs_shorter_than_the_window(strategy: str, world: int) -> None:
    trainer = quiet_trainer(strategy=strategy, max_epochs=4, accumulate_grad_batches=4)
    module = Scalar()
    trainer.fit(module, repeated([1.0, 3.0], world))
    assert trainer.global_step == 4
    assert trainer.estimated_stepping_batches == 4
    # Each gradient is averaged over 2: w <- w - 0.5 (w - 2), four times from 0.
    assert float(whole(trainer, "w")) == pytest.approx(2.0 - 2.0 * 0.5**4)


def test_an_epoch_shorter_than_the_window_steps_at_its_end() -> None:
    epochs_shorter_than_the_window("single", 1)


@on_two_ranks
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_an_epoch_shorter_than_the_window_steps_at_its_end_on_two_ranks(strategy: str) -> None:
    epochs_shorter_than_the_window(strategy, 2)


@pytest.mark.parametrize(
    ("batches", "accumulate", "arguments", "steps"),
    [(10, 2, {"max_steps": 3}, 3), (7, 2, {"max_epochs": 2}, 8), (5, 3, {"max_epochs": 3, "max_steps": 4}, 4)],
)
def test_the_estimate_is_the_number_of_steps(
    batches: int, accumulate: int, arguments: dict[str, int], steps: int
) -> None:
    estimates = []

    class Asking(Scalar):
        def configure_optimizers(self) -> Any:
            estimates.append(self.trainer.estimated_stepping_batches)
            return super().configure_optimizers()

    trainer = quiet_trainer(strategy="single", accumulate_grad_batches=accumulate, **arguments)
    trainer.fit(Asking(), repeated([1.0] * batches, 1))
    assert trainer.global_step == steps
    assert estimates == [steps]


class Ends(Callback):
    def __init__(self) -> None:
        self.train_ends = 0
        self.scheduler_epochs: list[int] = []

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.train_ends += 1


class Scheduled(Scalar):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def steps_up_to_a_limit(strategy: str, world: int, folder: Path) -> None:
    module, ends = Scheduled(), Ends()
    saves = ModelCheckpoint(folder)
    trainer = quiet_trainer(strategy=strategy, max_steps=3, accumulate_grad_batches=2, callbacks=[ends, saves])
    trainer.fit(module, repeated([1.0] * 10, world))
    assert len(module.batches) == 6
    assert trainer.global_step == 3
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 3
    assert ends.train_ends == 1
    assert Path(saves.last_model_path or saves.best_model_path) == folder / "step-00000003"
    assert json.loads((folder / "step-00000003" / "trainer.json").read_text())["global_step"] == 3


def test_max_steps_counts_optimizer_steps(tmp_path: Path) -> None:
    steps_up_to_a_limit("single", 1, tmp_path)


@on_two_ranks
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_max_steps_counts_optimizer_steps_on_two_ranks(strategy: str, tmp_path: Path) -> None:
    steps_up_to_a_limit(strategy, 2, tmp_path)


def rates_of_four_steps(strategy: str, world: int) -> None:
    recorder = Recorder()
    trainer = quiet_trainer(strategy=strategy, max_epochs=1, callbacks=recorder)
    trainer.fit(Scheduled(), repeated([1.0] * 4, world))
    # on_step comes after the scheduler's change of that step.
    assert recorder.rates == pytest.approx([1.0, 0.1, 0.1, 0.01])
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 4
    assert recorder.steps == [1, 2, 3, 4]


def test_the_scheduler_steps_once_per_step_in_one_process() -> None:
    rates_of_four_steps("single", 1)


@on_two_ranks
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_the_scheduler_steps_once_per_step_on_two_ranks(strategy: str) -> None:
    rates_of_four_steps(strategy, 2)


# --- plateau ---------------------------------------------------------------------------------------------------------


class Plateau(Scalar):
    def __init__(self, monitor: str = "val_loss", strict: bool = True) -> None:
        super().__init__(lr=1.0)
        self.monitor = monitor
        self.strict = strict

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", 1.0)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1)
        entry = {"scheduler": scheduler, "monitor": self.monitor, "strict": self.strict}
        return {"optimizer": optimizer, "lr_scheduler": entry}


def fresh_values_only(strategy: str, world: int) -> None:
    trainer = quiet_trainer(strategy=strategy, max_epochs=4, check_val_every_n_epoch=2)
    trainer.fit(Plateau(), repeated([1.0], world), repeated([1.0], 1))
    # After epochs 2 and 4: the second is no better than the first.
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1)
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 2


def test_a_plateau_scheduler_steps_on_fresh_values_only() -> None:
    fresh_values_only("single", 1)


@on_two_ranks
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_a_plateau_scheduler_steps_on_fresh_values_only_on_two_ranks(strategy: str) -> None:
    fresh_values_only(strategy, 2)


def test_a_missing_plateau_metric_is_an_error_at_the_first_validation() -> None:
    module = Plateau(monitor="val_los")
    with pytest.raises(ValueError, match=r"'val_los'.*val_loss"):
        quiet_trainer(strategy="single", max_epochs=4).fit(module, repeated([1.0], 1), repeated([1.0], 1))
    assert len(module.batches) == 1


class LogsLate(Plateau):
    """Logs for the scheduler when the epoch ends, after its validation."""

    def on_train_epoch_end(self) -> None:
        self.log("late", 1.0)


def late_metric(strategy: str, world: int) -> None:
    class Late(Callback):
        def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
            module.log("late", 1.0)

    for module, callbacks in ((LogsLate("late"), []), (Plateau("late"), [Late()])):
        trainer = quiet_trainer(strategy=strategy, max_epochs=3, callbacks=callbacks)
        trainer.fit(module, repeated([1.0], world), repeated([1.0], world))
        # The second and the third epoch are no better than the first.
        assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 3
        assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01)


def test_a_plateau_metric_may_be_logged_at_the_end_of_the_epoch() -> None:
    late_metric("single", 1)


@on_two_ranks
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_a_plateau_metric_may_be_logged_at_the_end_of_the_epoch_on_two_ranks(strategy: str) -> None:
    late_metric(strategy, 2)


def test_a_plateau_metric_that_does_not_come_at_the_end_of_the_epoch_either_is_missing() -> None:
    module = LogsLate(monitor="lat")
    with pytest.raises(ValueError, match=r"'lat'.*late"):
        quiet_trainer(strategy="single", max_epochs=4).fit(module, repeated([1.0], 1), repeated([1.0], 1))
    assert len(module.batches) == 1


def test_a_lenient_plateau_scheduler_warns_once(recwarn: pytest.WarningsRecorder) -> None:
    trainer = quiet_trainer(strategy="single", max_epochs=3)
    trainer.fit(Plateau(monitor="other", strict=False), repeated([1.0], 1), repeated([1.0], 1))
    assert trainer.optimizers[0].param_groups[0]["lr"] == 1.0
    assert len([w for w in recwarn if "'other'" in str(w.message)]) == 1


# --- validation intervals ----------------------------------------------------------------------------------------------


class Validations(Callback):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
        if not trainer.sanity_checking:
            self.steps.append(trainer.global_step)


def validations(strategy: str, world: int, interval: float) -> list[int]:
    seen = Validations()
    trainer = quiet_trainer(
        strategy=strategy, max_epochs=2, accumulate_grad_batches=2, val_check_interval=interval, callbacks=seen
    )
    trainer.fit(Scalar(), repeated([1.0] * 7, world), repeated([1.0], world))
    assert trainer.global_step == 8
    return seen.steps


@pytest.mark.parametrize(("interval", "steps"), [(2, [2, 4, 6, 8]), (1.0, [4, 8]), (0.5, [2, 4, 6, 8]), (3, [3, 6])])
def test_validation_intervals_count_optimizer_steps(interval: float, steps: list[int]) -> None:
    assert validations("single", 1, interval) == steps


@on_two_ranks
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_validation_intervals_are_the_same_on_two_ranks(strategy: str) -> None:
    assert validations(strategy, 2, 2) == [2, 4, 6, 8]


@on_two_ranks
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_a_validation_is_not_run_again_after_a_resume(strategy: str, tmp_path: Path) -> None:
    seen = []
    for max_steps in (4, 8):
        seen.append(Validations())
        trainer = quiet_trainer(
            strategy=strategy, max_steps=max_steps, accumulate_grad_batches=2, val_check_interval=2, callbacks=seen[-1]
        )
        ckpt_path = tmp_path / "at-4" if max_steps == 8 else None
        trainer.fit(Scalar(), repeated([1.0] * 7, 2), repeated([1.0], 2), ckpt_path=ckpt_path)
        if max_steps == 4:
            trainer.save_checkpoint(tmp_path / "at-4")
    assert [one.steps for one in seen] == [[2, 4], [6, 8]]


# --- clipping ----------------------------------------------------------------------------------------------------------


def clipped(strategy: str, world: int, algorithm: str, value: float) -> tuple[list[float], list[float]]:
    recorder = Recorder(norms=algorithm == "norm")
    trainer = quiet_trainer(
        strategy=strategy, max_steps=1, gradient_clip_val=value, gradient_clip_algorithm=algorithm, callbacks=recorder
    )
    trainer.fit(Vector(), repeated([0.0], world))
    return whole(trainer, "w").tolist(), recorder.norms


def test_clipping_in_one_process() -> None:
    w, norms = clipped("single", 1, "norm", 6.5)
    assert w == pytest.approx([-1.5, -2.0, 0.0, -6.0], abs=1e-5)
    assert norms == [13.0]
    assert clipped("single", 1, "value", 3.5)[0] == pytest.approx([-3.0, -3.5, 0.0, -3.5])


@on_two_ranks
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_clipping_by_the_whole_norm_on_two_ranks(strategy: str) -> None:
    w, norms = clipped(strategy, 2, "norm", 6.5)
    assert w == pytest.approx([-1.5, -2.0, 0.0, -6.0], abs=1e-5)
    assert norms == pytest.approx([13.0], abs=1e-5)
    assert type(norms[0]) is float


@on_two_ranks
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_clipping_off_is_off(strategy: str) -> None:
    w, norms = clipped(strategy, 2, "norm", 0.0)
    assert w == pytest.approx([-3.0, -4.0, 0.0, -12.0], abs=1e-5)
    assert norms == pytest.approx([13.0], abs=1e-5)


@on_two_ranks
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_clipping_by_value_on_two_ranks(strategy: str) -> None:
    assert clipped(strategy, 2, "value", 3.5)[0] == pytest.approx([-3.0, -3.5, 0.0, -3.5])


# --- limits, second fits, uneven ranks -----------------------------------------------------------------------------------


class Epochs(Callback):
    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        self.seen.append(trainer.current_epoch)


def test_a_second_fit_goes_on_to_a_raised_limit(caplog: pytest.LogCaptureFixture) -> None:
    epochs = Epochs()
    trainer, module, data = (
        quiet_trainer(strategy="single", max_epochs=2, callbacks=epochs),
        Scalar(),
        repeated([1.0, 2.0], 1),
    )
    trainer.fit(module, data)
    trainer.validate(module, data)
    trainer.fit(module, data)
    assert epochs.seen == [0, 1]
    assert "max_epochs=2 is reached" in caplog.text
    trainer.max_epochs = 4
    trainer.fit(module, data)
    assert epochs.seen == [0, 1, 2, 3]
    assert trainer.global_step == 8
    other = Scalar()
    trainer.fit(other, data)
    assert len(other.batches) == 8


class Heavy(Scalar):
    """With momentum: its optimizer has a state."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


def a_second_module_starts_anew(strategy: str, world: int) -> None:
    trainer = quiet_trainer(strategy=strategy, max_steps=2)
    for _ in range(2):
        trainer.fit(Heavy(), repeated([1.0, 2.0], world))
        # By hand: w = 0.5 after v = -1; then v = 0.9 * -1 + (0.5 - 2) = -2.4 and w = 0.5 + 1.2.
        assert float(whole(trainer, "w")) == pytest.approx(1.7)


def test_a_second_module_has_an_optimizer_of_its_own() -> None:
    a_second_module_starts_anew("single", 1)


@on_two_ranks
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_a_second_module_has_an_optimizer_of_its_own_on_two_ranks(strategy: str) -> None:
    a_second_module_starts_anew(strategy, 2)


@on_two_ranks
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_limits_are_absolute_on_two_ranks(strategy: str) -> None:
    epochs, module, data = Epochs(), Scalar(), repeated([1.0, 2.0], 2)
    trainer = quiet_trainer(strategy=strategy, max_epochs=2, callbacks=epochs)
    trainer.fit(module, data)
    trainer.validate(module, data)
    trainer.fit(module, data)
    assert epochs.seen == [0, 1]
    trainer.max_epochs = 3
    trainer.fit(module, data)
    trainer.max_epochs, trainer.max_steps = 9, 7
    trainer.fit(module, data)
    trainer.fit(module, data)
    assert (epochs.seen, trainer.global_step) == ([0, 1, 2, 3], 7)
    # By hand, half of the way to x with each step: 1, 2, 1, 2, 1, 2, 1.
    assert [float(b) for b in module.batches] == [1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0]
    assert float(whole(trainer, "w")) == 1.3203125


def test_max_steps_is_absolute_too(caplog: pytest.LogCaptureFixture) -> None:
    trainer, module, data = quiet_trainer(strategy="single", max_steps=3), Scalar(), repeated([1.0, 2.0], 1)
    trainer.fit(module, data)
    trainer.fit(module, data)
    assert len(module.batches) == 3
    assert "max_steps=3 is reached" in caplog.text
    trainer.max_steps = 5
    trainer.fit(module, data)
    # Sample 3 of epoch 1 is the next one: 1, 2 | 1, then 2 | 1.
    assert [float(b) for b in module.batches] == [1.0, 2.0, 1.0, 2.0, 1.0]


class EpochEnds(Callback):
    """Writes down where epochs begin and end."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, int]] = []

    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        self.seen.append(("start", trainer.current_epoch, trainer.global_step))

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.seen.append(("end", trainer.current_epoch, trainer.global_step))


class LogsEpochMean(Scalar):
    stop_after = -1

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.log("seen", batch.mean(), on_epoch=True)
        self.trainer.should_stop |= batch_idx == self.stop_after
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("stop_after", [-1, 2])
def test_a_limit_within_an_epoch_ends_it_for_hooks_and_metrics_alone(stop_after: int) -> None:
    epochs, module = EpochEnds(), LogsEpochMean()
    module.stop_after = stop_after
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    by_epoch = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    module.configure_optimizers = lambda: ([optimizer], [by_epoch])  # type: ignore[method-assign]
    trainer = quiet_trainer(strategy="single", max_steps=3 if stop_after < 0 else -1, callbacks=epochs)
    data = repeated([1.0, 2.0, 6.0, 10.0, 30.0], 1)
    trainer.fit(module, data)
    assert epochs.seen == [("start", 0, 0), ("end", 0, 3)]
    assert trainer.callback_metrics["seen"] == 3.0, "the mean of 1, 2 and 6"
    assert by_epoch.last_epoch == 0, "the epoch is not over for schedulers"
    module.stop_after = -1
    trainer.max_steps = 6
    trainer.fit(module, data)
    assert epochs.seen[2:] == [("start", 0, 3), ("end", 0, 5), ("start", 1, 5), ("end", 1, 6)]
    assert trainer.callback_metrics["seen"] == float(module.batches[-1])
    assert sorted(float(b) for b in module.batches[:5]) == [1.0, 2.0, 6.0, 10.0, 30.0]


class OwnStream(IterableDataset[Any]):
    """Each rank has a stream of its own length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.ones(self.length))


@on_two_ranks
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_ranks_with_different_numbers_of_batches_stop_together(strategy: str) -> None:
    trainer = quiet_trainer(strategy=strategy, max_epochs=1)
    rank = trainer.global_rank
    module = Scalar()
    trainer.fit(module, DataLoader(OwnStream(3 if rank == 0 else 5), batch_size=1))
    assert trainer.global_step == 3
    results = trainer.validate(module, DataLoader(OwnStream(3 if rank == 0 else 5), batch_size=1))
    w = float(whole(trainer, "w"))
    assert results[0]["val_loss"] == pytest.approx((w - 1.0) ** 2 / 2)


@on_two_ranks
@pytest.mark.parametrize(
    ("accumulate", "held", "steps"),
    [(1, "rank 0: 3, rank 1: 4 or more", 3), (2, "rank 0: 3, rank 1: 4 or more", 2), (8, "rank 0: 3, rank 1: 5", 1)],
)
def test_the_warning_says_how_much_of_each_stream_is_known(accumulate: int, held: str, steps: int) -> None:
    """Streams are not read further than to the window in which one ends: batches 1 to 4, 1 to 4, and all."""
    trainer = quiet_trainer(strategy="ddp", max_epochs=1, accumulate_grad_batches=accumulate)
    rank = trainer.global_rank
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Scalar(), DataLoader(OwnStream(3 if rank == 0 else 5), batch_size=1))
    said = f"the ranks hold different numbers of training batches ({held}); all stop at the shortest"
    assert [text for w in caught if "stop at" in (text := str(w.message))] == ([said] if rank == 0 else [])
    assert trainer.global_step == steps


# --- errors ------------------------------------------------------------------------------------------------------------


def test_an_unknown_argument_names_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"'max_epoch'.*'max_epochs'"):
        Trainer(max_epoch=1)


class Wrong(Scalar):
    """Returns what is no loss."""

    def __init__(self, returned: Callable[[Scalar], Any]) -> None:
        super().__init__()
        self.returned = returned

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.returned(self)


#: What a step must not return, and the error.
WRONG_LOSSES: list[tuple[Callable[[Scalar], Any], type[Exception], str]] = [
    (lambda m: m.w.detach().sum(), RuntimeError, "training_step returned a loss without a graph"),
    (lambda m: {"los": m.w.sum()}, ValueError, r"training_step returned a dict without 'loss'.*los"),
    (lambda m: torch.cat([m.w, m.w]), TypeError, r"training_step returned a tensor of shape \(2,\)"),
    (lambda m: "loss", TypeError, "training_step returned str"),
]


@pytest.mark.parametrize(("returned", "error", "text"), WRONG_LOSSES)
def test_a_wrong_loss_names_training_step(returned: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        quiet_trainer(strategy="single", max_steps=1).fit(Wrong(returned), repeated([1.0], 1))


@on_two_ranks
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_a_wrong_loss_names_training_step_on_two_ranks(strategy: str) -> None:
    for returned, error, text in WRONG_LOSSES:
        with pytest.raises(error, match=text):
            quiet_trainer(strategy=strategy, max_steps=1).fit(Wrong(returned), repeated([1.0], 2))


def goes_on_after_ctrl_c(strategy: str, world: int) -> None:
    class Once(Scalar):
        failed = False

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            if batch_idx == 2 and not self.failed:
                self.failed = True
                raise KeyboardInterrupt
            return super().training_step(batch, batch_idx)

    class Notes(Callback):
        def __init__(self) -> None:
            self.seen: list[str] = []

        def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
            self.seen.append(type(exception).__name__)

        def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
            self.seen.append("teardown")

    notes, module = Notes(), Once()
    trainer = quiet_trainer(strategy=strategy, max_epochs=1, callbacks=notes)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(module, repeated([1.0] * 5, world))
    assert notes.seen == ["KeyboardInterrupt", "teardown"]
    assert trainer.interrupted
    assert float(whole(trainer, "w")) == 0.75
    trainer.fit(module, repeated([1.0] * 5, world))
    assert trainer.global_step == 5
    assert not trainer.interrupted


def test_the_users_own_exception_leaves_fit_and_the_trainer_can_be_used_again() -> None:
    goes_on_after_ctrl_c("single", 1)


@on_two_ranks
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_ctrl_c_leaves_fit_and_the_trainer_can_be_used_again_on_two_ranks(strategy: str) -> None:
    goes_on_after_ctrl_c(strategy, 2)


class Estimating(Scalar):
    """Keeps what configure_optimizers and each step see of the number of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int | float] = []
        self.later: set[int | float] = set()

    def configure_optimizers(self) -> Any:
        self.seen.append(self.trainer.estimated_stepping_batches)
        return super().configure_optimizers()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.later.add(self.trainer.estimated_stepping_batches)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("saved_after", "limits", "steps"),
    [
        # 32 samples in batches of 2 are 16 steps an epoch; the rest goes on in batches of 1.
        (32, {"max_epochs": 3}, 32 + 32),
        (32, {"max_epochs": 3, "max_steps": 50}, 50),
        (32, {"max_epochs": 3, "max_steps": 70}, 32 + 32),
        (24, {"max_epochs": 3}, 24 + 16 + 32),
        # 16 batches are left, then 32, three to a step.
        (24, {"max_epochs": 3, "accumulate_grad_batches": 3}, 24 + 6 + 11),
        (24, {"max_epochs": 2, "accumulate_grad_batches": 3}, 24 + 6),
    ],
)
def test_the_estimate_of_a_resume_is_what_was_done_and_what_is_left(
    tmp_path: Path, saved_after: int, limits: dict[str, Any], steps: int
) -> None:
    values = torch.arange(32.0)
    first = quiet_trainer(strategy="single", max_steps=saved_after)
    first.fit(Scalar(0.01), DataLoader(values, batch_size=2))
    first.save_checkpoint(tmp_path / "saved")
    module = Estimating()
    trainer = quiet_trainer(strategy="single", **limits)
    trainer.fit(module, DataLoader(values, batch_size=1), ckpt_path=tmp_path / "saved")
    assert trainer.global_step == steps
    assert module.seen == [steps]
    assert module.later == {steps}
    assert trainer.estimated_stepping_batches == steps


def test_the_estimate_of_a_second_fit_counts_the_first() -> None:
    module = Estimating()
    trainer = quiet_trainer(strategy="single", max_epochs=1)
    trainer.fit(module, repeated([1.0] * 4, 1))
    trainer.max_epochs = 3
    trainer.fit(module, repeated([1.0] * 8, 1))
    assert trainer.global_step == 4 + 8 + 8
    assert module.seen == [4]
    assert module.later == {4, 20}


def told(**arguments: Any) -> list[str]:
    """The warnings of one fit on 4 batches an epoch, with validation, about what cannot be."""
    trainer = quiet_trainer(strategy="single", num_sanity_val_steps=0, **arguments)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Scalar(), repeated([1.0] * 4, 1), repeated([1.0], 1))
    return [str(w.message) for w in caught if "accumulate" in str(w.message) or "no validation" in str(w.message)]


def test_a_window_longer_than_the_epoch_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="acclight"):
        (warning,) = told(max_epochs=3, accumulate_grad_batches=16)
    assert warning == (
        "accumulate_grad_batches=16, but an epoch has 4 batches: each epoch makes one step, over the 4 that it holds"
    )
    assert "effective batch 1 x 1 process x accumulation 4 of 16 [argument] = 4" in caplog.text
    assert told(max_epochs=3, accumulate_grad_batches=4) == []


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (
            {"max_epochs": 3, "val_check_interval": 13},
            "val_check_interval=13 put the first after step 13, .* ends at step 12",
        ),
        (
            {"max_steps": 3, "val_check_interval": 4},
            "val_check_interval=4 put the first after step 4, .* ends at step 3",
        ),
        ({"max_epochs": 3, "val_check_interval": 12}, None),
        ({"max_epochs": 3, "check_val_every_n_epoch": 4}, "check_val_every_n_epoch=4 put the first into epoch 3, .*=3"),
        ({"max_epochs": 3, "check_val_every_n_epoch": 3}, None),
        (
            {"max_steps": 3},
            "val_check_interval=1.0 and check_val_every_n_epoch=1 put the first after step 4, .* step 3",
        ),
        ({"max_steps": 4}, None),
        ({"max_steps": 5, "check_val_every_n_epoch": 2}, "put the first after step 8, but training ends at step 5"),
        ({"max_steps": 5, "check_val_every_n_epoch": 2, "val_check_interval": 0.5}, "after step 6, .* at step 5"),
        ({"max_steps": 6, "check_val_every_n_epoch": 2, "val_check_interval": 0.5}, None),
        ({"max_steps": 3, "limit_val_batches": 0}, None),
    ],
)
def test_validations_that_never_run_are_warned_of(arguments: dict[str, Any], reason: str | None) -> None:
    warned = told(**arguments)
    assert len(warned) == (reason is not None)
    assert reason is None or re.search(reason, warned[0])


@on_two_ranks
def test_ranks_of_unequal_length_end_the_epoch_together() -> None:
    class Looked(Scalar):
        def on_train_epoch_end(self) -> None:
            self.ends = self.trainer.current_epoch

    module = Looked()
    trainer = quiet_trainer(strategy="ddp", max_steps=3, log_every_n_steps=50)
    batches = [torch.tensor([1.0])] * (3, 5)[trainer.global_rank]
    trainer.fit(module, batches, [torch.tensor([1.0])])
    # The limit and the shortest rank's end fall together: validation, metrics and hooks on both ranks.
    assert (trainer.global_step, module.ends) == (3, 0)
    assert {"loss", "val_loss"} <= trainer.callback_metrics.keys()
    assert trainer.progress.epoch_done


class PlansAhead(Scalar):
    """Its learning rate goes down to zero over the estimated number of steps."""

    def configure_optimizers(self) -> Any:
        self.estimate = self.trainer.estimated_stepping_batches
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=int(self.estimate))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@on_two_ranks
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "deepspeed_stage_2"])
def test_ranks_of_unequal_length_plan_the_same_training(strategy: str) -> None:
    module, seen, recorder = PlansAhead(), Validations(), Recorder()
    trainer = quiet_trainer(strategy=strategy, max_epochs=2, val_check_interval=0.5, callbacks=[seen, recorder])
    batches = [torch.tensor([1.0])] * (4, 9)[trainer.global_rank]
    trainer.fit(module, batches, [torch.tensor([1.0])])
    # The shortest rank's 4 batches, twice; half of an epoch is 2 steps.
    assert (trainer.global_step, module.estimate, trainer.estimated_stepping_batches) == (8, 8, 8)
    assert seen.steps == [2, 4, 6, 8]
    assert recorder.rates == pytest.approx([7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8, 0.0])


@on_two_ranks
def test_a_rank_whose_own_loader_is_empty_ends_the_training_of_all() -> None:
    trainer, module = quiet_trainer(strategy="ddp", max_epochs=2), Scalar()
    rank = trainer.global_rank
    trainer.fit(module, [torch.tensor([1.0])] * (3, 0)[rank])
    assert (trainer.global_step, module.losses) == (0, [])
    trainer.fit(module, [torch.tensor([1.0])] * (3, 2)[rank])
    assert trainer.global_step == 4
