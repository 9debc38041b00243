"""Data sets and loaders that keep their own state: a resume goes to their place at once, and to the same samples."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from acclight.data import TrainData
from tests.distributed import RankChecks
from tests.scenarios import Scalar, quiet_trainer
from tests.test_data_resume import begun, samples, state_of, train

on_two_ranks = RankChecks(world_size=2, timeout=90.0)


class Counter(IterableDataset[int]):
    """Gives 0, 1, 2, ...; its state is the next one. What it gives is noted in a file, by whichever process."""

    def __init__(self, length: int, notes: Path, divide: bool = False) -> None:
        self.length, self.notes, self.divide = length, notes, divide
        self.next = 0

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info() if self.divide else None
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        self.next = max(self.next, first)
        while self.next < self.length:
            self.next += step
            with self.notes.open("a") as file:
                file.write(f"{self.next - step}\n")
            yield self.next - step
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next, "tensor": torch.tensor([self.next])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["tensor"].tolist() == [state["next"]]
        self.next = state["next"]


class Walked(Counter):
    """Keeps its place to itself."""

    state_dict: Any = None


def ranks_of(loader: Any, world_size: int, seed: int = 7) -> list[TrainData]:
    """Each with a loader of its own, as in processes of their own."""
    loaders = [copy.deepcopy(loader) for _ in range(world_size)]
    return [TrainData(one, rank=rank, world_size=world_size, seed=seed) for rank, one in enumerate(loaders)]


def again(stopped: list[TrainData], loader: Any, world_size: int) -> list[TrainData]:
    """Resumed at the same number of ranks, each with its own state."""
    ranks = ranks_of(loader, world_size, seed=99)
    for data, before in zip(ranks, stopped, strict=True):
        data.load_state_dict(json.loads(json.dumps(state_of(stopped))))
        data.load_own_state(before.own_state())
        data.begin_epoch(data.epoch)
    return ranks


@pytest.mark.parametrize("steps", [1, 4, 5])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("workers", "divide"), [(0, False), (2, False), (2, True), (3, False)])
def test_a_stream_goes_on_at_its_place(workers: int, divide: bool, world: int, steps: int, tmp_path: Path) -> None:
    def loader(name: str) -> DataLoader[Any]:
        return DataLoader(Counter(40, tmp_path / name, divide), 2, num_workers=workers)

    whole = train(begun(ranks_of(loader("whole"), world), 0))
    assert sorted(samples(whole)) == list(range(40))
    stopped = begun(ranks_of(loader("first"), world), 0)
    first = train(stopped, steps, ahead=1)
    rest = train(again(stopped, loader("rest"), world))
    assert [a + b for a, b in zip(first, rest, strict=True)] == whole
    # A second interruption in the same epoch.
    once = again(stopped, loader("once"), world)
    second = train(once, 2, ahead=1)
    third = train(again(once, loader("twice"), world))
    assert [a + b + c for a, b, c in zip(first, second, third, strict=True)] == whole
    # Each of the world * max(workers, 1) walks begins behind what its last used batch has taken.
    read = [int(line) for line in (tmp_path / "rest").read_text().splitlines()]
    walks = world * max(workers, 1) if not divide else world
    assert len(read) <= walks * (40 - 2 * world * (steps - max(workers, 1)))
    if steps >= workers:
        assert 0 not in read


def test_another_number_of_ranks_or_workers_walks_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def loader(name: str, workers: int) -> DataLoader[Any]:
        return DataLoader(Counter(40, tmp_path / name), 2, num_workers=workers)

    stopped = begun(ranks_of(loader("first", 0), 1), 0)
    first = train(stopped, 6)
    for world, workers in ((2, 0), (1, 2)):
        ranks = ranks_of(loader(f"{world}-{workers}", workers), world)
        for data in ranks:
            data.load_state_dict(state_of(stopped))
            if world == 1:
                data.load_own_state(stopped[0].own_state())
            data.begin_epoch(0)
        caplog.clear()
        assert sorted(samples(first) + samples(train(ranks))) == list(range(40))
        assert "walking over 12 elements of the training stream" in caplog.text


def test_a_stream_without_state_says_that_it_is_walked_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loader = DataLoader(Walked(40, tmp_path / "notes"), 2)
    stopped = begun(ranks_of(loader, 1), 0)
    train(stopped, 3)
    assert stopped[0].own_state() is None
    assert train(again(stopped, DataLoader(Walked(40, tmp_path / "rest"), 2), 1), 1) == [[[6, 7]]]
    assert "walking over 6 elements of the training stream" in caplog.text
    assert (tmp_path / "rest").read_text().split() == [str(number) for number in range(8)]


def test_the_next_epoch_begins_at_the_start(tmp_path: Path) -> None:
    loader = DataLoader(Counter(6, tmp_path / "notes"), 2)
    stopped = begun(ranks_of(loader, 1), 0)
    train(stopped, 2)
    after = again(stopped, DataLoader(Counter(6, tmp_path / "rest"), 2), 1)
    assert train(after) == [[[4, 5]]]
    assert train(begun(after, 1)) == [[[0, 1], [2, 3], [4, 5]]]


class Batches:
    """A loader that is no DataLoader, with a state."""

    def __init__(self, length: int) -> None:
        self.length, self.given, self.made = length, 0, 0

    def __iter__(self) -> Iterator[list[int]]:
        while self.given < self.length:
            self.given += 1
            self.made += 1
            yield [self.given - 1]
        self.given = 0

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]


def test_a_loader_of_batches_goes_on_at_its_place() -> None:
    stopped = begun(ranks_of(Batches(5), 1), 0)
    assert train(stopped, 2, ahead=1) == [[[0], [1]]]
    after = again(stopped, Batches(5), 1)
    assert train(after) == [[[2], [3], [4]]]
    assert after[0]._loader.made == 3
    assert train(begun(after, 1)) == [[[0], [1], [2], [3], [4]]]


def resumed_fit(strategy: str, world: int, workers: int, folder: Path) -> None:
    def fit(steps: int, name: str, **arguments: Any) -> tuple[Any, list[Any]]:
        module = Scalar(lr=0.1)
        trainer = quiet_trainer(strategy=strategy, max_steps=steps, accumulate_grad_batches=2)
        data = Counter(64, folder / f"{name}-{trainer.global_rank}")
        trainer.fit(module, DataLoader(data, 2, num_workers=workers, collate_fn=as_floats), **arguments)
        return trainer, [batch.tolist() for batch in module.batches]

    _, whole = fit(8, "whole")
    trainer, first = fit(3, "first")
    trainer.save_checkpoint(folder / "saved")
    trainer, rest = fit(8, "rest", ckpt_path=folder / "saved")
    assert first + rest == whole
    module, data = Scalar(lr=0.1), Counter(64, folder / f"two-{trainer.global_rank}")
    loader = DataLoader(data, 2, num_workers=workers, collate_fn=as_floats)
    trainer = quiet_trainer(strategy=strategy, max_steps=3, accumulate_grad_batches=2)
    trainer.fit(module, loader)
    trainer.max_steps = 8
    trainer.fit(module, loader)
    assert [batch.tolist() for batch in module.batches] == whole, "a second fit goes on, too"
    if workers == 0:
        read = [int(line) for line in (folder / f"rest-{trainer.global_rank}").read_text().splitlines()]
        assert min(read) >= 3 * 2 * 2 * world - world, "what was used before is not read again"


def as_floats(ids: list[int]) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.float32)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_fit_goes_on_in_its_stream(workers: int, tmp_path: Path) -> None:
    resumed_fit("single", 1, workers, tmp_path)


@on_two_ranks
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "deepspeed_stage_2"])
def test_a_fit_goes_on_in_its_stream_on_two_ranks(strategy: str, workers: int, tmp_path: Path) -> None:
    resumed_fit(strategy, 2, workers, tmp_path)


class Rows(Dataset[int]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["rows", "stream"])
@pytest.mark.parametrize("world", [1, 2])
def test_torchdatas_loader(kind: str, workers: int, world: int, tmp_path: Path) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    def loader(name: str) -> Any:
        data: Any = Rows() if kind == "rows" else Counter(24, tmp_path / name)
        return StatefulDataLoader(data, 2, shuffle=kind == "rows", num_workers=workers)

    whole = train(begun(ranks_of(loader("whole"), world), 0))
    assert sorted(samples(whole)) == list(range(24))
    stopped = begun(ranks_of(loader("first"), world), 0)
    first = train(stopped, 3, ahead=1)
    rest = train(again(stopped, loader("rest"), world))
    assert [a + b for a, b in zip(first, rest, strict=True)] == whole
