"""What `Trainer(parallelism=...)` means: Accelerate's ParallelismConfig, checked before anything is built from it."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping
from typing import Any

from accelerate import ParallelismConfig

from acclight.messages import info

_SIZES = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
_KNOWN = tuple(field.name for field in dataclasses.fields(ParallelismConfig))


def resolve_parallelism(
    given: ParallelismConfig | Mapping[str, Any] | None, *, strategy: str, world_size: int
) -> ParallelismConfig | None:
    """The configuration of the script; where it says nothing, the launcher's; None where neither does.

    Args:
        given: As the Trainer was given it.
        strategy: The strategy's name.
        world_size: Number of processes.

    Raises:
        TypeError: For anything but a ParallelismConfig, a dict or None.
        ValueError: For an unknown field, sizes whose product is not the number of processes, or a strategy or kind of
            parallelism that cannot be.
    """
    launched = os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true"
    if given is None:
        if not launched:
            return None
        config = ParallelismConfig()
    elif isinstance(given, Mapping):
        config = _from_fields(given)
    elif isinstance(given, ParallelismConfig):
        config = given
    else:
        raise TypeError(
            f"parallelism is a {type(given).__name__}: give accelerate's ParallelismConfig or a dict of its fields"
        )
    if given is not None and launched and _sizes(config) != _sizes(ParallelismConfig()):
        info(f"parallelism {_sizes(config)} of the script wins over {_sizes(ParallelismConfig())} of the launcher")
    sizes = {name: getattr(config, name) for name in _SIZES}
    if strategy != "fsdp2":
        raise ValueError(
            f"parallelism ({_sizes(config)}) cannot be used with the strategy {strategy!r}: use strategy='fsdp2', which shards "
            "over the mesh that it describes"
        )
    if config.sp_size > 1:
        raise ValueError(
            f"parallelism: sp_size={config.sp_size} is DeepSpeed's sequence parallelism, which acclight does not run; use cp_size"
        )
    if config.total_size != world_size:
        product = " x ".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "all sizes are 1"
        raise ValueError(
            f"parallelism: {product} makes {config.total_size}, but there are {world_size} processes; the product must be "
            f"{world_size}"
        )
    if world_size > 1 and not (config.dp_shard_enabled or config.cp_enabled):
        raise ValueError(
            f"parallelism ({_sizes(config)}) leaves FSDP2 nothing to shard over: give dp_shard_size (or cp_size) above 1, or use "
            "the strategy 'ddp' without parallelism"
        )
    return config if world_size > 1 else None


def _from_fields(fields: Mapping[str, Any]) -> ParallelismConfig:
    for name in fields:
        if name not in _KNOWN:
            near = difflib.get_close_matches(str(name), _KNOWN, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; it takes {', '.join(_KNOWN)}"
            raise ValueError(f"parallelism has no field {name!r}{hint}")
    for name in _SIZES:
        size = fields.get(name, 1)
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"parallelism: {name}={size!r}: give a whole number, 1 or more")
    # What the script does not say is 1, whatever a launcher has put into the environment.
    return ParallelismConfig(**(dict.fromkeys(_SIZES, 1) | dict(fields)))


def _sizes(config: ParallelismConfig) -> str:
    return ", ".join(f"{name}={getattr(config, name)}" for name in _SIZES if getattr(config, name) > 1) or "no sizes"
