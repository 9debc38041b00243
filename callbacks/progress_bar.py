"""RichProgressBar: a live display in the terminal, redrawn in place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from acclight.callbacks.progress import Progress, Status

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.progress import TaskID


class RichProgressBar(Progress):
    """Shows a bar for the training and, below it, one for the evaluation that runs; the metrics have their own line.

    What the program prints meanwhile appears above.

    Args:
        seconds: The least time between two redraws.
        console: Where to draw. Default: standard output.
    """

    def __init__(self, seconds: float = 0.1, console: Console | None = None) -> None:
        super().__init__(seconds)
        self._console = console
        self._live: Live | None = None

    def open(self) -> None:
        """Starts the live display."""
        from rich.console import Console
        from rich.live import Live
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bars

        # Redrawn by the steps themselves: a thread would take time from them, and could hold a lock while workers fork.
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[text]}"),
            auto_refresh=False,
            expand=True,
        )
        self._tasks: dict[str, TaskID] = {}
        self._metrics = ""
        self._live = Live(get_renderable=self._render, console=self._console or Console(), auto_refresh=False)
        self._live.start()

    def draw(self, status: Status) -> None:
        """Redraws."""
        if self._live is None:
            return
        if status.task not in self._tasks:
            self._tasks[status.task] = self._bars.add_task("", text="")
        description = f"{status.task} epoch {status.epoch}" if status.task == "train" else status.task
        text = "  ".join(part for part in (status.count, status.speed, status.left) if part)
        self._bars.update(
            self._tasks[status.task], description=description, total=status.total, completed=status.done, text=text
        )
        self._metrics = status.metrics
        self._live.refresh()

    def milestone(self, status: Status) -> None:
        """Redraws, and takes away the bar of an evaluation within a training, and all of a sanity check."""
        self.draw(status)
        if self._live is not None:
            self._live.transient = status.task == "sanity check"
        if status.task != "train" and status.epoch:
            self._bars.remove_task(self._tasks.pop(status.task))

    def close(self) -> None:
        """Ends the live display; its last state stays on the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _render(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        return Group(self._bars, Text(self._metrics)) if self._metrics else self._bars
