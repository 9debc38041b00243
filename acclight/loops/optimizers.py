"""Reads what configure_optimizers returned, in any of Lightning's forms, and steps schedulers when they are due."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau

from acclight.callback import overrides
from acclight.messages import warn

if TYPE_CHECKING:
    from acclight.module import TrainModule
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
        if self.interval not in ("step", "epoch"):
            raise ValueError(f"lr_scheduler interval={self.interval!r}: use 'step' (optimizer steps) or 'epoch'")
        if not isinstance(self.frequency, int) or self.frequency < 1:
            raise ValueError(f"lr_scheduler frequency={self.frequency!r}: use a whole number, 1 or more")
        self.reduce_on_plateau = self.reduce_on_plateau or isinstance(self.scheduler, ReduceLROnPlateau)

    def complain(self, why: str) -> None:
        """The watched metric is not there.

        Raises:
            ValueError: With `strict`; else it is warned of once.
        """
        if self.strict:
            raise ValueError(f"the scheduler watches {self.monitor!r}, {why}")
        if not self.missed:
            warn(f"the scheduler watches {self.monitor!r}, {why}: it does not step")
            self.missed = True


def read_optimizers(module: TrainModule) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    """Optimizers and schedulers from every form that configure_optimizers may return.

    The forms: one optimizer; a list or tuple of them; two lists (optimizers, schedulers); a dictionary with "optimizer" and
    perhaps "lr_scheduler"; a tuple or list of such dictionaries; None. A scheduler stands for itself, or in a dictionary with
    "scheduler" and the other fields of `SchedulerConfig`.

    Raises:
        TypeError: For another form, named in the message.
        ValueError: A part of it cannot be used.
    """
    optimizers, schedulers = _read_form(module.configure_optimizers())
    if len(set(map(id, optimizers))) < len(optimizers):
        raise ValueError("configure_optimizers returned the same optimizer twice")
    own = set(map(id, module.parameters()))
    for optimizer in optimizers:
        foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]
        if foreign:
            raise ValueError(
                f"configure_optimizers returned a {type(optimizer).__name__} over {len(foreign)} parameter(s) that the module "
                f"does not have (the first of shape {tuple(foreign[0].shape)}): make it of self.parameters(), once all layers "
                "are attributes of the module"
            )
        if isinstance(optimizer, torch.optim.LBFGS) and module.automatic_optimization:
            raise ValueError(
                "torch.optim.LBFGS evaluates the loss several times in a step: set automatic_optimization = False, and call "
                "self.optimizers().step(closure) in training_step"
            )
    if module.automatic_optimization:
        _check_apart(module, optimizers)
    for config in schedulers:
        _check_scheduler(module, config, optimizers)
    return optimizers, schedulers


def _check_apart(module: TrainModule, optimizers: Sequence[Optimizer]) -> None:
    """All optimizers step at the end of every window: a parameter of two would step twice on one gradient."""
    names = {id(p): name for name, p in module.named_parameters()}
    taken: dict[int, Optimizer] = {}
    for optimizer in optimizers:
        for parameter in [p for group in optimizer.param_groups for p in group["params"]]:
            if taken.setdefault(id(parameter), optimizer) is not optimizer:
                raise ValueError(
                    f"configure_optimizers returned two optimizers over {names[id(parameter)]!r}, and both would step on the "
                    "same gradient: give each its own parameters, or set self.automatic_optimization = False and step them "
                    "in training_step"
                )


def _read_form(returned: Any) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    if returned is None:
        warn("configure_optimizers returned None: the parameters stay as they are")
        return [], []
    if isinstance(returned, Optimizer):
        return [returned], []
    if isinstance(returned, Mapping):
        return _read_dicts([returned])
    if isinstance(returned, (list, tuple)):
        items = list(returned)
        if len(items) == 2 and isinstance(items[0], (list, tuple)):
            optimizers, schedulers = items
            schedulers = schedulers if isinstance(schedulers, (list, tuple)) else [schedulers]
            return _optimizers(optimizers), [_scheduler(one) for one in schedulers]
        if items and all(isinstance(item, Mapping) for item in items):
            return _read_dicts(items)
        if items and all(isinstance(item, Optimizer) for item in items):
            return items, []
    raise TypeError(
        f"configure_optimizers returned {_form(returned)}; return an optimizer, a list of them, two lists (optimizers, "
        "schedulers), a dictionary with 'optimizer' and 'lr_scheduler', or a list of such dictionaries"
    )


def _form(returned: Any) -> str:
    """What was returned, in words."""
    if not isinstance(returned, (list, tuple)):
        return f"a {type(returned).__name__}"
    inside = ", ".join(_form(item) if isinstance(item, (list, tuple)) else type(item).__name__ for item in returned)
    return f"a {type(returned).__name__} of ({inside})"


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
            raise TypeError(f"configure_optimizers returned a {type(item).__name__} where an optimizer was expected")
    return list(items)


def _scheduler(item: Any, monitor: str | None = None) -> SchedulerConfig:
    if not isinstance(item, Mapping):
        return SchedulerConfig(item, monitor=monitor)
    known = {f.name for f in fields(SchedulerConfig) if f.init}
    unknown = sorted(set(item) - known)
    if unknown:
        raise ValueError(f"lr_scheduler has the unknown key {unknown[0]!r}; it takes {sorted(known)}")
    if "scheduler" not in item:
        raise ValueError(f"lr_scheduler has the keys {sorted(item)}, and needs 'scheduler'")
    return SchedulerConfig(**{"monitor": monitor, **item})


def _check_scheduler(module: TrainModule, config: SchedulerConfig, optimizers: Sequence[Optimizer]) -> None:
    """What of a scheduler can be told before training.

    Raises:
        TypeError: It has no step() that can be called, or no state for a checkpoint.
        ValueError: It belongs to another optimizer, or lacks the metric that it watches.
    """
    scheduler, name = config.scheduler, type(config.scheduler).__name__
    for method in ("step", "state_dict", "load_state_dict"):
        if not callable(getattr(scheduler, method, None)):
            raise TypeError(f"configure_optimizers gave a {name} as a scheduler; it has no {method}()")
    owner = getattr(scheduler, "optimizer", None)
    if owner is not None and not any(owner is one for one in optimizers):
        raise ValueError(
            f"configure_optimizers returned a {name} of a {type(owner).__name__} that is not among the optimizers it returned: "
            "return that optimizer too, or make the scheduler with one of those"
        )
    if not module.automatic_optimization:
        if config.monitor is not None or config.reduce_on_plateau:
            warn(
                f"with automatic_optimization=False nobody steps the {name} but training_step; its monitor is not read"
            )
        return
    if config.reduce_on_plateau and not config.monitor:
        raise ValueError(
            f"a {name} scheduler needs the metric that it watches: "
            "return {'optimizer': optimizer, 'lr_scheduler': {'scheduler': scheduler, 'monitor': 'val_loss'}}"
        )
    if isinstance(scheduler, OneCycleLR) and config.interval == "epoch":
        warn("a OneCycleLR with interval='epoch' takes one step per epoch; it is mostly meant to have interval='step'")
    if not config.reduce_on_plateau and not overrides(module, "lr_scheduler_step"):
        needed = [
            p.name
            for p in inspect.signature(scheduler.step).parameters.values()
            if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        if needed:
            raise TypeError(
                f"{name}.step() needs the argument {needed[0]!r}: override lr_scheduler_step(scheduler, metric) to call it"
            )


def step_schedulers(trainer: Trainer, interval: str, count: int) -> None:
    """After a step, or an epoch: the schedulers of this interval that watch no metric, where they are due.

    Args:
        trainer: Whose schedulers and module are used.
        interval: "step" or "epoch".
        count: Steps, or epochs, done.
    """
    if trainer.manual_optimization:
        return
    for config in trainer.lr_scheduler_configs:
        if config.interval == interval and not config.reduce_on_plateau and count % config.frequency == 0:
            trainer.module.lr_scheduler_step(config.scheduler, None)


def step_value_watched(trainer: Trainer) -> bool:
    """Whether a scheduler that is due after the coming step watches a value of it, or may; the same on every rank."""
    names = trainer.metrics.step_names
    return any(
        names is None or config.monitor in names
        for config in _plateaus(trainer, "step", trainer.progress.steps_taken + 1)
    )


def step_watching_schedulers(trainer: Trainer, fresh: set[str]) -> None:
    """After a step whose values were read: schedulers that watch a metric which training logs on its steps.

    Args:
        trainer: Whose schedulers and module are used.
        fresh: The metrics of this step.
    """
    for config in _plateaus(trainer, "step", trainer.progress.steps_taken):
        assert config.monitor is not None
        if config.monitor in trainer.metrics.training_names():
            if config.monitor in fresh:
                _step_plateau(trainer, config, fresh)
            elif config.monitor not in trainer.metrics.names_of_steps():
                config.complain(
                    "which training logs for its epochs alone, after steps (interval='step'): log it with on_step=True, or use "
                    "interval='epoch'"
                )


def step_epoch_schedulers(trainer: Trainer) -> None:
    """At the end of an epoch: schedulers that count epochs, and those that watch a metric of training."""
    epochs = trainer.current_epoch + 1
    step_schedulers(trainer, "epoch", epochs)
    training = trainer.metrics.training_names()
    for config in _plateaus(trainer, "epoch", epochs):
        if config.monitor in training or _nobody_else_logs(trainer, config):
            _step_plateau(trainer, config, set(trainer.callback_metrics))
    for config in _plateaus(trainer, "step", 0):
        if config.monitor not in training and _nobody_else_logs(trainer, config):
            _step_plateau(trainer, config, set(trainer.callback_metrics))


def step_plateau_schedulers(trainer: Trainer, fresh: set[str]) -> None:
    """After a validation: schedulers that watch a metric which only validation logs.

    Args:
        trainer: Whose schedulers and module are used.
        fresh: The metrics of this validation.
    """
    training, may_come = trainer.metrics.training_names(), trainer.logs_at_epoch_end
    for interval, count in (("epoch", trainer.current_epoch + 1), ("step", trainer.global_step)):
        for config in _plateaus(trainer, interval, count):
            if config.monitor not in training and (config.monitor in fresh or not may_come):
                _step_plateau(trainer, config, fresh)


def _nobody_else_logs(trainer: Trainer, config: SchedulerConfig) -> bool:
    """At the end of an epoch: a metric that training does not log will not come from a validation either."""
    validates = trainer.validation is not None and bool(trainer.validation.data)
    logged = trainer.metrics.validation_names()
    return not validates or (bool(logged) and config.monitor not in logged)


def _plateaus(trainer: Trainer, interval: str, count: int) -> list[SchedulerConfig]:
    """The schedulers of this interval that watch a metric, where they are due."""
    if trainer.manual_optimization:
        return []
    watching = [config for config in trainer.lr_scheduler_configs if config.reduce_on_plateau]
    return [config for config in watching if config.interval == interval and count % config.frequency == 0]


def _step_plateau(trainer: Trainer, config: SchedulerConfig, names: set[str]) -> None:
    assert config.monitor is not None
    if config.monitor in names:
        trainer.module.lr_scheduler_step(config.scheduler, trainer.callback_metrics[config.monitor])
    elif trainer.steps_of_fit:
        # Else it is the end of an epoch that was trained before a resume: a metric of training is not there, and not known.
        config.complain(f"which was not logged; there are {sorted(names)}")
