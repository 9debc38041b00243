"""MetricStore: all meters of a run, for the training epoch and for one evaluation at a time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from acclight.logging.meter import REDUCTIONS, Meter, merge
from acclight.messages import warn

Gather = Callable[[Any], list[Any]]


@dataclass
class Shown:
    """What is shown at one moment: the loggers' values, the progress display's, and the callbacks'."""

    logger: dict[str, float] = field(default_factory=dict)
    prog_bar: dict[str, float] = field(default_factory=dict)
    callback: dict[str, float] = field(default_factory=dict)


class MetricStore:
    """Collects what `self.log` is given; reads and reduces it only when it is shown.

    Args:
        gather: Gives the values of all ranks for this rank's value (a collective).
        device: Where tensors are.
    """

    def __init__(self, gather: Gather, device: torch.device) -> None:
        self._gather = gather
        self._device = device
        self.train: dict[str, Meter] = {}
        self.evaluation: dict[str, Meter] = {}
        self._meters = self.train
        self.window = 0
        #: The batch that runs, from which the number of samples is read.
        self.batch: Any = None
        self._batch_size: float | None = None
        #: True inside training steps and the hooks around them.
        self.in_step = False
        #: False where nothing may be logged; the text says why.
        self.refusal: str | None = None
        #: Put behind keys while one of several evaluation loaders runs.
        self.loader_name: str | None = None
        #: Throw-away forwards of ranks without data: nothing is kept.
        self.muted = False

    # -- where we are -----------------------------------------------------------------------------------------------------

    def begin_batch(self, batch: Any) -> None:
        """A batch begins; its number of samples is read only when it is needed."""
        self.batch = batch
        self._batch_size = None

    def begin_evaluation(self) -> None:
        """From now on values belong to an evaluation; training's are kept aside."""
        self.evaluation = {}
        self._meters = self.evaluation

    def end_evaluation(self) -> None:
        """Back to training's values."""
        self._meters = self.train
        self.loader_name = None
        self.muted = False

    @property
    def evaluating(self) -> bool:
        return self._meters is self.evaluation

    # -- self.log ---------------------------------------------------------------------------------------------------------

    def log(
        self,
        name: str,
        value: Any,
        *,
        prog_bar: bool = False,
        logger: bool = True,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str = "mean",
        batch_size: int | None = None,
        add_dataloader_idx: bool = True,
    ) -> None:
        """See TrainModule.log."""
        if self.muted:
            return
        if self.refusal is not None:
            raise RuntimeError(f"self.log({name!r}) {self.refusal}")
        key = f"{name}/{self.loader_name}" if self.loader_name is not None and add_dataloader_idx else name
        meter = self._meters.get(key)
        if meter is None:
            meter = self._meters[key] = self._new_meter(key, value, prog_bar, logger, on_step, on_epoch, reduce_fx)
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ValueError(f"self.log({name!r}) got a tensor of shape {tuple(value.shape)}; log one number")
            value = value.detach() if value.dim() == 0 else value.detach().squeeze()
        elif not isinstance(value, (int, float)):
            if meter.metric is not None:
                return
            value = _number(name, value)
        weight = self._batch_size if batch_size is None else float(batch_size)
        if weight is None:
            weight = self._batch_size = _samples(self.batch)
        meter.add(value, weight, self.window)

    def _new_meter(
        self, key: str, value: Any, prog_bar: bool, logger: bool, on_step: bool | None, on_epoch: bool | None, fx: str
    ) -> Meter:
        if fx not in REDUCTIONS:
            raise ValueError(f"self.log({key!r}, reduce_fx={fx!r}): use one of {', '.join(REDUCTIONS)}")
        in_step = self.in_step and not self.evaluating
        step = in_step if on_step is None else on_step
        epoch = not in_step if on_epoch is None else on_epoch
        if not step and not epoch:
            raise ValueError(f"self.log({key!r}, on_step=False, on_epoch=False) would never show the value")
        meter = Meter(key, on_step=step, on_epoch=epoch, prog_bar=prog_bar, logger=logger, reduce_fx=fx)
        if _is_torchmetric(value):
            meter.metric = value
        return meter

    # -- reading ------------------------------------------------------------------------------------------------------------

    def show_step(self) -> Shown:
        """The values of the window that has just ended, over its micro-batches and all ranks. A collective."""
        meters = [m for m in self.train.values() if m.on_step and m.window == self.window and m.values]
        shown = Shown()
        for name, value, flags in self._reduce([(m, m.step_state()) for m in meters]):
            both = flags.on_epoch
            _put(shown, f"{name}_step" if both else name, value, flags)
            if both:
                shown.callback[name] = value
        return shown

    def show_epoch(self) -> Shown:
        """The values of the epoch, or of the evaluation, over all ranks; afterwards they begin anew. A collective."""
        meters = [m for m in self._meters.values() if m.on_epoch]
        shown = Shown()
        plain = [(m, m.epoch_state()) for m in meters if m.metric is None]
        for name, value, flags in self._reduce(plain):
            both = flags.on_step
            _put(shown, f"{name}_epoch" if both else name, value, flags)
            if both:
                shown.callback[name] = value
        for meter in meters:
            if meter.metric is not None:
                # torchmetrics reduces over the ranks by itself, for metrics that are no means.
                _put(shown, meter.name, float(meter.metric.compute()), meter)
                meter.metric.reset()
            meter.reset_epoch()
        return shown

    def live(self) -> dict[str, float]:
        """This process's newest values of the keys in the progress display. Reading them waits for the device."""
        return {m.name: float(m.values[-1]) for m in self.train.values() if m.prog_bar and m.on_step and m.values}

    def _reduce(self, states: Sequence[tuple[Meter, tuple[Any, float]]]) -> list[tuple[str, float, Meter]]:
        totals = _to_floats([total for _, (total, _) in states])
        own = {
            m.name: (total, weight, m.reduce_fx, m.on_step, m.on_epoch, m.prog_bar, m.logger)
            for (m, (_, weight)), total in zip(states, totals, strict=True)
        }
        ranks: list[Mapping[str, Any]] = self._gather(own)
        names = {name: entry for entries in ranks for name, entry in entries.items()}
        reduced = []
        for name, (_, _, fx, on_step, on_epoch, prog_bar, logger) in names.items():
            value = merge([entries[name][:2] for entries in ranks if name in entries], fx)
            if value is not None:
                flags = Meter(name, on_step=on_step, on_epoch=on_epoch, prog_bar=prog_bar, logger=logger, reduce_fx=fx)
                reduced.append((name, value, flags))
        return reduced


def _put(shown: Shown, name: str, value: float, flags: Meter) -> None:
    shown.callback[name] = value
    if flags.logger:
        shown.logger[name] = value
    if flags.prog_bar:
        shown.prog_bar[name] = value


def _to_floats(totals: list[Any]) -> list[float]:
    """All totals as floats, with one transfer from the device for all tensors together."""
    tensors = [t for t in totals if isinstance(t, Tensor)]
    values = iter(
        torch.stack([t.double() if t.device.type == "cpu" else t.float() for t in tensors]).tolist() if tensors else []
    )
    return [next(values) if isinstance(t, Tensor) else float(t) for t in totals]


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(
            f"self.log({name!r}) got a {type(value).__name__}; log a number, a scalar tensor or a torchmetrics metric"
        ) from None


def _is_torchmetric(value: Any) -> bool:
    # Without importing it: a value can only be one of its objects when it has been imported.
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, torchmetrics.Metric)


_ambiguous_warned = False


def _samples(batch: Any) -> float:
    """How many samples a batch holds: the length on which its tensors and lists agree."""
    if isinstance(batch, Tensor):
        return float(batch.shape[0]) if batch.dim() else 1.0
    sizes = _sizes(batch)
    if not sizes:
        return 1.0
    if len(set(sizes)) > 1:
        global _ambiguous_warned
        if not _ambiguous_warned:
            _ambiguous_warned = True
            warn(
                f"the parts of a batch have different lengths ({sorted(set(sizes))[:4]}), so that its number of samples is "
                f"unclear; {sizes[0]} is used: pass batch_size= to self.log"
            )
    return float(sizes[0])


def _sizes(batch: Any) -> list[int]:
    if isinstance(batch, Tensor):
        return [batch.shape[0]] if batch.dim() else []
    if isinstance(batch, Mapping):
        return [size for part in batch.values() for size in _sizes(part)]
    if isinstance(batch, tuple) or (isinstance(batch, list) and batch and isinstance(batch[0], Tensor)):
        return [size for part in batch for size in _sizes(part)]
    return [len(batch)] if isinstance(batch, list) else []
