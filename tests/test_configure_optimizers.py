"""Every form that configure_optimizers may return, when its schedulers step, and what its errors say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, SequentialLR, StepLR
from torch.utils.data import DataLoader, IterableDataset

from acclight import TrainModule
from tests.distributed import RankChecks
from tests.scenarios import DISTRIBUTED, Recorder, Scalar, quiet_trainer, repeated

on_two_ranks = RankChecks(world_size=2, timeout=60.0)


class Returns(TrainModule):
    """Two weights; `form` makes what configure_optimizers returns from an optimizer of each."""

    def __init__(self, form: Callable[[Optimizer, Optimizer], Any]) -> None:
        super().__init__()
        self.form = form
        self.a = nn.Parameter(torch.zeros(1))
        self.b = nn.Parameter(torch.zeros(1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return ((self.a - batch) ** 2 / 2 + (self.b - batch) ** 2 / 2).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", 1.0)

    def configure_optimizers(self) -> Any:
        return self.form(SGD([self.a], lr=0.5), SGD([self.b], lr=0.25))


def halves(optimizer: Optimizer) -> StepLR:
    return StepLR(optimizer, 1, gamma=0.5)


def plateau(optimizer: Optimizer) -> ReduceLROnPlateau:
    return ReduceLROnPlateau(optimizer, patience=0, factor=0.1)


FORMS: dict[str, tuple[Callable[[Optimizer, Optimizer], Any], int, list[tuple[str, int, str | None]]]] = {
    # What is returned; how many optimizers; interval, frequency and monitor of each scheduler.
    "an optimizer": (lambda a, b: a, 1, []),
    "a list of one": (lambda a, b: [a], 1, []),
    "a list": (lambda a, b: [a, b], 2, []),
    "a tuple": (lambda a, b: (a, b), 2, []),
    "two lists": (lambda a, b: ([a, b], [halves(a), halves(b)]), 2, [("epoch", 1, None), ("epoch", 1, None)]),
    "two lists in a list": (lambda a, b: [[a], [halves(a)]], 1, [("epoch", 1, None)]),
    "a list and a scheduler": (lambda a, b: ([a], halves(a)), 1, [("epoch", 1, None)]),
    "two lists, schedulers as dictionaries": (
        lambda a, b: ([a, b], [{"scheduler": halves(a), "interval": "step", "frequency": 2}, {"scheduler": halves(b)}]),
        2,
        [("step", 2, None), ("epoch", 1, None)],
    ),
    "two lists, none of the second": (lambda a, b: ([a, b], []), 2, []),
    "a dictionary": (lambda a, b: {"optimizer": a}, 1, []),
    "a dictionary with a scheduler": (lambda a, b: {"optimizer": a, "lr_scheduler": halves(a)}, 1, [("epoch", 1, None)]),
    "a dictionary with a dictionary": (
        lambda a, b: {"optimizer": a, "lr_scheduler": {"scheduler": halves(a), "interval": "step", "name": "lr"}},
        1,
        [("step", 1, None)],
    ),
    "a dictionary with a plateau": (
        lambda a, b: {"optimizer": a, "lr_scheduler": plateau(a), "monitor": "val_loss"}, 1, [("epoch", 1, "val_loss")],
    ),
    "a dictionary whose scheduler names its metric": (
        lambda a, b: {"optimizer": a, "lr_scheduler": {"scheduler": plateau(a), "monitor": "val_loss", "frequency": 2}},
        1,
        [("epoch", 2, "val_loss")],
    ),
    "a dictionary with none": (lambda a, b: {"optimizer": a, "lr_scheduler": None}, 1, []),
    "dictionaries": (
        lambda a, b: ({"optimizer": a, "lr_scheduler": halves(a)}, {"optimizer": b}), 2, [("epoch", 1, None)],
    ),
    "a list of dictionaries": (
        lambda a, b: [{"optimizer": one, "lr_scheduler": {"scheduler": halves(one), "interval": "step"}} for one in (a, b)],
        2,
        [("step", 1, None), ("step", 1, None)],
    ),
    "a scheduler of schedulers": (
        lambda a, b: ([a], [SequentialLR(a, [halves(a), LambdaLR(a, lambda n: 1.0)], [2])]), 1, [("epoch", 1, None)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_read(name: str) -> None:
    form, optimizers, schedulers = FORMS[name]
    module = Returns(form)
    trainer = quiet_trainer(strategy="single", max_epochs=1)
    trainer.fit(module, repeated([1.0], 1), repeated([1.0], 1))
    assert len(trainer.optimizers) == optimizers
    assert [(c.interval, c.frequency, c.monitor) for c in trainer.lr_scheduler_configs] == schedulers
    assert float(module.a.detach()) == 0.5
    assert float(module.b.detach()) == (0.25 if optimizers == 2 else 0.0)


def test_schedulers_of_several_optimizers_step_each_in_its_own_time() -> None:
    def form(a: Optimizer, b: Optimizer) -> Any:
        return [a, b], [
            {"scheduler": halves(a), "interval": "step", "frequency": 2},
            {"scheduler": halves(b), "interval": "epoch", "frequency": 2},
            {"scheduler": plateau(a), "monitor": "val_loss"},
        ]

    trainer = quiet_trainer(strategy="single", max_epochs=4)
    trainer.fit(Returns(form), repeated([1.0] * 3, 1), repeated([1.0], 1))
    # 12 steps: six halvings. 4 epochs: two. The metric is no better in epochs 2, 3 and 4.
    rates = [one.param_groups[0]["lr"] for one in trainer.optimizers]
    assert rates == pytest.approx([0.5 * 0.5**6 * 0.1**3, 0.25 * 0.5**2])


def test_a_plateau_that_counts_steps_looks_at_validations_inside_the_epoch() -> None:
    def form(a: Optimizer, b: Optimizer) -> Any:
        entry = {"scheduler": plateau(a), "monitor": "val_loss", "interval": "step", "frequency": 4}
        return {"optimizer": a, "lr_scheduler": entry}

    trainer = quiet_trainer(strategy="single", max_epochs=1, val_check_interval=2)
    trainer.fit(Returns(form), repeated([1.0] * 8, 1), repeated([1.0], 1))
    # Validations at 2, 4, 6, 8, of which those at 4 and 8 count; the second is no better.
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.05)


def test_a_plateau_may_watch_the_training_epoch() -> None:
    class Watches(Scalar):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            self.log("train_loss", 1.0, on_epoch=True)
            return self.loss(batch)

        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), lr=1.0)
            return {"optimizer": optimizer, "lr_scheduler": plateau(optimizer), "monitor": "train_loss"}

    trainer = quiet_trainer(strategy="single", max_epochs=3)
    trainer.fit(Watches(), repeated([1.0], 1))
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01)


class WatchesTraining(Scalar):
    """A plateau without patience on `train_loss`, logged as `logged` says: each look but the first makes the rate a tenth."""

    def __init__(self, logged: dict[str, Any] | None = None, **entry: Any) -> None:
        super().__init__()
        self.logged = logged or {}
        self.entry = entry

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.log("train_loss", 1.0, **self.logged)
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=1.0)
        entry = {"scheduler": plateau(optimizer), "monitor": "train_loss", **self.entry}
        return {"optimizer": optimizer, "lr_scheduler": entry}


@pytest.mark.parametrize("validated", [False, True])
def test_a_plateau_by_epochs_may_watch_what_training_logs_on_its_steps(validated: bool) -> None:
    trainer = quiet_trainer(strategy="single", max_epochs=3)
    trainer.fit(WatchesTraining(), repeated([1.0, 2.0], 1), repeated([1.0], 1) if validated else None)
    # The value of each epoch's last step; those of epochs 2 and 3 are no better.
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01)


class Endless(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        return iter(torch.ones(3))


def test_a_plateau_watches_the_last_step_of_a_stream() -> None:
    class Falls(WatchesTraining):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            self.log("train_loss", float(batch_idx))
            return self.loss(batch)

    trainer = quiet_trainer(strategy="single", max_epochs=2)
    trainer.fit(Falls(), DataLoader(Endless(), batch_size=1))
    assert float(trainer.callback_metrics["train_loss"]) == 2.0
    assert trainer.lr_scheduler_configs[0].scheduler.best == 2.0
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 2


BY_STEPS = [
    # How it is logged, the frequency, and how often of six steps the scheduler looks.
    pytest.param({}, 1, 6, id="on steps"),
    pytest.param({"on_epoch": True}, 2, 3, id="on both"),
    pytest.param({}, 4, 1, id="every four"),
]


def check_by_steps(strategy: str, world: int, logged: dict[str, Any], frequency: int, looks: int) -> None:
    trainer = quiet_trainer(strategy=strategy, max_epochs=3)
    module = WatchesTraining(logged, interval="step", frequency=frequency)
    trainer.fit(module, repeated([1.0, 2.0], world))
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == looks
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 ** (looks - 1))


@pytest.mark.parametrize(("logged", "frequency", "looks"), BY_STEPS)
def test_a_plateau_by_steps_may_watch_training(logged: dict[str, Any], frequency: int, looks: int) -> None:
    check_by_steps("single", 1, logged, frequency, looks)


@on_two_ranks
@pytest.mark.parametrize(("logged", "frequency", "looks"), BY_STEPS)
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_a_plateau_by_steps_may_watch_training_on_two_ranks(
    strategy: str, logged: dict[str, Any], frequency: int, looks: int
) -> None:
    check_by_steps(strategy, 2, logged, frequency, looks)


@on_two_ranks
def test_a_plateau_by_steps_watches_what_one_rank_alone_logs() -> None:
    class First(WatchesTraining):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            if self.global_rank == 0:
                self.log("train_loss", 1.0)
            return self.loss(batch)

    trainer = quiet_trainer(strategy="ddp", max_epochs=2)
    trainer.fit(First(interval="step"), repeated([1.0, 2.0], 2))
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.001)


@pytest.mark.parametrize(
    ("entry", "logged", "text", "steps"),
    [
        (
            {"interval": "step"},
            {"on_step": False, "on_epoch": True},
            r"'train_loss', which training logs for its epochs",
            1,
        ),
        ({"monitor": "train_los"}, {}, r"'train_los', which was not logged; there are \['train_loss'\]", 2),
        ({"monitor": "train_los", "interval": "step"}, {}, r"'train_los', which was not logged", 2),
    ],
)
def test_a_plateau_that_could_never_step_is_an_error(
    entry: dict[str, Any], logged: dict[str, Any], text: str, steps: int
) -> None:
    trainer = quiet_trainer(strategy="single", max_epochs=2)
    with pytest.raises(ValueError, match=text):
        trainer.fit(WatchesTraining(logged, **entry), repeated([1.0, 2.0], 1))
    assert trainer.global_step == steps


@pytest.mark.parametrize("missing", ["overflow", "no loss"])
def test_a_scheduler_counts_the_steps_that_were_taken(missing: str) -> None:
    class Missing(Scalar):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            if batch_idx == 1 and missing == "no loss":
                return None
            return (self.w * (1e38 if batch_idx == 1 else 1.0)).sum()

        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), lr=1.0)
            return [optimizer], [{"scheduler": halves(optimizer), "interval": "step", "frequency": 2}]

    trainer = quiet_trainer(strategy="single", max_epochs=1, precision="16-mixed")
    trainer.fit(Missing(), repeated([1.0] * 5, 1))
    # Steps 1, 3, 4, 5 were taken: two ticks.
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.25


def test_no_optimizer_trains_nothing_and_says_so(recwarn: pytest.WarningsRecorder) -> None:
    module = Returns(lambda a, b: None)
    trainer = quiet_trainer(strategy="single", max_epochs=1)
    trainer.fit(module, repeated([1.0] * 2, 1))
    assert trainer.global_step == 2
    assert float(module.a.detach()) == 0.0
    assert "configure_optimizers returned None" in str(recwarn.list[0].message)


def test_one_window_is_clipped_by_the_norm_of_all_optimizers() -> None:
    """Both gradients are -1: their common norm is sqrt(2)."""
    module = Returns(lambda a, b: [a, b])
    recorder = Recorder(norms=True)
    trainer = quiet_trainer(strategy="single", max_steps=1, gradient_clip_val=0.5**0.5, callbacks=recorder)
    trainer.fit(module, repeated([1.0], 1))
    assert float(module.a.detach()) == pytest.approx(0.25, abs=1e-6)
    assert float(module.b.detach()) == pytest.approx(0.125, abs=1e-6)
    assert recorder.norms == pytest.approx([2.0**0.5])


def test_fp16_with_several_optimizers_steps_with_the_true_gradients() -> None:
    module = Returns(lambda a, b: [a, b])
    trainer = quiet_trainer(strategy="single", precision="16-mixed", max_steps=2, gradient_clip_val=100.0)
    trainer.fit(module, repeated([1.0] * 2, 1))
    assert float(module.a.detach()) == pytest.approx(0.75)
    assert float(module.b.detach()) == pytest.approx(0.4375)


class Shared(Returns):
    """Two optimizers over one weight."""

    def configure_optimizers(self) -> Any:
        return [SGD([self.a, self.b], lr=0.5), SGD([self.b], lr=0.25)]


def test_two_optimizers_over_one_parameter_are_refused_in_automatic_optimization() -> None:
    module = Shared(lambda *_: None)
    with pytest.raises(ValueError, match=r"two optimizers over 'b'.*automatic_optimization = False"):
        quiet_trainer(strategy="single", max_epochs=1).fit(module, repeated([1.0], 1))
    assert module.b.item() == 0.0


def test_two_optimizers_over_one_parameter_may_step_by_hand() -> None:
    class ByHand(Shared):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(((self.b - batch) ** 2 / 2).mean())
                optimizer.step()

    module = ByHand(lambda *_: None)
    module.automatic_optimization = False
    quiet_trainer(strategy="single", max_epochs=1).fit(module, repeated([1.0], 1))
    # 0 + 0.5 * 1, then 0.5 + 0.25 * 0.5
    assert module.b.item() == 0.625


class NoState:
    def step(self) -> None:
        pass


WRONG: list[tuple[Callable[[Optimizer, Optimizer], Any], type[Exception], str]] = [
    (lambda a, b: 3, TypeError, r"configure_optimizers returned a int; return an optimizer, a list"),
    (lambda a, b: (a, halves(a)), TypeError, r"returned a tuple of \(SGD, StepLR\); return"),
    (lambda a, b: [a, [halves(a)]], TypeError, r"returned a list of \(SGD, a list of \(StepLR\)\)"),
    (lambda a, b: [], TypeError, r"returned a list of \(\)"),
    (lambda a, b: ([a], [halves(a)], []), TypeError, r"returned a tuple of \(a list of \(SGD\), "),
    (lambda a, b: {"optimiser": a}, ValueError, r"a dictionary with the keys \['optimiser'\]"),
    (lambda a, b: {"optimizer": halves(a)}, TypeError, r"a StepLR where an optimizer was expected"),
    (lambda a, b: ([halves(a)], []), TypeError, r"a StepLR where an optimizer was expected"),
    (lambda a, b: ([a], [{"sheduler": halves(a)}]), ValueError, r"unknown key 'sheduler'; it takes"),
    (lambda a, b: ([a], [{"interval": "step"}]), ValueError, r"the keys \['interval'\], and needs 'scheduler'"),
    (lambda a, b: ([a], [{"scheduler": halves(a), "interval": "batch"}]), ValueError, r"interval='batch': use 'step'"),
    (lambda a, b: ([a], [{"scheduler": halves(a), "frequency": 0}]), ValueError, r"frequency=0: use a whole number"),
    (lambda a, b: ([a], [{"scheduler": halves(a), "frequency": 0.5}]), ValueError, r"frequency=0.5: use a whole number"),
    (lambda a, b: ([a], ["StepLR"]), TypeError, r"gave a str as a scheduler; it has no step\(\)"),
    (lambda a, b: ([a], [NoState()]), TypeError, r"gave a NoState as a scheduler; it has no state_dict\(\)"),
    (lambda a, b: ([a], [halves(b)]), ValueError, r"a StepLR of a SGD that is not among the optimizers"),
    (lambda a, b: ([a], [plateau(a)]), ValueError, r"a ReduceLROnPlateau scheduler needs the metric"),
    (lambda a, b: [a, a], ValueError, r"returned the same optimizer twice"),
    (
        lambda a, b: torch.optim.LBFGS(a.param_groups[0]["params"]), ValueError,
        r"LBFGS evaluates the loss several times in a step: set automatic_optimization = False",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("form", "error", "text"), WRONG)
def test_a_wrong_form_is_named(form: Callable[[Optimizer, Optimizer], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        quiet_trainer(strategy="single", max_steps=1).fit(Returns(form), repeated([1.0], 1))


def test_one_cycle_by_epochs_is_warned_of() -> None:
    module = Returns(lambda a, b: ([a], [OneCycleLR(a, max_lr=1.0, total_steps=10)]))
    with pytest.warns(UserWarning, match="OneCycleLR with interval='epoch'"):
        quiet_trainer(strategy="single", max_steps=1).fit(module, repeated([1.0], 1))
