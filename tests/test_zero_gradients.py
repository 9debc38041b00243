"""A DeepSpeed step uses the gradients of its own window, whichever parameters that window reaches."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from acclight import TrainModule
from acclight.strategies.zero_gradients import ZeroGradients
from tests.distributed import RankChecks, run_ranks
from tests.scenarios import Recorder, quiet_trainer, repeated, whole

on_two_ranks = RankChecks(world_size=2, timeout=100.0)

STAGES = [1, 2, 3]


class Heads(TrainModule):
    """A trunk t that every batch uses, and heads p and q where the plan says so; each use has the gradient 1 per element.

    With SGD and lr 1 a parameter ends at minus its uses / accumulation.
    """

    def __init__(self, plan: str) -> None:
        super().__init__()
        self.t, self.p, self.q = (nn.Parameter(torch.zeros(4)) for _ in range(3))
        self.plan = plan.split("|")

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        used: list[Tensor] = [getattr(self, name) for name in ("t", *self.plan[batch_idx])]
        return torch.stack(used).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class ManualHeads(Heads):
    """The same with manual optimization: `accumulate` backwards for a step, gradients cleared before or after it."""

    def __init__(self, plan: str, accumulate: int, clear: str) -> None:
        super().__init__(plan)
        self.automatic_optimization = False
        self.accumulate = accumulate
        self.clear = clear

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        if self.clear == "before" and batch_idx % self.accumulate == 0:
            optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx) / self.accumulate)
        if (batch_idx + 1) % self.accumulate == 0:
            optimizer.step()
            if self.clear == "after":
                optimizer.zero_grad()


def ends(trainer: Any) -> list[float]:
    return [float(whole(trainer, name)[2]) for name in "tpq"]


# Accumulation, plan, the ends of t, p and q, and for each window the squared norm of the gradients (of 4 elements each).
PLANS = [
    (1, "p|q|p|q", [-4.0, -2.0, -2.0], [8.0, 8.0, 8.0, 8.0]),
    (1, "p|||q", [-4.0, -1.0, -1.0], [8.0, 4.0, 4.0, 8.0]),
    (2, "p|q|p|q|p|q", [-3.0, -1.5, -1.5], [6.0, 6.0, 6.0]),
    (2, "p|p|q|q", [-2.0, -1.0, -1.0], [8.0, 8.0]),
    (2, "q|p||p|q|q", [-3.0, -1.0, -1.5], [6.0, 5.0, 8.0]),
    (2, "|q||q||q", [-3.0, 0.0, -1.5], [5.0, 5.0, 5.0]),
]


def check_plan(strategy: Any, accumulate: int, plan: str, expected: list[float], squares: list[float]) -> None:
    recorder = Recorder(norms=True)
    trainer = quiet_trainer(strategy=strategy, max_epochs=1, accumulate_grad_batches=accumulate, callbacks=[recorder])
    trainer.fit(Heads(plan), repeated([1.0] * len(plan.split("|")), trainer.world_size))
    assert ends(trainer) == expected
    assert recorder.norms == pytest.approx([square**0.5 for square in squares])


@on_two_ranks
@pytest.mark.parametrize(("accumulate", "plan", "expected", "squares"), PLANS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_step_uses_the_gradients_of_its_window(
    stage: int, accumulate: int, plan: str, expected: list[float], squares: list[float]
) -> None:
    check_plan(f"deepspeed_stage_{stage}", accumulate, plan, expected, squares)


@on_two_ranks
@pytest.mark.parametrize("clear", ["before", "after"])
@pytest.mark.parametrize(
    ("accumulate", "plan", "expected"),
    [(1, "p|q|p|q", [-4.0, -2.0, -2.0]), (2, "p|q|p|q", [-2.0, -1.0, -1.0]), (2, "p|p|q|q", [-2.0, -1.0, -1.0])],
)
@pytest.mark.parametrize("stage", STAGES)
def test_a_manual_step_uses_the_gradients_since_the_last(
    stage: int, accumulate: int, plan: str, expected: list[float], clear: str
) -> None:
    trainer = quiet_trainer(strategy=f"deepspeed_stage_{stage}", max_epochs=1)
    trainer.fit(ManualHeads(plan, accumulate, clear), repeated([1.0] * 4, 2))
    assert ends(trainer) == expected


def on_one_rank() -> None:
    for plan in PLANS:
        check_plan("deepspeed_stage_3", *plan)


def test_a_step_uses_the_gradients_of_its_window_on_one_rank() -> None:
    run_ranks(on_one_rank, world_size=1)


@on_two_ranks
def test_deepspeed_still_keeps_what_no_backward_replaces() -> None:
    # Fails once DeepSpeed forgets a window's gradients in its step: then ZeroGradients.after_backward can go.
    trainer = quiet_trainer(strategy="deepspeed_stage_3", max_epochs=1)
    with mock.patch.object(ZeroGradients, "after_backward"):
        trainer.fit(Heads("p|q|p|q"), repeated([1.0] * 4, 2))
    assert ends(trainer) == [-4.0, -4.0, -3.0]


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise OSError("out of luck")


class FailsOnce(TrainModule):
    """w = 0 and the loss w * x per element, whose gradient is x; fails once, where it is told to.

    Two batches make a window: with x = 1 to 6 and lr 1, w ends at -(1.5 + 3.5 + 5.5) = -10.5.
    """

    def __init__(self, where: str, nth: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4))
        self.v = nn.Linear(4, 4, bias=False)
        nn.init.zeros_(self.v.weight)
        self.where = where
        self.left = nth

    def reach(self, where: str) -> None:
        if where == self.where:
            self.left -= 1
            if self.left == 0:
                raise OSError("out of luck")

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        w = self.w
        if self.where == "backward":
            self.left -= 1
            if self.left == 0:
                # The gradient of v comes first, and is in the engine's hands when that of w fails.
                w = _Fails.apply(w)
        loss = w.sum() * batch.mean() + self.v(torch.ones(1, 4)).sum() * batch.mean()
        self.reach("step")
        return loss

    def on_after_backward(self) -> None:
        self.reach("after backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.reach("before step")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


@on_two_ranks
@pytest.mark.parametrize(
    ("where", "nth"),
    [("step", 4), ("backward", 3), ("backward", 4), ("after backward", 3), ("after backward", 4), ("before step", 2)],
)
@pytest.mark.parametrize("stage", STAGES)
def test_a_window_that_failed_leaves_nothing_to_the_next_fit(stage: int, where: str, nth: int) -> None:
    module = FailsOnce(where, nth)
    trainer = quiet_trainer(strategy=f"deepspeed_stage_{stage}", max_epochs=1, accumulate_grad_batches=2)
    batches = repeated([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 2)
    with pytest.raises(OSError, match="out of luck"):
        trainer.fit(module, batches)
    assert trainer.global_step == 1
    trainer.fit(module, batches)
    assert trainer.global_step == 3
    for name in ("w", "v.weight"):
        assert torch.equal(whole(trainer, name), torch.full_like(whole(trainer, name), -10.5)), name


class Unfrozen(TrainModule):
    """a and b with the gradients 2 and 6 per element: trained for one epoch of a single step, or for both of them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.zeros(4)) for _ in range(2))
        self.b.requires_grad_(how in ("lr", "refrozen"))
        self.how = how

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return 2.0 * self.a.sum() + 6.0 * self.b.sum()

    def on_train_start(self) -> None:
        if self.how == "refrozen":
            self.b.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 0:
            return
        groups = self.trainer.optimizers[0]
        if self.how == "lr":
            groups.param_groups[1]["lr"] = 1.0
            return
        self.b.requires_grad_(True)
        if self.how == "group":
            groups.add_param_group({"params": [self.b]})

    def on_train_epoch_end(self) -> None:
        if self.how == "save" and self.current_epoch == 0:
            self.trainer.optimizers[0].add_param_group({"params": [nn.Parameter(torch.zeros(4))]})
            self.trainer.save_checkpoint("saved")

    def configure_optimizers(self) -> Any:
        if self.how == "lr":
            return torch.optim.SGD([{"params": [self.a]}, {"params": [self.b], "lr": 0.0}], lr=1.0)
        return torch.optim.SGD([self.a] if self.how == "group" else [self.a, self.b], lr=1.0)


@on_two_ranks
@pytest.mark.parametrize(
    ("how", "named"), [("all", "b"), ("group", "b"), ("save", r"what add_param_group .*group 1\)")]
)
@pytest.mark.parametrize("stage", STAGES)
def test_parameters_that_come_later_are_refused(stage: int, how: str, named: str) -> None:
    module = Unfrozen(how)
    trainer = quiet_trainer(strategy=f"deepspeed_stage_{stage}", max_epochs=2)
    with pytest.raises(RuntimeError, match=rf"^{named} is to be trained since fit has begun.*with lr=0 until"):
        trainer.fit(module, repeated([1.0], 2))
    # The first epoch has had its step: 2 times lr 1.
    assert trainer.global_step == 1
    if how != "save":
        module.b.requires_grad_(False)
    assert torch.equal(whole(trainer, "a"), torch.full((4,), -2.0))


@on_two_ranks
@pytest.mark.parametrize("how", ["lr", "refrozen"])
@pytest.mark.parametrize("stage", STAGES)
def test_parameters_that_were_there_from_the_start_are_trained_later(stage: int, how: str) -> None:
    trainer = quiet_trainer(strategy=f"deepspeed_stage_{stage}", max_epochs=2)
    trainer.fit(Unfrozen(how), repeated([1.0], 2))
    assert torch.equal(whole(trainer, "a"), torch.full((4,), -4.0))
    assert torch.equal(whole(trainer, "b"), torch.full((4,), -6.0))
