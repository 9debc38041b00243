"""Parameters that are frozen and unfrozen while a fit runs, and windows that leave some without a gradient.

Rank r of two reads the value 1 + 2r, and the mean is 2: each step subtracts 2 from `a` and, where it is trained, 6 from `b`.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from acclight import LossSum, Trainer, TrainModule
from acclight.strategies import DDPStrategy, FSDP2Strategy
from tests.distributed import RankChecks, RanksFailed, run_ranks
from tests.scenarios import quiet_trainer, repeated, whole

on_two_ranks = RankChecks(world_size=2)

STRATEGIES = ["ddp", "fsdp2"]


class TwoParts(TrainModule):
    """a = b = zeros(4), and a loss whose gradients are mean(x) and 3 mean(x) in every element.

    Args:
        changes: What `b.requires_grad` becomes, by the name of a hook and how many steps are done by then.
        frozen: b begins frozen.
        added: The optimizer gets b once it is unfrozen, in a group of its own; else it has both from the start.
        summed: The loss is a LossSum over five items.
    """

    def __init__(
        self, changes: dict[tuple[str, int], bool], *, frozen: bool = True, added: bool = False, summed: bool = False
    ) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(4))
        self.b = nn.Parameter(torch.zeros(4), requires_grad=not frozen)
        self.changes, self.added, self.summed = changes, added, summed

    def change(self, hook: str) -> None:
        needs = self.changes.get((hook, self.global_step))
        if needs is not None:
            self.b.requires_grad_(needs)
            if needs and self.added:
                self.trainer.optimizers[0].add_param_group({"params": [self.b]})

    def on_fit_start(self) -> None:
        self.change("on_fit_start")

    def on_train_start(self) -> None:
        self.change("on_train_start")

    def on_train_epoch_start(self) -> None:
        self.change("on_train_epoch_start")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        self.change("on_train_batch_start")
        return None

    def on_step(self) -> None:
        self.change("on_step")

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.change("training_step")
        mean = batch.mean()
        loss = (self.a * mean).sum() + (self.b * mean * 3).sum()
        return LossSum(loss * 5, 5) if self.summed else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.a] if self.added else self.parameters(), lr=1.0)


def batches(strategy: str) -> DataLoader[Any]:
    """One batch, whose mean over the ranks is 2."""
    return DataLoader(torch.tensor([1.0, 3.0]), batch_size=2 if strategy == "single" else 1)


def trained(model: TrainModule, strategy: Any, **arguments: Any) -> tuple[Trainer, list[float], list[float]]:
    """Two epochs of one step unless the arguments say more; the Trainer, and the elements of a and b."""
    name = strategy if isinstance(strategy, str) else strategy.kind
    trainer = quiet_trainer(strategy=strategy, **{"max_epochs": 2, **arguments})
    trainer.fit(model, batches(name))
    return trainer, whole(trainer, "a").tolist(), whole(trainer, "b").tolist()


@on_two_ranks
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("added", [False, True])
def test_parameters_unfrozen_at_an_epoch_are_trained_from_then_on(strategy: str, added: bool) -> None:
    _, a, b = trained(TwoParts({("on_train_epoch_start", 1): True}, added=added), strategy)
    assert (a, b) == ([-4.0] * 4, [-6.0] * 4)


@on_two_ranks
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_unfrozen_parameters_are_clipped_with_the_others(strategy: str) -> None:
    # Norms: 4 of a alone, then sqrt(4 * 2^2 + 4 * 6^2) = sqrt(160), each clipped to 1.
    model = TwoParts({("on_train_epoch_start", 1): True})
    trainer, a, b = trained(model, strategy, gradient_clip_val=1.0)
    assert a == pytest.approx([-0.5 - 2 / 160**0.5] * 4)
    assert b == pytest.approx([-6 / 160**0.5] * 4)
    assert trainer.grad_norm == pytest.approx(160**0.5)


@on_two_ranks
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_elements_of_unfrozen_parameters_are_clipped(strategy: str) -> None:
    model = TwoParts({("on_train_epoch_start", 1): True})
    _, a, b = trained(model, strategy, gradient_clip_val=1.5, gradient_clip_algorithm="value")
    assert (a, b) == ([-3.0] * 4, [-1.5] * 4)


@on_two_ranks
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_sum_of_losses_is_divided_for_unfrozen_parameters_too(strategy: str) -> None:
    _, a, b = trained(TwoParts({("on_train_epoch_start", 1): True}, summed=True), strategy)
    assert (a, b) == (pytest.approx([-4.0] * 4), pytest.approx([-6.0] * 4))


@on_two_ranks
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("hook", "step", "steps_of_b"),
    [("on_fit_start", 0, 3), ("on_train_batch_start", 1, 2), ("on_step", 1, 2)],
)
def test_a_parameter_may_be_unfrozen_in_any_hook(strategy: str, hook: str, step: int, steps_of_b: int) -> None:
    _, a, b = trained(TwoParts({(hook, step): True}), strategy, max_epochs=3)
    assert (a, b) == ([-6.0] * 4, [-6.0 * steps_of_b] * 4)


@on_two_ranks
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("hook", "step", "steps_of_b"),
    [("on_fit_start", 0, 0), ("on_train_start", 0, 0), ("on_train_epoch_start", 1, 1), ("on_step", 2, 2)],
)
def test_a_parameter_may_be_frozen_in_any_hook_before_a_step(
    strategy: str, hook: str, step: int, steps_of_b: int
) -> None:
    _, a, b = trained(TwoParts({(hook, step): False}, frozen=False), strategy, max_epochs=3)
    assert (a, b) == ([-6.0] * 4, [-6.0 * steps_of_b] * 4)


@on_two_ranks
def test_ddp_averages_what_training_step_unfreezes() -> None:
    _, a, b = trained(TwoParts({("training_step", 1): True}), "ddp", max_epochs=3)
    assert (a, b) == ([-6.0] * 4, [-12.0] * 4)


@pytest.mark.parametrize(
    ("check", "arguments"),
    [
        (test_parameters_unfrozen_at_an_epoch_are_trained_from_then_on, {"added": False}),
        (test_parameters_unfrozen_at_an_epoch_are_trained_from_then_on, {"added": True}),
        (test_unfrozen_parameters_are_clipped_with_the_others, {}),
        (test_elements_of_unfrozen_parameters_are_clipped, {}),
        (test_a_sum_of_losses_is_divided_for_unfrozen_parameters_too, {}),
        (test_a_parameter_may_be_unfrozen_in_any_hook, {"hook": "on_step", "step": 1, "steps_of_b": 2}),
        (test_a_parameter_may_be_frozen_in_any_hook_before_a_step, {"hook": "on_step", "step": 2, "steps_of_b": 2}),
    ],
)
def test_one_process_does_the_same(check: Any, arguments: dict[str, Any]) -> None:
    check.on_each_rank(strategy="single", **arguments)


@on_two_ranks
def test_ddp_wraps_anew_only_where_something_has_changed() -> None:
    wrappers: list[nn.Module] = []

    class Watched(TwoParts):
        def on_train_batch_end(self, *arguments: Any) -> None:
            assert isinstance(self.trainer.strategy.wrapped, DistributedDataParallel)
            wrappers.append(self.trainer.strategy.wrapped)

    model = Watched({("on_train_epoch_start", 1): True, ("on_train_epoch_start", 3): False})
    strategy = DDPStrategy(bucket_cap_mb=3, gradient_as_bucket_view=True, comm_hook="fp16")
    _, a, b = trained(model, strategy, max_epochs=5)
    assert [wrappers.index(one) for one in wrappers] == [0, 1, 1, 3, 3]
    # All of 1/2, 3/2 and their sums are exact in float16.
    assert (a, b) == ([-10.0] * 4, [-12.0] * 4)
    last: Any = wrappers[-1]
    assert (last.bucket_bytes_cap, last.gradient_as_bucket_view) == (3 * 2**20, True)


@on_two_ranks
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_unfreezing_within_a_window_counts_all_that_comes_after(strategy: str) -> None:
    class InTheMiddle(TwoParts):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
            self.b.requires_grad_(batch_idx > 0)
            return None

    # Micro-batches of 1 and 3 on each rank, of which b sees the second alone: 3 * 3 / 2.
    trainer = quiet_trainer(strategy=strategy, max_epochs=1, accumulate_grad_batches=2)
    trainer.fit(InTheMiddle({}), repeated([1.0, 3.0], 2))
    assert (whole(trainer, "a").tolist(), whole(trainer, "b").tolist()) == ([-2.0] * 4, [-4.5] * 4)


def unfreeze_on_rank_0() -> None:
    class OnOneRank(TwoParts):
        def on_train_epoch_start(self) -> None:
            self.b.requires_grad_(self.current_epoch == 1 and self.trainer.is_global_zero)

    quiet_trainer(strategy=DDPStrategy(timeout=4), max_epochs=2).fit(OnOneRank({}), batches("ddp"))


def test_ddp_says_that_only_some_ranks_have_unfrozen_a_parameter() -> None:
    said = r"rank 0 has unfrozen b during the training, and the other ranks have not within 2 s"
    with pytest.raises(RanksFailed, match=said):
        run_ranks(unfreeze_on_rank_0, grace=1.0)


@on_two_ranks
def test_ddp_names_what_training_step_has_frozen() -> None:
    with pytest.raises(RuntimeError, match="training_step has frozen b, for whose gradients DDP waits"):
        trained(TwoParts({("training_step", 1): False}, frozen=False), "ddp")


@on_two_ranks
@pytest.mark.parametrize("steps", [1, 2])
def test_ddp_names_what_the_end_of_a_window_left_without_a_gradient(steps: int) -> None:
    class OnlyInTheFirst(TwoParts):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            used = self.global_step + 1 < steps or batch_idx % 2 == 0
            return (self.a.sum() + (self.b.sum() if used else 0.0)) * batch.mean()

    model = OnlyInTheFirst({}, frozen=False)
    trainer = quiet_trainer(strategy="ddp", max_epochs=1, accumulate_grad_batches=2)
    # Also in the last window of a fit, and before the replicas have stepped apart: b had gradients, which were not averaged.
    with pytest.raises(
        RuntimeError, match="without a gradient, which DDP waits for: b; use them, freeze them, or give"
    ):
        trainer.fit(model, repeated([1.0] * 2 * steps, 2))
    assert trainer.global_step == steps - 1
    assert model.b.tolist() == [1.0 - steps] * 4
    # A second fit begins with a reducer that waits for nothing.
    trainer.max_steps = steps
    model.training_step = lambda batch, batch_idx: (model.a.sum() + model.b.sum()) * batch.mean()  # type: ignore[method-assign]
    trainer.fit(model, repeated([1.0] * 2 * steps, 2))
    assert model.b.tolist() == [-1.0 * steps] * 4


class Fails(TrainModule):
    """Raises once, in a hook's n-th call; every element's gradient is the mean of the batch."""

    def __init__(self, hook: str, call: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(6))
        self.unit = nn.Linear(6, 6, bias=False)
        nn.init.zeros_(self.unit.weight)
        self.hook, self.left = hook, call

    def reach(self, hook: str) -> None:
        self.left -= hook == self.hook
        if hook == self.hook and self.left == 0:
            raise KeyError("this once")

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.reach("training_step")
        out = self.unit(torch.ones(1, 6))
        self.reach("forward")
        loss = (self.w.sum() + out.sum()) * batch.mean()
        if loss.requires_grad:
            out.register_hook(lambda gradient: self.reach("backward"))
        return loss

    def on_before_backward(self, loss: Tensor) -> None:
        self.reach("on_before_backward")

    def on_after_backward(self) -> None:
        self.reach("on_after_backward")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.reach("on_train_batch_end")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


@on_two_ranks
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("hook", "call"),
    [
        ("training_step", 4), ("forward", 3), ("forward", 4), ("on_before_backward", 4), ("backward", 3), ("backward", 4),
        ("on_after_backward", 3), ("on_after_backward", 4), ("on_train_batch_end", 3),
    ],
)  # fmt: skip
def test_a_second_fit_knows_nothing_of_the_window_that_failed(strategy: Any, hook: str, call: int) -> None:
    if strategy == "fsdp2":
        strategy = FSDP2Strategy(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=10)
    model = Fails(hook, call)
    trainer = quiet_trainer(strategy=strategy, max_epochs=1, accumulate_grad_batches=2)
    batches = repeated([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 2)
    with pytest.raises(KeyError, match="this once"):
        trainer.fit(model, batches)
    assert trainer.global_step == 1
    trainer.fit(model, batches)
    # 1.5 before it failed, then the windows of 3 and 4 and of 5 and 6.
    assert whole(trainer, "w").tolist() == [-10.5] * 6
    assert whole(trainer, "unit.weight").unique().tolist() == [-10.5]


class Empty(TrainModule):
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        return None

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("mean", batch.mean())

    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        return batch

    def configure_optimizers(self) -> None:
        return None


@on_two_ranks
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_module_without_parameters_is_evaluated_and_not_fitted(strategy: str) -> None:
    trainer, model, loader = quiet_trainer(strategy=strategy), Empty(), repeated([1.0, 2.0], 2)
    assert trainer.validate(model, loader, verbose=False) == [{"mean": 1.5}]
    predictions = trainer.predict(model, loader)
    assert predictions is not None
    assert torch.cat(predictions).tolist() == [1.0, 1.0, 2.0, 2.0]
    with pytest.raises(ValueError, match=r"Empty has no parameters, so that fit under '.*' has nothing to train"):
        trainer.fit(model, loader)


@on_two_ranks
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_frozen_module_is_not_fitted(strategy: str) -> None:
    model = TwoParts({}, frozen=True)
    model.a.requires_grad_(False)
    with pytest.raises(ValueError, match=r"TwoParts has frozen parameters only.*leave some unfrozen before fit"):
        quiet_trainer(strategy=strategy, max_epochs=1).fit(model, repeated([1.0], 2))


class Evaluated(TwoParts):
    """Another Trainer validates it at the end of each epoch."""

    def __init__(self, strategy: str) -> None:
        super().__init__({}, frozen=False)
        self.strategy = strategy
        self.seen: list[float] = []

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("b", self.b.mean())

    def on_train_epoch_end(self) -> None:
        other = quiet_trainer(strategy=self.strategy)
        self.seen.append(other.validate(self, batches(self.strategy), verbose=False)[0]["b"])


def check_another_trainer_evaluates_within_a_fit(strategy: str) -> None:
    model = Evaluated(strategy)
    trainer = quiet_trainer(strategy=strategy, max_epochs=3)
    trainer.fit(model, batches(strategy), batches(strategy))
    assert model.seen == [-6.0, -12.0, -18.0]
    # The fit goes on with its own Trainer: what its validations log is still its own.
    assert trainer.callback_metrics["b"] == -18.0


@on_two_ranks
def test_another_trainer_evaluates_within_a_fit_under_ddp() -> None:
    check_another_trainer_evaluates_within_a_fit("ddp")


def test_another_trainer_evaluates_within_a_fit_in_one_process() -> None:
    check_another_trainer_evaluates_within_a_fit("single")


@on_two_ranks
def test_another_trainer_is_refused_a_module_that_a_fit_has_sharded() -> None:
    with pytest.raises(
        RuntimeError, match="validate was called for a module whose fit another Trainer runs, and 'fsdp2'"
    ):
        trained(Evaluated("fsdp2"), "fsdp2")


def test_a_trainer_is_not_copied() -> None:
    with pytest.raises(TypeError, match="a Trainer cannot be copied: make a new one"):
        copy.deepcopy(quiet_trainer())


class Layers(TrainModule):
    """Two layers of ones(8, 8); the second is frozen in the first epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        for layer in (self.first, self.second):
            nn.init.ones_(layer.weight)
        self.second.requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.second(self.first(batch.view(1, 1).expand(1, 8))).sum() / 64

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.second.requires_grad_(True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.25)


@on_two_ranks
def test_a_whole_unit_of_fsdp2_may_be_unfrozen_under_mixed_precision() -> None:
    # The input is ones: each weight of the first has the gradient 8 / 64, and is 1 - 0.25 / 8 = 0.96875 after the first epoch.
    # Then each hidden value is 8 * 0.96875, and a weight of the second has the gradient 7.75 / 64; all of it exact in bfloat16.
    policy = {"param_dtype": "bf16", "reduce_dtype": "fp32"}
    strategy = FSDP2Strategy(mixed_precision_policy=policy, auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=10)
    trainer = quiet_trainer(strategy=strategy, max_epochs=2)
    trainer.fit(Layers(), repeated([1.0], 2))
    assert whole(trainer, "first.weight").unique().tolist() == [1 - 0.25 / 8 - 0.25 / 8]
    assert whole(trainer, "second.weight").unique().tolist() == [1 - 0.25 * 7.75 / 64]
