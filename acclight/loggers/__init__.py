"""Where metrics and hyper-parameters go. Each logger is imported when it is first named."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from acclight.loggers.csv_logger import CSVLogger
    from acclight.loggers.logger import Logger, SilentLogger
    from acclight.loggers.tensorboard import TensorBoardLogger
    from acclight.loggers.tracker import TrackerLogger

__all__ = ["CSVLogger", "Logger", "SilentLogger", "TensorBoardLogger", "TrackerLogger"]

_MODULES = {
    "CSVLogger": "csv_logger",
    "Logger": "logger",
    "SilentLogger": "logger",
    "TensorBoardLogger": "tensorboard",
    "TrackerLogger": "tracker",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
