"""Reads streams: a DataLoader over an IterableDataset, and plain iterables of batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
import torch.utils.data._utils.worker as torch_worker
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from acclight.data.draws import OwnDraws, derive_seed
from acclight.data.loader import Dealt, Differs, digest, keeps_state, reading_copy, size_of
from acclight.data.workers import StreamWorkerInfo, seed_each_batch
from acclight.messages import info

LOOKED_AT = 8
"""So many first elements tell whether the ranks walk the same stream."""


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


class _Place(NamedTuple):
    """Where one walk of a dataset that keeps its state is.

    Attributes:
        walked: Elements behind it.
        state: What the dataset's state_dict has given there.
    """

    walked: int
    state: Any


class _Placed(NamedTuple):
    """A worker's batch, and where its walk is afterwards.

    Attributes:
        batch: What the user's `collate_fn` has made.
        turn: The worker's number, see `StreamWorkerInfo`.
        place: Of its walk.
    """

    batch: Any
    turn: int
    place: _Place | None


class _CollateAndPlace:
    """`collate_fn` in a worker: the user's, and with its batch the place of the walk."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: Any) -> Any:
        batch = self._collate(samples)
        info: Any = get_worker_info()
        return _Placed(batch, info.id, info.stream.place())


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
        world_size: Number of processes.
        own: Whether the dataset divides itself among the ranks, so that all of it is this rank's; None where that shows
            in its first elements, once `settle` is set.
        batch_size: Samples of this rank's batches.
        run: Elements in a row for one rank.
    """

    def __init__(
        self, dataset: Dataset[Any], *, rank: int, world_size: int, own: bool | None, batch_size: int, run: int
    ) -> None:
        self.dataset = dataset
        self.own = own
        self._rank, self._world, self._batch_size, self._run = rank, world_size, batch_size, run
        self.seed = 0
        self.start = 0
        """Elements over all ranks that were used before."""
        self.settle: Callable[[list[Any]], None] | None = None
        """In the main process, where `own` is None: takes the first elements and sets it."""
        self.places: dict[int, _Place] = {}
        """Where the walks begin, by the worker's number (0 in the main process); the others begin at the start."""
        self._walked = self._opened = 0

    @property
    def rounds_before(self) -> int:
        """Batches of this rank that were used before."""
        return self.start // (self._batch_size * self._world)

    def place(self) -> _Place | None:
        """Where the walk in this process is; None while the dataset is ahead of it."""
        return None if self._walked < self._opened else _Place(self._walked, copy.deepcopy(self.dataset.state_dict()))  # type: ignore[attr-defined]

    def first(self) -> list[Any]:
        """The first elements, as a walk from the start gives them."""
        with OwnDraws(self.seed):
            return list(islice(self.dataset, LOOKED_AT))  # type: ignore[call-overload]  # as below

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
        place, workers = (worker.place, worker.number) if worker else (0, 1)
        elements: Iterable[Any] = self.dataset  # type: ignore[assignment]  # torch's Dataset does not declare __iter__
        begun = self.places.get(worker.id if worker else 0)
        if begun is not None:
            self.dataset.load_state_dict(begun.state)  # type: ignore[attr-defined]
        self._walked, self._opened = 0 if begun is None else begun.walked, 0
        if self.settle is not None:
            # Not opened twice: the dataset may hold what can be read but once.
            elements, ahead = iter(elements), []
            for element in islice(elements, LOOKED_AT):
                draws.forget_pair()
                ahead.append(element)
            self.settle(ahead)
            elements, self._opened = chain(ahead, elements), len(ahead)
        rank, world = (0, 1) if self.own else (self._rank, self._world)
        skip = self.start * world // self._world
        for index, element in enumerate(elements, start := self._walked):
            draws.forget_pair()
            self._walked = index + 1
            if index == start and worker and worker.asked_for_number:
                # Its own part: as much of it was used as this worker gave batches; no other worker walks it.
                skip = -(-max(self.rounds_before - worker.id, 0) // worker.number) * self._batch_size * world
                place, workers = 0, 1
                draws.reseed(derive_seed(self.seed, worker.id))
            if index < skip:
                continue
            turn, offset = divmod(index - skip, self._run)
            mine = turn // world * self._run + offset  # its place among this rank's
            if turn % world == rank and mine // self._batch_size % workers == place:
                yield element


class _Beginning(IterableDataset[Any]):
    """In a worker of its own: what tells a stream from another rank's, see `digest`."""

    rounds_before = 0

    def __init__(self, stream: SharedStream) -> None:
        self.stream, self.dataset = stream, stream.dataset

    def __iter__(self) -> Iterator[Any]:
        yield [digest(self.stream.first())]


class StreamReader:
    """Reads a DataLoader over an IterableDataset for one rank; see `SharedStream` for what goes where.

    A dataset may ask for its rank and give this rank its own share without saying so anywhere. Then the ranks' first
    elements differ; when a stream is read for the first time, the ranks compare them. In the main process they are those
    that training then reads; for worker processes, one worker more opens the stream, gives a digest and ends.

    Used samples are counted as full batches, as nothing here sees how many a batch holds. Workers start anew for each
    epoch, as kept ones would not learn of the epoch.

    Args:
        loader: The user's; it is not changed.
        rank: This process.
        world_size: Number of processes.
        own: Whether the dataset says that it gives this rank its own share already.
        differs: Whether a value differs between the ranks, which all have to ask; None leaves the streams unlooked at.
        whole_batches: Whether batches are those of one process alone, dealt out in turn; else single elements are.
        tells_place: Whether each batch comes with the dataset's own state, where it keeps one.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        rank: int,
        world_size: int,
        own: bool,
        differs: Differs | None = None,
        whole_batches: bool,
        tells_place: bool = False,
    ) -> None:
        batch_size = loader.batch_size or 1
        asks = differs is not None and world_size > 1 and not own
        self._stream = SharedStream(
            loader.dataset,
            rank=rank,
            world_size=world_size,
            own=None if asks else own,
            batch_size=batch_size,
            run=batch_size if whole_batches else 1,
        )
        self._loader = reading_copy(loader, dataset=self._stream)
        self._start = _StreamStart(loader.worker_init_fn)
        self._collate = loader.collate_fn
        self._round = Dealt(None, batch_size * world_size)
        self._rank, self._own, self._differs = rank, own, differs
        self._worker_seed = 0
        self._keeps_state = tells_place and keeps_state(loader.dataset)
        self._state: dict[str, Any] | None = None  # what `restore` was given

    def begin(self, seed: int, epoch: int) -> None:
        """See `Reader`."""
        self._state = None
        self._stream.seed = derive_seed(seed, epoch, "stream", self._rank if self._own else 0)
        self._worker_seed = derive_seed(seed, epoch, "workers", self._rank)

    def count(self, start: int) -> int | None:
        """See `Reader`: a stream's length is known when it has ended."""
        return None

    def batches_before(self, start: int) -> int:
        """See `Reader`."""
        return start // self._round.samples

    def read(self, start: int, at_most: int | None) -> Iterator[tuple[Any, Dealt]]:
        """See `Reader`. What was used before is walked over, not collated, unless the dataset has kept its state."""
        self.close()
        self._stream.start = start
        places = self._stream.places = self._places_told() if start else {}
        if start and not places:
            info(f"walking over {start} elements of the training stream, to where training goes on")
        if self._stream.own is None and self._loader.num_workers > 0:
            self._settle(self._digest_of_a_worker())
        elif self._stream.own is None:
            self._stream.settle = lambda elements: self._settle(digest(elements))
        seed_each_batch(
            self._loader,
            seed=self._worker_seed,
            first=self._stream.rounds_before,
            start=self._start,
            collate=_CollateAndPlace(self._collate) if self._keeps_state else self._collate,
        )
        for batch in islice(self._loader, at_most):
            if not self._keeps_state:
                yield batch, self._round
                continue
            if isinstance(batch, _Placed):
                batch, turn, place = batch
            else:
                turn, place = 0, self._stream.place()
            if place is not None:
                places = {**places, turn: place}
            yield batch, self._round._replace(state=self._as_state(places))

    def restore(self, state: Any) -> None:
        """See `Reader`."""
        self._state = state

    def _as_state(self, places: dict[int, _Place]) -> Any:
        known = [[turn, *place] for turn, place in sorted(places.items())]
        return {"workers": self._loader.num_workers, "own": self._stream.own, "places": known}

    def _places_told(self) -> dict[int, _Place]:
        """Where the walks begin, as `restore` was told; nowhere with another number of workers."""
        state, self._state = self._state, None
        if state is None or not self._keeps_state or state["workers"] != self._loader.num_workers:
            return {}
        # Whether the ranks' streams differ was found out at their start, and cannot be here.
        self._stream.own = state["own"]
        return {turn: _Place(walked, own) for turn, walked, own in state["places"]}

    def _settle(self, own: str | None) -> None:
        assert self._differs is not None
        self._stream.own, self._stream.settle = self._differs(own), None

    def _digest_of_a_worker(self) -> str | None:
        looking = DataLoader(
            _Beginning(self._stream),
            batch_size=None,
            num_workers=1,
            worker_init_fn=self._start,
            multiprocessing_context=self._loader.multiprocessing_context,
            generator=torch.Generator(),
        )
        found: str | None = next(iter(looking))[0]
        return found

    def close(self) -> None:
        """See `Reader`."""
        self._loader._iterator = None


class PlainReader:
    """Reads an iterable of batches that is no DataLoader: every rank gets the batches that it was given, all of them.

    Positions count batches over all ranks, and a resume walks over those used before, for the same world size.
    """

    def __init__(self, batches: Iterable[Any], *, world_size: int) -> None:
        self._batches, self._world = batches, world_size
        self._keeps_state = keeps_state(batches)
        self._state: Any = None  # what `restore` was given

    def begin(self, seed: int, epoch: int) -> None:
        """See `Reader`: the order is the iterable's own."""
        self._state = None

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
        if self._state is not None and self._keeps_state and skip:
            self._batches.load_state_dict(self._state)  # type: ignore[attr-defined]
            skip = 0
        elif skip and size_of(self._batches) is None:
            info(f"walking over {skip} batches of the training loader, to where training goes on")
        self._state = None
        for batch in islice(self._batches, skip, None if at_most is None else skip + at_most):
            state = copy.deepcopy(self._batches.state_dict()) if self._keeps_state else None  # type: ignore[attr-defined]
            yield batch, Dealt(None, self._world, state)

    def restore(self, state: Any) -> None:
        """See `Reader`."""
        self._state = state

    def close(self) -> None:
        """See `Reader`: nothing is kept."""
