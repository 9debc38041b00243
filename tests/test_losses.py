"""Losses that are missing, on all ranks or on some, and sums whose count is known only after the forward."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from acclight import LossSum, TrainModule
from acclight.loops import losses
from acclight.strategies import DDPStrategy
from tests.distributed import RankChecks, RanksFailed, run_ranks
from tests.scenarios import DISTRIBUTED, Recorder, Scalar, Tokens, quiet_trainer, ragged_tokens, repeated, whole

on_two_ranks = RankChecks(world_size=2, timeout=60.0)


# --- no loss ---------------------------------------------------------------------------------------------------------


class Absent(Scalar):
    """AdamW with a large weight decay and w = 1: a step without a gradient would be seen. Samples below zero have no loss."""

    def __init__(self, early: bool = True) -> None:
        super().__init__()
        self.early = early
        with torch.no_grad():
            self.w.fill_(1.0)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if self.early and batch.min() < 0:
            return None
        loss = self.loss(batch)
        return None if batch.min() < 0 else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.5)


def check_absent(strategy: Any, world: int, early: bool, accumulate: int, batches: list[float], steps: int) -> float:
    recorder = Recorder()
    trainer = quiet_trainer(strategy=strategy, max_epochs=1, accumulate_grad_batches=accumulate, callbacks=recorder)
    trainer.fit(Absent(early), repeated(batches, world))
    assert trainer.global_step == steps
    assert recorder.steps == list(range(1, steps + 1))
    return float(whole(trainer, "w"))


EVERY_RANK = [
    # Micro-batches of every rank (below 0: None), the accumulation, and the gradients at w of the steps that are taken.
    pytest.param([-1.0, 3.0, -1.0], 1, id="whole windows"),
    pytest.param([3.0, -1.0], 2, id="the last micro-batch"),
    pytest.param([-1.0, 3.0], 2, id="the first micro-batch"),
    pytest.param([-1.0, -1.0, 3.0, -1.0, 3.0, 3.0], 2, id="windows of two"),
]


def expected_weight(batches: list[float], accumulate: int) -> float:
    """A missing loss adds nothing to its window's mean; a window without any takes no step."""
    w = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([w], lr=0.1, weight_decay=0.5)
    for start in range(0, len(batches), accumulate):
        window = batches[start : start + accumulate]
        optimizer.zero_grad()
        for x in window:
            if x >= 0:
                ((w - x) ** 2 / 2 / len(window)).sum().backward()
        if w.grad is not None:
            optimizer.step()
    return float(w.detach())


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(("batches", "accumulate"), EVERY_RANK)
def test_no_loss_in_one_process(batches: list[float], accumulate: int, early: bool) -> None:
    steps = -(-len(batches) // accumulate)
    w = check_absent("single", 1, early, accumulate, batches, steps)
    assert w == pytest.approx(expected_weight(batches, accumulate), abs=1e-6)


@on_two_ranks
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(("batches", "accumulate"), EVERY_RANK)
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_no_loss_on_every_rank(strategy: str, batches: list[float], accumulate: int, early: bool) -> None:
    steps = -(-len(batches) // accumulate)
    w = check_absent(strategy, 2, early, accumulate, batches, steps)
    assert w == pytest.approx(expected_weight(batches, accumulate), abs=1e-6)


def one_sample_each(pairs: list[tuple[float, float]]) -> DataLoader[Any]:
    """Batches of one sample: of each pair the first goes to rank 0, the second to rank 1."""
    return DataLoader(torch.tensor([x for pair in pairs for x in pair]), batch_size=1)


SOME_RANKS = [
    pytest.param([(3.0, -1.0)], 1, id="one rank"),
    pytest.param([(3.0, -1.0), (-1.0, 5.0), (-1.0, -1.0), (2.0, 4.0)], 1, id="in turn, and nobody in between"),
    pytest.param([(3.0, -1.0), (-1.0, -1.0), (-1.0, -1.0), (-1.0, 7.0)], 2, id="windows"),
    pytest.param([(-1.0, -1.0), (-1.0, -1.0), (-1.0, 3.0)], 2, id="a cut window"),
]


@on_two_ranks
@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize(("pairs", "accumulate"), SOME_RANKS)
def test_no_loss_on_some_ranks_under_ddp(pairs: list[list[float]], accumulate: int, unused: bool) -> None:
    trainer = quiet_trainer(
        strategy=DDPStrategy(find_unused_parameters=unused), max_epochs=1, accumulate_grad_batches=accumulate
    )
    trainer.fit(Absent(), one_sample_each([(a, b) for a, b in pairs]))
    # The mean over a window of both ranks is that over twice as many micro-batches in one process.
    flat = [x for pair in pairs for x in pair]
    assert float(whole(trainer, "w")) == pytest.approx(expected_weight(flat, 2 * accumulate), abs=1e-6)
    assert trainer.global_step == -(-len(pairs) // accumulate)


class AbsentSum(Absent):
    """A sample counts as much as its value; values below zero have no loss."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if batch.min() < 0:
            return None
        return LossSum(self.loss(batch) * batch.sum(), batch.sum())


@on_two_ranks
def test_a_sum_on_one_rank_and_no_loss_on_the_other() -> None:
    trainer = quiet_trainer(strategy="ddp", max_epochs=1)
    trainer.fit(AbsentSum(), one_sample_each([(-1.0, 3.0), (4.0, -1.0), (-1.0, -1.0), (2.0, 6.0)]))
    w = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([w], lr=0.1, weight_decay=0.5)
    for window in ([3.0], [4.0], [2.0, 6.0]):
        optimizer.zero_grad()
        sum((w - x) ** 2 / 2 * x for x in window).div(sum(window)).sum().backward()
        optimizer.step()
    assert float(whole(trainer, "w")) == pytest.approx(float(w.detach()), abs=1e-6)


def fit_with_a_hole(strategy: str, early: bool) -> None:
    losses._SECONDS_FOR_AGREEMENT = 2.0
    trainer = quiet_trainer(strategy=strategy, max_epochs=1)
    trainer.fit(Absent(early), one_sample_each([(3.0, 3.0), (3.0, -1.0), (3.0, 3.0)]))


@pytest.mark.parametrize(
    ("strategy", "early"),
    [
        ("fsdp2", False),
        ("deepspeed_stage_1", True),
        ("deepspeed_stage_3", True),
        pytest.param("fsdp2", True, marks=pytest.mark.slow),
        pytest.param("deepspeed_stage_2", True, marks=pytest.mark.slow),
        pytest.param("deepspeed_stage_3", False, marks=pytest.mark.slow),
    ],
)
def test_no_loss_on_one_rank_ends_all_where_all_must_run_backward(strategy: str, early: bool) -> None:
    started = time.monotonic()
    with pytest.raises(RanksFailed) as failure:
        run_ranks(fit_with_a_hole, [strategy, early], timeout=90.0)
    assert time.monotonic() - started < 45.0
    first, second = (report.error or "" for report in failure.value.reports)
    assert f"Absent.training_step returned None on rank 1, but not on every rank: under '{strategy}'" in second
    assert "rank 1 failed first with RuntimeError" in first


# --- sums ------------------------------------------------------------------------------------------------------------


class SummedTokens(Tokens):
    """The loss of Tokens as a sum and its count."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> LossSum:
        logits = self(batch["tokens"]).flatten(0, 1)
        labels = batch["labels"].flatten()
        total = nn.functional.cross_entropy(logits, labels, ignore_index=self.ignored, reduction="sum")
        return LossSum(total, (labels != self.ignored).sum())

    def count_items(self, batch: Any) -> Tensor:
        raise AssertionError("a sum brings its own count")


SummedTokens.count_items = TrainModule.count_items  # type: ignore[method-assign]


def train_tokens(module: TrainModule, strategy: Any, clip: float | None) -> tuple[dict[str, Tensor], list[float]]:
    recorder = Recorder(norms=True)
    trainer = quiet_trainer(
        strategy=strategy, max_epochs=1, accumulate_grad_batches=2, gradient_clip_val=clip, callbacks=recorder
    )
    trainer.fit(module, DataLoader(ragged_tokens(20), batch_size=2))
    return {name: whole(trainer, name) for name, _ in module.named_parameters()}, recorder.norms


def check_sums(strategy: str, clip: float | None) -> None:
    """A sum with its count must give what count_items gives, whose count is known beforehand; that is tested elsewhere."""
    torch.manual_seed(4)
    by_count, norms = train_tokens(Tokens(), strategy, clip)
    torch.manual_seed(4)
    by_sum, sum_norms = train_tokens(SummedTokens(), strategy, clip)
    assert sum_norms == pytest.approx(norms, abs=2e-6)
    for name, value in by_count.items():
        torch.testing.assert_close(by_sum[name], value, atol=2e-6, rtol=0.0, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("clip", [None, 0.3])
def test_sums_in_one_process(clip: float | None) -> None:
    check_sums("single", clip)


@on_two_ranks
@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_sums_on_two_ranks(strategy: str, clip: float | None) -> None:
    check_sums(strategy, clip)


@on_two_ranks
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_a_sum_without_items_adds_nothing(strategy: str) -> None:
    class Sums(Scalar):
        def training_step(self, batch: Tensor, batch_idx: int) -> LossSum:
            own = batch[batch > 0]
            return LossSum(((self.w - own) ** 2 / 2).sum(), len(own))

    trainer = quiet_trainer(strategy=strategy, max_epochs=1)
    trainer.fit(Sums(lr=0.5), one_sample_each([(4.0, -1.0), (-1.0, -1.0)]))
    # w = 0.5 * 4, then a gradient of zero.
    assert float(whole(trainer, "w")) == pytest.approx(2.0)


# --- sums beside means -----------------------------------------------------------------------------------------------


class Mixed(Scalar):
    """The loss of one sample x: a LossSum over `count` items where `how` says so, else its mean, else None.

    Args:
        how: By sample: "sum", "mean" or "none".
        count: Of a LossSum.
    """

    def __init__(self, how: dict[float, str], count: int = 4) -> None:
        super().__init__(lr=1.0)
        self.how = how
        self.count = count

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.loss(batch)
        how = self.how[float(batch)]
        return None if how == "none" else LossSum(loss * self.count, self.count) if how == "sum" else loss


class MixedCounted(Mixed):
    """Its means stand for two items each."""

    def count_items(self, batch: Tensor) -> int:
        return 2


def fit_mixed(strategy: str, module: Mixed, pairs: list[tuple[float, float]], accumulate: int = 1) -> float:
    trainer = quiet_trainer(strategy=strategy, max_epochs=1, accumulate_grad_batches=accumulate)
    trainer.fit(module, one_sample_each([(a, b) for a, b in pairs]))
    return float(whole(trainer, "w"))


def test_sums_beside_counted_means_in_one_process() -> None:
    # (4 * 1 + 2 * 3) / 6, then (2 * 3 + 4 * 1) / 6: with lr = 1 the weight is the mean over the window's items.
    w = fit_mixed("single", MixedCounted({1.0: "sum", 3.0: "mean"}), [(1.0, 3.0), (3.0, 1.0)], accumulate=2)
    assert w == pytest.approx(10 / 6)
    # Four items of 1 alone.
    assert fit_mixed("single", MixedCounted({1.0: "sum", 3.0: "none"}), [(1.0, 3.0)]) == pytest.approx(1.0)


COUNTED = [
    # Samples of rank 0 and of rank 1, how each counts, the count of a sum, the accumulation, and the mean of the last window.
    pytest.param([(1.0, 7.0)], {"1.0": "sum", "7.0": "mean"}, 4, 1, (4 * 1 + 2 * 7) / 6, id="one rank each"),
    pytest.param([(1.0, 1.0), (7.0, 7.0)], {"1.0": "sum", "7.0": "mean"}, 4, 2, (8 * 1 + 4 * 7) / 12, id="in turn"),
    pytest.param([(1.0, 7.0), (7.0, 9.0)], {"1.0": "sum", "7.0": "mean", "9.0": "mean"}, 4, 1, 8.0, id="then means"),
    pytest.param([(7.0, 9.0), (1.0, 1.0)], {"1.0": "sum", "7.0": "mean", "9.0": "mean"}, 4, 1, 1.0, id="means first"),
    pytest.param(
        [(7.0, 9.0), (1.0, 7.0)],
        {"1.0": "sum", "7.0": "mean", "9.0": "mean"},
        2,
        1,
        4.0,
        id="late, over the same items",
    ),
]


@on_two_ranks
@pytest.mark.parametrize(("pairs", "how", "count", "accumulate", "mean"), COUNTED)
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_sums_beside_counted_means_on_two_ranks(
    strategy: str, pairs: Any, how: dict[str, str], count: int, accumulate: int, mean: float
) -> None:
    module = MixedCounted({float(x): kind for x, kind in how.items()}, count)
    assert fit_mixed(strategy, module, pairs, accumulate) == pytest.approx(mean)


MIXED = "Mixed.training_step returned a LossSum for one part of a step and a mean loss for another"


def test_sums_beside_plain_means_are_refused_in_one_process() -> None:
    with pytest.raises(ValueError, match=MIXED):
        fit_mixed("single", Mixed({1.0: "sum", 3.0: "mean"}), [(1.0, 3.0)], accumulate=2)


@on_two_ranks
@pytest.mark.parametrize(
    ("pairs", "accumulate"),
    [
        pytest.param([(1.0, 3.0)], 1, id="one rank each"),
        pytest.param([(1.0, 1.0), (3.0, 1.0)], 2, id="both on one rank"),
        pytest.param([(1.0, 1.0), (1.0, 3.0)], 1, id="later"),
    ],
)
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_sums_beside_plain_means_are_refused_on_every_rank(strategy: str, pairs: Any, accumulate: int) -> None:
    with pytest.raises(ValueError, match=MIXED):
        fit_mixed(strategy, Mixed({1.0: "sum", 3.0: "mean"}), pairs, accumulate)


def begin_sums_alone() -> None:
    losses._SECONDS_FOR_AGREEMENT = 2.0
    fit_mixed("ddp", Mixed({1.0: "sum", 3.0: "mean"}), [(3.0, 3.0), (1.0, 3.0), (3.0, 3.0)])


def test_sums_that_begin_on_one_rank_alone_end_all() -> None:
    started = time.monotonic()
    with pytest.raises(RanksFailed) as failure:
        run_ranks(begin_sums_alone, timeout=90.0)
    assert time.monotonic() - started < 60.0
    first, second = (report.error or "" for report in failure.value.reports)
    assert f"ValueError: {MIXED}" in first
    assert f"rank 0 failed first with ValueError: {MIXED}" in second


@on_two_ranks
def test_all_ranks_may_go_from_sums_to_means_and_back_while_some_have_no_loss() -> None:
    how = {1.0: "sum", 3.0: "mean", 5.0: "none"}
    # The window's gradient at w: of a sum w - x, of a mean beside None (w - x) / 2.
    pairs = [(1.0, 1.0), (3.0, 5.0), (5.0, 3.0), (5.0, 1.0), (1.0, 1.0), (5.0, 5.0), (3.0, 3.0), (1.0, 5.0)]
    expected = [1.0, 2.0, 2.5, 1.0, 1.0, 1.0, 3.0, 1.0]
    weights: list[float] = []

    class Watched(Mixed):
        def on_train_batch_end(self, *arguments: Any) -> None:
            weights.append(float(self.w.detach()))

    fit_mixed("ddp", Watched(how), pairs)
    assert weights == pytest.approx(expected)


# --- a micro-batch without items -------------------------------------------------------------------------------------


class Masked(Scalar):
    """The mean over the samples above zero as many write it by hand, 0/0 where there are none, and a unit of its own."""

    def __init__(self, returns: str = "mean", lr: float = 0.5) -> None:
        super().__init__(lr)
        self.returns = returns
        self.inner = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.inner.weight)
        if returns == "mean":
            self.count_items = self._count  # type: ignore[method-assign]

    def _count(self, batch: Tensor) -> Any:
        return (batch > 0).sum()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        kept = (batch > 0).float()
        errors = (self.w - batch) ** 2 / 2 + (self.inner(torch.ones(1, 1)) - batch).flatten() ** 2 / 2
        loss = (errors * kept).sum() / kept.sum()
        if self.returns == "number":
            return LossSum(loss * kept.sum(), int(kept.sum()))
        if self.returns == "in a dict":
            return {"loss": LossSum(loss * kept.sum(), kept.sum()), "kept": kept.sum()}
        return LossSum(loss * kept.sum(), kept.sum()) if self.returns == "tensor" else loss


def check_without_items(
    strategy: Any, returns: str, pairs: list[tuple[float, float]], accumulate: int, world: int = 2
) -> None:
    trainer = quiet_trainer(strategy=strategy, max_epochs=1, accumulate_grad_batches=accumulate * 2 // world)
    trainer.fit(Masked(returns), one_sample_each([(a, b) for a, b in pairs]))
    expected = 0.0
    for start in range(0, len(pairs), accumulate):
        kept = [x for pair in pairs[start : start + accumulate] for x in pair if x > 0]
        # The gradient of the mean over all items of the window; zero where it has none.
        expected -= 0.5 * (expected - sum(kept) / len(kept)) if kept else 0.0
    assert float(whole(trainer, "w")) == pytest.approx(expected, abs=1e-6)
    assert float(whole(trainer, "inner.weight")) == pytest.approx(expected, abs=1e-6)


RETURNS = ["mean", "number", "tensor", "in a dict"]
WITHOUT_ITEMS = [
    pytest.param([(4.0, -1.0), (2.0, 6.0)], 1, id="one rank"),
    pytest.param([(-1.0, -1.0), (4.0, 8.0)], 1, id="every rank"),
    pytest.param([(4.0, -1.0), (-1.0, 8.0), (-1.0, -1.0), (2.0, -1.0)], 2, id="windows"),
]


@pytest.mark.parametrize("returns", RETURNS)
@pytest.mark.parametrize(("pairs", "accumulate"), WITHOUT_ITEMS)
def test_a_micro_batch_without_items_in_one_process(returns: str, pairs: Any, accumulate: int) -> None:
    check_without_items("single", returns, pairs, accumulate, world=1)


@on_two_ranks
@pytest.mark.parametrize("returns", RETURNS)
@pytest.mark.parametrize(("pairs", "accumulate"), WITHOUT_ITEMS)
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_a_micro_batch_without_items_on_two_ranks(strategy: str, returns: str, pairs: Any, accumulate: int) -> None:
    check_without_items(strategy, returns, [(a, b) for a, b in pairs], accumulate)


@on_two_ranks
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_a_count_that_only_the_device_knows(strategy: str) -> None:
    """What an accelerator does, whose counts are not read."""
    known_count = losses._known_count
    losses._known_count = lambda count: None
    try:
        for returns in ("mean", "tensor"):
            check_without_items(strategy, returns, [(4.0, -1.0), (-1.0, 8.0), (-1.0, -1.0), (2.0, -1.0)], 2)
    finally:
        losses._known_count = known_count


@on_two_ranks
def test_units_of_their_own_get_no_gradient_without_items_under_fsdp2() -> None:
    from acclight.strategies import FSDP2Strategy

    strategy = FSDP2Strategy(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=1)
    check_without_items(strategy, "mean", [(4.0, -1.0), (-1.0, 8.0), (-1.0, -1.0), (2.0, -1.0)], 2)


def test_a_micro_batch_without_items_skips_no_fp16_step() -> None:
    trainer = quiet_trainer(strategy="single", max_epochs=1, accumulate_grad_batches=2, precision="16-mixed")
    trainer.fit(Masked(), one_sample_each([(0.5, -1.0), (-1.0, -1.0), (-1.0, 0.75)]))
    assert trainer.skipped_steps == 0
    # Half of the way to 0.5; no items; then half of the way to 0.75.
    assert float(whole(trainer, "w")) == pytest.approx(0.5, rel=1e-3)


def test_fractions_of_an_item_weigh_their_share() -> None:
    class Fractions(Scalar):
        def count_items(self, batch: Tensor) -> Tensor:
            return batch.sum() / 100

    trainer = quiet_trainer(strategy="single", max_epochs=1, accumulate_grad_batches=2)
    trainer.fit(Fractions(lr=1.0), repeated([1.0, 3.0], 1))
    # (1 * 1 + 3 * 3) / 4
    assert float(whole(trainer, "w")) == pytest.approx(2.5)


@pytest.mark.parametrize(
    ("count", "error", "message"),
    [
        (-1, ValueError, "count_items returned -1"),
        (torch.tensor(-2), ValueError, "count_items returned -2"),
        (float("nan"), ValueError, "count_items returned nan"),
        (None, TypeError, "count_items returned None"),
        ("3", TypeError, "count_items returned '3'"),
        (torch.ones(2), TypeError, "count_items returned a tensor of shape (2,)"),
    ],
)
@pytest.mark.parametrize("where", ["count_items", "LossSum"])
def test_counts_that_are_none(count: Any, error: type[Exception], message: str, where: str) -> None:
    class Counts(Scalar):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            loss = self.loss(batch)
            return LossSum(loss, count) if where == "LossSum" else loss

    module = Counts()
    if where == "count_items":
        module.count_items = lambda batch: count  # type: ignore[method-assign]
    else:
        message = message.replace("count_items returned", "training_step returned a LossSum whose count is")
    with pytest.raises(error, match=re.escape(f"Counts.{message}")):
        quiet_trainer(strategy="single", max_epochs=1).fit(module, repeated([1.0], 1))


# --- backward called by the user -------------------------------------------------------------------------------------


class CallsBackward(Scalar):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.loss(batch)
        loss.backward()
        return loss


def check_explained(strategy: str) -> None:
    with pytest.raises(RuntimeError, match="second time") as failure:
        quiet_trainer(strategy=strategy, max_epochs=1).fit(CallsBackward(), repeated([1.0, 1.0], 1))
    # Another rank's error may be told too.
    note = failure.value.__notes__[0]
    assert "loss.backward()" in note
    assert "self.automatic_optimization = False" in note


def test_backward_in_training_step_is_explained() -> None:
    check_explained("single")


@on_two_ranks
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_backward_in_training_step_is_explained_on_two_ranks(strategy: str) -> None:
    check_explained(strategy)
