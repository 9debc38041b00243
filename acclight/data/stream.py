"""Reads streams: a DataLoader over an IterableDataset, and plain iterables of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch.utils.data._utils.worker as torch_worker
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from acclight.data.draws import OwnDraws, derive_seed
from acclight.data.loader import Dealt, reading_copy, size_of
from acclight.data.workers import StreamWorkerInfo, seed_each_batch


class _StreamStart:
    """Runs first in a stream's worker: puts `StreamWorkerInfo` in place, then calls the user's `worker_init_fn`."""

    def __init__(self, user: Callable[[int], None] | None) -> None:
        self._user = user

    def __call__(self, worker_id: int) -> None:
        torch_info: Any = get_worker_info()
        turn = (worker_id + torch_info.dataset.rounds_before) % torch_info.num_workers
        info: Any = StreamWorkerInfo(torch_info, turn)
        torch_worker._worker_info = info
        if self._user is not None:
            self._user(turn)


class SharedStream(IterableDataset[Any]):
    """One rank's share of a stream that every rank, and every worker, walks from its start.

    Each element goes to exactly one rank, and there to exactly one worker. `run` elements in a row go to one rank.
    Batches come out the same, in the same order, for any number of workers, and a resume at another world size goes on
    with the next unseen element. All walks draw from the same seed, so a dataset that shuffles by the global generators
    shuffles alike everywhere; those generators are left as they were.

    A dataset that divides itself among the workers (it asks for `num_workers`) keeps its division; then this rank's
    share is taken of each worker's part, and a resume is exact for the same number of ranks and workers.

    Args:
        dataset: The user's.
        rank: This process.
        world_size: Ranks to divide among; 1 when the dataset divides itself among the ranks.
        batch_size: Samples of this rank's batches.
        run: Elements in a row for one rank.
    """

    def __init__(self, dataset: Dataset[Any], *, rank: int, world_size: int, batch_size: int, run: int) -> None:
        self.dataset = dataset
        self._rank, self._world, self._batch_size, self._run = rank, world_size, batch_size, run
        self.seed = 0
        self.start = 0
        """Elements over all ranks that were used before."""

    @property
    def rounds_before(self) -> int:
        """Batches of this rank that were used before."""
        return self.start // (self._batch_size * self._world)

    def __iter__(self) -> Iterator[Any]:
        worker: Any = get_worker_info()
        draws = OwnDraws(self.seed)
        elements = self._mine(worker, draws)
        while True:
            with draws:  # once for a batch, as exchanging the random states takes time
                batch = list(islice(elements, self._batch_size))
            if not batch:
                return
            yield from batch

    def _mine(self, worker: StreamWorkerInfo | None, draws: OwnDraws) -> Iterator[Any]:
        skip = self.start
        place, workers = (worker.place, worker.number) if worker else (0, 1)
        elements: Iterable[Any] = self.dataset  # type: ignore[assignment]  # torch's Dataset does not declare __iter__
        for index, element in enumerate(elements):
            draws.forget_pair()
            if index == 0 and worker and worker.asked_for_number:
                # Its own part: as much of it was used as this worker gave batches; no other worker walks it.
                skip = -(-max(self.rounds_before - worker.id, 0) // worker.number) * self._batch_size * self._world
                place, workers = 0, 1
                draws.reseed(derive_seed(self.seed, worker.id))
            if index < skip:
                continue
            turn, offset = divmod(index - skip, self._run)
            mine = turn // self._world * self._run + offset  # its place among this rank's
            if turn % self._world == self._rank and mine // self._batch_size % workers == place:
                yield element


class StreamReader:
    """Reads a DataLoader over an IterableDataset for one rank; see `SharedStream` for what goes where.

    Used samples are counted as full batches, as nothing here sees how many a batch holds. Workers start anew for each
    epoch, as kept ones would not learn of the epoch.

    Args:
        loader: The user's; it is not changed.
        rank: This process.
        world_size: Number of processes.
        own: Whether the dataset gives this rank its own share already.
        whole_batches: Whether batches are those of one process alone, dealt out in turn; else single elements are.
    """

    def __init__(self, loader: DataLoader[Any], *, rank: int, world_size: int, own: bool, whole_batches: bool) -> None:
        batch_size = loader.batch_size or 1
        self._share = world_size if own else 1
        self._stream = SharedStream(
            loader.dataset,
            rank=0 if own else rank,
            world_size=1 if own else world_size,
            batch_size=batch_size,
            run=batch_size if whole_batches else 1,
        )
        self._loader = reading_copy(loader, dataset=self._stream)
        self._start = _StreamStart(loader.worker_init_fn)
        self._collate = loader.collate_fn
        self._round = Dealt(None, batch_size * world_size)
        self._rank, self._own = rank, own
        self._worker_seed = 0

    def begin(self, seed: int, epoch: int) -> None:
        """See `Reader`."""
        self._stream.seed = derive_seed(seed, epoch, "stream", self._rank if self._own else 0)
        self._worker_seed = derive_seed(seed, epoch, "workers", self._rank)

    def count(self, start: int) -> int | None:
        """See `Reader`: a stream's length is known when it has ended."""
        return None

    def batches_before(self, start: int) -> int:
        """See `Reader`."""
        return start // self._round.samples

    def read(self, start: int, at_most: int | None) -> Iterator[tuple[Any, Dealt]]:
        """See `Reader`. What was used before is walked over, not collated."""
        self.close()
        self._stream.start = start // self._share
        seed_each_batch(
            self._loader,
            seed=self._worker_seed,
            first=self._stream.rounds_before,
            start=self._start,
            collate=self._collate,
        )
        for batch in islice(self._loader, at_most):
            yield batch, self._round

    def close(self) -> None:
        """See `Reader`."""
        self._loader._iterator = None


class PlainReader:
    """Reads an iterable of batches that is no DataLoader: every rank gets the batches that it was given, all of them.

    Positions count batches over all ranks, and a resume walks over those used before, for the same world size.
    """

    def __init__(self, batches: Iterable[Any], *, world_size: int) -> None:
        self._batches, self._world = batches, world_size

    def begin(self, seed: int, epoch: int) -> None:
        """See `Reader`: the order is the iterable's own."""

    def count(self, start: int) -> int | None:
        """See `Reader`."""
        total = size_of(self._batches)
        return None if total is None else max(total - self.batches_before(start), 0)

    def batches_before(self, start: int) -> int:
        """See `Reader`."""
        return start // self._world

    def read(self, start: int, at_most: int | None) -> Iterator[tuple[Any, Dealt]]:
        """See `Reader`."""
        skip = self.batches_before(start)
        for batch in islice(self._batches, skip, None if at_most is None else skip + at_most):
            yield batch, Dealt(None, self._world)

    def close(self) -> None:
        """See `Reader`: nothing is kept."""
