"""However training_step reaches the parameters, their gradients are the whole batch's and all ranks stay equal."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from acclight import TrainModule
from acclight.strategies import DeepSpeedStrategy, FSDP2Strategy
from tests.distributed import RankChecks
from tests.scenarios import DISTRIBUTED, quiet_trainer, whole

on_two_ranks = RankChecks(world_size=2, timeout=60.0)


class Reaches(TrainModule):
    """A network and a weight of the module's own, used in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3))
        self.own = nn.Parameter(torch.tensor([0.5, -1.0, 2.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.own

    def helper(self, x: Tensor) -> Tensor:
        return self.net[2](torch.tanh(self.net[0](x))) + self.own

    def functional(self, x: Tensor) -> Tensor:
        # The layer's own forward never runs.
        return nn.functional.linear(x, self.net[0].weight, self.net[0].bias)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return WAYS[self.way](self, batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


WAYS: dict[str, Callable[[Reaches, Tensor], Tensor]] = {
    "self(x)": lambda m, x: m(x) - 1.0,
    "self.net(x)": lambda m, x: m.net(x) - m.own,
    "self.helper(x)": lambda m, x: m.helper(x),
    "own parameter": lambda m, x: m.own * x + m.net(x),
    "functional": lambda m, x: torch.cat([m.functional(x), m(x)], dim=1),
}


def plain(module: Reaches, rows: Tensor, size: int) -> dict[str, Tensor]:
    module = copy.deepcopy(module)
    optimizer = module.configure_optimizers()
    for batch in rows.split(size):
        optimizer.zero_grad()
        module.training_step(batch, 0).backward()
        optimizer.step()
    return {name: p.detach() for name, p in module.named_parameters()}


@on_two_ranks
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("strategy", [*DISTRIBUTED, "fsdp2 in units", "deepspeed_stage_3 in parts"])
def test_gradients_are_averaged(strategy: str, way: str) -> None:
    chosen: Any = strategy
    if strategy == "deepspeed_stage_3 in parts":
        # Else DeepSpeed keeps parameters as small as these whole on every rank.
        whole_below = {"stage": 3, "stage3_param_persistence_threshold": 0}
        chosen = DeepSpeedStrategy(ds_config={"zero_optimization": whole_below})
    elif strategy == "fsdp2 in units":
        if way == "functional":
            pytest.skip("FSDP2 shards a unit's parameters except in the unit's own forward")
        chosen = FSDP2Strategy(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=1)
    torch.manual_seed(2)
    module = Reaches(way)
    rows = torch.randn(16, 3)
    expected = plain(module, rows, 4)
    trainer = quiet_trainer(strategy=chosen, max_epochs=1)
    trainer.fit(module, DataLoader(rows, batch_size=2))
    if strategy == "deepspeed_stage_3 in parts":
        assert all(p.ds_status.name == "NOT_AVAILABLE" for p in module.parameters())  # type: ignore[attr-defined]
    for name, value in expected.items():
        own = whole(trainer, name)
        torch.testing.assert_close(own, value, atol=1e-6, rtol=0.0, msg=lambda text, n=name: f"{n}: {text}")
        other = own.clone()
        dist.broadcast(other, src=0)
        assert torch.equal(own, other), name
