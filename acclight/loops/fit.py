"""The fit loop: epochs, windows, micro-batches; readable from top to bottom."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from acclight.callback import overrides
from acclight.loops.evaluate import step_arguments
from acclight.loops.interruption import PREEMPTION, Agreement, SignalWatch, preemption_signals
from acclight.loops.losses import WindowLosses, detached
from acclight.loops.optimizers import (
    step_epoch_schedulers,
    step_schedulers,
    step_value_watched,
    step_watching_schedulers,
)
from acclight.messages import info, warn

if TYPE_CHECKING:
    from acclight.core import AcceleratorCore
    from acclight.data import TrainData
    from acclight.loops.validation import FitValidation
    from acclight.module import TrainModule
    from acclight.trainer import Trainer


class FitLoop:
    """Runs training until a limit is reached.

    Args:
        trainer: Whose arguments, hooks and metrics are used.
        core: The Accelerator core, with the model prepared.
        module: The user's module.
        data: What this rank reads of the training loader.
        validation: The validations of this fit.
    """

    def __init__(
        self, trainer: Trainer, core: AcceleratorCore, module: TrainModule, data: TrainData, validation: FitValidation
    ) -> None:
        self.trainer = trainer
        self.core = core
        self.module = module
        self.data = data
        self.validation = validation
        self.progress = trainer.progress
        #: Where this fit has begun; its metrics know nothing of the steps before.
        self.first_step = trainer.progress.global_step
        self.losses = WindowLosses(core, module)
        _, self.step_takes = step_arguments(trainer, "training_step", 1)
        self.may_leave = overrides(module, "on_train_batch_start")
        #: Batches of the epoch that runs which every rank has; None where one does not know.
        self.epoch_batches: int | None = None
        #: The batch that runs is the last of its epoch; False where the loader does not say.
        self.at_last_batch = False
        #: A window is under way, and its step is not counted yet.
        self.in_window = False
        #: The optimizers step, or have stepped, and the step is not counted yet.
        self.in_step = False
        self.started = time.monotonic()
        self.agreement = Agreement(core.shared_notes())
        self.watch = SignalWatch(preemption_signals())
        self.stop_agreed = self.time_over = self.warned_of_no_loss = False
        #: The signal that ended the run early, once all ranks have agreed.
        self.preempted: signal.Signals | None = None

    # -- the whole run ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """From where the progress stands to the first limit; a training from the start tries the validation first."""
        trainer, progress = self.trainer, self.progress
        owed = self.owed()
        if not owed and (reason := self.limit_reached()):
            info(f"fit has nothing left to do: {reason}")
            return
        # What a window that an exception ended had gathered is not of this training.
        self.core.drop_gradients()
        with self.watch:
            if progress.global_step == 0:
                self.validation.sanity_check()
            self.module.train()
            for call in trainer.hooks.on_train_start:
                call()
            self.ask_all(now=True)
            while owed or not self.limit_reached():
                self.run_epoch(owed=owed)
                owed = False
                if not progress.epoch_done:
                    break
                self.ask_all(now=True)
            trainer.finish_saving()
            if self.preempted is not None:
                info(f"{self.preempted.name} came: stopping at step {progress.global_step}")
                if trainer.checkpoint_callback is not None:
                    trainer.checkpoint_callback.save(trainer)
                return
            for call in trainer.hooks.on_train_end:
                call()
            trainer.save_pending()

    @property
    def signal_owed(self) -> signal.Signals | None:
        """A signal that was noted, here or on another rank, and has to be delivered once everything is closed."""
        return self.watch.received or self.preempted

    def ask_all(self, *, now: bool = False) -> None:
        """Learns what any rank knows: a wish to stop, that the time is over, a signal has come, a checkpoint is written."""
        trainer = self.trainer
        limit = trainer.max_time_seconds
        late = limit is not None and time.monotonic() - self.started >= limit
        # What was agreed but has to wait (for min_steps) is asked for anew after every step, because a script may take it back.
        now = now or self.stop_agreed
        saved = trainer.saving is not None and trainer.saving.ended
        self.stop_agreed, late, saved, *signalled = self.agreement.ask(
            trainer.should_stop, late, saved, *(self.watch.received is one for one in PREEMPTION), now=now
        )
        self.time_over = self.time_over or late
        if self.stop_agreed:
            trainer.should_stop = True
        self.preempted = self.preempted or next(
            (one for one, came in zip(PREEMPTION, signalled, strict=True) if came), None
        )
        if saved:
            trainer.finish_saving()

    def limit_reached(self) -> str | None:
        """Which limit ends the training now, in words; None to go on."""
        trainer, progress = self.trainer, self.progress
        if 0 <= trainer.max_steps <= progress.global_step:
            return f"max_steps={trainer.max_steps} is reached (global_step={progress.global_step})"
        epochs = progress.epoch + 1 if progress.epoch_done else progress.epoch
        if trainer.max_epochs is not None and 0 <= trainer.max_epochs <= epochs:
            return f"max_epochs={trainer.max_epochs} is reached ({epochs} epochs done)"
        if self.preempted is not None:
            return f"{self.preempted.name} has come"
        if self.data.num_batches == 0:
            return "the training loader has no batches"
        enough = progress.global_step >= (trainer.min_steps or 0) and epochs >= (trainer.min_epochs or 0)
        if self.stop_agreed and enough:
            return "trainer.should_stop was set"
        if self.time_over:
            return f"max_time={trainer.max_time} has passed"
        return None

    def owed(self) -> bool:
        """Something that belongs after the last step has not happened: its validation, or the end that max_steps makes.

        A process may die between a checkpoint and what comes after it. That the hooks of the end of training were left out
        is known only together with such a thing: the newest checkpoint of a run that is through may be older than they are.
        """
        at_limit = self.progress.global_step == self.trainer.max_steps
        if self.progress.global_step == 0 or self.progress.epoch_done or (self.limit_reached() and not at_limit):
            return False
        return self.validation.owed() or (at_limit and self.progress.ended_at != self.progress.global_step)

    # -- one epoch ----------------------------------------------------------------------------------------------------

    def run_epoch(self, *, owed: bool = False) -> None:
        """One epoch, or the rest of one after a resume.

        Args:
            owed: First comes what was left out after the last step; then perhaps no limit lets more of the epoch be trained.
        """
        trainer, progress, hooks = self.trainer, self.progress, self.trainer.hooks
        if progress.epoch_done:
            progress.epoch += 1
            progress.epoch_done = False
        if trainer.loaders is not None and trainer.loaders.reload_if_due():
            assert trainer.data is not None
            assert trainer.validation is not None
            self.data, self.validation = trainer.data, trainer.validation
        self.data.begin_epoch(progress.epoch)
        self.agree_on_length()
        for call in hooks.on_train_epoch_start:
            call()
        cut_short = False
        empty = self.data.batches_done == 0
        if owed:
            if self.validation.owed():
                self.validation.run()
                trainer.save_pending()
            self.ask_all(now=True)
            cut_short = self.limit_reached() is not None and not self.epoch_exhausted()
        windows = self.windows()
        try:
            for window in windows if not cut_short else ():
                empty = False
                skip = self.run_window(window)
                trainer.save_pending()
                if skip:
                    break
                validated = self.validation.due_after_step()
                if validated:
                    self.validation.run()
                    trainer.save_pending()
                self.ask_all(now=validated)
                if self.limit_reached():
                    cut_short = not self.epoch_exhausted()
                    break
        finally:
            windows.close()
        if empty:
            # A stream that gives nothing, or an iterator that is used up: more epochs would give no more.
            warn(
                f"the training loader gave no batches in epoch {progress.epoch}: training ends at step {progress.global_step}"
            )
        if not empty and not (cut_short and self.preempted is not None):
            self.end_epoch(whole=not cut_short)

    def end_epoch(self, *, whole: bool) -> None:
        """What belongs to the end of an epoch: validation, hooks, epoch metrics, schedulers; then the epoch counts as done.

        Args:
            whole: No limit cut it short; else hooks and metrics see the part that was trained, and a later fit trains the rest.
        """
        trainer, progress, hooks = self.trainer, self.progress, self.trainer.hooks
        if self.epoch_batches is None:
            # Nobody knew that this step was the last.
            trainer.publish(trainer.metrics.show_step())
        if whole and self.validation.due_at_epoch_end():
            self.validation.run()
        if not trainer.steps_of_fit:
            info(f"epoch {progress.epoch} was trained before this fit: what its batches logged is not shown again")
        trainer.publish(trainer.metrics.show_epoch_so_far())
        for call in hooks.on_train_epoch_end:
            call()
        trainer.show(trainer.metrics.show_epoch(goes_on=not whole))
        if whole:
            step_epoch_schedulers(trainer)
        progress.epoch_done = whole
        progress.ended_at = progress.global_step
        for call in hooks.on_train_epoch_end_last:
            call()
        trainer.save_pending()

    def validation_follows(self) -> bool:
        """A validation comes right after the step that has just been done."""
        return self.validation.due_after_step() or (self.epoch_exhausted() and self.validation.due_at_epoch_end())

    def looked_at_after(self, batches: int) -> bool:
        """Whether a validation, or the end of an epoch or of all steps, comes after a step on so many batches.

        Callbacks look at metrics there, and find the values of that step, whatever the loggers' interval.
        """
        last = self.progress.global_step + 1 == self.trainer.max_steps
        return last or self.epoch_exhausted(batches) or self.validation.due_after_step(batches)

    def epoch_exhausted(self, coming: int = 0) -> bool:
        """Every batch of this epoch was trained on, or will be after so many more."""
        return self.epoch_batches is not None and self.data.batches_done + coming >= self.epoch_batches

    def agree_on_length(self) -> None:
        """Learns how many batches of this epoch all ranks can train on: what follows from it has to be the same on each."""
        if not self.data.ranks_agree:
            counts = self.data.agree(self.core.gather_objects)
            if None not in counts and len(set(counts)) > 1:
                self.warn_uneven([str(count) for count in counts])
        self.epoch_batches = self.data.num_batches

    # -- one window ---------------------------------------------------------------------------------------------------

    def windows(self) -> Generator[list[Any]]:
        """Windows of micro-batches, all ranks' equally long; the last of an epoch may be shorter."""
        batches = iter(self.data)
        size = self.trainer.accumulate_grad_batches
        unknown = not self.data.ranks_agree and self.epoch_batches is None
        while True:
            window = list(itertools.islice(batches, size))
            if unknown:
                lengths = self.core.gather_objects(len(window))
                if len(set(lengths)) > 1:
                    # A full window says nothing of what comes after it.
                    done = self.data.batches_done
                    self.warn_uneven([f"{done + n}{'' if n < size else ' or more'}" for n in lengths])
                window = window[: min(lengths)]
            if not window:
                return
            yield window
            if len(window) < size:
                return

    def warn_uneven(self, counts: list[str]) -> None:
        """Says what every rank holds when they do not hold equally much."""
        held = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(counts))
        warn(f"the ranks hold different numbers of training batches ({held}); all stop at the shortest")

    def run_window(self, window: list[Any]) -> bool:
        """Trains on one window and counts its step; True when the module asked to leave out the rest of the epoch."""
        trainer, core, hooks, metrics = self.trainer, self.core, self.trainer.hooks, self.trainer.metrics
        values_shown = (self.progress.global_step + 1) % trainer.log_every_n_steps == 0
        values_read = values_shown or self.looked_at_after(len(window)) or step_value_watched(trainer)
        metrics.begin_window(kept=values_read or self.epoch_batches is None)
        self.in_window = True
        self.losses.begin(window)
        first, final = self.data.batches_done, len(window) - 1
        outputs: Any = None
        for index, batch in enumerate(window):
            self.at_last_batch = index == final and self.epoch_exhausted(len(window))
            batch = trainer.to_device(batch)
            metrics.begin_batch(batch, self.data.samples(index))
            arguments = (batch, first + index)
            if self.asked_to_leave(*arguments):
                core.drop_gradients()
                self.in_window = False
                metrics.end_window()
                return True
            if trainer.manual_optimization:
                outputs = trainer.manual.train(*arguments[: self.step_takes])
            else:
                core.begin_micro_batch(index == final)
                outputs = core.forward("training_step", *arguments[: self.step_takes])
                if index == 0:
                    self.zero_grad()
                loss, weight = self.losses.read(outputs, index)
                if loss is not None:
                    for call in hooks.on_before_backward:
                        call(loss)
                    core.backward(loss, weight)
                    for call in hooks.on_after_backward:
                        call()
                    del loss
            outputs = detached(outputs)
            if index < final:
                for call in hooks.on_train_batch_end:
                    call(outputs, *arguments)
                # What else the step has returned must not live through the next one.
                outputs = None
        stepped = trainer.manual.stepped if trainer.manual_optimization else self.step()
        self.data.consumed(len(window))
        self.progress.global_step += 1
        self.in_step = False
        if stepped:
            step_schedulers(trainer, "step", self.progress.steps_taken)
        elif stepped is False:
            self.progress.skipped_steps += 1
        else:
            self.progress.empty_steps += 1
        self.in_window = False
        for call in hooks.on_step:
            call()
        for call in hooks.on_train_batch_end:
            call(outputs, *arguments)
        metrics.end_window()
        if values_read:
            shown = metrics.show_step()
            (trainer.show if values_shown else trainer.publish)(shown)
            if stepped:
                step_watching_schedulers(trainer, set(shown.callback))
        for call in hooks.on_step_last:
            call()
        return False

    def asked_to_leave(self, batch: Any, batch_idx: int) -> bool:
        """Runs on_train_batch_start; True, on all ranks, when the module's returned -1 on any."""
        wishes = [call(batch, batch_idx) for call in self.trainer.hooks.on_train_batch_start]
        return self.may_leave and self.core.any_rank(-1 in wishes)

    def zero_grad(self) -> None:
        """Forgets the gradients of the last window."""
        for position, optimizer in enumerate(self.trainer.optimizers):
            for call in self.trainer.hooks.on_before_zero_grad:
                call(optimizer)
            self.core.zero_grad(position)

    def step(self) -> bool | None:
        """Steps every optimizer once; False when fp16 loss scaling skipped a step, None when no rank has a loss."""
        trainer, core, hooks = self.trainer, self.core, self.trainer.hooks
        if not self.losses.end():
            if not self.warned_of_no_loss:
                self.warned_of_no_loss = True
                warn(
                    "training_step returned None for all batches of a step on all ranks, which trains nothing; "
                    "return the loss, unless that is meant"
                )
            return None
        for position, optimizer in enumerate(trainer.optimizers):
            core.unscale(position)
            for call in hooks.on_before_optimizer_step:
                call(optimizer)
        core.clip(skip=bool(hooks.configure_gradient_clipping))
        for call in hooks.configure_gradient_clipping:
            for optimizer in trainer.optimizers:
                call(optimizer, trainer.gradient_clip_val, trainer.gradient_clip_algorithm)
        self.in_step = True
        stepped = [core.optimizer_step(position) for position in range(len(trainer.optimizers))]
        return all(stepped)
