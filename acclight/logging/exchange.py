"""Exchange: brings the values of all ranks together in one packed collective, whatever keys each rank has logged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from acclight.logging.meter import reduce_ranks

_ABSENT = (0.0, -1.0)


class Ranks(Protocol):
    """What is needed to reach the other ranks."""

    world_size: int

    def gather_values(self, values: Sequence[float]) -> list[list[float]]:
        """Equally many numbers of every rank; one collective."""

    def gather_objects(self, value: Any) -> list[Any]:
        """A plain object of every rank."""


class Key(NamedTuple):
    """What must be the same on all ranks to be one value.

    Attributes:
        hook: Where it was logged.
        name: As the user gave it.
        suffix: "/" and the evaluation loader's name, or nothing.
        on_step: As for `self.log`.
        on_epoch: As for `self.log`.
        reduce_fx: As for `self.log`.
        metric: Where the module holds the torchmetrics object, as a dotted path; None for plain values.
    """

    hook: str
    name: str
    suffix: str
    on_step: bool
    on_epoch: bool
    reduce_fx: str
    metric: str | None = None

    def shown_as(self, ending: str) -> str:
        """The name for "step" or "epoch" values; the ending is there only to tell the two apart."""
        return f"{self.name}_{ending}{self.suffix}" if self.on_step and self.on_epoch else self.plain_name

    @property
    def plain_name(self) -> str:
        """The name that callbacks may always use."""
        return f"{self.name}{self.suffix}"


@dataclass(frozen=True)
class Flags:
    """What may differ between ranks: it is shown where one rank says so.

    Attributes:
        prog_bar: Shown in the progress display.
        logger: Handed to the loggers.
        loader: The position of the only evaluation loader that it was logged for, or None.
    """

    prog_bar: bool
    logger: bool
    loader: int | None = None

    def joined(self, other: Flags) -> Flags:
        """What holds for both."""
        loader = self.loader if self.loader == other.loader else None
        return Flags(self.prog_bar or other.prog_bar, self.logger or other.logger, loader)


class Reduced(NamedTuple):
    """One key's value over all ranks.

    Attributes:
        key: The key.
        flags: Where it goes.
        value: None where no rank has logged it this time.
        everywhere: Every rank has logged it.
    """

    key: Key
    flags: Flags
    value: float | None
    everywhere: bool


class Exchange:
    """Reduces one kind of values again and again: those of steps, or those of epochs.

    The ranks agree on a list of keys, and send the values of that list as plain numbers. A rank with a key that is not
    in the list raises a flag in the same collective; then the ranks first tell each other their keys.

    Args:
        ranks: The way to the other ranks.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._agreed: dict[Key, Flags] = {}
        self._told: dict[Key, Flags] = {}

    def reduce(self, own: dict[Key, tuple[Flags, float, float]]) -> list[Reduced]:
        """The values of all ranks. A collective, which every rank has to join, also with nothing to show.

        Args:
            own: This rank's flags, total and weight by key.

        Returns:
            The union of all keys, in the same order on every rank.

        Raises:
            ValueError: On every rank, when ranks log one name in two ways.
        """
        if self._ranks.world_size == 1:
            return [
                Reduced(key, flags, reduce_ranks([(total, weight)], key.reduce_fx), True)
                for key, (flags, total, weight) in own.items()
            ]
        states = self._gather(own)
        if states is None:
            self._agree({key: flags for key, (flags, _, _) in own.items()})
            states = self._gather(own)
            assert states is not None
        reduced = []
        for place, (key, flags) in enumerate(self._agreed.items()):
            logged = [rank[place] for rank in states if rank[place][1] >= 0.0]
            value = reduce_ranks(logged, key.reduce_fx) if logged else None
            reduced.append(Reduced(key, flags, value, len(logged) == len(states)))
        return reduced

    def _gather(self, own: dict[Key, tuple[Flags, float, float]]) -> list[list[tuple[float, float]]] | None:
        news = any(self._told.get(key) != flags for key, (flags, _, _) in own.items())
        numbers = [float(news)]
        for key in self._agreed:
            numbers += own[key][1:] if key in own else _ABSENT
        ranks = self._ranks.gather_values(numbers)
        if any(rank[0] for rank in ranks):
            return None
        return [list(zip(rank[1::2], rank[2::2], strict=True)) for rank in ranks]

    def _agree(self, own: dict[Key, Flags]) -> None:
        self._told |= own
        for keys in self._ranks.gather_objects(own):
            for key, flags in keys.items():
                self._agreed[key] = self._agreed[key].joined(flags) if key in self._agreed else flags
        check_names(self._agreed)


def check_names(keys: Iterable[Key]) -> None:
    """Raises ValueError when two keys would be shown under one name: at the same moment, or with an ending at any."""
    names = Names()
    for key in keys:
        names.add(key)


class Names:
    """The names of the keys that came so far; what a key costs does not grow with their number."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, bool], Key] = {}
        self._shown: dict[str, Key] = {}

    def add(self, key: Key) -> None:
        """Takes a key; raises ValueError where it would be shown under the name of another one, as `check_names` says."""
        endings = [ending for ending, there in (("step", key.on_step), ("epoch", key.on_epoch)) if there]
        for ending in endings:
            for name in (key.shown_as(ending), key.plain_name):
                other = self._shown.get(name, key)
                if other.plain_name != key.plain_name:
                    raise ValueError(
                        f"{_call(other)} in {other.hook} and {_call(key)} in {key.hook} would both be shown as {name!r}: give "
                        "one of them another name"
                    )
            other = self._seen.get((key.plain_name, ending == "step"), key)
            if other == key:
                continue
            if other.hook != key.hook:
                raise ValueError(
                    f"self.log({key.name!r}) is called in {other.hook} and in {key.hook}, and both would be shown under one "
                    "name: give one of them another name"
                )
            named = [f"{field}={getattr(key, field)!r}" for field in ("on_step", "on_epoch", "reduce_fx", "metric")]
            others = [f"{field}={getattr(other, field)!r}" for field in ("on_step", "on_epoch", "reduce_fx", "metric")]
            differing = [f"{b} and {a}" for a, b in zip(named, others, strict=True) if a != b]
            raise ValueError(
                f"self.log({key.name!r}) in {key.hook} has {', '.join(differing)} on different ranks: log it in one way"
            )
        for ending in endings:
            self._shown.setdefault(key.shown_as(ending), key)
            self._shown.setdefault(key.plain_name, key)
            self._seen.setdefault((key.plain_name, ending == "step"), key)


def _call(key: Key) -> str:
    return f"self.log({key.name!r}, on_step={key.on_step}, on_epoch={key.on_epoch})"
