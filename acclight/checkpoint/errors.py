"""The one error of this package."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint cannot be written, read or trusted; the message names the file and what is wrong with it."""
