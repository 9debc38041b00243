"""Every form that configure_optimizers may return, when its schedulers step, and what its errors say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, SequentialLR, StepLR

from acclight import TrainModule
from tests.scenarios import Recorder, Scalar, quiet_trainer, repeated


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
