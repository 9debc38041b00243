"""Sharding weights that rank 0 alone has: every rank's copy of rank 0's, or none before the shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


def copy_from_first_rank(module: nn.Module) -> None:
    """Gives every rank rank 0's weights: `fully_shard` cuts what it finds, and ranks that were not seeded alike differ."""
    _broadcast(module, parameters=True)


@contextmanager
def loaded_by_first_rank(module: nn.Module) -> Iterator[None]:
    """Lets Accelerate shard a model whose weights rank 0 alone has, while the context lasts.

    Accelerate 1.15 goes over the meta device, which unties shared parameters, and tears down persistent buffers, which have no
    shards. `tests/test_strategies.py` checks both.
    """
    module.tie_weights = knot(module)  # type: ignore[assignment]  # Accelerate calls it where ties are torn
    persistent = [
        (part, name)
        for part in module.modules()
        for name in part._buffers
        if name not in part._non_persistent_buffers_set
    ]
    for part, name in persistent:
        part._non_persistent_buffers_set.add(name)
    # A norm that tracks puts the count of an old checkpoint into what is loaded, where nothing takes it.
    tracking: list[Any] = [part for part in module.modules() if getattr(part, "track_running_stats", False)]
    for part in tracking:
        part.track_running_stats = False
    try:
        yield
    finally:
        for part in tracking:
            part.track_running_stats = True
        for part, name in persistent:
            part._non_persistent_buffers_set.discard(name)
        del module.tie_weights
    _broadcast(module, parameters=False)


def knot(module: nn.Module) -> Callable[[], None]:
    """A function that makes the names which share a parameter now share one again."""
    kept: dict[int, str] = {}
    ties = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        first = kept.setdefault(id(parameter), name)
        if first != name:
            ties.append((name, first))

    def tie() -> None:
        for name, first in ties:
            owner, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner), attribute, module.get_parameter(first))

    return tie


def _broadcast(module: nn.Module, *, parameters: bool) -> None:
    if dist.get_world_size() == 1:
        return
    for tensor in (*(module.parameters() if parameters else ()), *module.buffers()):
        if not isinstance(tensor, DTensor) and not tensor.is_meta:
            dist.broadcast(tensor.detach(), src=0)
