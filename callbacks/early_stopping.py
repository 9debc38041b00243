"""EarlyStopping: ends the training when a metric no longer gets better."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from acclight import Callback
from acclight.callbacks.monitor import Monitor, is_logged, missing_metric
from acclight.messages import info, warn

if TYPE_CHECKING:
    from acclight import Trainer, TrainModule


class EarlyStopping(Callback):
    """Sets `trainer.should_stop` once `monitor` has not got better `patience` times in a row.

    Only values that were logged anew count: an epoch without a validation neither adds to the wait nor ends it.

    Args:
        monitor: The metric, as it was logged.
        min_delta: A value is better only when it is better by more than this.
        patience: How many values in a row may be no better; 0 stops at the first.
        verbose: Say when the metric got better.
        mode: "min" where smaller is better, "max" where bigger is.
        strict: Raise when the metric is not there. False: look again the next time.
        check_finite: Stop when the metric is NaN or infinite.
        stopping_threshold: Stop as soon as the metric is better than this.
        divergence_threshold: Stop as soon as the metric is worse than this.
        check_on_train_epoch_end: True looks at the end of training epochs only, False after validations only.
            Default: whenever there is a new value at either.

    Raises:
        ValueError: For arguments out of range; with `strict`, after the first validation, for a metric not logged.
    """

    # Metrics of an epoch are there when the callbacks that run last look.
    runs_last = True

    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int = 3,
        verbose: bool = False,
        mode: str = "min",
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_on_train_epoch_end: bool | None = None,
    ) -> None:
        if patience < 0:
            raise ValueError(f"patience={patience} must be 0 or more")
        if min_delta < 0:
            raise ValueError(f"min_delta={min_delta} must be 0 or more; `mode` says which direction is better")
        self.monitor = monitor
        self.mode = mode
        self.min_delta = min_delta
        self.patience = patience
        self.verbose = verbose
        self.strict = strict
        self.check_finite = check_finite
        self.stopping_threshold = stopping_threshold
        self.divergence_threshold = divergence_threshold
        self.check_on_train_epoch_end = check_on_train_epoch_end
        self._watch = Monitor(monitor, mode)
        self._name_checked = self._validated = False
        self._looked_at = -1
        self._reset()

    def _reset(self) -> None:
        self.best_score = math.inf if self.mode == "min" else -math.inf
        self.wait_count = 0
        self.stopped_epoch = 0

    @property
    def state_key(self) -> str:
        """One for each metric, so that several of these callbacks can be told apart in a checkpoint."""
        return f"{type(self).__qualname__}(monitor={self.monitor}, mode={self.mode})"

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        """A run that begins at step 0 knows of no earlier one."""
        self._name_checked = self._validated = False
        self._looked_at = -1
        if trainer.global_step == 0:
            self._reset()

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Looks at the metric."""
        if not trainer.fitting:
            return
        self._validated = True
        if self.check_on_train_epoch_end is not True:
            self._check_name(trainer, may_come=trainer.logs_at_epoch_end)
            self._look(trainer)

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Looks at the metric where it was not yet there after the validation."""
        if self.check_on_train_epoch_end is not False:
            if self._validated or not trainer.num_val_batches:
                self._check_name(trainer)
            self._look(trainer)

    def _look(self, trainer: Trainer) -> None:
        value = self._watch.value(trainer)
        if value is None or self._looked_at == trainer.global_step:
            return
        self._looked_at = trainer.global_step
        if self._watch.better(value, self._goal):
            if self.verbose:
                info(f"EarlyStopping: {self.monitor} got better, from {self.best_score:g} to {value:g}")
            self.best_score, self.wait_count = value, 0
        else:
            self.wait_count += 1
        reason = self._reason(value)
        if reason is not None:
            trainer.should_stop = True
            self.stopped_epoch = trainer.current_epoch
            info(f"EarlyStopping ends the training at step {trainer.global_step}: {self.monitor} {reason}")

    @property
    def _goal(self) -> float:
        """What a value has to be better than."""
        return self.best_score - self.min_delta if self.mode == "min" else self.best_score + self.min_delta

    def _reason(self, value: float) -> str | None:
        """Why to stop now, in words; None to go on."""
        if self.check_finite and not math.isfinite(value):
            return f"is {value}"
        if self.stopping_threshold is not None and self._watch.better(value, self.stopping_threshold):
            return f"is {value:g}, better than stopping_threshold={self.stopping_threshold:g}"
        if self.divergence_threshold is not None and self._watch.better(self.divergence_threshold, value):
            return f"is {value:g}, worse than divergence_threshold={self.divergence_threshold:g}"
        if self.wait_count > 0 and self.wait_count >= self.patience:
            return f"was no better than its best, {self.best_score:g}, {self.wait_count} time(s) in a row"
        return None

    def _check_name(self, trainer: Trainer, *, may_come: bool = False) -> None:
        # Right after a resume, nobody knows yet what training logs.
        if self._name_checked or not trainer.steps_of_fit or (may_come and not is_logged(trainer, self.monitor)):
            return
        self._name_checked = True
        if not is_logged(trainer, self.monitor):
            message = missing_metric(trainer, f"EarlyStopping(monitor={self.monitor!r})", self.monitor)
            if self.strict:
                raise ValueError(message)
            warn(message)

    def state_dict(self) -> dict[str, Any]:
        """The best value and the wait so far."""
        return {"best_score": self.best_score, "wait_count": self.wait_count, "stopped_epoch": self.stopped_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on with the wait of the run that is resumed."""
        self.best_score = float(state_dict["best_score"])
        self.wait_count = state_dict["wait_count"]
        self.stopped_epoch = state_dict["stopped_epoch"]
