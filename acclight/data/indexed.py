"""Reads a DataLoader over a map-style dataset: the user's loader in everything but the indices."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import accumulate, islice, takewhile
from typing import Any

from torch.utils.data import DataLoader

from acclight.data.deal import Deal
from acclight.data.draws import derive_seed
from acclight.data.loader import Dealt, parts_of, reading_copy
from acclight.data.order import EpochOrder
from acclight.data.workers import seed_each_batch


class _Indices:
    """Stands where the loader had its batch sampler; gives the indices of the iteration that begins.

    The same object for all epochs, as workers that are kept between epochs hold on to it.
    """

    def __init__(self, order: EpochOrder, deal: Deal) -> None:
        self._order, self._deal = order, deal
        self.start = 0
        self.at_most: int | None = None
        self.given: deque[Dealt] = deque()

    def __iter__(self) -> Iterator[Any]:
        self.given.clear()
        for dealt in islice(self._deal.rounds(self._order, self.start), self.at_most):
            self.given.append(dealt)
            yield dealt.entry

    def __len__(self) -> int:
        count = self._deal.count(self._order, self.start)
        if count is None:
            raise TypeError("the sampler has no length")
        return count if self.at_most is None else min(count, self.at_most)


class IndexedReader:
    """Reads a map-style DataLoader for one rank.

    Workers, collation, pinning and subclass are the user's; index batches come from `deal`. A sample that was used
    before a resume is not loaded again.

    Args:
        loader: The user's loader; it is not changed.
        order: Its order, the same on every rank; or this rank's own, when the sampler divides itself.
        deal: Gives this rank its share of the order.
        rank: This process.
        share: How many samples over all ranks one sample of `order` stands for: world_size when the order is this
            rank's own, else 1.
    """

    def __init__(self, loader: DataLoader[Any], order: EpochOrder, deal: Deal, *, rank: int, share: int = 1) -> None:
        self._order, self._deal, self._share = order, deal, share
        self._indices = _Indices(order, deal)
        slot = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._loader = reading_copy(loader, **{slot: self._indices})
        self._start = loader.worker_init_fn
        self._collate = loader.collate_fn
        self._rank = rank
        self._worker_seed = 0
        # Workers that are kept hold a copy of the dataset, which a set_epoch here does not reach.
        self._fresh_workers = any(callable(getattr(part, "set_epoch", None)) for part in parts_of(loader.dataset))

    def begin(self, seed: int, epoch: int) -> None:
        """See `Reader`."""
        self._order.begin(seed, epoch)
        self._worker_seed = derive_seed(seed, epoch, "workers", self._rank)
        if self._fresh_workers:
            self.close()

    def count(self, start: int) -> int | None:
        """See `Reader`."""
        return self._deal.count(self._order, start // self._share)

    def batches_before(self, start: int) -> int:
        """See `Reader`."""
        whole, left = self.count(0), self.count(start)
        if whole is not None and left is not None:
            return whole - left
        ends = accumulate(dealt.samples for dealt in self._deal.rounds(self._order, 0))
        return sum(1 for _ in takewhile(lambda end: end <= start // self._share, ends))

    def read(self, start: int, at_most: int | None) -> Iterator[tuple[Any, Dealt]]:
        """See `Reader`.

        Raises:
            RuntimeError: The loader's subclass does not read its batch sampler.
        """
        self._indices.start, self._indices.at_most = start // self._share, at_most
        seed_each_batch(
            self._loader,
            seed=self._worker_seed,
            first=self.batches_before(start),
            start=self._start,
            collate=self._collate,
        )
        given = self._indices.given
        for batch in self._loader:
            if not given:
                raise RuntimeError(
                    f"{type(self._loader).__name__} gave a batch without reading its batch_sampler, so its samples "
                    f"cannot be divided among the processes; give a DataLoader that does, or an iterable of batches"
                )
            dealt = given.popleft()
            yield batch, Dealt(dealt.entry, dealt.samples * self._share)

    def restore(self, state: Any) -> None:
        """See `Reader`: the position says it all."""

    def close(self) -> None:
        """See `Reader`."""
        self._loader._iterator = None
