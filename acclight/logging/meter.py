"""Meter: the values of one key, copied as they come and summed only when somebody looks or many have gathered."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

# So many tensors are kept before they are summed: one sum over all of them costs as much as two or three additions.
_FOLD_AT = 128

REDUCTIONS = ("mean", "sum", "min", "max")


class Tally:
    """Some values and their weights, reduced to one; tensors stay on their device.

    Args:
        reduce_fx: "mean" (weighted), "sum", "min" or "max".
    """

    __slots__ = ("_number", "_tensors", "_total", "_weights", "newest", "reduce_fx", "weight")

    def __init__(self, reduce_fx: str) -> None:
        self.reduce_fx = reduce_fx
        self.clear()

    def clear(self) -> None:
        """Forgets everything."""
        self.weight = 0.0
        #: The last value that came.
        self.newest: Tensor | float | None = None
        self._number: float | None = None
        self._total: Tensor | None = None
        self._tensors: list[Tensor] = []
        self._weights: list[float] = []

    def add(self, value: Tensor | float, weight: float) -> None:
        """Takes one value: a detached scalar tensor that nobody else holds, or a number. No tensor is read."""
        self.newest = value
        self.weight += weight
        if weight == 0.0:
            # The mean of no samples is NaN, and must not make that of all samples NaN.
            return
        if isinstance(value, Tensor):
            self._tensors.append(value)
            self._weights.append(weight)
            if len(self._tensors) >= _FOLD_AT:
                self._fold()
            return
        number = value * weight if self.reduce_fx == "mean" else value
        self._number = number if self._number is None else _join(self._number, number, self.reduce_fx)

    def _fold(self) -> None:
        tensors, weights = self._tensors, self._weights
        self._tensors, self._weights = [], []
        dtype = _wide(tensors[0].device)
        if self.reduce_fx in ("min", "max"):
            stacked = torch.stack([tensor.to(dtype) for tensor in tensors])
            folded = stacked.min() if self.reduce_fx == "min" else stacked.max()
            if self._total is not None:
                folded = (torch.minimum if self.reduce_fx == "min" else torch.maximum)(self._total, folded)
            self._total = folded
            return
        if self._total is None:
            self._total = torch.zeros((), dtype=dtype, device=tensors[0].device)
        if self.reduce_fx == "sum" or len(set(weights)) == 1:
            kinds = {tensor.dtype for tensor in tensors}
            alike = tensors if len(kinds) == 1 else [tensor.to(dtype) for tensor in tensors]
            weight = weights[0] if self.reduce_fx == "mean" else 1.0
            self._total.add_(torch.stack(alike).sum(dtype=dtype), alpha=weight)
            return
        for tensor, weight in zip(tensors, weights, strict=True):
            # Not one product with a tensor of the weights: copying those to an accelerator would wait for it.
            self._total.add_(tensor, alpha=weight)

    def parts(self) -> tuple[Tensor | None, float | None]:
        """The total of the tensors, and that of the numbers; for `whole`, which joins them once the tensor is read."""
        if self._tensors:
            self._fold()
        return self._total, self._number


def whole(tensor: float | None, number: float | None, reduce_fx: str) -> float:
    """One total from the two of `Tally.parts`, the first read as a float; 0 where there is neither."""
    if tensor is None or number is None:
        return (tensor if number is None else number) or 0.0
    return _join(tensor, number, reduce_fx)


def reduce_ranks(states: list[tuple[float, float]], reduce_fx: str) -> float:
    """One value from the (total, weight) of every rank that has logged the key; NaN is the mean of no samples."""
    totals = [total for total, weight in states if weight > 0.0]
    if not totals:
        return math.nan
    joined = totals[0]
    for total in totals[1:]:
        joined = _join(joined, total, reduce_fx)
    return joined / sum(weight for _, weight in states) if reduce_fx == "mean" else joined


def _join(a: float, b: float, reduce_fx: str) -> float:
    if reduce_fx in ("mean", "sum"):
        return a + b
    if math.isnan(a) or math.isnan(b):
        return math.nan
    return min(a, b) if reduce_fx == "min" else max(a, b)


def _wide(device: torch.device) -> torch.dtype:
    # The mean of a million batches keeps its digits; where the hardware has no float64, of many thousands.
    return torch.float64 if device.type in ("cpu", "cuda") else torch.float32


class Meter:
    """What was logged under one key in one hook.

    Args:
        name: The key as the user gave it.
        suffix: "/" and the evaluation loader's name, or nothing.
        flags: The arguments of `self.log` as they were given, to compare later calls with.
        on_step: Single values are shown: of an optimizer step, or of an evaluation batch.
        on_epoch: The value of the epoch, or of the evaluation, is shown.
        prog_bar: Shown in the progress display.
        logger: Handed to the loggers.
        reduce_fx: "mean" (weighted by samples), "sum", "min" or "max".
        keeps_series: Keep every single value: those of an evaluation are shown at its end.
    """

    __slots__ = (
        "batch_value", "epoch", "flags", "keeps_series", "loader", "logger", "metric", "name", "on_epoch", "on_step", "path",
        "prog_bar", "reduce_fx", "series", "step", "suffix", "updates", "used", "window",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        suffix: str,
        flags: tuple[Any, ...],
        *,
        on_step: bool,
        on_epoch: bool,
        prog_bar: bool,
        logger: bool,
        reduce_fx: str,
        keeps_series: bool,
    ) -> None:
        self.name = name
        self.suffix = suffix
        self.flags = flags
        self.on_step = on_step
        self.on_epoch = on_epoch
        self.prog_bar = prog_bar
        self.logger = logger
        self.reduce_fx = reduce_fx
        self.keeps_series = keeps_series
        self.step = Tally(reduce_fx)
        self.epoch = Tally(reduce_fx)
        #: The window of micro-batches, or the evaluation batch, that `step` belongs to.
        self.window = -1
        #: The values of single evaluation batches, with the batches' places in the dataset's order.
        self.series: list[tuple[int, Tally]] = []
        #: A torchmetrics object, which computes its own value, and where the module holds it.
        self.metric: Any = None
        self.path = ""
        #: Its value for the last batch, and how many updates it had by then.
        self.batch_value: Any = None
        self.updates = 0
        #: Something was logged since the epoch began.
        self.used = False
        #: The position of the only evaluation loader that it was logged for, or None.
        self.loader: int | None = None

    def add_step(self, value: Tensor | float, weight: float, window: int, number: int) -> None:
        """Takes a value of the window, or of the evaluation batch, that runs."""
        if window != self.window:
            if self.keeps_series:
                self.step = Tally(self.reduce_fx)
                self.series.append((number, self.step))
            else:
                self.step.clear()
            self.window = window
        self.step.add(value, weight)

    def begin_epoch(self) -> None:
        """Forgets the values of the epoch; the progress display keeps the newest one."""
        self.epoch.clear()
        self.series = []
        self.used = False
