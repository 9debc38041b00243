"""IterableDataset: each element goes to exactly one rank and one worker, whatever the dataset does."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from acclight.data import EvalData, TrainData, rank_identity
from acclight.data.loader import digest
from tests.distributed import RankChecks
from tests.scenarios import Scalar, quiet_trainer

on_two_ranks = RankChecks(world_size=2, timeout=90.0)


class Stream(IterableDataset[int]):
    """0, 1, 2, ... the same in each process."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


class DividedAmongWorkers(Stream):
    """As PyTorch's documentation shows it: in __iter__."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(self.length) if info is None else range(info.id, self.length, info.num_workers))


class Bounded(IterableDataset[int]):
    """As PyTorch's documentation shows it: the division is made by worker_init_fn."""

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.end))


def divide(worker_id: int) -> None:
    info: Any = get_worker_info()
    dataset = info.dataset
    part = -(-(dataset.end - dataset.start) // info.num_workers)
    start = dataset.start + worker_id * part
    dataset.start, dataset.end = start, min(start + part, dataset.end)


class AsksForItsNumberOnly(Stream):
    """Reads its worker's number, as for a seed or a log line, and walks the whole stream."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is None or (info.id in (0, 1) and info.seed >= 0)
        return super().__iter__()


class Shuffled(Stream):
    """A shuffle buffer on the global generators, which goes on drawing as it is read."""

    def __init__(self, length: int, kind: str) -> None:
        super().__init__(length)
        self.kind = kind

    def __iter__(self) -> Iterator[int]:
        buffer: list[int] = []
        for index in range(self.length):
            buffer.append(index)
            if len(buffer) == 8:
                yield buffer.pop(self.draw(8))
        while buffer:
            yield buffer.pop(self.draw(len(buffer)))

    def draw(self, number: int) -> int:
        if self.kind == "python":
            return random.randrange(number)
        if self.kind == "numpy":
            np.random.normal()  # one of a pair: NumPy keeps the other
            return int(np.random.randint(number))
        return int(torch.randint(number, ()))


class DividedAmongRanks(Stream):
    """Says, like a DistributedSampler, that it is this rank's own share."""

    def __init__(self, length: int, rank: int, num_replicas: int) -> None:
        super().__init__(length)
        self.rank, self.num_replicas = rank, num_replicas

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, self.length, self.num_replicas))


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def read(kind: type[Any], loader: Any, world_size: int, **options: Any) -> list[list[list[int]]]:
    if kind is TrainData:
        options.setdefault("seed", 0)
    ranks = [kind(loader, rank=rank, world_size=world_size, **options) for rank in range(world_size)]
    return [[batch.tolist() for batch in data] for data in ranks]


def flat(ranks: list[list[list[int]]]) -> list[int]:
    return sorted(sample for batches in ranks for batch in batches for sample in batch)


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("kind", [TrainData, EvalData])
def test_each_sample_once(kind: type[Any], workers: int) -> None:
    for world_size in (1, 2, 3):
        assert flat(read(kind, DataLoader(Stream(10), 2, num_workers=workers), world_size)) == list(range(10))


@pytest.mark.parametrize("workers", [0, 2])
def test_training_takes_elements_in_turn(workers: int) -> None:
    loader = DataLoader(Stream(10), 2, num_workers=workers)
    assert read(TrainData, loader, 1) == [[[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]]
    assert read(TrainData, loader, 2) == [[[0, 2], [4, 6], [8]], [[1, 3], [5, 7], [9]]]
    assert read(TrainData, loader, 2, limit=2) == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]
    dropping = DataLoader(Stream(10), 2, num_workers=workers, drop_last=True)
    assert read(TrainData, dropping, 2) == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]
    splitting = DataLoader(Stream(8), 4, num_workers=workers)
    assert read(TrainData, splitting, 2, split_batches=True) == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]


def test_without_batching() -> None:
    loader = DataLoader(Stream(5), batch_size=None)
    ranks = [TrainData(loader, rank=rank, world_size=2, seed=0) for rank in (0, 1)]
    assert [list(data) for data in ranks] == [[0, 2, 4], [1, 3]]


@pytest.mark.parametrize("kind", [TrainData, EvalData])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_dataset_that_divides_itself_among_the_workers(kind: type[Any], world_size: int) -> None:
    for workers in (0, 1, 2):
        loader = DataLoader(DividedAmongWorkers(20), 2, num_workers=workers)
        assert flat(read(kind, loader, world_size)) == list(range(20))
        loader = DataLoader(Bounded(0, 20), 2, num_workers=workers, worker_init_fn=divide)
        assert flat(read(kind, loader, world_size)) == list(range(20))
    # two workers in turn, each with its own half, as in PyTorch alone
    assert read(kind, DataLoader(Bounded(0, 8), 2, num_workers=2, worker_init_fn=divide), 1) == [
        [[0, 1], [4, 5], [2, 3], [6, 7]]
    ]


def test_asking_for_ones_own_number_is_no_division() -> None:
    assert flat(read(TrainData, DataLoader(AsksForItsNumberOnly(10), 2, num_workers=2), 2)) == list(range(10))


@pytest.mark.parametrize("draws", ["python", "numpy", "torch"])
def test_a_stream_shuffled_by_the_global_generators(draws: str) -> None:
    orders = []
    for workers in (0, 2):
        loader = DataLoader(Shuffled(30, draws), 3, num_workers=workers)
        (alone,) = read(EvalData, loader, 1)
        seed_everything(workers)
        assert read(EvalData, loader, 2) == [alone[0::2], alone[1::2]]
        assert flat([alone]) == list(range(30))
        assert [sample for batch in alone for sample in batch] != list(range(30))
        orders.append(alone)
        assert flat(read(TrainData, loader, 2)) == list(range(30))
    assert orders[0] == orders[1]


def test_reading_leaves_the_global_generators() -> None:
    seed_everything(1)
    expected = random.random(), float(np.random.rand()), float(torch.rand(()))
    seed_everything(1)
    for draws in ("python", "numpy", "torch"):
        read(TrainData, DataLoader(Shuffled(30, draws), 3), 1)
    assert (random.random(), float(np.random.rand()), float(torch.rand(()))) == expected


def test_a_dataset_that_divides_itself_among_the_ranks() -> None:
    for workers in (0, 2):
        ranks = []
        for rank in (0, 1):
            loader = DataLoader(DividedAmongRanks(9, rank, 2), 2, num_workers=workers)
            ranks.append([batch.tolist() for batch in TrainData(loader, rank=rank, world_size=2, seed=0)])
        assert ranks == [[[0, 2], [4, 6], [8]], [[1, 3], [5, 7]]]
    with pytest.raises(ValueError, match="DividedAmongRanks was made for rank 1 of 3"):
        TrainData(DataLoader(DividedAmongRanks(9, 1, 3)), rank=0, world_size=2, seed=0)


def test_a_stream_without_an_end_is_read_as_far_as_asked() -> None:
    class Endless(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            index = 0
            while True:
                yield index
                index += 1

    data = TrainData(DataLoader(Endless(), 2, num_workers=1), rank=1, world_size=2, seed=0, limit=2)
    assert data.num_batches is None
    for _ in range(2):
        assert [batch.tolist() for batch in data] == [[1, 3], [5, 7]]


def test_set_epoch_reaches_a_streams_workers_also_kept_ones() -> None:
    class Epochs(IterableDataset[int]):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            return iter([self.epoch] * 2)

    data = TrainData(DataLoader(Epochs(), 2, num_workers=1, persistent_workers=True), rank=0, world_size=1, seed=0)
    for epoch in range(3):
        data.begin_epoch(epoch)
        assert [batch.tolist() for batch in data] == [[epoch, epoch]]
    data.close()


def test_an_error_in_the_stream_reaches_the_reader() -> None:
    class Broken(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            yield 0
            raise OSError("shard 3 is gone")

    before = random.getstate()
    for workers in (0, 1):
        with pytest.raises(OSError, match="shard 3 is gone"):
            list(TrainData(DataLoader(Broken(), 1, num_workers=workers), rank=0, world_size=1, seed=0))
    assert random.getstate() == before


class Given(IterableDataset[int]):
    def __init__(self, samples: list[int], name: str = "") -> None:
        self.samples, self.name, self.table = samples, name, torch.zeros(3)

    def __iter__(self) -> Iterator[int]:
        return iter(self.samples)


def test_ranks_that_were_given_different_streams_are_told_apart() -> None:
    def identity(samples: list[int], name: str = "") -> dict[str, str]:
        return rank_identity(DataLoader(Given(samples, name)))

    same = identity(list(range(1000)), "a")
    assert same == identity(list(range(1000)), "a")
    others = identity(list(range(999)), "a"), identity([*range(999), 5], "a"), identity(list(range(1000)), "b")
    assert [[key for key in same if other[key] != same[key]] for other in others] == [
        ["samples"],
        ["samples"],
        ["name"],
    ]
    assert rank_identity(DataLoader(range(3))) == {"len()": "3"}  # type: ignore[arg-type]
    assert rank_identity([1, 2]) == {}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_rank_with_a_stream_of_its_own_reads_the_whole_of_it(workers: int) -> None:
    for kind, more in ((TrainData, {"seed": 0}), (EvalData, {})):
        ranks = []
        for rank, length in enumerate((3, 5)):
            loader = DataLoader(Given(list(range(length))), 1, num_workers=workers)
            data = kind(loader, rank=rank, world_size=2, own_share=True, **more)
            ranks.append([batch.item() for batch in data])
        assert ranks == [[0, 1, 2], [0, 1, 2, 3, 4]]


def test_ranks_with_map_style_data_of_their_own() -> None:
    ranks = []
    for rank, length in enumerate((3, 5)):
        loader = DataLoader(range(length), 2)  # type: ignore[arg-type]
        assert EvalData(loader, rank=rank, world_size=2, own_share=True).rounds is None
        data = TrainData(loader, rank=rank, world_size=2, seed=0, own_share=True)
        assert not data.ranks_agree
        ranks.append([batch.tolist() for batch in data])
    assert ranks == [[[0, 1], [2]], [[0, 1], [2, 3], [4]]]


def test_batches_in_no_fixed_order_raise() -> None:
    with pytest.raises(ValueError, match=r"in_order=False"):
        TrainData(DataLoader(Stream(4), num_workers=1, in_order=False), rank=0, world_size=1, seed=0)


class Noise(IterableDataset[float]):
    def __iter__(self) -> Iterator[float]:
        info: Any = get_worker_info()
        for _ in range(4 // info.num_workers):
            yield random.random()


def test_workers_that_divide_a_stream_draw_each_their_own() -> None:
    (batches,) = read(TrainData, DataLoader(Noise(), 2, num_workers=2), 1)
    assert batches[0][1] != batches[1][1]


class AsksForItsRank(IterableDataset[torch.Tensor]):
    """Three elements on rank 0 and five on rank 1, without an attribute that says so."""

    def __init__(self, how: str = "torch") -> None:
        self.how = how

    def __iter__(self) -> Iterator[torch.Tensor]:
        rank = torch.distributed.get_rank() if self.how == "torch" else int(os.environ["RANK"])
        return iter([torch.tensor(float(10 * rank + i)) for i in range((3, 5)[rank])])


class Same(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        for i in range(8):
            yield torch.tensor(float(i)) + random.randrange(0, 1)


class Validated(Scalar):
    seen: list[float]

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.seen.append(batch.item())
        self.log("seen", 1.0, reduce_fx="sum")


@on_two_ranks
@pytest.mark.parametrize("how", ["torch", "environ"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_asks_for_its_rank_is_not_divided_again(how: str, workers: int) -> None:
    rank = int(os.environ["RANK"])
    module = Validated()
    module.seen = []

    def loader() -> Any:
        # Workers that each walk the whole of the rank's part.
        return DataLoader(AsksForItsRank(how), batch_size=1, num_workers=workers)

    trainer = quiet_trainer(strategy="ddp", max_epochs=2, num_sanity_val_steps=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, loader(), loader())
    own = [10.0 * rank + i for i in range((3, 5)[rank])]
    assert [batch.item() for batch in module.batches] == 2 * own[:3]
    assert module.seen == 2 * own
    assert trainer.callback_metrics["seen"].item() == 8.0
    assert trainer.global_step == 6
    uneven = [str(w.message) for w in caught if "stop at the shortest" in str(w.message)]
    assert len(uneven) == (2 if rank == 0 else 0)  # in each epoch


@on_two_ranks
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_all_ranks_share_is_divided(workers: int) -> None:
    rank = int(os.environ["RANK"])
    module = Scalar()
    quiet_trainer(strategy="ddp", max_epochs=1).fit(module, DataLoader(Same(), batch_size=2, num_workers=workers))
    assert [batch.tolist() for batch in module.batches] == [[0.0 + rank, 2.0 + rank], [4.0 + rank, 6.0 + rank]]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resume_knows_again_that_a_stream_is_the_ranks_own(workers: int) -> None:
    def data() -> TrainData:
        loader = DataLoader(Stream(9), 2, num_workers=workers)
        return TrainData(loader, rank=1, world_size=2, seed=0, differs=lambda digest: True)

    first = data()
    batches = iter(first)
    assert [next(batches).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    first.consumed(2)
    second = data()
    second.load_state_dict(first.state_dict())
    second.begin_epoch(0)
    assert [batch.tolist() for batch in second] == [[4, 5], [6, 7], [8]]
    assert [batch.tolist() for batch in second] == [[4, 5], [6, 7], [8]]


def test_what_tells_streams_apart() -> None:
    def element(x: float) -> dict[str, Any]:
        return {"a": torch.tensor([x], dtype=torch.bfloat16), "b": (np.arange(3), "text", {"x", "y"}), "c": None}

    assert digest([element(1.0)]) == digest([element(1.0)]) is not None
    assert len({digest([element(1.0)]), digest([element(2.0)]), digest([]), digest([1]), digest([[1]])}) == 5
    assert digest([lambda: None]) is None  # cannot be pickled
