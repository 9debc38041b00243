"""The fp16 loss scale of a ZeRO engine, which scales and looks for overflows by itself: by torch's rule, or by its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass
class LossScale:
    """A loss scale that follows the rule of torch.amp.GradScaler, with its numbers.

    Attributes:
        scale: What losses are multiplied by.
        good_steps: Steps without an overflow since it last changed.
    """

    scale: float = 2.0**16
    good_steps: int = 0
    growth_interval: int = 2000

    def update(self, overflow: bool) -> None:
        """Takes note of one step."""
        self.good_steps = 0 if overflow else self.good_steps + 1
        if overflow:
            self.scale *= 0.5
        elif self.good_steps == self.growth_interval:
            self.scale *= 2.0
            self.good_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """Its numbers, as every strategy saves them."""
        return {"scale": self.scale, "good_steps": self.good_steps}


@contextmanager
def divided(zero: Any, divisor: float) -> Iterator[None]:
    """Makes a ZeRO optimizer's step divide the gradients, and their norm, by `divisor` beside the loss scale."""
    if divisor == 1.0:
        yield
        return
    owner, name = (zero, "external_loss_scale") if zero.custom_loss_scaler else (zero.loss_scaler, "cur_scale")
    setattr(owner, name, getattr(owner, name) * divisor)
    try:
        yield
    finally:
        setattr(owner, name, getattr(owner, name) / divisor)


def engine_state(scaler: Any) -> dict[str, Any]:
    """The same numbers of DeepSpeed's own loss scaler."""
    good_steps = scaler.cur_iter - scaler.last_overflow_iter - 1 if scaler.dynamic else 0
    return {"scale": float(scaler.cur_scale), "good_steps": good_steps}


def fill_engine(scaler: Any, state: Mapping[str, Any]) -> None:
    """Gives them back to DeepSpeed's own loss scaler; a static one keeps its scale."""
    if scaler.dynamic:
        scaler.cur_scale, scaler.cur_iter, scaler.last_overflow_iter = state["scale"], state["good_steps"], -1
