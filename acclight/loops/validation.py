"""Validation within a fit: when it is due, and the sanity check before training."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from acclight.logging.torchmetric import MetricStates, metrics_in
from acclight.loops.evaluate import evaluate
from acclight.loops.optimizers import step_plateau_schedulers
from acclight.loops.pause import paused_training
from acclight.loops.reading import evaluation_data

if TYPE_CHECKING:
    from acclight.trainer import Trainer


class FitValidation:
    """The validations of one fit.

    Args:
        trainer: Whose intervals, limits, hooks and metrics are used.
        loaders: The user's validation loaders by name; empty for no validation.
    """

    def __init__(self, trainer: Trainer, loaders: dict[str, Any]) -> None:
        self.trainer = trainer
        self.data = evaluation_data(trainer, "validation", loaders)
        #: Optimizer steps between validations inside epochs; None for the end of epochs alone.
        self.every_n_steps = self._steps_between()
        #: They count from the start of the epoch, not of the training.
        self.counts_in_epoch = isinstance(trainer.val_check_interval, float)
        #: torchmetrics objects that training updates, and how often the others were updated by validations.
        self._of_training: WeakSet[Any] = WeakSet()
        self._updates: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def _steps_between(self) -> int | None:
        interval = self.trainer.val_check_interval
        if isinstance(interval, int):
            return interval
        if interval == 1.0:
            return None
        steps = self.trainer.steps_per_epoch
        if math.isinf(steps):
            raise ValueError(
                f"val_check_interval={interval} is a fraction of an epoch, but the training loader has no length: "
                "give a number of optimizer steps (an int)"
            )
        return max(1, int(steps * interval + 1e-9))  # 0.29 * 100 is 28.999999999999996

    def due_after_step(self, coming: int = 0) -> bool:
        """A validation belongs after the optimizer step that has just been done, or after one to come.

        Args:
            coming: Batches of the step to come; 0 asks about the one that has just been done.
        """
        trainer = self.trainer
        if not self.data or self.every_n_steps is None:
            return False
        if not self.counts_in_epoch:
            return (trainer.global_step + (coming > 0)) % self.every_n_steps == 0
        assert trainer.data is not None
        steps = math.ceil((trainer.data.batches_done + coming) / trainer.accumulate_grad_batches)
        return steps % self.every_n_steps == 0 and self._epoch_is_due()

    def owed(self) -> bool:
        """The validation after the last step was not run, or not to its end: a checkpoint was written before it, say."""
        trainer = self.trainer
        assert trainer.data is not None
        begun = trainer.data.batches_done > 0 and not trainer.progress.epoch_done
        return begun and self.due_after_step() and trainer.progress.validated_at != trainer.global_step

    def due_at_epoch_end(self) -> bool:
        """A validation belongs to the end of this epoch, and has not been run there yet (before a resume, say)."""
        trainer = self.trainer
        if not self.data or self.every_n_steps is not None or trainer.progress.validated_at == trainer.global_step:
            return False
        return self._epoch_is_due()

    def never_due(self) -> str | None:
        """Why training ends before the first validation that is still to come, in words; None where one comes."""
        trainer, progress = self.trainer, self.trainer.progress
        step, end = trainer.global_step, trainer.estimated_stepping_batches
        whole, left = trainer.steps_per_epoch, trainer.steps_left_in_epoch
        if not self.data or self.owed() or (not left and self.due_at_epoch_end()):
            return None
        asked = f"val_check_interval={trainer.val_check_interval!r}"
        if self.every_n_steps is not None and not self.counts_in_epoch:
            comes: int | float = self.every_n_steps - step % self.every_n_steps
        else:
            n = trainer.check_val_every_n_epoch
            asked += f" and check_val_every_n_epoch={n}"
            begun = progress.epoch + progress.epoch_done
            every, done = self.every_n_steps or whole, 0 if math.isinf(whole) else whole - left
            epoch, comes = begun, (done // every + 1) * every - done
            if (begun + 1) % n or done + comes > whole:
                epoch = begun + n - (begun + 1) % n
                comes = left + (epoch - begun - 1) * whole + every
            if trainer.max_epochs is not None and 0 <= trainer.max_epochs <= epoch:
                return f"{asked} put the first into epoch {epoch}, counted from 0, but max_epochs={trainer.max_epochs}"
        if math.isinf(comes) or step + comes <= end:
            return None
        return f"{asked} put the first after step {step + comes}, but training ends at step {end}"

    def _epoch_is_due(self) -> bool:
        return (self.trainer.current_epoch + 1) % self.trainer.check_val_every_n_epoch == 0

    def run(self) -> None:
        """One validation; its metrics reach callbacks, loggers and the schedulers that watch one."""
        trainer = self.trainer
        trainer.validating = True
        try:
            for call in () if trainer.sanity_checking else trainer.hooks.on_validation_model_zero_grad:
                call()
            with paused_training(trainer, "validation"), self._training_metrics_set_aside():
                shown = evaluate(trainer, "validation", self.data)
                trainer.show_validation(shown)
                if not trainer.sanity_checking:
                    # Before the hook, in which checkpoints are written.
                    trainer.progress.validated_at = trainer.global_step
                    step_plateau_schedulers(trainer, set(shown.callback))
                for call in trainer.hooks.on_validation_end:
                    call()
        finally:
            trainer.validating = False

    @contextmanager
    def _training_metrics_set_aside(self) -> Iterator[None]:
        """Lets a torchmetrics object that training and validation share have the values of each apart.

        Those that training has updated begin anew, and are as before afterwards; those of validation alone are its own affair.
        """
        metrics = metrics_in(self.trainer.module)
        for metric in metrics:
            if metric._update_count not in (0, self._updates.get(metric, 0)):
                self._of_training.add(metric)
        shared = [metric for metric in metrics if metric in self._of_training]
        states = MetricStates(shared)
        for metric in shared:
            metric.reset()
        try:
            yield
        finally:
            states.restore()
            for metric in metrics:
                self._updates[metric] = metric._update_count

    def sanity_check(self) -> None:
        """Tries some batches before training, without a trace in metrics, loggers, callbacks or random state."""
        trainer, full = self.trainer, self.data
        steps = trainer.num_sanity_val_steps
        if not full or steps == 0:
            return
        trainer.sanity_checking = True
        try:
            if steps > 0:
                self.data = {name: data.first(steps) for name, data in full.items()}
            with _without_a_trace(trainer):
                for call in trainer.hooks.on_sanity_check_start:
                    call()
                self.run()
                for call in trainer.hooks.on_sanity_check_end:
                    call()
        finally:
            if self.data is not full:
                for data in self.data.values():
                    data.close()
            self.data = full
            trainer.sanity_checking = False
            trainer.forget_metrics()

    def summary(self) -> str:
        """One phrase for the start-up summary."""
        if not self.data:
            return "no validation"
        if self.every_n_steps is not None:
            return f"validation every {self.every_n_steps} steps" if self.every_n_steps > 1 else "validation every step"
        epochs = self.trainer.check_val_every_n_epoch
        return "validation every epoch" if epochs == 1 else f"validation every {epochs} epochs"


@contextmanager
def _without_a_trace(trainer: Trainer) -> Iterator[None]:
    """Puts back the states of torchmetrics objects, and of callbacks as far as they have one for checkpoints."""
    metrics = MetricStates(metrics_in(trainer.module))
    callbacks = [(callback, _kept(callback.state_dict())) for callback in trainer.callbacks]
    yield
    metrics.restore()
    for callback, before in callbacks:
        if not _same(callback.state_dict(), before):
            callback.load_state_dict(before)


def _kept(state: Any) -> Any:
    """A copy that costs no memory on the device; as from a checkpoint, its tensors are on the CPU."""
    if isinstance(state, dict):
        return {key: _kept(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(map(_kept, state))
    return state.detach().cpu().clone() if isinstance(state, torch.Tensor) else copy.deepcopy(state)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and torch.equal(_local(a).cpu(), _local(b))
    return type(a) is type(b) and bool(a == b)


def _local(tensor: Any) -> torch.Tensor:
    """What this rank holds of a tensor that may be sharded."""
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local
