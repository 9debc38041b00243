"""TrainData: which samples each rank gets. Orders and shares are worked out by hand or by plain PyTorch."""

from __future__ import annotations

import itertools
import multiprocessing
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from acclight.data import TrainData


class Ids(Dataset[int]):
    """Gives its own index."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epochs: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class WithEpoch(Ids):
    """Gives (index, epoch that reached it)."""

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __getitem__(self, index: int) -> tuple[int, int]:  # type: ignore[override]
        return index, self.epochs[-1]


def plain(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def flat(batches: Iterable[Any]) -> list[Any]:
    return [sample for batch in batches for sample in batch]


def read(loader: Any, world_size: int = 1, epoch: int = 0, seed: int = 1, **options: Any) -> list[list[Any]]:
    """Batches of one epoch, per rank; checks that num_batches told the truth beforehand."""
    ranks = []
    for rank in range(world_size):
        data = TrainData(loader, rank=rank, world_size=world_size, seed=seed, **options)
        data.begin_epoch(epoch)
        told = data.num_batches
        batches = [plain(batch) for batch in data]
        assert told is None or told == len(batches)
        ranks.append(batches)
    return ranks


def global_batches(ranks: Sequence[Sequence[Any]], accumulate: int) -> list[set[int]]:
    """Samples of each optimizer step."""
    rounds = list(itertools.zip_longest(*ranks, fillvalue=[]))
    return [set(flat(flat(rounds[i : i + accumulate]))) for i in range(0, len(rounds), accumulate)]


def test_sequential_order_is_sliced_by_rank() -> None:
    assert read(DataLoader(Ids(8), 2), 2) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_end_of_epoch_is_split_evenly() -> None:
    assert read(DataLoader(Ids(10), 2), 2) == [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [9]]]


def test_end_of_epoch_wraps_around_only_to_a_multiple_of_the_ranks() -> None:
    assert read(DataLoader(Ids(11), 2), 2) == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 0]]]


def test_end_of_epoch_is_dropped_with_drop_last() -> None:
    assert read(DataLoader(Ids(11), 2, drop_last=True), 2) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_end_of_epoch_repeats_nothing_without_even_batches() -> None:
    assert read(DataLoader(Ids(7), 2), 2, even_batches=False) == [[[0, 1], [4]], [[2, 3], [5, 6]]]
    assert read(DataLoader(Ids(5), 2), 2, even_batches=False) == [[[0, 1]], [[2, 3]]]


def test_fewer_samples_than_ranks_reach_every_rank() -> None:
    assert read(DataLoader(Ids(1), 4), 3) == [[[0]], [[0]], [[0]]]


def test_nothing_to_read_is_no_error() -> None:
    assert read(DataLoader(Ids(0), 2), 2) == [[], []]
    assert read(DataLoader(Ids(3), 2, drop_last=True), 2) == [[], []]
    assert read([], 1) == [[]]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("length", [16, 12, 20])  # ends that divide by the ranks
def test_global_batches_are_the_same_for_ranks_and_accumulation(length: int, shuffle: bool) -> None:
    loader = DataLoader(Ids(length), 2, shuffle=shuffle)
    one, two, four = (global_batches(read(loader, world), 4 // world) for world in (1, 2, 4))
    assert one == two == four
    assert set().union(*one) == set(range(length))


def test_shuffle_is_a_permutation_that_belongs_to_seed_and_epoch() -> None:
    loader = DataLoader(Ids(50), 5, shuffle=True)
    orders = {(seed, epoch): flat(read(loader, 1, epoch, seed=seed)[0]) for seed in (0, 1) for epoch in (0, 1)}
    assert all(sorted(order) == list(range(50)) for order in orders.values())
    assert len({tuple(order) for order in orders.values()}) == 4
    torch.manual_seed(99)
    assert flat(read(loader, 1, 1, seed=0)[0]) == orders[0, 1]


def test_a_generator_of_the_users_is_not_drawn_from() -> None:
    generator = torch.Generator().manual_seed(5)
    before = generator.get_state()
    loader = DataLoader(Ids(20), 2, shuffle=True, generator=generator)
    first = read(loader, 2)
    assert torch.equal(generator.get_state(), before)
    torch.randn(3, generator=generator)
    assert read(loader, 2) == first


class GlobalShuffle:
    """A sampler that shuffles by the global generators, like many of users' own."""

    def __init__(self, length: int, kind: str, sized: bool = True) -> None:
        self.length, self.kind = length, kind
        if sized:
            self.__class__ = SizedGlobalShuffle

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.length))
        if self.kind == "python":
            random.shuffle(order)
        elif self.kind == "numpy":
            np.random.shuffle(order)
        else:
            order = torch.randperm(self.length).tolist()
        return iter(order)


class SizedGlobalShuffle(GlobalShuffle):
    def __len__(self) -> int:
        return self.length


def random_samplers() -> dict[str, Any]:
    return {
        "random": RandomSampler(range(23)),
        "replacement": RandomSampler(range(23), replacement=True, num_samples=23),
        "subset": SubsetRandomSampler(list(range(23))),
        "weighted": WeightedRandomSampler([1.0] * 23, 23),
        **{kind: GlobalShuffle(23, kind) for kind in ("python", "numpy", "torch")},
        **{kind + " unsized": GlobalShuffle(23, kind, sized=False) for kind in ("python", "numpy", "torch")},
    }


@pytest.mark.parametrize("name", random_samplers())
def test_random_samplers_give_all_ranks_one_order_and_leave_the_random_state(name: str) -> None:
    sampler = random_samplers()[name]
    loader = DataLoader(Ids(23), 2, sampler=sampler)
    alone = flat(read(loader)[0])
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index,union-attr]
    first = TrainData(loader, rank=0, world_size=2, seed=1)
    first.begin_epoch(0)
    rank0 = [plain(batch) for batch in first]
    assert states == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # type: ignore[index,union-attr]
    random.seed(4)
    np.random.seed(4)
    torch.manual_seed(4)
    second = TrainData(loader, rank=1, world_size=2, seed=1)
    second.begin_epoch(0)
    rank1 = [plain(batch) for batch in second]
    # 23 samples: five global batches of 4, then 3 and the first one again
    assert rank0 == [alone[i : i + 2] for i in (0, 4, 8, 12, 16)] + [alone[20:22]]
    assert rank1 == [alone[i : i + 2] for i in (2, 6, 10, 14, 18)] + [[alone[22], alone[0]]]
    assert read(loader, epoch=1) != [alone]


def test_numpy_keeps_its_second_normal_value_over_the_start_of_an_epoch() -> None:
    np.random.seed(0)
    expected = np.random.randn(2).tolist()
    np.random.seed(0)
    values = [np.random.randn()]
    read(DataLoader(Ids(6), 2, shuffle=True))
    assert [*values, np.random.randn()] == expected


def test_a_custom_sampler_is_followed() -> None:
    loader = DataLoader(Ids(8), 2, sampler=[7, 5, 3, 1, 0, 2, 4, 6])
    assert read(loader) == [[[7, 5], [3, 1], [0, 2], [4, 6]]]
    assert read(loader, 2) == [[[7, 5], [0, 2]], [[3, 1], [4, 6]]]


def test_a_sampler_that_never_ends_but_has_a_length_raises() -> None:
    class Endless:
        def __iter__(self) -> Iterator[int]:
            while True:
                yield 0

        def __len__(self) -> int:
            return 4

    with pytest.raises(ValueError, match="Endless has length 4 but gave"):
        read(DataLoader(Ids(4), 2, sampler=Endless()))


def test_a_sampler_without_an_end_is_read_as_far_as_asked() -> None:
    class Endless:
        def __iter__(self) -> Iterator[int]:
            index = 0
            while True:
                yield index
                index += 1

    loader = DataLoader(Ids(10**9), 2, sampler=Endless())
    assert read(loader, 2, limit=2) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_a_distributed_sampler_is_used_as_it_is() -> None:
    for rank in (0, 1):
        sampler = DistributedSampler(range(9), num_replicas=2, rank=rank, shuffle=True, seed=3)
        sampler.set_epoch(2)
        expected = [list(sampler)[i : i + 2] for i in (0, 2, 4)]
        sampler.set_epoch(0)
        data = TrainData(DataLoader(Ids(9), 2, sampler=sampler), rank=rank, world_size=2, seed=0)
        data.begin_epoch(2)
        assert [plain(batch) for batch in data] == expected
        assert data.num_batches == 3


def test_a_distributed_sampler_for_another_world_raises() -> None:
    sampler = DistributedSampler(range(9), num_replicas=4, rank=3)
    with pytest.raises(ValueError, match=r"rank 3 of 4, but this process is rank 1 of 2"):
        TrainData(DataLoader(Ids(9), 2, sampler=sampler), rank=1, world_size=2, seed=0)


def test_a_distributed_sampler_of_one_process_is_an_ordinary_sampler() -> None:
    sampler = DistributedSampler(range(4), num_replicas=1, rank=0, shuffle=False)
    assert read(DataLoader(Ids(4), 1, sampler=sampler), 2) == [[[0], [2]], [[1], [3]]]


class Buckets:
    """A batch sampler that records set_epoch and gives one batch more in each epoch."""

    def __init__(self, batches: list[list[int]], grow: bool = False) -> None:
        self.batches, self.grow = batches, grow
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        yield from self.batches
        if self.grow:
            yield from [[0]] * self.epochs[-1]


def test_batches_of_a_batch_sampler_stay_whole() -> None:
    loader = DataLoader(Ids(7), batch_sampler=Buckets([[0], [1, 2], [3, 4, 5], [6]]))
    assert read(loader) == [[[0], [1, 2], [3, 4, 5], [6]]]
    assert read(loader, 2) == [[[0], [3, 4, 5]], [[1, 2], [6]]]


def test_an_odd_number_of_whole_batches() -> None:
    loader = DataLoader(Ids(6), batch_sampler=[[0], [1, 2], [3, 4, 5]])
    assert read(loader, 2) == [[[0], [3, 4, 5]], [[1, 2], [0]]]
    assert read(loader, 2, even_batches=False) == [[[0]], [[1, 2]]]
    assert read(DataLoader(Ids(6), batch_sampler=[[4, 5]]), 3) == [[[4, 5]]] * 3


def test_num_batches_is_what_is_given_not_what_the_sampler_says() -> None:
    data = TrainData(DataLoader(Ids(4), batch_sampler=Buckets([[0], [1]], grow=True)), rank=0, world_size=1, seed=0)
    for epoch in range(3):
        data.begin_epoch(epoch)
        assert data.num_batches == len(list(data)) == 2 + epoch


def test_torchs_own_batch_sampler_is_the_batch_size_that_it_has() -> None:
    sampler = BatchSampler(SequentialSampler(range(10)), 2, drop_last=False)
    assert read(DataLoader(Ids(10), batch_sampler=sampler), 2) == [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [9]]]


def test_without_batching_each_index_is_a_batch() -> None:
    assert read(DataLoader(Ids(5), batch_size=None), 2) == [[0, 2, 4], [1, 3, 0]]


def test_set_epoch_reaches_sampler_batch_sampler_and_dataset_once_an_epoch() -> None:
    class Inner:
        def __init__(self) -> None:
            self.epochs: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

        def __iter__(self) -> Iterator[int]:
            return iter(range(4))

        def __len__(self) -> int:
            return 4

    class Outer(BatchSampler):
        epochs: list[int]

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    inner, dataset = Inner(), WithEpoch(4)
    outer = Outer(inner, 2, False)
    outer.epochs = []
    data = TrainData(DataLoader(Subset(dataset, range(4)), batch_sampler=outer), rank=0, world_size=1, seed=0)
    assert data.num_batches == 2
    for epoch in range(3):
        data.begin_epoch(epoch)
        assert len(list(data)) == 2
    assert inner.epochs == outer.epochs == dataset.epochs == [0, 1, 2]


@pytest.mark.parametrize("keep", [False, True])
def test_set_epoch_reaches_the_workers(keep: bool) -> None:
    loader = DataLoader(WithEpoch(4), 2, num_workers=1, persistent_workers=keep)
    data = TrainData(loader, rank=0, world_size=1, seed=0)
    for epoch in range(3):
        data.begin_epoch(epoch)
        assert [plain(epochs) for _, epochs in data] == [[epoch, epoch]] * 2
    data.close()


def test_limit() -> None:
    loader = DataLoader(Ids(20), 2)
    assert read(loader, 2, limit=2) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert read(loader, 2, limit=100) == read(loader, 2)
    assert read(loader, 2, limit=0.4) == read(loader, 2, limit=2)  # of 5 batches per rank
    assert read(loader, 2, limit=0) == read(loader, 2, limit=0.0) == [[], []]
    assert read(loader, 1, limit=1) == [[[0, 1]]]
    assert len(read(DataLoader(Ids(100), 1), limit=0.29)[0]) == 29
    assert read([1, 2, 3], limit=2) == [[1, 2]]


@pytest.mark.parametrize("limit", [-1, 1.5, -0.1, True, "2"])
def test_limit_out_of_range_raises(limit: Any) -> None:
    with pytest.raises(ValueError, match="limit_train_batches="):
        TrainData(DataLoader(Ids(4)), rank=0, world_size=1, seed=0, limit=limit)


def test_limit_that_leaves_nothing_or_of_nothing_known_raises() -> None:
    with pytest.raises(ValueError, match=r"limit_train_batches=0.1 of 4 batches leaves none"):
        TrainData(DataLoader(Ids(4)), rank=0, world_size=1, seed=0, limit=0.1)
    with pytest.raises(ValueError, match=r"limit_train_batches=0.5: a fraction needs a loader with a length"):
        TrainData(iter([1, 2]), rank=0, world_size=1, seed=0, limit=0.5)


def test_split_batches_divides_the_batch_size() -> None:
    assert read(DataLoader(Ids(8), 4), 2, split_batches=True) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    with pytest.raises(ValueError, match="batch size 5 cannot be divided among 2"):
        read(DataLoader(Ids(8), 5), 2, split_batches=True)
    with pytest.raises(ValueError, match="needs a DataLoader with a batch_size"):
        read(DataLoader(Ids(8), batch_sampler=[[0], [1]]), 2, split_batches=True)


def test_several_loaders_and_no_loader_raise() -> None:
    with pytest.raises(TypeError, match="a list of DataLoaders is not one loader"):
        TrainData([DataLoader(Ids(2))], rank=0, world_size=1, seed=0)
    with pytest.raises(TypeError, match="a dict of DataLoaders is not one loader"):
        TrainData({"a": DataLoader(Ids(2))}, rank=0, world_size=1, seed=0)
    with pytest.raises(TypeError, match="int is no loader"):
        TrainData(3, rank=0, world_size=1, seed=0)  # type: ignore[arg-type]


def test_plain_iterables_are_each_ranks_own() -> None:
    assert read([[1], [2], [3]], 2) == [[[1], [2], [3]]] * 2
    data = TrainData((batch for batch in "ab"), rank=1, world_size=2, seed=0)
    assert data.num_batches is None
    assert list(data) == ["a", "b"]


def test_ranks_agree_where_the_order_is_shared() -> None:
    def agrees(loader: Any, world_size: int = 2) -> bool:
        return TrainData(loader, rank=0, world_size=world_size, seed=0).ranks_agree

    assert agrees(DataLoader(Ids(4)))
    assert agrees([1], world_size=1)
    assert not agrees([1])
    assert not agrees(DataLoader(Ids(4), sampler=DistributedSampler(range(4), num_replicas=2, rank=0)))


class Doubling(DataLoader[Any]):
    """A subclass with an argument and an __iter__ of its own."""

    def __init__(self, *args: Any, factor: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.factor = factor

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            yield batch * self.factor


def test_the_loaders_subclass_and_arguments_are_kept() -> None:
    loader = Doubling(Ids(8), 2, factor=10, collate_fn=torch.tensor)
    assert read(loader, 2) == [[[0, 10], [40, 50]], [[20, 30], [60, 70]]]
    assert [plain(batch) for batch in loader] == [[0, 10], [20, 30], [40, 50], [60, 70]]  # the user's own is as before


def test_a_subclass_that_reads_no_batch_sampler_raises() -> None:
    class Stubborn(DataLoader[Any]):
        def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
            return iter([0, 1])

    with pytest.raises(RuntimeError, match="Stubborn gave a batch without reading its batch_sampler"):
        read(Stubborn(Ids(4)), 2)


def draw(index_and_more: list[Any]) -> Any:
    return index_and_more, random.random(), float(np.random.rand()), float(torch.rand(()))


class Noisy(Ids):
    """Draws for each sample."""

    def __getitem__(self, index: int) -> Any:
        return index, random.random(), float(np.random.rand()), float(torch.rand(()))


def test_workers_draw_by_seed_epoch_and_rank() -> None:
    def drawn(workers: int, rank: int = 0, epoch: int = 0, seed: int = 1) -> list[Any]:
        loader = DataLoader(Noisy(8), 2, num_workers=workers, collate_fn=draw)
        data = TrainData(loader, rank=rank, world_size=2, seed=seed)
        data.begin_epoch(epoch)
        before = torch.get_rng_state()
        batches = list(data)
        assert torch.equal(before, torch.get_rng_state())
        return batches

    first = drawn(1)
    assert drawn(1) == first
    assert drawn(2) == first  # whichever worker makes a batch
    assert [samples[0][0] for samples, *_ in first] == [0, 4]
    others = drawn(1, rank=1), drawn(1, epoch=1), drawn(1, seed=2)
    draws = [value for batches in (first, *others) for samples, *own in batches for value in own]
    draws += [value for batches in (first, *others) for samples, *_ in batches for _, *own in samples for value in own]
    assert len(set(draws)) == len(draws)


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def say_hello(worker_id: int) -> None:
    print("worker", worker_id, file=sys.stderr)


def test_the_users_worker_init_fn_runs(capfd: pytest.CaptureFixture[str]) -> None:
    read(DataLoader(Ids(4), 2, num_workers=2, worker_init_fn=say_hello))
    assert sorted(line for line in capfd.readouterr().err.splitlines() if line.startswith("worker ")) == [
        "worker 0",
        "worker 1",
    ]


def test_workers_that_are_kept_read_every_epoch() -> None:
    data = TrainData(
        DataLoader(Ids(8), 2, num_workers=2, persistent_workers=True, shuffle=True), rank=0, world_size=1, seed=0
    )
    for epoch in range(3):
        data.begin_epoch(epoch)
        batches = iter(data)
        assert len(next(batches)) == 2  # left early
        data.begin_epoch(epoch)
        assert sorted(flat(plain(batch) for batch in data)) == list(range(8))
    data.close()


@pytest.fixture
def started() -> Callable[[], int]:
    """How many of the processes that were started since are alive; those of another test may still be on their way out."""
    before = set(multiprocessing.active_children())
    return lambda: len(set(multiprocessing.active_children()) - before)


def test_an_epoch_left_early_leaves_no_worker_processes(started: Callable[[], int]) -> None:
    data = TrainData(DataLoader(Ids(40), 2, num_workers=2), rank=0, world_size=1, seed=0)
    batches = iter(data)
    next(batches)
    assert started() == 2
    del batches
    assert started() == 0


def test_closing_ends_workers_that_are_kept(started: Callable[[], int]) -> None:
    data = TrainData(DataLoader(Ids(4), 2, num_workers=1, persistent_workers=True), rank=0, world_size=1, seed=0)
    assert len(list(data)) == 2
    assert started() == 1
    data.close()
    assert started() == 0


@pytest.mark.slow
def test_workers_may_be_spawned() -> None:
    for dataset in (Ids(4), Numbers()):
        loader = DataLoader(dataset, 2, num_workers=1, multiprocessing_context="spawn", worker_init_fn=say_hello)
        assert read(loader) == [[[0, 1], [2, 3]]]


def test_the_users_own_iteration_and_workers_are_left_alone() -> None:
    loader = DataLoader(Ids(6), 2, num_workers=1, persistent_workers=True)
    own = iter(loader)
    assert plain(next(own)) == [0, 1]
    assert read(loader, 2) == [[[0, 1], [4]], [[2, 3], [5]]]
    assert [plain(batch) for batch in own] == [[2, 3], [4, 5]]


def test_a_subclass_may_collate_in_the_main_process() -> None:
    class Checking(DataLoader[Any]):
        def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
            assert plain(self.collate_fn([1, 2])) == [1, 2]
            return super().__iter__()

    assert read(Checking(Ids(4), 2, num_workers=1)) == [[[0, 1], [2, 3]]]
