"""Ready-made callbacks. Each is imported when it is first named."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from acclight.callbacks.batch_size_finder import BatchSizeFinder
    from acclight.callbacks.early_stopping import EarlyStopping
    from acclight.callbacks.learning_rate_monitor import LearningRateMonitor
    from acclight.callbacks.model_checkpoint import ModelCheckpoint
    from acclight.callbacks.model_summary import ModelSummary
    from acclight.callbacks.on_exception_checkpoint import OnExceptionCheckpoint
    from acclight.callbacks.prediction_writer import BasePredictionWriter
    from acclight.callbacks.progress import Progress, default_progress
    from acclight.callbacks.progress_bar import RichProgressBar
    from acclight.callbacks.progress_lines import PlainProgress
    from acclight.callbacks.throughput_monitor import ThroughputMonitor
    from acclight.callbacks.weight_averaging import EMAWeightAveraging, WeightAveraging

__all__ = [
    "BasePredictionWriter",
    "BatchSizeFinder",
    "EMAWeightAveraging",
    "EarlyStopping",
    "LearningRateMonitor",
    "ModelCheckpoint",
    "ModelSummary",
    "OnExceptionCheckpoint",
    "PlainProgress",
    "Progress",
    "RichProgressBar",
    "ThroughputMonitor",
    "WeightAveraging",
    "default_progress",
]

_MODULES = {
    "BasePredictionWriter": "prediction_writer",
    "BatchSizeFinder": "batch_size_finder",
    "EMAWeightAveraging": "weight_averaging",
    "EarlyStopping": "early_stopping",
    "LearningRateMonitor": "learning_rate_monitor",
    "ModelCheckpoint": "model_checkpoint",
    "ModelSummary": "model_summary",
    "OnExceptionCheckpoint": "on_exception_checkpoint",
    "PlainProgress": "progress_lines",
    "Progress": "progress",
    "RichProgressBar": "progress_bar",
    "ThroughputMonitor": "throughput_monitor",
    "WeightAveraging": "weight_averaging",
    "default_progress": "progress",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
