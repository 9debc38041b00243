"""Which collectives a training step runs: the profiler sees every call into a process group, whoever makes it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from acclight import Callback, Trainer, TrainModule
from acclight.strategies import DDPStrategy, FSDP2Strategy
from tests.distributed import RankChecks
from tests.scenarios import quiet_trainer

on_two_ranks = RankChecks(world_size=2, timeout=120.0)

WINDOW, LAYERS = 4, 3
#: One layer's weights, 1 MiB: a bucket of DDP's and a unit of FSDP2's.
LAYER = 512 * 512
MODEL = LAYERS * LAYER
STRATEGIES: dict[str, Any] = {
    "ddp": lambda: DDPStrategy(bucket_cap_mb=1),
    "fsdp2": lambda: FSDP2Strategy(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=LAYER),
    **{f"deepspeed_stage_{stage}": (lambda stage=stage: f"deepspeed_stage_{stage}") for stage in (1, 2, 3)},
}


class Layers(TrainModule):
    """Three layers, and two values that are logged in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(LAYERS)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.layers(batch).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("batch_idx", float(batch_idx), on_step=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Watch(Callback):
    """Counts the collectives from the first batch of the third window to the first batch of the fourth.

    Of an all-reduce the profiler shows no size: those that Python calls are counted by their elements. (DDP's are called in C++.)
    """

    def __init__(self) -> None:
        self.profiler = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
        self.found: Counter[tuple[str, int | None]] = Counter()
        self.patched = pytest.MonkeyPatch()
        self._reduced: Counter[int] = Counter()
        self.votes = 0

    def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> None:
        if (trainer.global_step, batch_idx % WINDOW) == (2, 0):
            all_reduce = dist.all_reduce

            def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
                # Whether any rank wants to stop: asked every tenth of a second, so at most once a step.
                self.votes += tensor.dtype is torch.int64
                self._reduced[tensor.numel()] += tensor.dtype is not torch.int64
                return all_reduce(tensor, *args, **kwargs)

            self.patched.setattr(dist, "all_reduce", counted)
            self.profiler.__enter__()
        elif (trainer.global_step, batch_idx % WINDOW) == (3, 0):
            self.profiler.__exit__(None, None, None)
            self.patched.undo()
            for event in self.profiler.events():
                if event.name.startswith("c10d::"):
                    kind = event.name.removeprefix("c10d::")
                    # What a rank gives to a reduce-scatter, and what it gets from an all-gather.
                    sizes = {"_reduce_scatter_base_": 1, "_allgather_base_": 0}
                    size = event.input_shapes[sizes[kind]][0] if kind in sizes else None
                    self.found[kind, size] += 1
            in_python = sum(self._reduced.values()) + self.votes
            self.found["allreduce_", None] -= in_python
            self.found += Counter({("allreduce_", size): count for size, count in self._reduced.items()})


def collectives(strategy: str, *, shown_every: int) -> Counter[tuple[str, int | None]]:
    watch = Watch()
    trainer = quiet_trainer(
        strategy=STRATEGIES[strategy](), max_steps=4, accumulate_grad_batches=WINDOW, callbacks=watch,
        log_every_n_steps=shown_every,
    )  # fmt: skip
    trainer.fit(Layers(), DataLoader(torch.randn(2 * WINDOW * 5, 512), batch_size=1))
    assert watch.votes <= 1
    return watch.found


#: What one window of four micro-batches needs, by hand: (collective, elements; None where C++ calls it) -> how often.
NEEDED: dict[str, dict[tuple[str, int | None], int]] = {
    # Every bucket once.
    "ddp": {("allreduce_", None): LAYERS},
    # Every unit's gradient once; its weights in each forward, and in each backward again.
    "fsdp2": {("_reduce_scatter_base_", LAYER): LAYERS, ("_allgather_base_", LAYER): LAYERS * 2 * WINDOW},
    # The gradient once, in one bucket; its norm; the weights that each rank has stepped.
    "deepspeed_stage_1": {("allreduce_", MODEL): 1, ("allreduce_", 1): 1, ("_allgather_base_", MODEL): 1},
    # No rank has room for the whole gradient, which travels in every micro-batch.
    "deepspeed_stage_2": {("allreduce_", MODEL): WINDOW, ("allreduce_", 1): 1, ("_allgather_base_", MODEL): 1},
    # And the weights, for each forward; so small a model is gathered at once and kept until its backward is done.
    "deepspeed_stage_3": {
        ("_reduce_scatter_base_", MODEL): WINDOW,
        ("allreduce_", 1): 1,
        ("_allgather_base_", MODEL): WINDOW,
    },
}


@on_two_ranks
@pytest.mark.parametrize("strategy", list(NEEDED))
def test_a_window_that_shows_nothing_runs_what_its_gradient_needs(strategy: str) -> None:
    found = collectives(strategy, shown_every=100)
    assert found == NEEDED[strategy]


@on_two_ranks
def test_a_window_that_shows_something_adds_one_collective() -> None:
    silent = collectives("ddp", shown_every=100)
    shown = collectives("ddp", shown_every=1)
    assert (shown - silent).total() == 1
