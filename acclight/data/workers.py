"""Seeds of a loader's worker processes: those of each batch, so that a resume draws what an uninterrupted run would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, get_worker_info

from acclight.data.draws import derive_seed, seed_global_generators


def seed_each_batch(
    loader: DataLoader[Any],
    *,
    seed: int,
    first: int,
    start: Callable[[int], None] | None,
    collate: Callable[[Any], Any],
) -> None:
    """Has the loader's workers make batch k, whichever of them it is, with generators set by (seed, k).

    DataLoader gives batches to workers in turn, so each knows which are its own. Workers that are kept between epochs
    are seeded when they start, then go on counting.

    Args:
        loader: A copy of the user's loader; its `worker_init_fn` and `collate_fn` are set.
        seed: Of this epoch and rank.
        first: Number of the iteration's first batch in the epoch.
        start: What to run first in each worker: the user's `worker_init_fn`, or what calls it.
        collate: The user's `collate_fn`.
    """
    loader.generator.manual_seed(seed)
    if loader.num_workers > 0:
        loader.worker_init_fn = _StartAndSeed(start, seed, first)
        loader.collate_fn = _CollateAndSeed(collate, seed, first)


class _StartAndSeed:
    """`worker_init_fn`: the user's, then the seed of the worker's first batch."""

    def __init__(self, start: Callable[[int], None] | None, seed: int, first: int) -> None:
        self._start, self._seed, self._first = start, seed, first

    def __call__(self, worker_id: int) -> None:
        if self._start is not None:
            self._start(worker_id)
        seed_global_generators(derive_seed(self._seed, self._first + worker_id))


class _CollateAndSeed:
    """`collate_fn`: the user's, then the seed of the worker's next batch. Collation is the last step of a batch."""

    def __init__(self, collate: Callable[[Any], Any], seed: int, first: int) -> None:
        self._collate, self._seed, self._next = collate, seed, first
        self._started = False

    def __call__(self, samples: Any) -> Any:
        batch = self._collate(samples)
        info: Any = get_worker_info()
        if info is None:  # a subclass of DataLoader that collates in the main process
            return batch
        if not self._started:
            self._started = True
            self._next += info.place if isinstance(info, StreamWorkerInfo) else info.id
        self._next += info.number if isinstance(info, StreamWorkerInfo) else info.num_workers
        seed_global_generators(derive_seed(self._seed, self._next))
        return batch


class StreamWorkerInfo:
    """What a stream's dataset gets from `get_worker_info()`: torch's, and a note of whether it asked for the number.

    A dataset that gives each worker its own part has to ask how many there are; one that never asks walks the whole
    stream in every worker. Nothing else tells the two apart.

    Args:
        info: torch's own, of a loader whose dataset holds the user's as `dataset`.
        turn: The number under which this worker goes on: after a resume the next batch may be another worker's.

    Attributes:
        place: The worker's real number.
        stream: What the loader reads, which holds the user's dataset.
        asked_for_number: Whether anyone has read `num_workers`.
    """

    def __init__(self, info: Any, turn: int) -> None:
        self.id = turn
        self.place: int = info.id
        self.stream = info.dataset
        self.dataset = info.dataset.dataset
        self.asked_for_number = False
        self._info = info

    @property
    def num_workers(self) -> int:
        """Number of workers, for the dataset."""
        self.asked_for_number = True
        return self.number

    @property
    def number(self) -> int:
        """Number of workers, for the trainer's side."""
        return int(self._info.num_workers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._info, name)
