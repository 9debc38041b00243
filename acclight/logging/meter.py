"""Meter: the values of one key, kept as they came and summed only when somebody looks or many have gathered."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# So many values are kept as they are before they are summed: one stacked sum costs as much as two or three additions.
_FOLD_AT = 128

REDUCTIONS = ("mean", "sum", "min", "max")


class Meter:
    """The values of one key since the step, and since the epoch, began.

    Args:
        name: The key as the user gave it.
        on_step: Its value belongs to single optimizer steps.
        on_epoch: Its value belongs to the epoch or evaluation.
        prog_bar: Shown in the progress display.
        logger: Handed to the loggers.
        reduce_fx: "mean" (weighted), "sum", "min" or "max".
    """

    __slots__ = (
        "_epoch_total", "_epoch_weight", "_pending", "_pending_weights",
        "logger", "metric", "name", "on_epoch", "on_step", "prog_bar", "reduce_fx", "values", "weights", "window",
    )  # fmt: skip

    def __init__(
        self, name: str, *, on_step: bool, on_epoch: bool, prog_bar: bool, logger: bool, reduce_fx: str
    ) -> None:
        self.name = name
        self.on_step = on_step
        self.on_epoch = on_epoch
        self.prog_bar = prog_bar
        self.logger = logger
        self.reduce_fx = reduce_fx
        #: A torchmetrics object logged under this key, which computes its own value.
        self.metric: Any = None
        #: The window (see MetricStore) that `values` and `weights` belong to.
        self.window = -1
        self.values: list[Any] = []
        self.weights: list[float] = []
        self._pending: list[Any] = []
        self._pending_weights: list[float] = []
        self._epoch_total: Tensor | float | None = None
        self._epoch_weight = 0.0

    def add(self, value: Any, weight: float, window: int) -> None:
        """Takes one value (a detached scalar tensor or a number); nothing is computed."""
        if window != self.window:
            self._leave_window()
            self.window = window
        self.values.append(value)
        self.weights.append(weight)

    def _leave_window(self) -> None:
        if self.on_epoch:
            self._pending += self.values
            self._pending_weights += self.weights
            if len(self._pending) >= _FOLD_AT:
                self._fold()
        self.values = []
        self.weights = []

    def _fold(self) -> None:
        total, weight = combine(self._pending, self._pending_weights, self.reduce_fx)
        if self._epoch_total is None:
            self._epoch_total = total
        elif self.reduce_fx in ("mean", "sum"):
            self._epoch_total = self._epoch_total + total
        else:
            self._epoch_total = _extreme([self._epoch_total, total], self.reduce_fx)
        self._epoch_weight += weight
        self._pending, self._pending_weights = [], []

    def step_state(self) -> tuple[Any, float]:
        """(total, weight) of the window's values."""
        return combine(self.values, self.weights, self.reduce_fx)

    def epoch_state(self) -> tuple[Any, float]:
        """(total, weight) of all values since the epoch began."""
        self._leave_window()
        if self._pending:
            self._fold()
        return (0.0 if self._epoch_total is None else self._epoch_total), self._epoch_weight

    def reset_epoch(self) -> None:
        """Forgets the epoch's values."""
        self.values, self.weights, self._pending, self._pending_weights = [], [], [], []
        self._epoch_total, self._epoch_weight = None, 0.0


def combine(values: list[Any], weights: list[float], reduce_fx: str) -> tuple[Any, float]:
    """Total and weight of some values; tensors stay on their device, in at least float32."""
    if len(values) == 1 and not isinstance(values[0], Tensor):
        return (values[0] * weights[0] if reduce_fx == "mean" else values[0]), weights[0]
    if any(isinstance(v, Tensor) for v in values):
        device = next(v.device for v in values if isinstance(v, Tensor))
        stacked = torch.stack([_wide(v, device) for v in values])
        if reduce_fx == "mean":
            return stacked @ torch.tensor(weights, dtype=stacked.dtype, device=device), sum(weights)
        if reduce_fx == "sum":
            return stacked.sum(), sum(weights)
        return (stacked.min() if reduce_fx == "min" else stacked.max()), sum(weights)
    if reduce_fx == "mean":
        return sum(v * w for v, w in zip(values, weights, strict=True)), sum(weights)
    if reduce_fx == "sum":
        return sum(values), sum(weights)
    return _extreme(values, reduce_fx), sum(weights)


def _wide(value: Any, device: torch.device) -> Tensor:
    # float64 on the CPU: the mean of a million batches keeps its digits; accelerators keep float32, where it is fast.
    dtype = torch.float64 if device.type == "cpu" else torch.float32
    if isinstance(value, Tensor):
        return value.to(device=device, dtype=dtype, non_blocking=True)
    return torch.tensor(value, dtype=dtype, device=device)


def _extreme(values: list[Any], reduce_fx: str) -> Any:
    if any(isinstance(v, Tensor) for v in values):
        device = next(v.device for v in values if isinstance(v, Tensor))
        stacked = torch.stack([_wide(v, device) for v in values])
        return stacked.min() if reduce_fx == "min" else stacked.max()
    return min(values) if reduce_fx == "min" else max(values)


def merge(states: list[tuple[float, float]], reduce_fx: str) -> float | None:
    """One value from the (total, weight) of every rank that logged the key; None when nothing was counted."""
    counted = [(total, weight) for total, weight in states if weight > 0.0]
    if not counted:
        return None
    if reduce_fx == "mean":
        return sum(total for total, _ in counted) / sum(weight for _, weight in counted)
    if reduce_fx == "sum":
        return sum(total for total, _ in counted)
    return min(t for t, _ in counted) if reduce_fx == "min" else max(t for t, _ in counted)
