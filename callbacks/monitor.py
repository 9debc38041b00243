"""Monitor: one logged metric that a callback decides by, and whether its value belongs to the weights of now."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from acclight import Trainer

MODES = ("min", "max")


class Monitor:
    """Watches `trainer.callback_metrics[name]` during a fit.

    A value is fresh at the step at which it came in: one of a validation or an epoch does not belong to the weights of
    later steps. The owner calls `observe` wherever values come in: after a validation and at the end of an epoch.

    Args:
        name: The metric.
        mode: "min" where smaller is better, "max" where bigger is.

    Raises:
        ValueError: For another mode.
    """

    def __init__(self, name: str, mode: str) -> None:
        if mode not in ("min", "max"):
            raise ValueError(f"mode={mode!r} is neither 'min' nor 'max'")
        self.name = name
        self.mode = mode
        self._seen: object = None
        self._fresh_at = -1

    def better(self, value: float, than: float) -> bool:
        """Whether one value is better than another; NaN never is."""
        return value < than if self.mode == "min" else value > than

    def observe(self, trainer: Trainer) -> None:
        """Notes whether the metric was logged since the last look."""
        value = trainer.callback_metrics.get(self.name)
        if value is None:
            self._fresh_at = -1
        # A value that is logged again is another object, also where it is the same number.
        elif value is not self._seen:
            self._seen = value
            self._fresh_at = trainer.global_step

    def is_fresh(self, trainer: Trainer) -> bool:
        """Whether there is a value that belongs to the weights of this moment."""
        self.observe(trainer)
        return self._fresh_at == trainer.global_step

    def value(self, trainer: Trainer) -> float | None:
        """The metric's value for the weights of this moment, the same on all ranks; None where there is none."""
        return float(trainer.callback_metrics[self.name]) if self.is_fresh(trainer) else None


def is_logged(trainer: Trainer, name: str) -> bool:
    """Whether a metric has a value, or will have one: at a step whose values are reduced, or at the end of the epoch."""
    return name in trainer.callback_metrics or name in trainer.pending_metrics


def missing_metric(trainer: Trainer, who: str, name: str) -> str:
    """The message for a metric that nobody logs, with what is logged and the name that is nearest to it."""
    names = sorted({*trainer.callback_metrics, *trainer.pending_metrics})
    close = get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"{who}: the metric {name!r} was not logged{hint} (logged: {', '.join(names) or 'nothing'})"
