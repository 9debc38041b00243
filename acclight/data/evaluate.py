"""Evaluation data of one rank: over all ranks each sample exactly once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from acclight.data.deal import EvalDeal
from acclight.data.dispatch import DispatchReader, RanksSource, RoundSource, Scatter, StreamSource, dispatches
from acclight.data.indexed import IndexedReader
from acclight.data.loader import Differs, Limit, Reader, check_limit, checked, limited, samples_of
from acclight.data.order import EpochOrder
from acclight.data.stream import PlainReader, StreamReader
from acclight.data.train import split


class EvalData:
    """What one rank reads of a loader for validation, test or prediction.

    The batches are those that one process alone would make, and batch k goes to rank k % world_size: no sample is
    repeated, so near the end some ranks have one batch fewer, or a shorter one. That also holds for a stream
    (IterableDataset), where the number of batches is not known. A loader that divides itself among the ranks (how a
    stream shows that, `TrainData` says) and a plain iterable of batches are used as they are: each rank evaluates what
    it is given. A shuffled loader has the same order each time.

    Args:
        loader: A DataLoader, or an iterable of batches.
        rank: This process, 0 to world_size - 1.
        world_size: Number of processes.
        limit: A number (int) of batches for each rank, or a fraction (float) of the batches of all ranks: a fraction
            is the same samples at any world size.
        limit_name: What a user calls the limit, for errors.
        split_batches: Whether the loader's batch size is that of all ranks together.
        own_share: Whether the ranks were given different data (their `rank_identity` differs), so that each reads the
            whole of its own.
        dispatch_batches: Whether rank 0 reads for all.
        scatter: How rank 0 sends; without it each rank reads for itself.
        differs: Whether a digest differs between the ranks; with it, they compare the first elements of a stream when it
            is read for the first time.

    Raises:
        TypeError: Several loaders, or nothing that can be iterated over.
        ValueError: `limit` is out of range, or a fraction of an unknown length; the batch size cannot be split; a sampler
            was made for another rank; `dispatch_batches` cannot be.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        rank: int,
        world_size: int,
        limit: Limit = 1.0,
        limit_name: str = "limit",
        split_batches: bool = False,
        own_share: bool = False,
        dispatch_batches: bool | None = None,
        scatter: Scatter | None = None,
        differs: Differs | None = None,
    ) -> None:
        self._loader, declared = checked(loader, rank, world_size)
        dispatched = scatter is not None and dispatches(dispatch_batches, loader, world_size, declared=declared)
        if dispatched:
            differs = None
        self._options: dict[str, Any] = {
            "rank": rank, "world_size": world_size, "limit": limit, "limit_name": limit_name, "split_batches": split_batches,
            "own_share": own_share, "dispatch_batches": dispatch_batches, "scatter": scatter, "differs": differs,
        }  # fmt: skip
        self._own = declared or (own_share and not dispatched)
        check_limit(limit, limit_name)
        self._limit_name = limit_name
        self._limit = limit
        self._differs = differs
        self._first: int | None = None
        self._world = world_size
        self._given: list[Any] = []
        self._dealt: tuple[EvalDeal, EpochOrder] | None = None  # None for streams, whose length is not known
        self._deals: list[EvalDeal] = []  # of all ranks, where this one reads for them
        parts = split(loader, world_size) if split_batches else loader
        self._reader: Reader
        source: RoundSource | None = None
        if not isinstance(parts, DataLoader):
            self._reader = PlainReader(parts, world_size=world_size)
        elif isinstance(parts.dataset, IterableDataset):
            self._reader = StreamReader(
                parts, rank=rank, world_size=world_size, own=self._own, differs=differs, whole_batches=True
            )
            if dispatched and rank == 0:
                source = StreamSource(parts, world_size=world_size, whole_batches=True)
        else:
            order, deal = EpochOrder(parts), EvalDeal(0, 1) if self._own else EvalDeal(rank, world_size)
            self._dealt = deal, order
            self._reader = IndexedReader(parts, order, deal, rank=rank, share=world_size if self._own else 1)
            if dispatched and rank == 0:
                self._deals = [EvalDeal(one, world_size) for one in range(world_size)]
                source = RanksSource([IndexedReader(parts, order, one, rank=i) for i, one in enumerate(self._deals)])
        if scatter is not None and dispatched:
            self._reader = DispatchReader(self._reader, source, scatter, keep_last=True)
        self._at_most = self._apply_limit()

    @property
    def num_batches(self) -> int | None:
        """This rank's batches, after the limit; None when unknown."""
        total = self._reader.count(0)
        return None if total is None and self._at_most != 0 else _least(total, self._at_most)

    @property
    def rounds(self) -> int | None:
        """The most batches that any rank has; None when only all ranks together know."""
        if self._dealt is not None and not self._own:
            deal, order = self._dealt
            total = deal.total(order)
            return None if total is None else -(-total // self._world)
        # That this rank has none says nothing of the others.
        return self.num_batches if self._world == 1 or self._limit == 0 else None

    def first(self, batches: int) -> EvalData:
        """The same data, but at most so many batches for each rank."""
        short = EvalData(self._loader, **self._options)
        short._first = batches
        short._at_most = short._apply_limit()
        return short

    def __iter__(self) -> Iterator[Any]:
        """This rank's batches, from the first."""
        self._reader.begin(0, 0)
        self._at_most = self._apply_limit()
        self._given.clear()
        for batch, dealt in self._reader.read(0, self._at_most):
            self._given.append(dealt.entry)
            yield batch

    def indices(self, batch_idx: int) -> list[Any] | None:
        """Dataset indices of a batch of this rank that was read, in its order; None where the data has none.

        Without indices, batch i of rank r is batch i * world_size + r of the stream.
        """
        entry = self._given[batch_idx]
        if entry is None:
            return None
        return list(entry) if isinstance(entry, (list, tuple)) else [entry]

    def samples(self, batch_idx: int) -> int | None:
        """Number of samples of a batch of this rank that was read; None where the loader does not make batches of indices."""
        return samples_of(self._given[batch_idx])

    @property
    def loader(self) -> Any:
        """The user's loader."""
        return self._loader

    def close(self) -> None:
        """Ends the worker processes that the loader keeps between evaluations."""
        self._reader.close()

    def _apply_limit(self) -> int | None:
        """The most batches for this rank; None where the deal limits the batches of all ranks instead."""
        if self._dealt is None or self._own:
            most = (
                self._limit
                if isinstance(self._limit, int)
                else limited(self._reader.count(0), self._limit, self._limit_name)
            )
            return _least(most, self._first)
        deal, order = self._dealt
        deal.at_most = None
        most = (
            self._limit * self._world
            if isinstance(self._limit, int)
            else limited(deal.total(order), self._limit, self._limit_name)
        )
        for one in (deal, *self._deals):
            one.at_most = _least(most, None if self._first is None else self._first * self._world)
        return None


def _least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)
