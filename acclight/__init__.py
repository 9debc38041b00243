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

#: What users look for here, by Lightning's names or ours -> the line that imports it.
_ELSEWHERE = {
    "LightningModule": "from acclight import TrainModule",
    "LightningDataModule": "from acclight import DataModule",
    "TransformersModule": "from acclight.integrations.transformers import TransformersModule",
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
    if not name.startswith("_"):
        places = [place for place in ("callbacks", "loggers", "strategies") if name in _names_of(place)]
        line = f"from acclight.{places[0]} import {name}" if places else _ELSEWHERE.get(name)
        if line is not None:
            # Python would put a text of its own in the place of an AttributeError's.
            raise ImportError(f"acclight has no {name!r}: use `{line}`")
    raise AttributeError(f"module 'acclight' has no attribute {name!r}")


def _names_of(place: str) -> list[str]:
    names: list[str] = import_module(f"acclight.{place}").__all__
    return names


def __dir__() -> list[str]:
    return sorted(__all__)
