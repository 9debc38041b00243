"""What acclight says to the person who runs it: plain lines on standard error, once, from rank 0."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_utilities.core.rank_zero import rank_zero_only

#: acclight and what may stand between two of its own frames, or between it and the user's.
_BETWEEN = ("acclight", "accelerate", "contextlib", "functools", "importlib", "torch")

_logger = logging.getLogger("acclight")
if _logger.level == logging.NOTSET:
    _logger.setLevel(logging.INFO)


def info(text: str) -> None:
    """Says something on rank 0, through the logger "acclight"; shown unless the program has set that logger otherwise."""
    if _rank() != 0:
        return
    if not _logger.hasHandlers():
        # A program without any logging set-up would see nothing below a warning.
        _logger.addHandler(logging.StreamHandler())
    _logger.info(text)


def warn(text: str) -> None:
    """Warns on rank 0, at the user's line."""
    if _rank() == 0:
        warnings.warn(text, stacklevel=_users_level())


@contextmanager
def quiet() -> Iterator[None]:
    """While it lasts nothing is said; for trials, whose lines and warnings come again when it counts."""
    level = _logger.level
    _logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        _logger.setLevel(level)


def _users_level() -> int:
    """The stack level, for `warn`, of the nearest line that is not acclight's own; Python 3.11 has no skip_file_prefixes."""
    frame, level = sys._getframe(2), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame = frame.f_back
        # As warnings does when it counts levels.
        level += "importlib" not in frame.f_code.co_filename or "_bootstrap" not in frame.f_code.co_filename
    return level


def _rank() -> int:
    if getattr(rank_zero_only, "rank", None) is None:
        # Before the first Trainer: a strategy that is being made, say.
        vars(rank_zero_only)["rank"] = int(os.environ.get("RANK", "0"))
    return int(vars(rank_zero_only)["rank"])
