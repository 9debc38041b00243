"""Reducer: reads what the meters hold, with one transfer from the device, and reduces it over the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from acclight.logging.exchange import Exchange, Flags, Key, Ranks, Reduced
from acclight.logging.meter import Tally, reduce_ranks, whole

#: (number of the evaluation batch, its values) of one key.
Series = list[tuple[int, Tally]]


class Reducer:
    """Everything that needs the other ranks.

    Args:
        ranks: The way to them.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._exchanges: dict[str, Exchange] = {}

    def forget_keys(self) -> None:
        """Another run begins, on every rank: what the ranks have agreed on no longer holds."""
        self._exchanges = {}

    def values(self, kind: str, own: Mapping[Key, tuple[Flags, Tally]]) -> list[Reduced]:
        """One value per key over all ranks; the union of the ranks' keys. A collective.

        Args:
            kind: Values that are reduced together again and again, such as "step".
            own: What this rank has, by key.
        """
        totals = _read(own.values())
        states = {
            key: (flags, total, tally.weight) for (key, (flags, tally)), total in zip(own.items(), totals, strict=True)
        }
        return self._exchanges.setdefault(kind, Exchange(self._ranks)).reduce(states)

    def series(
        self, own: Mapping[Key, Series], lengths: Mapping[str, int]
    ) -> tuple[dict[Key, dict[int, float]], dict[str, int]]:
        """The values of single evaluation batches of all ranks. A collective.

        Args:
            own: This rank's, by key.
            lengths: By the loader's suffix, how many batches there were as far as this rank knows.

        Returns:
            Per key the value by the batch's number, and the lengths over all ranks.
        """
        flat = [(key, number, tally) for key, series in own.items() for number, tally in series]
        totals = _read((Flags(False, False), tally) for _, _, tally in flat)
        sent = [(key, number, total, tally.weight) for (key, number, tally), total in zip(flat, totals, strict=True)]
        collected: dict[Key, dict[int, list[tuple[float, float]]]] = {}
        longest: dict[str, int] = {}
        for rank_values, rank_lengths in self._ranks.gather_objects((sent, dict(lengths))):
            for key, number, total, weight in rank_values:
                collected.setdefault(key, {}).setdefault(number, []).append((total, weight))
            for suffix, length in rank_lengths.items():
                longest[suffix] = max(length, longest.get(suffix, 0))
        return {
            key: {number: reduce_ranks(states, key.reduce_fx) for number, states in sorted(numbers.items())}
            for key, numbers in collected.items()
        }, longest

    def keys(self, own: Iterable[Key]) -> dict[Key, bool]:
        """The union of some keys over all ranks, in the same order on each, and whether every rank has them. A collective."""
        ranks = self._ranks.gather_objects(list(own))
        return {key: all(key in others for others in ranks) for keys in ranks for key in keys}


def _read(tallies: Iterable[tuple[Flags, Tally]]) -> list[float]:
    """All totals as floats, with one transfer from the device for all together."""
    held = [(tally.parts(), tally.reduce_fx) for _, tally in tallies]
    tensors = [tensor for (tensor, _), _ in held if tensor is not None]
    read = iter(torch.stack(tensors).tolist() if tensors else [])
    return [whole(None if tensor is None else next(read), number, fx) for (tensor, number), fx in held]
