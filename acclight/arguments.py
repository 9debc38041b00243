"""What the arguments of Trainer and of its methods may be: each mistake is one sentence, before anything is made."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch

from acclight.callback import Callback
from acclight.data.loader import check_limit
from acclight.datamodule import DataModule
from acclight.module import TrainModule

_LAUNCHER = (
    "the launcher decides on devices, processes and machines, as in `accelerate launch --num_processes 2 script.py` or "
    "`torchrun --nproc_per_node 2 script.py`; in a notebook, accelerate.notebook_launcher(function, num_processes=2)"
)
#: Arguments of Lightning's Trainer that have no counterpart -> what to do instead.
_ELSEWHERE = dict.fromkeys(("accelerator", "devices", "num_nodes", "num_processes", "gpus", "tpu_cores"), _LAUNCHER) | {
    "barebones": "give logger=False and False for each of enable_checkpointing, enable_progress_bar and enable_model_summary",
    "profiler": "use torch.profiler in a callback",
    "benchmark": "set torch.backends.cudnn.benchmark",
    "plugins": "give a strategy object from acclight.strategies, or a precision",
    "resume_from_checkpoint": "give fit(..., ckpt_path=...)",
    "use_distributed_sampler": "every loader is divided among the ranks, unless its sampler or dataset does that itself",
    "sync_batchnorm": "use torch.nn.SyncBatchNorm.convert_sync_batchnorm on the model",
    "weights_save_path": "give ModelCheckpoint(dirpath=...)",
}


def checked(init: Callable[..., None]) -> Callable[..., None]:
    """Makes an `__init__` refuse unknown arguments, naming the nearest known one, and values that cannot be used.

    What was given is kept as `given_arguments`, by name.
    """
    known = list(inspect.signature(init).parameters)[1:]

    @functools.wraps(init)
    def checking(self: Any, *args: Any, **kwargs: Any) -> None:
        for name, value in kwargs.items():
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
                hint = _ELSEWHERE.get(name) or (
                    f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known)}"
                )
                raise TypeError(f"Trainer has no argument {name!r}: {hint}")
            if name in _CHECKS:
                _CHECKS[name](name, value)
        self.given_arguments = kwargs
        init(self, *args, **kwargs)

    return checking


def _whole(least: int, *, none: bool = False) -> Callable[[str, Any], None]:
    def check(name: str, value: Any) -> None:
        if value is None and none:
            return
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name}={value!r}: give a whole number, {least} or more{' (-1: no limit)' * (least < 0)}")

    return check


def _choice(*known: Any) -> Callable[[str, Any], None]:
    def check(name: str, value: Any) -> None:
        if not any(value is one or (isinstance(one, str) and value == one) for one in known):
            raise ValueError(f"{name}={value!r}: use {' or '.join(map(repr, known))}")

    return check


def _clip_value(name: str, value: Any) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is not None and not (number and math.isfinite(value) and value >= 0):
        raise ValueError(f"{name}={value!r}: give a number, 0 (no clipping) or more")


def _validation_interval(name: str, value: Any) -> None:
    if isinstance(value, float) and 0.0 < value <= 1.0:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(
            f"{name}={value!r}: a float is a fraction of the epoch, above 0.0 and up to 1.0; an int counts optimizer steps, 1 "
            "or more"
        )


def _limit(name: str, value: Any) -> None:
    check_limit(value, name)


def _dry_run(name: str, value: Any) -> None:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{name}={value!r}: give True (one batch), False, or a number of batches")


def _folder(name: str, value: Any) -> None:
    if value is not None and not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name}={value!r}: give a path")


def _duration(name: str, value: Any) -> None:
    as_timedelta(value)


def _callbacks(name: str, value: Any) -> None:
    if value is None or isinstance(value, Callback):
        return
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise TypeError(f"{name}={value!r}: give an acclight.Callback object, or a list of them")
    for one in value:
        if isinstance(one, type):
            raise TypeError(f"{name} holds the class {one.__name__}: give an object, {one.__name__}(...)")
        if not isinstance(one, Callback):
            raise TypeError(f"{name} holds a {type(one).__name__}, which is no acclight.Callback")


_switch = _choice(True, False)
_CHECKS: dict[str, Callable[[str, Any], None]] = {
    "max_epochs": _whole(-1, none=True),
    "max_steps": _whole(-1),
    "max_time": _duration,
    "min_epochs": _whole(0, none=True),
    "min_steps": _whole(0, none=True),
    "accumulate_grad_batches": _whole(1),
    "gradient_clip_val": _clip_value,
    "gradient_clip_algorithm": _choice("norm", "value"),
    "callbacks": _callbacks,
    "log_every_n_steps": _whole(1),
    "val_check_interval": _validation_interval,
    "check_val_every_n_epoch": _whole(1, none=True),
    "num_sanity_val_steps": _whole(-1),
    **{f"limit_{stage}_batches": _limit for stage in ("train", "val", "test", "predict")},
    "overfit_batches": _limit,
    "reload_dataloaders_every_n_epochs": _whole(0),
    "fast_dev_run": _dry_run,
    "deterministic": _choice(True, False, "warn"),
    "detect_anomaly": _switch,
    "inference_mode": _switch,
    "default_root_dir": _folder,
    "enable_progress_bar": _switch,
    "enable_checkpointing": _switch,
    "enable_model_summary": _switch,
}


def as_timedelta(value: Any) -> timedelta | None:
    """`max_time` in whichever form it was given: a timedelta, its arguments, or the text "days:hours:minutes:seconds".

    Raises:
        ValueError: For anything else.
    """
    if value is None or isinstance(value, timedelta):
        return value
    try:
        if isinstance(value, Mapping):
            return timedelta(**value)
        days, hours, minutes, seconds = map(int, value.split(":"))
        return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    except (AttributeError, TypeError, ValueError):
        raise ValueError(
            f"max_time={value!r}: give a timedelta, its arguments as a dict such as {{'hours': 2}}, or '00:02:00:00' (days, "
            "hours, minutes, seconds)"
        ) from None


def check_module(method: str, module: Any) -> None:
    """Raises TypeError for what cannot be trained, and says what can."""
    if isinstance(module, type):
        raise TypeError(
            f"Trainer.{method} was given the class {module.__name__}: give an object, {module.__name__}(...)"
        )
    if not isinstance(module, TrainModule):
        raise TypeError(
            f"Trainer.{method} was given a {type(module).__name__} as its module: give a subclass of acclight.TrainModule"
        )
    if "_parameters" not in vars(module):
        raise TypeError(f"{type(module).__name__}.__init__ has to call super().__init__() first")


def check_loaders(method: str, argument: str, loaders: Any) -> None:
    """Raises TypeError for a tensor, an array or a text, whose rows or letters would be taken for batches."""
    if isinstance(loaders, (str, bytes)):
        raise TypeError(f"Trainer.{method}({argument}={loaders!r}): give a loader, such as a DataLoader, not a text")
    if isinstance(loaders, (torch.Tensor, np.ndarray)):
        raise TypeError(
            f"Trainer.{method}({argument}=...) was given a {type(loaders).__name__}: give a loader of it, such as "
            "DataLoader(TensorDataset(tensor), batch_size=32)"
        )


def loaders_and_datamodule(method: str, argument: str, loaders: Any, datamodule: Any) -> tuple[Any, DataModule | None]:
    """The loaders, and the DataModule also where it came in their place, as Lightning's users give it.

    Raises:
        TypeError: The datamodule is none, or the loaders are a tensor.
        ValueError: Both were given.
    """
    check_loaders(method, argument, loaders)
    if isinstance(loaders, DataModule) and datamodule is None:
        loaders, datamodule = None, loaders
    if datamodule is not None and not isinstance(datamodule, DataModule):
        raise TypeError(
            f"Trainer.{method}(datamodule=...) was given a {type(datamodule).__name__}: give a subclass of acclight.DataModule, "
            f"or {argument}= for loaders"
        )
    if loaders is not None and datamodule is not None:
        raise ValueError(f"{method} was given both {argument} and datamodule: give one of them")
    return loaders, datamodule


def check_ckpt_path(value: Any) -> None:
    """Raises TypeError or ValueError for what is no path of a checkpoint."""
    if value is not None and not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"ckpt_path={value!r}: give a checkpoint's folder, 'last', 'best' or 'auto'")
    if value == "":
        raise ValueError(
            "ckpt_path='' is empty: give a checkpoint's folder, 'last', 'best' or 'auto', or None for no checkpoint"
        )
