"""Throw-away forwards: a rank without data joins the others' collectives, and nothing of what its step does is kept."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from acclight.logging.torchmetric import MetricStates, metrics_in

if TYPE_CHECKING:
    from acclight.trainer import Trainer

# What torch and DeepSpeed (0.19) keep on a module themselves.
_NOT_THE_USERS = frozenset(vars(nn.Module())) | {"_original_parameters", "_external_params"}
_NOT_THE_USERS_EITHER = ("ds_", "_ds_", "applied_")


@contextmanager
def thrown_away(trainer: Trainer) -> Iterator[None]:
    """Afterwards the logged metrics, the torchmetrics objects and the plain attributes of the module are as before.

    Plain attributes are numbers, tensors, lists, dicts, sets and deques on the module itself: steps collect in them what the
    hook of the epoch's end works with.
    """
    module, metrics = trainer.module, trainer.metrics
    states = MetricStates(metrics_in(module))
    own = {name: value for name, value in (vars(module) | module._buffers).items() if _is_the_users(name)}
    before = {name: (value, _copy(value)) for name, value in own.items() if _is_plain(value)}
    metrics.muted = True
    try:
        yield
    finally:
        metrics.muted = False
        states.restore()
        for name, (value, copy) in before.items():
            _restore(value, copy)
            if name in vars(module):
                vars(module)[name] = value


def _is_the_users(name: str) -> bool:
    return name not in _NOT_THE_USERS and not name.startswith(_NOT_THE_USERS_EITHER)


def _is_plain(value: Any) -> bool:
    return type(value) in (int, float, torch.Tensor, list, dict, set, deque)


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return value if isinstance(value, (int, float)) else value.copy()


def _restore(value: Any, copy: Any) -> None:
    """Gives a tensor or a collection its contents back; it stays the same object, which others may hold too."""
    if isinstance(value, torch.Tensor):
        value.detach().copy_(copy)
    elif isinstance(value, (list, deque)):
        value.clear()
        value.extend(copy)
    elif not isinstance(value, (int, float)):
        value.clear()
        value.update(copy)
