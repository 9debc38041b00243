"""Validation within a fit: when it is due, and the sanity check before training."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from acclight.loops.evaluate import evaluate
from acclight.loops.optimizers import step_plateau_schedulers
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
        return max(1, int(steps * interval))

    def due_after_step(self) -> bool:
        """A validation belongs after the optimizer step that has just been done."""
        return bool(self.data) and self.every_n_steps is not None and self.trainer.global_step % self.every_n_steps == 0

    def due_at_epoch_end(self) -> bool:
        """A validation belongs to the end of this epoch, and has not been run there yet (before a resume, say)."""
        trainer = self.trainer
        if not self.data or self.every_n_steps is not None or trainer.progress.validated_at == trainer.global_step:
            return False
        return (trainer.current_epoch + 1) % trainer.check_val_every_n_epoch == 0

    def run(self) -> None:
        """One validation; its metrics reach callbacks, loggers and the schedulers that watch one."""
        trainer = self.trainer
        trainer.validating = True
        try:
            shown = evaluate(trainer, "validation", self.data)
            if not trainer.sanity_checking:
                trainer.progress.validated_at = trainer.global_step
            trainer.show(shown)
            for call in trainer.hooks.on_validation_end:
                call()
            if not trainer.sanity_checking:
                step_plateau_schedulers(trainer, set(shown.callback))
        finally:
            trainer.validating = False

    def sanity_check(self) -> None:
        """Tries some batches before training, without a trace in metrics, loggers or random state."""
        trainer, full = self.trainer, self.data
        steps = trainer.num_sanity_val_steps
        if not full or steps == 0:
            return
        trainer.sanity_checking = True
        try:
            if steps > 0:
                self.data = {name: data.first(steps) for name, data in full.items()}
            for call in trainer.hooks.on_sanity_check_start:
                call()
            self.run()
            for call in trainer.hooks.on_sanity_check_end:
                call()
        finally:
            self.data = full
            trainer.sanity_checking = False
            trainer.forget_metrics()

    def summary(self) -> str:
        """One phrase for the start-up summary."""
        if not self.data:
            return "no validation"
        if self.every_n_steps is not None:
            return f"validation every {self.every_n_steps} steps"
        epochs = self.trainer.check_val_every_n_epoch
        return "validation every epoch" if epochs == 1 else f"validation every {epochs} epochs"
