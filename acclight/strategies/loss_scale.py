"""LossScale: the rule of torch.amp.GradScaler for an engine that scales and looks for overflows by itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LossScale:
    """The fp16 loss scale; the numbers are torch.amp.GradScaler's.

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
