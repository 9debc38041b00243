"""Trainer(parallelism=...): the mesh over which FSDP2 shards, and which ranks read the same data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import ParallelismConfig
from torch import Tensor, nn
from torch.utils.data import DataLoader

from acclight import TrainModule, checkpoint
from tests.distributed import RankChecks
from tests.scenarios import quiet_trainer, whole

on_four_ranks = RankChecks(world_size=4, timeout=150.0)


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.rows: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.rows.append(batch.clone())
        return (self.net(batch) - 1.0).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("mean", batch.mean())

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return batch

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def data() -> Tensor:
    return torch.randn(24, 6, generator=torch.Generator().manual_seed(3))


def twin(batch: int) -> dict[str, Tensor]:
    """The weights after three plain steps on whole global batches, clipped at the norm 0.5."""
    torch.manual_seed(0)
    module = Net()
    optimizer = module.configure_optimizers()
    for step in range(3):
        optimizer.zero_grad()
        module.training_step(data()[step * batch : (step + 1) * batch], step).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def fitted(parallelism: Any, batch_size: int) -> tuple[Net, Any]:
    torch.manual_seed(0)
    module = Net()
    trainer = quiet_trainer(strategy="fsdp2", max_steps=3, gradient_clip_val=0.5, parallelism=parallelism)
    trainer.fit(module, DataLoader(data(), batch_size=batch_size), DataLoader(data(), batch_size=5))
    return module, trainer


@on_four_ranks
@pytest.mark.parametrize("form", ["dict", "object"])
def test_hybrid_sharding_is_placed_by_the_mesh_and_trains_the_same(form: str, tmp_path: Path) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    sizes = {"dp_replicate_size": 2, "dp_shard_size": 2}
    module, trainer = fitted(sizes if form == "dict" else ParallelismConfig(**sizes), batch_size=2)
    assert trainer.accelerator.parallelism_config.dp_replicate_size == 2
    for parameter in module.parameters():
        assert isinstance(parameter.data, DTensor)
        assert parameter.placements == (Replicate(), Shard(0))
        assert parameter.device_mesh.shape == (2, 2)
        assert parameter.to_local().numel() == parameter.numel() // 2, "half, on two pairs of ranks"
    expected = twin(batch=8)
    for name, value in expected.items():
        torch.testing.assert_close(whole(trainer, name), value, atol=1e-6, rtol=0.0)
    assert float(trainer.callback_metrics["mean"]) == pytest.approx(float(data().mean()), abs=1e-6)
    trainer.save_checkpoint(tmp_path / form)
    weights = checkpoint.load_weights(tmp_path / form)
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, atol=1e-6, rtol=0.0)
    resumed = quiet_trainer(strategy="fsdp2", max_steps=3, parallelism=sizes)
    again = Net()
    resumed.fit(again, DataLoader(data(), batch_size=2), ckpt_path=tmp_path / form)
    assert resumed.global_step == 3
    torch.testing.assert_close(whole(resumed, "net.0.weight"), expected["net.0.weight"], atol=1e-6, rtol=0.0)


@on_four_ranks
def test_ranks_of_one_context_group_read_the_same_batch() -> None:
    """Sharding, data and averages; splitting a sequence within the step needs attention kernels that a CPU has not."""
    from torch.distributed.tensor import Shard

    module, trainer = fitted({"dp_shard_size": 2, "cp_size": 2}, batch_size=4)
    rank = trainer.global_rank
    assert trainer.accelerator.torch_device_mesh.mesh_dim_names == ("dp_shard", "cp")
    assert (trainer.core.data_rank, trainer.core.data_world_size) == (rank // 2, 2)
    assert torch.equal(module.rows[0], data()[:4] if rank < 2 else data()[4:8])
    for parameter in module.parameters():
        assert parameter.placements == (Shard(0),)
        assert parameter.to_local().numel() == parameter.numel() // 4, "the model is sharded over both"
    for name, value in twin(batch=8).items():
        torch.testing.assert_close(whole(trainer, name), value, atol=1e-6, rtol=0.0)
    with pytest.raises(ValueError, match="predict cannot run with 4 processes that share 2 batches"):
        trainer.predict(module, DataLoader(data(), batch_size=4))


class Split(Net):
    """Splits its layers over the tensor-parallel ranks."""

    def configure_model(self) -> None:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = self.trainer.accelerator.torch_device_mesh["tp"]
        parallelize_module(self.net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        assert self.net[0].weight.to_local().shape == (4, 6), "half of the outputs"


@on_four_ranks
def test_a_tensor_parallel_model_is_made_and_accelerate_cannot_prepare_it_still() -> None:
    """Accelerate 1.15 imports a class that transformers 5.24 has no more; when this fails, tensor parallelism can be run."""
    trainer = quiet_trainer(strategy="fsdp2", max_steps=1, parallelism={"dp_shard_size": 2, "tp_size": 2})
    assert trainer.accelerator.torch_device_mesh.mesh_dim_names == ("dp_shard", "tp")
    assert trainer.accelerator.parallelism_config.tp_handler is not None
    assert trainer.core.data_world_size == 2
    with pytest.raises(
        ImportError, match=r"parallelism: tp_size=2 cannot be prepared by accelerate .* with transformers"
    ):
        trainer.fit(Split(), DataLoader(data(), batch_size=2))


@on_four_ranks
@pytest.mark.parametrize(
    ("strategy", "sizes", "message"),
    [
        ("fsdp2", {"dp_replicate_size": 2, "dp_shard_size": 4}, "dp_replicate_size=2 x dp_shard_size=4 makes 8, but there are"),
        ("fsdp2", {"dp_shard_size": 2}, "dp_shard_size=2 makes 2, but there are 4 processes; the product must be 4"),
        ("fsdp2", {}, "all sizes are 1 makes 1, but there are 4"),
        ("fsdp2", {"tp_size": 4}, r"\(tp_size=4\) leaves FSDP2 nothing to shard over"),
        ("fsdp2", {"sp_size": 4}, "sp_size=4 is DeepSpeed's sequence parallelism"),
        ("fsdp2", {"dp_shards": 4}, "no field 'dp_shards'; did you mean 'dp_shard_size'"),
        ("ddp", {"dp_replicate_size": 4}, "cannot be used with the strategy 'ddp': use strategy='fsdp2'"),
        ("deepspeed_stage_3", {"dp_shard_size": 4}, "cannot be used with the strategy 'deepspeed_stage_3'"),
    ],
)  # fmt: skip
def test_what_cannot_be_raises_with_the_numbers(strategy: str, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quiet_trainer(strategy=strategy, parallelism=sizes)


@on_four_ranks
def test_the_launcher_is_followed_and_the_script_wins() -> None:
    import os

    launched = {
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
        "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
    }
    os.environ.update(launched)
    try:
        assert quiet_trainer(strategy="fsdp2").accelerator.torch_device_mesh.shape == (2, 2)
        trainer = quiet_trainer(strategy="fsdp2", parallelism={"dp_shard_size": 4})
        assert trainer.accelerator.torch_device_mesh.shape == (4,)
    finally:
        for name in launched:
            del os.environ[name]


def test_what_is_no_configuration_and_a_strategy_of_one_process() -> None:
    with pytest.raises(TypeError, match="parallelism is a int: give accelerate's ParallelismConfig or a dict"):
        quiet_trainer(strategy="single", parallelism=4)
    with pytest.raises(ValueError, match="cannot be used with the strategy 'single'"):
        quiet_trainer(parallelism={"dp_shard_size": 2})
