"""Checkpoints of several ranks: real processes, sharded and replicated tensors, and errors that reach every rank."""

from __future__ import annotations

import errno
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

from acclight.checkpoint import CheckpointError, Reader, files, latest, load_weights, ranks, verify, write
from acclight.checkpoint import format as layout
from tests.distributed import RankChecks, RanksFailed, run_ranks

on_two_ranks = RankChecks(world_size=2, backend="gloo", timeout=60.0)

# Even and uneven shards, one that leaves a rank with nothing, and the dtypes that training uses.
SHAPES = {"even": (4, 3), "linear.weight": (5, 3), "linear.bias": (5,), "odd": (63, 65), "tiny": (1, 4)}


def full_tensors(step: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    tensors["bf16"] = torch.randn(7, 2, generator=generator).bfloat16()
    tensors["ids"] = torch.randint(0, 2**40, (3, 5), generator=generator)
    return tensors


def plain_tensors(step: int = 1) -> dict[str, torch.Tensor]:
    return {"step": torch.tensor(float(step)), "count": torch.tensor(step), "table": torch.arange(5) * step}


def sharded(tensors: dict[str, torch.Tensor], dim: int = 0) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        name: distribute_tensor(tensor, mesh, [Shard(dim if tensor.ndim > dim else 0)])
        for name, tensor in tensors.items()
    }


def save(path: Path, step: int = 1, *, shard: bool = True, **changes: Any) -> Path:
    place = sharded if shard else dict
    rank = dist.get_rank() if dist.is_initialized() else 0
    given: dict[str, Any] = {
        "model": {**place(full_tensors(step)), **plain_tensors(step)},
        "optimizer": {f"{name}/exp_avg": tensor for name, tensor in place(full_tensors(step + 100)).items()}
        | {"even/step": torch.tensor(float(step))},
        "optimizer_meta": {"groups": [{"lr": 0.1}]},
        "trainer": {"global_step": step},
        "schedulers": [],
        "data": {"seed": 1},
        "rng": {"rank": rank, "state": torch.full((3,), rank, dtype=torch.uint8)},
    }
    return write(path, **(given | changes))


def zeros(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def assert_holds(path: Path, step: int, place: Any) -> None:
    """`path` loads into what `place` makes of whole tensors, and every value is the one that was saved."""
    reader = Reader(path)
    model = zeros({**place(full_tensors(step)), **plain_tensors(step)})
    reader.load_model(model)
    for name, expected in {**full_tensors(step), **plain_tensors(step)}.items():
        assert torch.equal(whole(model[name]), expected), name
    optimizer = zeros({f"{name}/exp_avg": tensor for name, tensor in place(full_tensors(step)).items()})
    optimizer["even/step"] = torch.tensor(0.0)
    reader.load_optimizer(optimizer)
    for name, expected in full_tensors(step + 100).items():
        assert torch.equal(whole(optimizer[f"{name}/exp_avg"]), expected), name
    assert optimizer["even/step"].item() == step
    assert reader.trainer == {"global_step": step}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def replicated(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {name: distribute_tensor(tensor, mesh, [Replicate()]) for name, tensor in tensors.items()}


def by_column(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return sharded(tensors, dim=1)


# --- any world size to any world size --------------------------------------------------------------------------------


@pytest.mark.parametrize("layout_name", ["sharded", "by_column", "replicated", "dict"])
@on_two_ranks
def test_saved_on_two_loads_on_two(tmp_path: Path, layout_name: str) -> None:
    path = save(tmp_path / "c")
    assert sorted(file.name for file in (path / "model").iterdir()) == [
        "shard-00001-model-00001-of-00001.safetensors",
        "shard-00002-model-00001-of-00001.safetensors",
    ]
    place = {"sharded": sharded, "by_column": by_column, "replicated": replicated, "dict": dict}[layout_name]
    assert_holds(path, 1, place)
    for name, tensor in {**full_tensors(), **plain_tensors()}.items():
        assert torch.equal(load_weights(path)[name], tensor), name


def save_sharded(path: str) -> None:
    save(Path(path))


@pytest.fixture
def saved_alone(tmp_path: Path) -> Path:
    return save(tmp_path / "alone", shard=False)


@pytest.mark.parametrize("world_size", [2, 3])
def test_saved_on_several_loads_on_one(tmp_path: Path, world_size: int) -> None:
    run_ranks(save_sharded, [str(tmp_path / "c")], world_size=world_size, backend="gloo", timeout=60)
    assert verify(tmp_path / "c") == []
    assert_holds(tmp_path / "c", 1, dict)
    weights = load_weights(tmp_path / "c")
    expected = {**full_tensors(), **plain_tensors()}
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


@on_two_ranks
def test_saved_on_one_loads_on_two(saved_alone: Path) -> None:
    assert_holds(saved_alone, 1, sharded)
    assert Reader(saved_alone).rng(1) is None


@on_two_ranks
def test_fsdp2_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            model(torch.full((2, 3), step + dist.get_rank() + 1.0)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        for module in model.modules():
            if hasattr(module, "reshard"):
                module.reshard()

    def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        return {
            f"{name}/{key}": value
            for name, parameter in model.named_parameters()
            for key, value in optimizer.state[parameter].items()
        }

    model, optimizer = build()
    train(model, optimizer, range(3))
    path = save(tmp_path / "c", model=model.state_dict(), optimizer=state_of(model, optimizer))
    train(model, optimizer, range(3, 6))
    resumed, resumed_optimizer = build()
    train(resumed, resumed_optimizer, range(9, 10))  # other values, and an optimizer state to load into
    reader = Reader(path)
    reader.load_model(resumed.state_dict())
    reader.load_optimizer(state_of(resumed, resumed_optimizer))
    train(resumed, resumed_optimizer, range(3, 6))
    for name, expected in model.state_dict().items():
        assert torch.equal(resumed.state_dict()[name].full_tensor(), expected.full_tensor()), name


@on_two_ranks
def test_plain_tensors_of_some_ranks_only(tmp_path: Path) -> None:
    rank = dist.get_rank()
    path = save(tmp_path / "c", model={f"of rank {rank}": torch.full((2,), float(rank))}, optimizer={})
    assert {name: tensor.tolist() for name, tensor in load_weights(path).items()} == {
        "of rank 0": [0.0, 0.0],
        "of rank 1": [1.0, 1.0],
    }


@on_two_ranks
def test_of_values_that_differ_rank_0s_are_kept(tmp_path: Path) -> None:
    rank = dist.get_rank()
    buffers = {f"running_mean.{index}": torch.tensor([float(rank)]) for index in range(6)}
    trainer = {"global_step": rank, "callbacks": {"C": {"seen": torch.tensor(rank), **({"own": 1} if rank else {})}}}
    path = save(tmp_path / "c", model=buffers, trainer=trainer)
    assert [tensor.item() for tensor in load_weights(path).values()] == [0.0] * 6
    reader = Reader(path)
    assert reader.trainer["global_step"] == 0
    assert reader.trainer["callbacks"]["C"] == {"seen": torch.tensor(0)}


@on_two_ranks
def test_sharded_tensors_of_a_callback_come_back_whole(tmp_path: Path) -> None:
    path = save(tmp_path / "c", trainer={"callbacks": {"EMA": {"shadow": sharded(full_tensors(5))}}})
    shadow = Reader(path).trainer["callbacks"]["EMA"]["shadow"]
    assert all(torch.equal(shadow[name], tensor) for name, tensor in full_tensors(5).items())


@on_two_ranks
def test_each_rank_has_its_own_random_state(tmp_path: Path) -> None:
    reader = Reader(save(tmp_path / "c"))
    for rank in range(2):
        state = reader.rng(rank)
        assert state is not None
        assert state["rank"] == rank
        assert state["state"].tolist() == [rank] * 3
    assert reader.rng(2) is None


# --- reading ---------------------------------------------------------------------------------------------------------


@on_two_ranks
def test_every_file_is_hashed_once(tmp_path: Path) -> None:
    path = save(tmp_path / "c")
    hashed: list[str] = []
    real = layout.digest
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(layout, "digest", lambda file: hashed.append(str(file.relative_to(path))) or real(file))
        Reader(path)
        everywhere = ranks.gather(hashed)
        assert all(everywhere)
        assert sorted(name for names in everywhere for name in names) == sorted(layout.read_manifest(path))
        hashed.clear()
        Reader(path, verify=False)
        assert hashed == []


@on_two_ranks
def test_damage_reaches_every_rank_and_the_newest_good_one_is_found(tmp_path: Path) -> None:
    good, bad = save(tmp_path / "step-1", 1), save(tmp_path / "step-2", 2)
    if dist.get_rank() == 0:
        for file in (bad / "model").iterdir():
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content)
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"step-2/model/shard-00001.*SHA-256.*step-2/model/shard-00002.*SHA-256"):
        Reader(bad)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reader = Reader.latest(tmp_path)
    assert ["step-2/model/shard-00001" in str(warning.message) for warning in caught] == [True][dist.get_rank() :]
    assert reader is not None
    assert reader.path == good
    assert_holds(good, 1, sharded)


@on_two_ranks
def test_a_misfit_on_one_rank_reaches_every_rank(tmp_path: Path) -> None:
    reader = Reader(save(tmp_path / "c"))
    into = zeros({**sharded(full_tensors()), **plain_tensors()})
    if dist.get_rank() == 1:
        into["extra"] = torch.zeros(1)
    with pytest.raises(CheckpointError, match="not in the checkpoint: extra"):
        reader.load_model(into)
    assert not into["table"].any()


# --- a save that fails -----------------------------------------------------------------------------------------------


def full_disk(*args: Any, **kwargs: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("target", "file"),
    [
        ("os.fsync", "model/shard-00002"),
        ("acclight.checkpoint.files.write_file", ""),
        ("acclight.checkpoint.files.write_tensors", ""),
    ],
)
@on_two_ranks
def test_a_full_disk_on_one_rank_reaches_every_rank(tmp_path: Path, target: str, file: str) -> None:
    save(tmp_path / "step-1", 1)
    with pytest.MonkeyPatch.context() as patched:
        if dist.get_rank() == 1:
            patched.setattr(target, full_disk)
        with pytest.raises((CheckpointError, OSError), match=rf"{file}.*No space left on device") as caught:
            save(tmp_path / "step-2", 2)
    dist.barrier()
    told = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    assert "rank 1" in told
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-1"]
    assert latest(tmp_path) == tmp_path / "step-1"
    assert_holds(save(tmp_path / "step-2", 2), 2, sharded)


@on_two_ranks
def test_a_value_that_cannot_be_saved_on_one_rank(tmp_path: Path) -> None:
    rank = dist.get_rank()
    rng = {"raw": b"x"} if rank == 1 else {}
    with pytest.raises(TypeError if rank == 1 else CheckpointError, match=r"rng\.raw is a builtins\.bytes"):
        save(tmp_path / "c", rng=rng)
    dist.barrier()
    assert list(tmp_path.iterdir()) == []


@on_two_ranks
def test_ctrl_c_on_one_rank(tmp_path: Path) -> None:
    def interrupt(*args: Any) -> Any:
        raise KeyboardInterrupt

    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patched:
        if rank == 1:
            patched.setattr("acclight.checkpoint.files.NewFile.write", interrupt)
        with pytest.raises(KeyboardInterrupt if rank == 1 else CheckpointError):
            save(tmp_path / "c")
    dist.barrier()
    assert list(tmp_path.iterdir()) == []


@on_two_ranks
def test_a_folder_that_not_every_rank_sees(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patched:
        if dist.get_rank() == 1:
            patched.setattr(Path, "is_dir", lambda self: False)
        with pytest.raises(CheckpointError, match="file system that all ranks share"):
            save(tmp_path / "c")
    dist.barrier()
    assert list(tmp_path.iterdir()) == []


@on_two_ranks
def test_a_place_that_is_taken(tmp_path: Path) -> None:
    save(tmp_path / "c", 1)
    with pytest.raises(CheckpointError, match="already holds a good checkpoint"):
        save(tmp_path / "c", 2)
    assert_holds(tmp_path / "c", 1, sharded)


@on_two_ranks
def test_a_save_that_only_rank_0_calls_ends_with_the_reason(tmp_path: Path) -> None:
    if dist.get_rank() == 0:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(ranks, "MEET_SECONDS", 0.5)
            with pytest.raises(CheckpointError, match=r"only 1 of 2 ranks called within 0\.5 s\. Every rank"):
                save(tmp_path / "c", shard=False)
    dist.barrier()
    assert list(tmp_path.iterdir()) == []
    for number in range(3):
        save(tmp_path / f"{number}")
    assert_holds(save(tmp_path / "c"), 1, sharded)


def die_in_the_second_save(folder: str, where: str) -> None:
    save(Path(folder) / "step-1", 1)

    def die(*args: Any, **kwargs: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    if where == "rank 1, inside a shard" and dist.get_rank() == 1:
        files.NewFile.write = die  # type: ignore[method-assign]
    if where == "rank 0, before the manifest" and dist.get_rank() == 0:
        layout.write_manifest = die
    save(Path(folder) / "step-2", 2)


@pytest.mark.parametrize("where", ["rank 1, inside a shard", "rank 0, before the manifest"])
def test_a_killed_rank_leaves_the_previous_one(tmp_path: Path, where: str) -> None:
    with pytest.raises(RanksFailed, match=r"died|failed"):
        run_ranks(die_in_the_second_save, [str(tmp_path), where], backend="gloo", timeout=60, grace=5)
    assert latest(tmp_path) == tmp_path / "step-1"
    assert_holds(tmp_path / "step-1", 1, dict)
    path = save(tmp_path / "step-2", 2, shard=False)
    assert latest(tmp_path) == path
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-1", "step-2"]
