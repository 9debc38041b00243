"""PlainProgress: progress as plain lines, for log files, pipes and terminals that cannot redraw."""

from __future__ import annotations

from acclight.callbacks.progress import Progress, Status


class PlainProgress(Progress):
    """Prints a line every so many seconds, and one per epoch and evaluation, to standard output on rank 0.

    Each line stands for itself: task, epoch, count and total, loss and metrics, speed and time left.

    Args:
        seconds: The least time between two lines. The first step has a line too, as a sign of life.
    """

    def __init__(self, seconds: float = 10.0) -> None:
        super().__init__(seconds)
        self._shown: tuple[str, int, str] | None = None

    def open(self) -> None:
        """Nothing is shown yet."""
        self._shown = None

    def draw(self, status: Status) -> None:
        """Prints a line."""
        self._shown = (status.task, status.done, status.metrics)
        epoch = status.epoch and f"epoch {status.epoch}"
        step = status.step and f"step {status.step}"
        count = f"{status.unit} {status.count}"
        parts = [status.task, epoch, step, count, status.metrics, status.speed, status.left]
        print(" | ".join(part for part in parts if part), flush=True)

    def milestone(self, status: Status) -> None:
        """Prints a line, unless the last one said the same; a sanity check that is soon over needs none."""
        if status.task != "sanity check" and self._shown != (status.task, status.done, status.metrics):
            self.draw(status)
