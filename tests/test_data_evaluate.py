"""EvalData: over all ranks each sample exactly once, in batches that one process alone would make."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from acclight.data import EvalData


class Ids(Dataset[int]):
    """Gives its own index."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


def plain(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def read(loader: Any, world_size: int, **options: Any) -> list[list[Any]]:
    """Batches per rank; checks num_batches, rounds and indices on the way."""
    ranks = [EvalData(loader, rank=rank, world_size=world_size, **options) for rank in range(world_size)]
    told = [(data.num_batches, data.rounds) for data in ranks]
    given = [[plain(batch) for batch in data] for data in ranks]
    for data, (number, rounds), batches in zip(ranks, told, given, strict=True):
        assert (data.num_batches, data.rounds) == (number, rounds)
        assert number in (None, len(batches))
        assert rounds in (None, max(map(len, given)))
        for index, batch in enumerate(batches):
            assert data.indices(index) in (None, batch if isinstance(batch, list) else [batch])
    return given


@pytest.mark.parametrize("workers", [0, 2])
def test_the_end_is_not_padded(workers: int) -> None:
    loader = DataLoader(Ids(5), 2, num_workers=workers)
    assert read(loader, 1) == [[[0, 1], [2, 3], [4]]]
    assert read(loader, 2) == [[[0, 1], [4]], [[2, 3]]]
    assert read(loader, 4) == [[[0, 1]], [[2, 3]], [[4]], []]


def test_one_sample_and_none() -> None:
    assert read(DataLoader(Ids(1), 4), 2) == [[[0]], []]
    assert read(DataLoader(Ids(0), 4), 2) == [[], []]


def test_drop_last_leaves_out_the_same_samples_at_any_world_size() -> None:
    loader = DataLoader(Ids(7), 2, drop_last=True)
    assert read(loader, 1) == [[[0, 1], [2, 3], [4, 5]]]
    assert read(loader, 2) == [[[0, 1], [4, 5]], [[2, 3]]]
    assert read(DataLoader(Ids(9), 2, drop_last=True), 2) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_a_number_limits_the_batches_of_each_rank() -> None:
    loader = DataLoader(Ids(9), 2)
    assert read(loader, 2, limit=1) == [[[0, 1]], [[2, 3]]]
    assert read(loader, 2, limit=3) == read(loader, 2) == [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7]]]
    assert read(loader, 2, limit=0) == [[], []]


def test_a_fraction_is_the_same_samples_at_any_world_size() -> None:
    loader = DataLoader(Ids(9), 2)  # 5 batches
    assert read(loader, 1, limit=0.6) == [[[0, 1], [2, 3], [4, 5]]]
    assert read(loader, 2, limit=0.6) == [[[0, 1], [4, 5]], [[2, 3]]]
    assert read(loader, 2, limit=0.0) == [[], []]
    with pytest.raises(ValueError, match=r"limit=0.1 of 5 batches leaves none"):
        EvalData(loader, rank=0, world_size=2, limit=0.1)
    with pytest.raises(ValueError, match="limit=-1"):
        EvalData(loader, rank=0, world_size=2, limit=-1)


def test_a_shuffled_loader_has_one_order_each_time_and_on_each_rank() -> None:
    loader = DataLoader(Ids(11), 2, shuffle=True)
    (alone,) = read(loader, 1)
    torch.manual_seed(5)
    assert read(loader, 2) == [alone[0::2], alone[1::2]]
    data = EvalData(loader, rank=0, world_size=1)
    assert [plain(batch) for batch in data] == [plain(batch) for batch in data] == alone
    assert sorted([sample for batch in alone for sample in batch]) == list(range(11))


def test_whole_batches_and_single_indices() -> None:
    assert read(DataLoader(Ids(7), batch_sampler=[[0], [1, 2], [3, 4, 5], [6]]), 2) == [[[0], [3, 4, 5]], [[1, 2], [6]]]
    assert read(DataLoader(Ids(3), batch_size=None), 2) == [[0, 2], [1]]


def test_indices_are_the_datasets() -> None:
    data = EvalData(DataLoader(Ids(10), 2, sampler=[9, 8, 7, 6, 5]), rank=1, world_size=2)
    assert [plain(batch) for batch in data] == [[7, 6]]
    assert data.indices(0) == [7, 6]


def test_a_distributed_sampler_is_used_as_it_is() -> None:
    ranks = []
    for rank in (0, 1):
        sampler = DistributedSampler(range(5), num_replicas=2, rank=rank, shuffle=False)
        data = EvalData(DataLoader(Ids(5), 2, sampler=sampler), rank=rank, world_size=2, limit=1)
        assert (data.num_batches, data.rounds) == (1, None)
        ranks.append([plain(batch) for batch in data])
    assert ranks == [[[0, 2]], [[1, 3]]]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_gives_each_sample_once_in_the_batches_of_one_process(workers: int) -> None:
    loader = DataLoader(Stream(10), 2, num_workers=workers)
    assert read(loader, 1) == [[[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]]
    assert read(loader, 2) == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7]]]
    assert read(loader, 2, limit=1) == [[[0, 1]], [[2, 3]]]
    data = EvalData(loader, rank=0, world_size=2)
    assert (data.num_batches, data.rounds) == (None, None)
    assert len(list(data)) == 3
    assert data.indices(0) is None


def test_plain_iterables_are_each_ranks_own() -> None:
    assert read([[1], [2]], 2) == [[[1], [2]]] * 2
    assert EvalData([1, 2, 3], rank=0, world_size=2).num_batches == 3
    assert EvalData([1, 2, 3], rank=0, world_size=2).rounds is None
    assert EvalData([1, 2, 3], rank=0, world_size=1, limit=2).rounds == 2
    assert EvalData(iter("ab"), rank=0, world_size=2, limit=0).rounds == 0


def test_first_is_the_start_of_the_same_data() -> None:
    loader = DataLoader(Ids(9), 2)
    full = [EvalData(loader, rank=rank, world_size=2) for rank in (0, 1)]
    short = [data.first(1) for data in full]
    assert [data.rounds for data in short] == [1, 1]
    assert [[plain(batch) for batch in data] for data in short] == [[[0, 1]], [[2, 3]]]
    assert [data.rounds for data in full] == [3, 3]
    assert EvalData(loader, rank=0, world_size=1, limit=0.4).first(10).num_batches == 2
    assert len(list(EvalData(DataLoader(Stream(9), 2), rank=0, world_size=1, limit=3).first(2))) == 2


def test_an_evaluation_left_early_starts_again_at_the_first_batch() -> None:
    for keep in (False, True):
        data = EvalData(DataLoader(Ids(12), 2, num_workers=1, persistent_workers=keep), rank=0, world_size=1)
        batches = iter(data)
        next(batches)
        del batches
        assert plain(next(iter(data))) == [0, 1]
        assert len(list(data)) == 6
        data.close()


def test_indices_are_those_of_the_last_evaluation() -> None:
    order = [0, 1, 2, 3]
    data = EvalData(DataLoader(Ids(4), 2, sampler=order), rank=0, world_size=1)
    assert [plain(batch) for batch in data] == [[0, 1], [2, 3]]
    order.reverse()
    assert [plain(batch) for batch in data] == [[3, 2], [1, 0]]
    assert [data.indices(0), data.indices(1)] == [[3, 2], [1, 0]]
