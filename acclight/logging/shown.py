"""Shown: what is shown at one moment, and to whom."""

from __future__ import annotations

from dataclasses import dataclass, field

from acclight.logging.exchange import Reduced


@dataclass
class Shown:
    """What is shown at one moment: the loggers' values, the progress display's, and the callbacks'.

    Attributes:
        logger: Values by name.
        prog_bar: Values by name.
        callback: Values by name.
        series: The loggers' values of single evaluation batches: how many batches came before, and values by name.
        loaders: By name, the position of the only evaluation loader that a value of `callback` belongs to, or None.
    """

    logger: dict[str, float] = field(default_factory=dict)
    prog_bar: dict[str, float] = field(default_factory=dict)
    callback: dict[str, float] = field(default_factory=dict)
    series: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    loaders: dict[str, int | None] = field(default_factory=dict)

    def put(self, entry: Reduced, value: float, ending: str) -> None:
        """Adds one value.

        Args:
            entry: Its key and where it goes.
            value: Over all ranks.
            ending: "step" or "epoch".
        """
        name = entry.key.shown_as(ending)
        for known in (name, entry.key.plain_name):
            self.callback[known] = value
            self.loaders[known] = entry.flags.loader
        if entry.flags.logger:
            self.logger[name] = value
        if entry.flags.prog_bar:
            self.prog_bar[name] = value

    def of_loader(self, position: int) -> dict[str, float]:
        """The values of one evaluation loader, and those that belong to none."""
        return {name: value for name, value in self.callback.items() if self.loaders[name] in (None, position)}
