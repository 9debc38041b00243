"""TrainData's position: a resume goes on with the next unseen sample, at any world size."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from acclight.data import TrainData


class Ids(Dataset[int]):
    """Gives its own index, and notes what was loaded in this process."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.loaded.append(index)
        return index


class Stream(IterableDataset[int]):
    """Ids of a stream, in an order drawn when it begins; divided among the workers if asked."""

    def __init__(self, length: int, shuffle: bool = False, divide: bool = False) -> None:
        self.length, self.shuffle, self.divide = length, shuffle, divide

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.length))
        if self.shuffle:
            random.shuffle(order)
        info = get_worker_info() if self.divide else None
        return iter(order if info is None else order[info.id :: info.num_workers])


def plain(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def ranks_of(loader: Any, world_size: int, seed: int = 7, **options: Any) -> list[TrainData]:
    return [TrainData(loader, rank=rank, world_size=world_size, seed=seed, **options) for rank in range(world_size)]


def train(ranks: list[TrainData], steps: int | None = None, ahead: int = 0) -> list[list[Any]]:
    """Batches per rank of so many rounds; `ahead` more are read, but not trained on."""
    taken = []
    for data in ranks:
        batches = iter(data)
        mine = [plain(batch) for batch in itertools.islice(batches, steps)]
        list(itertools.islice(batches, ahead))
        data.consumed(len(mine))
        taken.append(mine)
    return taken


def state_of(ranks: list[TrainData]) -> dict[str, Any]:
    """The state, the same on all ranks, through JSON."""
    states = [json.dumps(data.state_dict()) for data in ranks]
    assert len(set(states)) == 1
    return dict(json.loads(states[0]))


def resumed(state: dict[str, Any], loader: Any, world_size: int, **options: Any) -> list[TrainData]:
    ranks = ranks_of(loader, world_size, seed=99, **options)
    for data in ranks:
        data.load_state_dict(state)
        data.begin_epoch(state["epoch"])
    return ranks


def begun(ranks: list[TrainData], epoch: int) -> list[TrainData]:
    for data in ranks:
        data.begin_epoch(epoch)
    return ranks


def samples(ranks: list[list[Any]]) -> list[int]:
    """All samples of all ranks, in the order in which they were used."""
    rounds = itertools.zip_longest(*ranks, fillvalue=[])
    return [sample for batches in rounds for batch in batches for sample in batch]


def test_state_holds_the_position_in_samples_of_all_ranks() -> None:
    ranks = begun(ranks_of(DataLoader(Ids(40), 2, shuffle=True), 2), 3)
    train(ranks, 3, ahead=2)
    assert state_of(ranks) == {
        "seed": 7,
        "epoch": 3,
        "samples": 12,
        "dataset": {"type": "Ids", "length": 40},
        "sampler": "RandomSampler",
    }
    assert [data.batches_done for data in ranks] == [3, 3]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("epoch", "steps"), [(0, 4), (1, 3)])
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_rest_of_the_epoch_is_that_of_an_uninterrupted_run(
    world_size: int, epoch: int, steps: int, workers: int
) -> None:
    loader = DataLoader(Ids(20), 2, shuffle=True, num_workers=workers)
    whole = train(begun(ranks_of(loader, world_size), epoch))
    stopped = begun(ranks_of(loader, world_size), epoch)
    first = train(stopped, steps, ahead=1)
    after = resumed(state_of(stopped), loader, world_size)
    assert [data.batches_done for data in after] == [steps] * world_size
    rest = train(after)
    assert [a + b for a, b in zip(first, rest, strict=True)] == whole
    assert sorted(samples(whole)) == list(range(20))
    assert train(begun(after, epoch + 1)) == train(begun(ranks_of(loader, world_size), epoch + 1))


def test_from_two_ranks_to_one_no_sample_is_repeated_or_left_out() -> None:
    loader = DataLoader(Ids(40), 2, shuffle=True)
    stopped = begun(ranks_of(loader, 2), 0)
    first = samples(train(stopped, 3))
    (alone,) = after = resumed(state_of(stopped), loader, 1)
    assert (alone.num_batches, alone.batches_done, alone.batches_left) == (20, 6, 14)
    rest = samples(train(after))
    assert (len(first), len(rest)) == (12, 28)
    assert sorted(first + rest) == list(range(40))
    assert first + rest == samples(train(begun(ranks_of(loader, 1), 0)))


def test_from_one_rank_to_two_with_another_batch_size() -> None:
    stopped = begun(ranks_of(DataLoader(Ids(20), 3, shuffle=True), 1), 0)
    first = samples(train(stopped, 2))
    after = resumed(state_of(stopped), DataLoader(Ids(20), 2, shuffle=True), 2)
    rest = train(after)
    # 14 left of 20 in rounds of 4: three, and one sample each
    assert [[len(batch) for batch in rank] for rank in rest] == [[2, 2, 2, 1]] * 2
    assert first + samples(rest) == samples(train(begun(ranks_of(DataLoader(Ids(20), 3, shuffle=True), 1), 0)))
    assert all(data.batches_done == data.num_batches and data.batches_left == 0 for data in after)


def test_a_second_interruption_in_the_same_epoch() -> None:
    loader = DataLoader(Ids(30), 2, shuffle=True)
    order = samples(train(begun(ranks_of(loader, 1), 0)))
    used: list[int] = []
    ranks = begun(ranks_of(loader, 2), 0)
    for world_size, steps in ((3, 2), (1, 1), (2, 3)):
        used += samples(train(ranks, steps, ahead=1))
        ranks = resumed(state_of(ranks), loader, world_size)
    used += samples(train(ranks))
    # the last rounds of two ranks: all divide by 2
    assert used == order


def test_samples_used_before_are_not_loaded_again() -> None:
    dataset = Ids(20)
    stopped = begun(ranks_of(DataLoader(dataset, 2), 1), 0)
    train(stopped, 6)
    dataset.loaded.clear()
    assert train(resumed(state_of(stopped), DataLoader(dataset, 2), 1), 1) == [[[12, 13]]]
    assert dataset.loaded == [12, 13]


def test_the_end_of_an_epoch_is_a_position_too() -> None:
    loader = DataLoader(Ids(11), 2)
    done = begun(ranks_of(loader, 2), 0)
    train(done)
    state = state_of(done)
    assert state["samples"] == 11  # the sample that came twice counts once
    after = resumed(state, loader, 2)
    assert train(after) == [[], []]
    assert [data.batches_done for data in after] == [3, 3]
    assert train(begun(after, 1), 1) == [[[0, 1]], [[2, 3]]]


def test_beginning_another_epoch_forgets_the_restored_position() -> None:
    loader = DataLoader(Ids(8), 2)
    stopped = begun(ranks_of(loader, 1), 0)
    train(stopped, 2)
    (data,) = ranks_of(loader, 1)
    data.load_state_dict(state_of(stopped))
    data.begin_epoch(1)
    assert (data.batches_done, data.batches_left) == (0, 4)
    data.begin_epoch(0)
    assert train([data], 1) == [[[0, 1]]]


def test_without_begin_epoch_reading_goes_on_from_the_restored_position() -> None:
    loader = DataLoader(Ids(8), 2)
    stopped = begun(ranks_of(loader, 1), 0)
    train(stopped, 2)
    (data,) = ranks_of(loader, 1)
    data.load_state_dict(state_of(stopped))
    assert train([data]) == [[[4, 5], [6, 7]]]


def test_the_limit_counts_what_was_done_before() -> None:
    loader = DataLoader(Ids(40), 2)
    stopped = begun(ranks_of(loader, 2, limit=5), 0)
    train(stopped, 3)
    for limit in (5, 0.5):
        after = resumed(state_of(stopped), loader, 2, limit=limit)
        assert [data.batches_left for data in after] == [2, 2]
        assert train(after) == [[[12, 13], [16, 17]], [[14, 15], [18, 19]]]


def test_reading_again_in_the_same_epoch_starts_at_what_was_not_trained_on() -> None:
    (data,) = begun(ranks_of(DataLoader(Ids(8), 2), 1), 0)
    train([data], 1, ahead=2)
    assert train([data]) == [[[2, 3], [4, 5], [6, 7]]]


def test_counting_more_than_was_read_raises() -> None:
    (data,) = begun(ranks_of(DataLoader(Ids(8), 2), 1), 0)
    next(iter(data))
    with pytest.raises(ValueError, match=r"consumed\(2\): only 1 batches"):
        data.consumed(2)


def test_another_dataset_raises_and_names_both() -> None:
    state = state_of(ranks_of(DataLoader(Ids(8), 2), 1))
    (data,) = ranks_of(DataLoader(Ids(9), 2), 1)
    with pytest.raises(ValueError, match=r"type Ids and length 8, but this one is of type Ids and length 9"):
        data.load_state_dict(state)
    (data,) = ranks_of(DataLoader(range(8), 2), 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"type Ids and length 8, but this one is of type range and length 8"):
        data.load_state_dict(state)


def test_ranks_with_data_of_their_own_have_one_state() -> None:
    def ranks(plain_lists: bool) -> list[TrainData]:
        given = [list(range(3)), list(range(5))]
        loaders = given if plain_lists else [DataLoader(ids, batch_size=None) for ids in given]  # type: ignore[arg-type]
        return [
            TrainData(loader, rank=rank, world_size=2, seed=0, own_share=not plain_lists)
            for rank, loader in enumerate(loaders)
        ]

    for plain_lists in (True, False):
        stopped = ranks(plain_lists)
        assert train(stopped, 1) == [[0], [0]]
        after = ranks(plain_lists)
        for data in after:
            data.load_state_dict(state_of(stopped))
        assert train(after) == [[1, 2], [1, 2, 3, 4]]


def test_another_sampler_warns_in_the_middle_of_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 0, raising=False)
    stopped = begun(ranks_of(DataLoader(Ids(8), 2, shuffle=True), 1), 0)
    (data,) = ranks_of(DataLoader(Ids(8), 2), 1)
    data.load_state_dict(state_of(stopped))
    train(stopped, 1)
    with pytest.warns(UserWarning, match="sampler RandomSampler, this loader has SequentialSampler"):
        data.load_state_dict(state_of(stopped))


def test_a_position_that_a_sampler_does_not_have_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 0, raising=False)
    stopped = begun(ranks_of(DataLoader(Ids(8), 2), 1), 0)
    train(stopped, 3)
    (data,) = ranks_of(DataLoader(Ids(8), 2, sampler=[1, 2, 3]), 1)
    with (
        pytest.warns(UserWarning, match="sampler"),
        pytest.raises(ValueError, match=r"after 6 samples.*has a list, which has only 3"),
    ):
        data.load_state_dict(state_of(stopped))


def test_whole_batches_resume_at_another_world_size() -> None:
    batches = [[0], [1, 2], [3, 4, 5], [6], [7, 8], [9]]
    loader = DataLoader(Ids(10), batch_sampler=batches)
    stopped = begun(ranks_of(loader, 2), 0)
    assert train(stopped, 1) == [[[0]], [[1, 2]]]
    assert state_of(stopped)["samples"] == 3
    (alone,) = after = resumed(state_of(stopped), loader, 1)
    assert (alone.batches_done, alone.batches_left) == (2, 4)
    assert train(after) == [batches[2:]]


def test_whole_batches_of_another_size_raise_in_the_middle_of_an_epoch() -> None:
    stopped = begun(ranks_of(DataLoader(Ids(4), batch_sampler=[[0], [1, 2], [3]]), 1), 0)
    train(stopped, 1)
    (data,) = ranks_of(DataLoader(Ids(4), batch_sampler=[[0, 1], [2, 3]]), 1)
    with pytest.raises(ValueError, match="none of whose batches begins there"):
        data.load_state_dict(state_of(stopped))


def test_random_samplers_and_distributed_samplers_resume() -> None:
    weighted = DataLoader(Ids(12), 2, sampler=WeightedRandomSampler([1.0] * 12, 12))
    whole = train(begun(ranks_of(weighted, 2), 1))
    stopped = begun(ranks_of(weighted, 2), 1)
    first = train(stopped, 2)
    assert [a + b for a, b in zip(first, train(resumed(state_of(stopped), weighted, 2)), strict=True)] == whole

    def own(rank: int) -> TrainData:
        sampler = DistributedSampler(range(12), num_replicas=2, rank=rank, seed=3)
        return TrainData(DataLoader(Ids(12), 2, sampler=sampler), rank=rank, world_size=2, seed=0)

    whole = train(begun([own(0), own(1)], 1))
    stopped = begun([own(0), own(1)], 1)
    first = train(stopped, 2)
    assert state_of(stopped)["samples"] == 8
    after = [own(0), own(1)]
    for data in after:
        data.load_state_dict(state_of(stopped))
        data.begin_epoch(1)
    assert [data.batches_done for data in after] == [2, 2]
    assert [a + b for a, b in zip(first, train(after), strict=True)] == whole


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_streams_resume_at_another_world_size(workers: int, shuffle: bool) -> None:
    loader = DataLoader(Stream(24, shuffle), 2, num_workers=workers)
    order = samples(train(begun(ranks_of(loader, 1), 1)))
    stopped = begun(ranks_of(loader, 2), 1)
    first = samples(train(stopped, 3, ahead=1))
    assert sorted(first) == sorted(order[:12])
    after = resumed(state_of(stopped), loader, 1)
    assert after[0].batches_done == 6
    assert samples(train(after, 2, ahead=1)) == order[12:16]
    rest = train(resumed(state_of(after), loader, 2))
    assert sorted(samples(rest)) == sorted(order[16:])


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_streams_divided_among_workers_resume(steps: int) -> None:
    loader = DataLoader(Stream(24, divide=True), 2, num_workers=2)
    whole = train(begun(ranks_of(loader, 2), 0))
    assert sorted(samples(whole)) == list(range(24))
    stopped = begun(ranks_of(loader, 2), 0)
    first = train(stopped, steps, ahead=1)
    rest = train(resumed(state_of(stopped), loader, 2))
    assert [a + b for a, b in zip(first, rest, strict=True)] == whole


def test_plain_iterables_resume() -> None:
    stopped = begun(ranks_of([[0], [1], [2], [3]], 2), 0)
    train(stopped, 3)
    after = resumed(state_of(stopped), [[0], [1], [2], [3]], 2)
    assert [data.batches_left for data in after] == [1, 1]
    assert train(after) == [[[3]], [[3]]]


class Noisy(Ids):
    def __getitem__(self, index: int) -> Any:
        return index, float(torch.rand(()))


def test_what_workers_draw_after_a_resume_is_that_of_an_uninterrupted_run() -> None:
    def noise(ranks: list[TrainData], steps: int | None = None) -> list[Any]:
        (data,) = ranks
        batches = [(ids.tolist(), values.tolist()) for ids, values in itertools.islice(data, steps)]
        data.consumed(len(batches))
        return batches

    loader = DataLoader(Noisy(20), 2, shuffle=True, num_workers=2)
    whole = noise(begun(ranks_of(loader, 1), 0))
    for steps in (3, 4):
        stopped = begun(ranks_of(loader, 1), 0)
        assert noise(stopped, steps) + noise(resumed(state_of(stopped), loader, 1)) == whole


def test_beginning_the_same_epoch_again_starts_at_its_first_sample() -> None:
    (data,) = begun(ranks_of(DataLoader(Ids(8), 2), 1), 0)
    train([data], 2)
    data.begin_epoch(0)
    assert train([data], 1) == [[[0, 1]]]


def test_what_was_read_and_then_read_again_counts_once() -> None:
    (data,) = begun(ranks_of(DataLoader(Ids(5), 2), 1), 0)
    next(iter(data))
    train([data])
    assert data.state_dict()["samples"] == 5


def test_lists_of_indices_without_batching_count_their_samples() -> None:
    class Lists(Dataset[list[int]]):
        def __getitem__(self, indices: list[int]) -> list[int]:
            return [10 * index for index in indices]

        def __len__(self) -> int:
            return 6

    loader = DataLoader(Lists(), batch_size=None, sampler=[[0, 1], [2, 3], [4], [5]], collate_fn=list)  # type: ignore[arg-type]
    stopped = begun(ranks_of(loader, 2), 0)
    assert train(stopped, 1) == [[[0, 10]], [[20, 30]]]
    assert state_of(stopped)["samples"] == 4
    assert train(resumed(state_of(stopped), loader, 1)) == [[[40], [50]]]
