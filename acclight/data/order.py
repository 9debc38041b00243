"""The order in which one process alone would read a map-style loader."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from acclight.data.draws import OwnDraws, derive_seed
from acclight.data.loader import parts_of, size_of


class EpochOrder:
    """One epoch's entries of a loader's sampler, from any sample on: a pure function of (seed, epoch).

    The user's sampler is walked with all generators that it can draw from, the global ones and its own
    `torch.Generator`s, set by (seed, epoch), and put back afterwards. So `RandomSampler`, `WeightedRandomSampler` and a
    custom sampler give every rank the same order, without touching the global random state.

    There are two kinds of entries: indices, to be cut into batches of `batch_size`; or, with `batch_size` None, entries
    that stay whole: the batches of a custom batch sampler, or what the sampler gives where the loader does not batch.

    Args:
        loader: A loader with a map-style dataset.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        batch_sampler = loader.batch_sampler
        self._walked: Iterable[Any] = loader.sampler
        self.batch_size = loader.batch_size
        self.drop_last = loader.drop_last
        if self.batch_size is None and type(batch_sampler) is BatchSampler:
            self._walked = batch_sampler.sampler
            self.batch_size = batch_sampler.batch_size
            self.drop_last = batch_sampler.drop_last
        elif self.batch_size is None and batch_sampler is not None:
            self._walked = batch_sampler
        self._batched = batch_sampler is not None
        own = {id(part): getattr(part, "generator", None) for part in parts_of(self._walked)}
        self._generators = [generator for generator in own.values() if isinstance(generator, torch.Generator)]
        self._seed: int | None = None
        self._entries: Sequence[Any] | None = None

    def begin(self, seed: int, epoch: int) -> None:
        """Makes (seed, epoch) the one whose order is read."""
        self._seed = derive_seed(seed, epoch, "order")
        self._entries = None

    def total(self) -> int | None:
        """Entries of the epoch; None where the sampler has no length.

        Before `begin` it is what the sampler says of itself, afterwards what it really gives.
        """
        if self._seed is None:
            return size_of(self._walked)
        entries = self._all()
        return None if entries is None else len(entries)

    def chunks(self, start: int, size: int) -> Iterator[Sequence[Any]]:
        """Entries from the sample at position `start` on, `size` at a time; the last chunk may be shorter.

        Raises:
            ValueError: There are fewer samples, or no whole entry begins there.
        """
        skip = self.entries_before(start)
        entries = self._all()
        if entries is not None:
            for first in range(skip, len(entries), size):
                yield entries[first : first + size]
        else:
            rest = islice(self._endless(), skip, None)
            while chunk := list(islice(rest, size)):
                yield chunk

    def batch(self, entries: Sequence[Any]) -> Any:
        """What the loader takes as the index of the batch of these entries, `batch_size` of them or one whole."""
        return entries[0] if self.batch_size is None else list(entries)

    def samples_in(self, entries: Sequence[Any]) -> int:
        """Number of samples of some entries."""
        if self.batch_size is not None:
            return len(entries)
        return sum(len(entry) if self._batched or isinstance(entry, list) else 1 for entry in entries)

    def entries_before(self, start: int) -> int:
        """Number of entries up to the sample at position `start`.

        Raises:
            ValueError: There are fewer samples, or no whole entry begins there.
        """
        if self.batch_size is not None or start == 0:
            total = self.total()
            if total is not None and start > total:
                raise ValueError(f"{self._taken_at(start)}, which has only {total}")
            return start
        position = count = 0
        for chunk in self.chunks(0, 1):
            position += self.samples_in(chunk)
            count += 1
            if position >= start:
                break
        if position != start:
            raise ValueError(f"{self._taken_at(start)}, none of whose batches begins there")
        return count

    def _taken_at(self, start: int) -> str:
        return (
            f"resume with the sampler that the checkpoint was taken with, or from the end of an epoch: it was taken "
            f"after {start} samples of the epoch, and this loader has a {type(self._walked).__name__}"
        )

    def _all(self) -> Sequence[Any] | None:
        """All entries of the epoch; None where the sampler has no length, and so perhaps no end."""
        if self._entries is not None:
            return self._entries
        said = size_of(self._walked)
        if said is None:
            return None
        if type(self._walked) is SequentialSampler:
            self._entries = range(said)
            return self._entries
        most = 2 * said + 1024
        numpy_state = np.random.get_state()  # wholly; see OwnDraws
        with self._draws():
            entries = list(islice(self._walked, most))
        np.random.set_state(numpy_state)
        if len(entries) == most:
            raise ValueError(
                f"{type(self._walked).__name__} has length {said} but gave {most} entries and goes on; "
                f"a sampler without an end must not have __len__"
            )
        # Packed, 10^8 indices are 0.8 GB, and a round of many ranks is cut out in no time.
        self._entries = array("q", entries) if all(type(entry) is int for entry in entries) else entries
        return self._entries

    def _endless(self) -> Iterator[Any]:
        draws = self._draws()
        with draws:
            entries = iter(self._walked)
        while True:
            with draws:
                some = list(islice(entries, 64))  # one exchange of the random states for many entries
            if not some:
                return
            yield from some

    def _draws(self) -> OwnDraws:
        assert self._seed is not None, "begin() comes first"
        return OwnDraws(self._seed, self._generators)
