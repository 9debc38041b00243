"""Calls loggers so that one that fails does not end the training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any
from weakref import WeakSet

from acclight.loggers.logger import Logger
from acclight.messages import warn

#: Loggers whose failure has been told.
_told: WeakSet[Logger] = WeakSet()


def begin(loggers: Iterable[Logger], configuration: Mapping[str, Any], hparams: Mapping[str, Any]) -> None:
    """A fit begins: what is in force, and the hyper-parameters where there are some."""
    for one in loggers:
        _call(one, one.log_configuration, configuration)
        if hparams:
            _call(one, one.log_hyperparams, hparams)
        _call(one, one.save)


def write(loggers: Iterable[Logger], values: Mapping[str, float], step: int) -> None:
    """Gives every logger one row."""
    for one in loggers:
        _call(one, one.log_metrics, values, step)


def finish(loggers: Iterable[Logger], status: str) -> None:
    """Ends the run of every logger."""
    for one in loggers:
        _call(one, one.finalize, status)
        _told.discard(one)


def _call(logger: Logger, method: Callable[..., None], *args: Any) -> None:
    try:
        method(*args)
    except Exception as error:
        if logger not in _told:
            _told.add(logger)
            name = f"{type(logger).__name__} {logger.name!r}" if logger.name else type(logger).__name__
            told = f"{name} failed in {method.__name__} with {type(error).__name__}: {error}"
            warn(f"{told}; training goes on, and this is said once")
