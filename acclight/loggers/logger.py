"""Logger: what the trainer asks of every logger, and the run folder that the loggers on disk share."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from enum import Enum
from os import PathLike
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_only


class Logger:
    """Base class of all loggers.

    Only global rank 0 writes. The trainer calls the methods there alone, and the loggers of this package do nothing
    when they are called on another rank, so that user code needs no rank check.

    Attributes:
        name: Of the experiment; the folder of its runs. May be empty.
        version: Of this run. None until it is decided: by the trainer, which gives every rank the `next_version()` of
            rank 0, or by the first use.
    """

    name: str = ""
    version: int | str | None = None

    @property
    def log_dir(self) -> Path | None:
        """The folder of this run; None for a logger that writes no files."""
        return None

    @property
    def experiment(self) -> Any:
        """The raw writer, for what the methods here do not cover; on ranks other than 0 it ignores all calls."""
        raise NotImplementedError(f"{type(self).__name__} does not define `experiment`")

    def next_version(self) -> int | str | None:
        """The version that a new run would get. Creates nothing."""
        return None

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Writes metrics.

        Args:
            metrics: Values by name; floats, ints, or tensors with one element.
            step: The x axis: the number of optimizer steps done.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define `log_metrics`")

    def log_hyperparams(self, params: Mapping[str, Any] | Namespace) -> None:
        """Writes hyper-parameters; nested mappings are fine, and what is no plain value is written as text."""

    def log_configuration(self, configuration: Mapping[str, Any]) -> None:
        """Writes what is in force when a fit begins: strategy, processes, precision, batch sizes and so on, as plain values."""

    def save(self) -> None:
        """Makes sure that what was logged is on disk."""

    def finalize(self, status: str) -> None:
        """Ends a run. A later call of another method opens the run again.

        Args:
            status: "success", "failed" or "interrupted".
        """
        self.save()

    @property
    def state_key(self) -> str:
        """What tells this logger's state in a checkpoint from the others'."""
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """What a resumed fit needs to go on with this run, as plain values; empty where the arguments say it."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what `state_dict` gave, before anything is written."""


class RunFolderLogger(Logger):
    """Base class of the loggers that write into `save_dir/name/version`.

    Args:
        save_dir: The folder of all experiments.
        name: Of the experiment. An empty name leaves this level of folders out.
        version: A number n stands for the folder `version_n`, a string for the folder of that name. A run that is there
            already is continued. None: that of the run which a fit resumes, where it lies in the same folder, else the
            first number after those that are taken.
    """

    def __init__(
        self, save_dir: str | PathLike[str], name: str = "acclight_logs", version: int | str | None = None
    ) -> None:
        self.save_dir = Path(save_dir)
        self.name = name
        self.version = version
        self._version_was_given = version is not None

    @property
    def log_dir(self) -> Path:
        """The folder of this run. Reading it decides the version where that is still open."""
        if self.version is None:
            self.version = self.next_version()
        folder = f"version_{self.version}" if isinstance(self.version, int) else self.version
        return self.save_dir / self.name / folder

    @property
    def state_key(self) -> str:
        """With the folder of the experiment: a run that lies elsewhere is another one."""
        return f"{type(self).__qualname__}({(self.save_dir / self.name).resolve()})"

    def state_dict(self) -> dict[str, Any]:
        return {"version": self.version}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not self._version_was_given and state["version"] != self.version:
            self.finalize("interrupted")
            self.version = state["version"]

    def next_version(self) -> int:
        """One more than the highest `version_<n>` that is there."""
        folder = self.save_dir / self.name
        names = [entry.name for entry in folder.iterdir() if entry.is_dir()] if folder.is_dir() else []
        taken = [int(found[1]) for name in names if (found := re.fullmatch(r"version_(\d+)", name))]
        return max(taken, default=-1) + 1


class SilentLogger(Logger):
    """Takes every call, also of methods that other loggers have, and does nothing: for runs that only try things out."""

    @property
    def experiment(self) -> Any:
        return IgnoreCalls()

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return IgnoreCalls._ignore


class IgnoreCalls:
    """Stands in for the raw writer on ranks that do not write: any method may be called, and nothing happens."""

    def __getattr__(self, name: str) -> Any:
        return self._ignore

    @staticmethod
    def _ignore(*args: Any, **kwargs: Any) -> None:
        return None


def writes_here() -> bool:
    """Whether this process is the one that writes: global rank 0, or one without a trainer."""
    return getattr(rank_zero_only, "rank", None) in (0, None)


def as_number(name: str, value: Any) -> int | float:
    """A metric's value as a plain number, unrounded.

    Raises:
        TypeError: When it is no single number.
    """
    try:
        # NumPy's scalars and tensors have an item(), which is a plain number or says that there are several.
        number = value.item() if hasattr(value, "item") else value
    except (ValueError, RuntimeError):
        number = None
    if not isinstance(number, int | float):
        raise TypeError(f"metric {name!r} is {value!r}; a logger takes one number per metric")
    return number


def plain(value: Any) -> Any:
    """A hyper-parameter as something that JSON holds: paths, enums, types and other objects become text."""
    if isinstance(value, Enum):
        return plain(value.value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Namespace):
        return plain(vars(value))
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(entry) for entry in value), key=str)
    if isinstance(value, PathLike):
        return str(value)
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return f"{value.__module__}.{value.__qualname__}"
    # A NumPy scalar or a tensor with one element; a bigger one is text.
    if getattr(value, "size", None) == 1 or getattr(value, "numel", lambda: 0)() == 1:
        return plain(value.item())
    return str(value)


def flat(params: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, bool | int | float | str]]:
    """Plain hyper-parameters as (name, value) with "/" between the levels; lists and None become text."""
    for key, value in params.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value if isinstance(value, bool | int | float | str) else str(value)
