"""LearningRateMonitor: logs what the optimizers work with."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from acclight import Callback
from acclight.loggers.guarded import write
from acclight.messages import warn

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from acclight import Trainer, TrainModule

_INTERVALS = (None, "step", "epoch")


class LearningRateMonitor(Callback):
    """Logs every optimizer's learning rate, as it was in the step that has just been done.

    The name is `lr-SGD`; with several optimizers of a class `lr-SGD`, `lr-SGD-1`, ...; with several parameter groups
    `lr-SGD/pg1`, `lr-SGD/pg2`, ..., or with a group's own "name" in place of `pg1`. A scheduler's `name` in
    `configure_optimizers` replaces `lr-SGD`.

    Args:
        logging_interval: "step" logs where the trainer logs, "epoch" at the beginning of epochs. None: as "step".
        log_momentum: Log momentum (or the first of Adam's betas) as `<name>-momentum`.
        log_weight_decay: Log weight decay as `<name>-weight_decay`.

    Raises:
        ValueError: For another interval.
    """

    def __init__(
        self, logging_interval: str | None = None, log_momentum: bool = False, log_weight_decay: bool = False
    ) -> None:
        if logging_interval not in _INTERVALS:
            raise ValueError(f"logging_interval={logging_interval!r} is neither 'step' nor 'epoch' nor None")
        self.logging_interval = logging_interval
        self.log_momentum = log_momentum
        self.log_weight_decay = log_weight_decay
        self._names: list[str] = []
        self._rates: dict[str, float] = {}

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Names the optimizers."""
        if not trainer.loggers:
            warn("LearningRateMonitor has nothing to write to: give Trainer(logger=...) or leave it out")
        self._rates = {}
        names = {id(c.scheduler.optimizer): c.name for c in trainer.lr_scheduler_configs if c.name}
        self._names = []
        seen: Counter[str] = Counter()
        for optimizer in trainer.optimizers:
            name = names.get(id(optimizer)) or f"lr-{type(optimizer).__name__}"
            self._names.append(f"{name}-{seen[name]}" if seen[name] else name)
            seen[name] += 1

    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Logs what the epoch begins with."""
        if self.logging_interval == "epoch":
            self._log(trainer, self._read(trainer))

    def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> None:
        """Reads the values before a step that is logged: afterwards the scheduler may have changed them."""
        if self.logging_interval != "epoch" and (trainer.global_step + 1) % trainer.log_every_n_steps == 0:
            self._rates = self._read(trainer)

    def on_step(self, trainer: Trainer, module: TrainModule) -> None:
        """Logs them, once the step has been counted."""
        if self._rates:
            self._log(trainer, self._rates)
            self._rates = {}

    def _log(self, trainer: Trainer, rates: dict[str, float]) -> None:
        if trainer.is_global_zero:
            write(trainer.loggers, {**rates, "epoch": trainer.current_epoch}, trainer.global_step)

    def _read(self, trainer: Trainer) -> dict[str, float]:
        values: dict[str, float] = {}
        for name, optimizer in zip(self._names, trainer.optimizers, strict=True):
            for label, group in _groups(name, optimizer):
                values[label] = float(group["lr"])
                if self.log_momentum:
                    values[f"{label}-momentum"] = float(
                        group["betas"][0] if "betas" in group else group.get("momentum", 0)
                    )
                if self.log_weight_decay:
                    values[f"{label}-weight_decay"] = float(group.get("weight_decay", 0))
        return values


def _groups(name: str, optimizer: Optimizer) -> list[tuple[str, dict[str, Any]]]:
    """The parameter groups with the names under which they are logged."""
    groups = optimizer.param_groups
    if len(groups) == 1 and "name" not in groups[0]:
        return [(name, groups[0])]
    return [(f"{name}/{group.get('name', f'pg{number}')}", group) for number, group in enumerate(groups, 1)]
