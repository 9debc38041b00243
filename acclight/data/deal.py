"""How the entries of an epoch are dealt out to the ranks, round by round; a round is one batch for every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice, repeat
from typing import Any, Protocol

from acclight.data.loader import Dealt
from acclight.data.order import EpochOrder


class Deal(Protocol):
    """Deals an order out to one rank."""

    def rounds(self, order: EpochOrder, start: int) -> Iterator[Dealt]:
        """What this rank gets, from the sample at position `start` on."""

    def count(self, order: EpochOrder, start: int) -> int | None:
        """Number of `rounds`; None where the sampler has no length."""


class TrainDeal:
    """Every rank the same number of batches: a round takes the next world_size * batch_size samples, a slice per rank.

    So a global batch holds the same samples whatever part of it comes from ranks and whatever from accumulation, and
    after `start` samples the rest is cut anew for any world size.

    At the end of an epoch, the samples left may not fill a batch for every rank:

    - with drop_last they are left out;
    - with even_batches they are filled up, from the start of the epoch's order and only to a multiple of world_size,
      and split evenly (10 samples, batch size 2, 2 ranks: the last round is one sample each, and none is repeated);
    - without even_batches none is repeated: they are split as evenly as may be, and fewer than world_size are left out.

    Batches of a custom batch sampler stay whole, one per rank and round. The same holds for them: a last round with
    fewer than world_size is filled up with the epoch's first batches (even_batches), or left out.
    """

    def __init__(self, rank: int, world_size: int, even_batches: bool) -> None:
        self._rank, self._world, self._even = rank, world_size, even_batches

    def rounds(self, order: EpochOrder, start: int) -> Iterator[Dealt]:
        """See `Deal`."""
        size = self._world * (order.batch_size or 1)
        for entries in order.chunks(start, size):
            samples = order.samples_in(entries)
            if len(entries) < size:
                if not self._last_counts(order, len(entries)):
                    return
                entries = self._filled_up(order, entries)
            first, end = (len(entries) * rank // self._world for rank in (self._rank, self._rank + 1))
            yield Dealt(order.batch(entries[first:end]), samples)

    def count(self, order: EpochOrder, start: int) -> int | None:
        """See `Deal`."""
        total = order.total()
        if total is None:
            return None
        full, left = divmod(total - order.entries_before(start), self._world * (order.batch_size or 1))
        return full + (left > 0 and self._last_counts(order, left))

    def _last_counts(self, order: EpochOrder, left: int) -> bool:
        return not order.drop_last and (self._even or left >= self._world)

    def _filled_up(self, order: EpochOrder, entries: Sequence[Any]) -> Sequence[Any]:
        missing = -len(entries) % self._world
        if not self._even or not missing:
            return entries
        over_and_over = chain.from_iterable(chain.from_iterable(order.chunks(0, missing)) for _ in repeat(None))
        return [*entries, *islice(over_and_over, missing)]


class EvalDeal:
    """Each batch to exactly one rank, as one process alone would make them: batch k goes to rank k % world_size.

    No sample is repeated: near the end a rank may have one batch fewer, or a shorter one. `drop_last` leaves out what
    it leaves out in one process alone.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world = rank, world_size
        self.at_most: int | None = None
        """Batches over all ranks; None for all."""

    def rounds(self, order: EpochOrder, start: int) -> Iterator[Dealt]:
        """See `Deal`."""
        size = order.batch_size or 1
        for entries in islice(order.chunks(start, size), self._rank, self.at_most, self._world):
            if order.drop_last and len(entries) < size:
                return
            yield Dealt(order.batch(entries), order.samples_in(entries))

    def count(self, order: EpochOrder, start: int) -> int | None:
        """See `Deal`; `start` is 0, as an evaluation always begins at the start."""
        total = self.total(order)
        return None if total is None else len(range(self._rank, total, self._world))

    def total(self, order: EpochOrder) -> int | None:
        """Batches over all ranks, after `at_most`."""
        total = order.total()
        if total is None:
            return None
        size = order.batch_size or 1
        total = total // size if order.drop_last else -(-total // size)
        return total if self.at_most is None else min(total, self.at_most)
