"""Progress: what every progress display shows and when; and the choice between them."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from torch import Tensor

from acclight import Callback
from acclight.callbacks.pace import Pace, clock

if TYPE_CHECKING:
    from acclight import Trainer, TrainModule


@dataclass(frozen=True)
class Status:
    """How far one thing is."""

    #: "train", "sanity check", "validate", "test" or "predict".
    task: str
    #: "2/5" or "2"; empty outside of training.
    epoch: str
    #: Optimizer steps in training, batches of this rank in an evaluation.
    done: int
    total: int | None
    unit: str
    #: The optimizer step of the training that an evaluation interrupts, like `count`; else empty.
    step: str
    values: Mapping[str, float]
    per_second: float
    seconds_left: float | None

    @property
    def count(self) -> str:
        """For instance "120/1000"; "120" where the total is not known."""
        return _count(self.done, self.total)

    @property
    def speed(self) -> str:
        """For instance "85.1 steps/s", or "2.5 s/step" where that is slow; empty before anything is done."""
        speed, unit = self.per_second, self.unit
        if speed == 0.0:
            return ""
        if speed < 1.0:
            return f"{1.0 / speed:.3g} s/{unit}"
        plural = "batches" if unit == "batch" else f"{unit}s"
        return f"{speed:.0f} {plural}/s" if speed >= 1000 else f"{speed:.3g} {plural}/s"

    @property
    def left(self) -> str:
        """For instance "0:01:30 left"; empty where the total is not known, and at the end."""
        return "" if not self.seconds_left else f"{clock(self.seconds_left)} left"

    @property
    def metrics(self) -> str:
        """For instance "loss 0.1234  acc 0.91"."""
        return "  ".join(f"{name} {value:.4g}" for name, value in self.values.items())


class Progress(Callback):
    """Base class of the progress displays: keeps count, and calls `draw` at most once in so many seconds.

    Only rank 0 shows anything. Between two calls of `draw` a step costs about a microsecond: no metric is read, so that
    nothing waits for the device.

    Args:
        seconds: The least time between two calls of `draw`.

    Raises:
        ValueError: For a negative time.
    """

    # The line of an epoch shows the epoch's own metrics.
    runs_last = True

    def __init__(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"seconds={seconds} must be 0 or more")
        self._seconds = seconds
        # The moment from which on something is shown again; never on other ranks than 0.
        self._due = math.inf
        self._loss: Any = None
        self._count: Any = 1
        self._total: int | None = None
        self._pace: Pace | None = None
        self._task = ""
        self._task_pace: Pace | None = None
        self._task_done = 0
        self._task_total: int | None = None

    # -- what a display does ------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Called on rank 0 before the first `draw`."""

    def draw(self, status: Status) -> None:
        """Called on rank 0 while something runs."""
        raise NotImplementedError(f"{type(self).__name__} does not define `draw`")

    def milestone(self, status: Status) -> None:
        """Called on rank 0 at the end of an epoch and of an evaluation."""
        raise NotImplementedError(f"{type(self).__name__} does not define `milestone`")

    def close(self) -> None:
        """Called on rank 0 after the last `draw`, also after an exception; more than once is fine."""

    # -- training ----------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Opens the display at the step where the training begins."""
        if trainer.is_global_zero:
            self._loss, self._count = None, 1
            self._pace = Pace(trainer.global_step, time.perf_counter())
            self._total = _whole(trainer.estimated_stepping_batches)
            self._due = -math.inf
            self.open()

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Shows the step, when enough time has passed."""
        # What else a step returns must not be kept alive.
        loss = outputs.get("loss") if isinstance(outputs, dict) else None
        # Under manual optimization it may still have its graph.
        self._loss = loss.detach() if isinstance(loss, Tensor) and loss.requires_grad else loss
        if time.perf_counter() >= self._due:
            if isinstance(outputs, dict):
                self._count = outputs.get("count", 1)
            self.draw(self._training(trainer))

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Shows the end of the epoch."""
        if self._pace is not None:
            self._total = _whole(trainer.estimated_stepping_batches)
            self.milestone(self._training(trainer))

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Shows the last step."""
        if self._pace is not None:
            self.milestone(self._training(trainer))
        self._end()

    def _training(self, trainer: Trainer) -> Status:
        assert self._pace is not None
        now = time.perf_counter()
        self._due = now + self._seconds
        self._pace.mark(trainer.global_step, now)
        return Status(
            task="train",
            epoch=self._epoch(trainer),
            done=trainer.global_step,
            total=self._total,
            unit="step",
            step="",
            values=self._values(trainer),
            per_second=self._pace.per_second(),
            seconds_left=None if self._total is None else self._pace.seconds_left(self._total),
        )

    # -- validation, test and prediction ------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Begins to count batches."""
        self._begin_task(trainer, "sanity check" if trainer.sanity_checking else "validate")

    def on_validation_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Shows the batch, when enough time has passed."""
        self._advance(trainer)

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Shows the result."""
        self._end_task(trainer)

    def on_test_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Begins to count batches."""
        self._begin_task(trainer, "test")

    def on_test_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Shows the batch, when enough time has passed."""
        self._advance(trainer)

    def on_test_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Shows the result."""
        self._end_task(trainer)

    def on_predict_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Begins to count batches."""
        self._begin_task(trainer, "predict")

    def on_predict_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Shows the batch, when enough time has passed."""
        self._advance(trainer)

    def on_predict_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Shows the last batch."""
        self._end_task(trainer)

    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        """Closes the display, so that what is printed next finds a clean terminal."""
        self._end()

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """Closes the display."""
        self._end()

    def _begin_task(self, trainer: Trainer, task: str) -> None:
        if not trainer.is_global_zero:
            return
        now = time.perf_counter()
        if self._pace is None:
            self.open()
        else:
            self._pace.pause(now)
        self._task, self._task_pace, self._task_done = task, Pace(0, now), 0
        batches = sum(trainer.num_val_batches)
        self._task_total = _whole(batches)
        self._due = now + self._seconds

    def _advance(self, trainer: Trainer) -> None:
        self._task_done += 1
        if time.perf_counter() >= self._due:
            self.draw(self._evaluation(trainer))

    def _end_task(self, trainer: Trainer) -> None:
        if self._task_pace is None:
            return
        self.milestone(self._evaluation(trainer))
        self._task_pace = None
        if self._pace is None:
            self._end()
        else:
            self._pace.resume(time.perf_counter())

    def _evaluation(self, trainer: Trainer) -> Status:
        assert self._task_pace is not None
        now = time.perf_counter()
        self._due = now + self._seconds
        self._task_pace.mark(self._task_done, now)
        return Status(
            task=self._task,
            epoch="" if self._pace is None else self._epoch(trainer),
            done=self._task_done,
            total=self._task_total,
            unit="batch",
            step="" if self._pace is None else _count(trainer.global_step, self._total),
            values=self._values(trainer),
            per_second=self._task_pace.per_second(),
            seconds_left=None if self._task_total is None else self._task_pace.seconds_left(self._task_total),
        )

    def _values(self, trainer: Trainer) -> dict[str, float]:
        values = {name: float(value) for name, value in trainer.progress_bar_metrics.items()}
        # A training that shows a loss of its own needs no second one; that of an evaluation does not stand for it.
        shown = any("loss" in name and "val" not in name and "test" not in name for name in values)
        if self._loss is None or shown:
            return values
        return {"loss": float(self._loss) / float(self._count)} | values

    @staticmethod
    def _epoch(trainer: Trainer) -> str:
        epochs = "" if trainer.max_epochs is None or trainer.max_epochs < 0 else f"/{trainer.max_epochs}"
        return f"{trainer.current_epoch + 1}{epochs}"

    def _end(self) -> None:
        if self._due < math.inf:
            self._due = math.inf
            self.close()
        self._pace = self._task_pace = None
        self._loss = None


def default_progress() -> Progress:
    """The display that suits standard output: a live bar in a terminal or a notebook that can show it, else lines."""
    if _in_notebook() or _on_terminal():
        from acclight.callbacks.progress_bar import RichProgressBar

        return RichProgressBar()
    from acclight.callbacks.progress_lines import PlainProgress

    return PlainProgress()


def _on_terminal() -> bool:
    # A terminal without a name (cron, some job systems) or a "dumb" one (Emacs) cannot move its cursor.
    return sys.stdout.isatty() and os.environ.get("TERM", "").lower() not in ("", "dumb", "unknown")


def _in_notebook() -> bool:
    """Whether this is a Jupyter kernel with ipywidgets, which Rich needs to draw there."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell" and find_spec("ipywidgets") is not None


def _whole(number: int | float) -> int | None:
    """A total; None where it is not known."""
    return None if math.isinf(number) else int(number)


def _count(done: int, total: int | None) -> str:
    return str(done) if total is None else f"{done}/{total}"
