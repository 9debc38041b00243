"""Reads what configure_optimizers returned, in any of Lightning's forms, and steps schedulers when they are due."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from acclight.messages import warn

if TYPE_CHECKING:
    from acclight.trainer import Trainer


@dataclass
class SchedulerConfig:
    """One learning-rate scheduler and when it steps; the fields are Lightning's `lr_scheduler` dictionary."""

    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None
    strict: bool = True
    name: str | None = None
    reduce_on_plateau: bool = False
    #: The watched metric was missing, and that has been said.
    missed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if not hasattr(self.scheduler, "step"):
            raise TypeError(
                f"configure_optimizers gave {type(self.scheduler).__name__} as a scheduler; it has no step()"
            )
        if self.interval not in ("step", "epoch"):
            raise ValueError(f"lr_scheduler interval={self.interval!r}: use 'step' (optimizer steps) or 'epoch'")
        if self.frequency < 1:
            raise ValueError(f"lr_scheduler frequency={self.frequency!r}: use 1 or more")
        self.reduce_on_plateau = self.reduce_on_plateau or isinstance(self.scheduler, ReduceLROnPlateau)
        if self.reduce_on_plateau and not self.monitor:
            raise ValueError(
                "a ReduceLROnPlateau scheduler needs the metric that it watches: "
                "return {'optimizer': optimizer, 'lr_scheduler': {'scheduler': scheduler, 'monitor': 'val_loss'}}"
            )


def read_optimizers(returned: Any) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    """Optimizers and schedulers from every form that configure_optimizers may return.

    The forms: one optimizer; a list or tuple of them; two lists (optimizers, schedulers); a dictionary with "optimizer" and
    perhaps "lr_scheduler"; a tuple or list of such dictionaries; None.
    """
    if returned is None:
        return [], []
    if isinstance(returned, Optimizer):
        return [returned], []
    if isinstance(returned, Mapping):
        return _read_dicts([returned])
    if isinstance(returned, Sequence) and not isinstance(returned, str):
        items = list(returned)
        if len(items) == 2 and isinstance(items[0], (list, tuple)):
            optimizers, schedulers = items
            schedulers = schedulers if isinstance(schedulers, (list, tuple)) else [schedulers]
            return _optimizers(optimizers), [_scheduler(s) for s in schedulers]
        if items and all(isinstance(item, Mapping) for item in items):
            return _read_dicts(items)
        if items and all(isinstance(item, Optimizer) for item in items):
            return items, []
    raise TypeError(
        f"configure_optimizers returned {type(returned).__name__}; return an optimizer, a list of them, two lists "
        "(optimizers, schedulers), or a dictionary with 'optimizer' and 'lr_scheduler'"
    )


def _read_dicts(items: Sequence[Mapping[str, Any]]) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    optimizers, schedulers = [], []
    for item in items:
        unknown = set(item) - {"optimizer", "lr_scheduler", "monitor"}
        if unknown or "optimizer" not in item:
            raise ValueError(
                f"configure_optimizers returned a dictionary with the keys {sorted(item)}; "
                "it takes 'optimizer' and, if there is one, 'lr_scheduler'"
            )
        optimizers.append(item["optimizer"])
        if item.get("lr_scheduler") is not None:
            schedulers.append(_scheduler(item["lr_scheduler"], monitor=item.get("monitor")))
    return _optimizers(optimizers), schedulers


def _optimizers(items: Sequence[Any]) -> list[Optimizer]:
    for item in items:
        if not isinstance(item, Optimizer):
            raise TypeError(f"configure_optimizers returned {type(item).__name__} where an optimizer was expected")
    return list(items)


def _scheduler(item: Any, monitor: str | None = None) -> SchedulerConfig:
    if isinstance(item, SchedulerConfig):
        return item
    if not isinstance(item, Mapping):
        return SchedulerConfig(item, monitor=monitor)
    known = {f.name for f in fields(SchedulerConfig) if f.init}
    unknown = sorted(set(item) - known)
    if unknown:
        raise ValueError(f"lr_scheduler has the unknown key {unknown[0]!r}; it takes {sorted(known)}")
    if "scheduler" not in item:
        raise ValueError("lr_scheduler needs the key 'scheduler'")
    return SchedulerConfig(**{"monitor": monitor, **item})


def step_schedulers(
    configs: Sequence[SchedulerConfig], interval: str, count: int, metrics: Mapping[str, torch.Tensor], fresh: bool
) -> None:
    """Steps the schedulers of one interval that are due.

    Args:
        configs: All schedulers.
        interval: "step" or "epoch".
        count: Steps, or epochs, done.
        metrics: Values by name, for those that watch one.
        fresh: The metrics come from an evaluation, or an epoch, that has just ended; schedulers that watch one wait for that.

    Raises:
        ValueError: When a watched metric is not there and the scheduler is strict.
    """
    for config in configs:
        if config.interval != interval or count % config.frequency:
            continue
        if not config.reduce_on_plateau:
            config.scheduler.step()
            continue
        if not fresh:
            continue
        assert config.monitor is not None
        if config.monitor not in metrics:
            if config.strict:
                raise ValueError(
                    f"the scheduler watches {config.monitor!r}, which was not logged; there are {sorted(metrics)}"
                )
            if not config.missed:
                warn(f"the scheduler watches {config.monitor!r}, which was not logged: it does not step")
                config.missed = True
            continue
        config.scheduler.step(metrics[config.monitor])


def step_epoch_schedulers(trainer: Trainer) -> None:
    """At the end of an epoch: schedulers that count epochs, and those that watch a metric of the training epoch."""
    configs = [c for c in trainer.lr_scheduler_configs if not c.reduce_on_plateau or c.monitor in trainer.metrics.train]
    step_schedulers(configs, "epoch", trainer.current_epoch + 1, trainer.callback_metrics, fresh=True)


def step_plateau_schedulers(trainer: Trainer, fresh: set[str]) -> None:
    """After a validation: schedulers that watch a metric which only validation logs."""
    configs = [
        c for c in trainer.lr_scheduler_configs if c.reduce_on_plateau and c.monitor not in trainer.metrics.train
    ]
    metrics = {name: trainer.callback_metrics[name] for name in fresh}
    for interval, count in (("epoch", trainer.current_epoch + 1), ("step", trainer.global_step)):
        step_schedulers(configs, interval, count, metrics, fresh=True)
