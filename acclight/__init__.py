"""acclight: write a model once, train it on one CPU, one GPU or many machines. The public names."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from acclight.accelerate_version import check_accelerate

if TYPE_CHECKING:
    from acclight import checkpoint
    from acclight.callback import Callback
    from acclight.datamodule import DataModule
    from acclight.module import LossSum, TrainModule
    from acclight.seed import seed_everything
    from acclight.trainer import Trainer

__all__ = ["Callback", "DataModule", "LossSum", "TrainModule", "Trainer", "checkpoint", "seed_everything"]

check_accelerate()

_PLACES = {
    "Callback": "callback",
    "DataModule": "datamodule",
    "LossSum": "module",
    "TrainModule": "module",
    "Trainer": "trainer",
    "seed_everything": "seed",
}


def __getattr__(name: str) -> Any:
    if name == "checkpoint":
        return import_module("acclight.checkpoint")
    if name == "__version__":
        try:
            return version("acclight")
        except PackageNotFoundError:
            return "0+unknown"
    if name in _PLACES:
        return getattr(import_module(f"acclight.{_PLACES[name]}"), name)
    raise AttributeError(f"module 'acclight' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
