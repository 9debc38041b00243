"""Methods whose names miss a hook's by a letter: nobody would ever call them."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any
from weakref import WeakSet

from acclight.callback import HOOKS, MODULE_HOOKS, Callback
from acclight.datamodule import DataModule
from acclight.messages import warn

_LOADERS = tuple(f"{stage}_dataloader" for stage in ("train", "val", "test", "predict"))
_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_OF_MODULE = (
    *(f"{stage}_step" for stage in ("training", "validation", "test", "predict")),
    *(f"configure_{part}" for part in ("model", "optimizers", "callbacks")),
    *("prepare_data", "count_items", "lr_scheduler_step"), *_LOADERS, *_TRANSFERS, *HOOKS, *MODULE_HOOKS,
)  # fmt: skip
_OF_DATAMODULE = ("prepare_data", "setup", "teardown", *_LOADERS, *_TRANSFERS)

#: Classes that have been looked at.
_seen: WeakSet[type] = WeakSet()


def warn_of_misspelt(owners: Iterable[Any]) -> None:
    """Warns of each method of the user's own classes that is no hook but nearly one, once for each class.

    A method is left out that is meant otherwise: one that begins or ends with "_" or ends with a digit, that stands beside
    the hook in the same class, or that another method of the object uses.

    Args:
        owners: Modules, callbacks and datamodules.
    """
    for owner in owners:
        if type(owner) in _seen:
            continue
        _seen.add(type(owner))
        hooks = (
            HOOKS if isinstance(owner, Callback) else _OF_DATAMODULE if isinstance(owner, DataModule) else _OF_MODULE
        )
        for cls, name, hook in _misspelt(type(owner), hooks):
            warn(f"{cls.__name__}.{name} is no hook and will not be called: did you mean {hook}?")


def _misspelt(kind: type, hooks: tuple[str, ...]) -> Iterator[tuple[type, str, str]]:
    """Class, method and nearest hook."""
    own = [cls for cls in kind.__mro__ if cls.__module__.partition(".")[0] not in ("acclight", "torch", "builtins")]
    methods = [(cls, name, value) for cls in own for name, value in vars(cls).items() if inspect.isfunction(value)]
    inherited = {name for cls in kind.__mro__ if cls not in own for name in vars(cls)}
    used = {name for *_, value in methods for name in _names_in(value.__code__)}
    for cls, name, _ in methods:
        if name in hooks or name in inherited or name in used or name.strip("_0123456789") != name:
            continue
        for hook in difflib.get_close_matches(name, hooks, n=1, cutoff=0.9):
            if hook not in vars(cls):
                yield cls, name, hook


def _names_in(code: CodeType) -> Iterator[str]:
    """The attributes and global names that a function uses, with those inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
