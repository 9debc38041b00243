"""What `Trainer(logger=...)` may be given, and the loggers that it stands for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acclight.loggers.logger import Logger

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

Choice = bool | str | Logger | None


def make_loggers(given: Choice | GeneralTracker | Sequence[str | Logger | GeneralTracker], root: Path) -> list[Logger]:
    """The loggers that the Trainer writes to.

    Args:
        given: True or None for TensorBoard and CSV files, False for none, a logger, the name of one, or several of these.
        root: The Trainer's default_root_dir, for loggers that are made here.

    Raises:
        TypeError: For anything else.
        ValueError: For an unknown name.
        ImportError: For a tracker whose package is not installed.
    """
    if given is False:
        return []
    if given is None or given is True:
        given = ["tensorboard", "csv"]
    chosen: list[Any] = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    return [_make(one, root) for one in chosen]


def _make(one: Any, root: Path) -> Logger:
    if isinstance(one, Logger):
        if getattr(one, "root", root) is None:
            one.root = root  # type: ignore[attr-defined]  # a TrackerLogger that was not told
        return one
    if one == "tensorboard":
        # acclight's own has a folder for each run, and one entry per run in the hparams tab.
        from acclight.loggers.tensorboard import TensorBoardLogger

        return TensorBoardLogger(root)
    if one == "csv":
        from acclight.loggers.csv_logger import CSVLogger

        return CSVLogger(root)
    from accelerate.tracking import GeneralTracker

    if not isinstance(one, str | GeneralTracker):
        raise TypeError(
            f"logger={one!r}: give True, False, a logger, the name of one (such as 'wandb'), or a list of loggers and names"
        )
    from acclight.loggers.tracker import TrackerLogger

    made = TrackerLogger(one)
    made.root = root
    return made
