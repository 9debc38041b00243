"""FSDP on TPUs: torch_xla's XlaFullyShardedDataParallel, which does the work of `fully_shard` there."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import nn


def check_xla() -> None:
    """Raises ImportError where torch_xla is not installed."""
    if importlib.util.find_spec("torch_xla") is None:
        raise ImportError(
            "FSDP2Strategy(xla=True) needs torch_xla, which is not installed: `pip install torch_xla`, or leave out xla"
        )


def shard(module: nn.Module, units: Sequence[nn.Module], settings: Mapping[str, Any], *, grad_ckpt: bool) -> nn.Module:
    """Wraps a module, and the units in it, in XlaFullyShardedDataParallel.

    Args:
        module: What becomes the root.
        units: The parts that are gathered and freed by themselves.
        settings: Arguments of XlaFullyShardedDataParallel; types may be given by name.
        grad_ckpt: Recompute each unit's activations in the backward.
    """
    fsdp: Any = import_module("torch_xla.distributed.fsdp")
    chosen = {id(unit) for unit in units}
    arguments = dict(settings)
    for name in ("compute_dtype", "buffer_dtype"):
        if isinstance(arguments.get(name), str):
            arguments[name] = getattr(torch, arguments[name].removeprefix("torch."))

    def policy(part: nn.Module, recurse: bool, *unused: Any, **kwargs: Any) -> bool:
        return recurse or id(part) in chosen

    def wrap(part: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        inner = fsdp.checkpoint_module(part) if grad_ckpt else part
        return fsdp.XlaFullyShardedDataParallel(inner, *args, **kwargs)  # type: ignore[no-any-return]

    wrapped: nn.Module = fsdp.XlaFullyShardedDataParallel(
        module, auto_wrap_policy=policy, auto_wrapper_callable=wrap, **arguments
    )
    return wrapped
