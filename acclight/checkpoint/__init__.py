"""Checkpoints: written by all ranks, committed atomically, read back under any strategy and world size; no pickle."""

from acclight.checkpoint.errors import CheckpointError
from acclight.checkpoint.export import export, load_weights, read_trainer
from acclight.checkpoint.format import latest, prune, remove, verify
from acclight.checkpoint.reader import Reader
from acclight.checkpoint.writer import write

__all__ = [
    "CheckpointError",
    "Reader",
    "export",
    "latest",
    "load_weights",
    "prune",
    "read_trainer",
    "remove",
    "verify",
    "write",
]
