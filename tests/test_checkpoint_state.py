"""What a module keeps beside tensors, and random states of ranks that a checkpoint does not know."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from acclight import checkpoint
from acclight.checkpoint import CheckpointError
from tests.distributed import RankChecks
from tests.scenarios import Scalar, quiet_trainer, repeated

on_two_ranks = RankChecks(world_size=2, backend="gloo", timeout=90.0)


class Counting(nn.Module):
    """Counts its calls in plain values and in a tensor, neither of which is a parameter or a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Any = 0
        self.scales = torch.zeros(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.scales = self.scales + torch.tensor([1.0, 2.0, 3.0])
        return x

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "scales": self.scales}

    def set_extra_state(self, state: Any) -> None:
        self.calls, self.scales = state["calls"], state["scales"]


class Counted(Scalar):
    def __init__(self) -> None:
        super().__init__()
        self.count = Counting()

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return super().loss(self.count(x))


def trained(strategy: str, steps: int, folder: Path | None = None, ckpt: Path | None = None) -> Counted:
    module = Counted()
    trainer = quiet_trainer(strategy=strategy, max_steps=steps)
    world = dist.get_world_size() if dist.is_initialized() else 1
    trainer.fit(module, repeated([1.0] * (16 // world), world), ckpt_path=ckpt)
    if folder is not None:
        trainer.save_checkpoint(folder)
    return module


def test_extra_state_comes_back(tmp_path: Path) -> None:
    trained("single", 2, tmp_path / "saved")
    module = trained("single", 5, ckpt=tmp_path / "saved")
    assert module.count.calls == 5
    assert module.count.scales.tolist() == [5.0, 10.0, 15.0]
    weights = checkpoint.load_weights(tmp_path / "saved")
    assert set(weights) == {"w", "count._extra_state"}
    plain = Counted()
    plain.load_state_dict(weights, strict=True)
    assert (plain.count.calls, plain.count.scales.tolist()) == (2, [2.0, 4.0, 6.0])
    assert Counted.load_from_checkpoint(tmp_path / "saved").count.calls == 2
    checkpoint.export(tmp_path / "saved", tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "deepspeed_stage_2"])
@on_two_ranks
def test_extra_state_under_every_strategy(tmp_path: Path, strategy: str) -> None:
    trained(strategy, 2, tmp_path / "saved")
    module = trained(strategy, 5, ckpt=tmp_path / "saved")
    assert module.count.calls == 5
    assert checkpoint.load_weights(tmp_path / "saved")["count._extra_state"]["calls"] == 2


def test_an_extra_state_that_cannot_be_stored_is_named(tmp_path: Path) -> None:
    module = Counted()
    module.count.calls = object()
    trainer = quiet_trainer(strategy="single", max_steps=0)
    trainer.fit(module, repeated([1.0], 1))
    with pytest.raises(TypeError, match=r"extra_state\.count\._extra_state\.calls is a builtins\.object"):
        trainer.save_checkpoint(tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []


def test_an_extra_state_that_does_not_fit_is_named(tmp_path: Path) -> None:
    trained("single", 2, tmp_path / "saved")
    trainer = quiet_trainer(strategy="single", max_steps=3)
    with pytest.raises(CheckpointError, match=r"only in the checkpoint.*count\._extra_state"):
        trainer.fit(Scalar(), repeated([1.0] * 16, 1), ckpt_path=tmp_path / "saved")


@pytest.fixture(scope="module")
def written_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("alone") / "saved"
    trained("single", 2, path)
    return path


@on_two_ranks
def test_rank_0_says_that_a_rank_has_no_random_state(written_alone: Path) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trained("ddp", 3, ckpt=written_alone)
    said = [str(w.message) for w in seen if "holds the random states of 1 of the 2 ranks" in str(w.message)]
    assert len(said) == (1 if dist.get_rank() == 0 else 0), said
