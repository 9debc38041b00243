"""What acclight says to the person who runs it: plain lines on standard error, once, from rank 0."""

from __future__ import annotations

import logging
import os

from lightning_utilities.core.rank_zero import rank_zero_only, rank_zero_warn

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
    """Warns on rank 0."""
    _rank()
    rank_zero_warn(text, stacklevel=4)


def _rank() -> int:
    if getattr(rank_zero_only, "rank", None) is None:
        # Before the first Trainer: a strategy that is being made, say.
        vars(rank_zero_only)["rank"] = int(os.environ.get("RANK", "0"))
    return int(vars(rank_zero_only)["rank"])
