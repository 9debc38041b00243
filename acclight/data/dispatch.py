"""Dispatch: rank 0 alone reads the data, and sends every rank its batch of each round."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import islice, repeat
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from acclight.data.loader import Dealt, Reader, reading_copy
from acclight.data.stream import StreamReader

Scatter = Callable[[Sequence[Any] | None], Any]
"""Gives each rank its entry of the list that rank 0 has; the other ranks pass None. A collective."""

Round = list[tuple[Any, Dealt] | None]
"""What every rank gets of a round, in the order of the ranks; None for a rank that gets nothing."""

_END = object()


def dispatches(asked: bool | None, loader: object, world_size: int, *, declared: bool) -> bool:
    """Whether rank 0 reads for all ranks.

    Args:
        asked: `dispatch_batches`. Not unless asked for: from a stream that picks its own part on each rank, rank 0 would give
            out its own part alone.
        loader: The user's.
        world_size: Number of ranks.
        declared: The loader says that it gives this rank its own share already.

    Raises:
        ValueError: It was asked for, and cannot be.
    """
    if asked and not isinstance(loader, DataLoader):
        raise ValueError(
            f"dispatch_batches=True needs a DataLoader, and this is a {type(loader).__name__}, which is each rank's own: give a "
            "DataLoader, or dispatch_batches=None"
        )
    if asked and declared:
        raise ValueError(
            "dispatch_batches=True, but the loader divides itself among the ranks, so that rank 0 has its own share only: give a "
            "sampler or dataset that is not distributed, or dispatch_batches=None"
        )
    return bool(asked) and world_size > 1


class DispatchReader:
    """A `Reader` whose batches come from rank 0: the same ones that the ranks would read by themselves.

    All ranks take part in each exchange, one per round, and in none after the last: a round without a batch for every rank
    is the last one.

    Args:
        own: What this rank would read by itself; asked for numbers only.
        source: On rank 0, gives the rounds; None on the others.
        scatter: Sends.
        keep_last: Whether a last round that leaves some ranks without a batch is given out: evaluation counts it, training
            could not step with it.
    """

    def __init__(self, own: Reader, source: RoundSource | None, scatter: Scatter, *, keep_last: bool) -> None:
        self._own, self._source, self._scatter, self._keep_last = own, source, scatter, keep_last

    def begin(self, seed: int, epoch: int) -> None:
        """See `Reader`."""
        self._own.begin(seed, epoch)
        if self._source is not None:
            self._source.begin(seed, epoch)

    def count(self, start: int) -> int | None:
        """See `Reader`."""
        return self._own.count(start)

    def batches_before(self, start: int) -> int:
        """See `Reader`."""
        return self._own.batches_before(start)

    def read(self, start: int, at_most: int | None) -> Iterator[tuple[Any, Dealt]]:
        """See `Reader`.

        Raises:
            RuntimeError: Rank 0 could not read; there its own exception is raised.
        """
        rounds = None if self._source is None else self._source.rounds(start)
        try:
            for _ in repeat(None) if at_most is None else repeat(None, at_most):
                part, last, trouble = self._exchange(rounds)
                if trouble is not None:
                    raise RuntimeError(f"rank 0, which reads for all ranks (dispatch_batches), failed with {trouble}")
                if part is not None:
                    yield part
                if last:
                    return
        finally:
            if rounds is not None:
                rounds.close()

    def _exchange(self, rounds: Generator[Round] | None) -> tuple[tuple[Any, Dealt] | None, bool, str | None]:
        if rounds is None:
            received: tuple[tuple[Any, Dealt] | None, bool, str | None] = self._scatter(None)
            return received
        assert self._source is not None
        try:
            made: Any = next(rounds, _END)
        except BaseException as error:
            # The others wait in the exchange; they have to hear of it there.
            self._scatter([(None, True, f"{type(error).__name__}: {error}")] * self._source.world_size)
            raise
        last = made is _END or None in made
        if made is _END or (last and not self._keep_last):
            made = [None] * self._source.world_size
        sent: tuple[tuple[Any, Dealt] | None, bool, str | None] = self._scatter([(part, last, None) for part in made])
        return sent

    def restore(self, state: Any) -> None:
        """See `Reader`: rank 0 walks over what was used before."""

    def close(self) -> None:
        """See `Reader`."""
        self._own.close()
        if self._source is not None:
            self._source.close()


class RoundSource:
    """Rank 0's side of a dispatch: the rounds of all ranks."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def begin(self, seed: int, epoch: int) -> None:
        """Makes (seed, epoch) the one whose order is read."""
        raise NotImplementedError

    def rounds(self, start: int) -> Generator[Round]:
        """The rounds from the sample at position `start` on; only the last one may have a None."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends the worker processes that are kept between epochs."""
        raise NotImplementedError


class RanksSource(RoundSource):
    """Reads a map-style dataset for every rank, each sample once.

    Args:
        readers: What each rank would read by itself.
    """

    def __init__(self, readers: Sequence[Reader]) -> None:
        super().__init__(len(readers))
        self._readers = readers

    def begin(self, seed: int, epoch: int) -> None:
        """See `RoundSource`."""
        for reader in self._readers:
            reader.begin(seed, epoch)

    def rounds(self, start: int) -> Generator[Round]:
        """See `RoundSource`."""
        walks = [reader.read(start, None) for reader in self._readers]
        while any(made := [next(walk, None) for walk in walks]):
            yield made

    def close(self) -> None:
        """See `RoundSource`."""
        for reader in self._readers:
            reader.close()


class StreamSource(RoundSource):
    """Walks an iterable dataset once, as one process would with the batch size of all ranks.

    Workers collate full rounds. What they leave over at their end (each worker, where the dataset divides itself among them)
    is put together here, so that only the last round is a short one.

    Args:
        loader: The user's.
        world_size: Number of ranks.
        whole_batches: Ranks get batches of samples in a row (evaluation), else the samples of a round in turn.
    """

    def __init__(self, loader: DataLoader[Any], *, world_size: int, whole_batches: bool) -> None:
        super().__init__(world_size)
        size = loader.batch_size or 1
        self._collate = _CollateForRanks(loader, world_size, whole_batches)
        self._drop_last = loader.drop_last and loader.batch_size is not None
        big = size * world_size
        whole = reading_copy(
            loader,
            batch_size=big,
            drop_last=False,
            batch_sampler=BatchSampler(loader.sampler, big, False),
            collate_fn=self._collate,
        )
        self._size = big
        self._dealt = Dealt(None, big)
        self._reader = StreamReader(whole, rank=0, world_size=1, own=False, whole_batches=True)

    def begin(self, seed: int, epoch: int) -> None:
        """See `RoundSource`."""
        self._reader.begin(seed, epoch)

    def rounds(self, start: int) -> Generator[Round]:
        """See `RoundSource`."""
        left: list[Any] = []
        for (is_round, made), _ in self._reader.read(start, None):
            if is_round:
                yield self._deal(made)
                continue
            left += made
            while len(left) >= self._size:
                some, left = left[: self._size], left[self._size :]
                yield self._deal(self._collate.parts(some))
        if left:
            yield self._deal(self._collate.parts(left, drop_last=self._drop_last))

    def _deal(self, parts: Sequence[Any]) -> Round:
        return [None if part is _CollateForRanks.nothing else (part, self._dealt) for part in parts]

    def close(self) -> None:
        """See `RoundSource`."""
        self._reader.close()


class _CollateForRanks:
    """`collate_fn` of a round: (True, a batch for each rank), or (False, the samples) where there are too few."""

    nothing = object()

    def __init__(self, loader: DataLoader[Any], world_size: int, whole_batches: bool) -> None:
        self._user = loader.collate_fn
        self._size = loader.batch_size
        self._world = world_size
        self._whole = whole_batches

    def __call__(self, samples: list[Any]) -> tuple[bool, list[Any]]:
        full = len(samples) == (self._size or 1) * self._world
        return (True, self.parts(samples)) if full else (False, samples)

    def parts(self, samples: list[Any], *, drop_last: bool = False) -> list[Any]:
        """A batch for each rank; `nothing` for a rank that gets none."""
        size = self._size or 1
        shares = [
            samples[rank * size : (rank + 1) * size] if self._whole else list(islice(samples, rank, None, self._world))
            for rank in range(self._world)
        ]
        return [
            self.nothing
            if not share or (drop_last and len(share) < size)
            else self._user(share if self._size else share[0])
            for share in shares
        ]
