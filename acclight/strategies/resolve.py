"""Settles which strategy runs: what the script asks for, what the launcher has put into the environment, or neither."""

from __future__ import annotations

import difflib
import os
from typing import Any

from acclight.strategies.ddp import DDPStrategy
from acclight.strategies.deepspeed import DeepSpeedStrategy
from acclight.strategies.fsdp2 import FSDP2Strategy
from acclight.strategies.single import SingleDeviceStrategy
from acclight.strategies.strategy import Strategy

_NAMES: dict[str, Any] = {
    "single": SingleDeviceStrategy,
    "ddp": DDPStrategy,
    "fsdp2": FSDP2Strategy,
    "deepspeed_stage_1": lambda: DeepSpeedStrategy(stage=1),
    "deepspeed_stage_2": lambda: DeepSpeedStrategy(stage=2),
    "deepspeed_stage_3": lambda: DeepSpeedStrategy(stage=3),
}


def resolve_strategy(strategy: str | Strategy) -> Strategy:
    """The strategy object for what `Trainer(strategy=...)` was given, in the launch environment of this process.

    Raises:
        TypeError: For anything but a name or a Strategy.
        ValueError: For an unknown name, or when script and launcher name different kinds.
    """
    launch = launched_kind()
    if isinstance(strategy, Strategy):
        chosen = strategy
    elif not isinstance(strategy, str):
        raise TypeError(f"strategy={strategy!r}: give a name ({', '.join(['auto', *_NAMES])}) or a Strategy object")
    elif strategy == "auto":
        return _from_launch(launch)
    elif strategy in _NAMES:
        if launch == _NAMES_TO_KIND[strategy] and launch in ("fsdp2", "deepspeed"):
            chosen = _from_launch(launch)
            if chosen.name != strategy:
                raise ValueError(
                    f"strategy={strategy!r}, but the launcher set up {chosen.name!r}: change one of them, or use strategy='auto'"
                )
        else:
            chosen = _NAMES[strategy]()
    else:
        near = difflib.get_close_matches(strategy, ["auto", *_NAMES], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"strategy={strategy!r} is unknown{hint} Known are: {', '.join(['auto', *_NAMES])}")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if launch in ("fsdp2", "deepspeed") and chosen.kind != launch:
        raise ValueError(
            f"strategy={chosen.name!r}, but the launcher set up {launch!r}: change one of them, or use strategy='auto'"
        )
    if chosen.kind == "single" and world > 1:
        raise ValueError(
            f"strategy='single', but the launcher started {world} processes: start one, or use strategy='ddp'"
        )
    return chosen


_NAMES_TO_KIND = {name: name.partition("_stage")[0] for name in _NAMES}


def launched_kind() -> str | None:
    """The kind "fsdp2", "deepspeed" or "ddp" where a launcher says so (accelerate launch, torchrun); None for a plain start."""
    if _flag("ACCELERATE_USE_DEEPSPEED"):
        return "deepspeed"
    if _flag("ACCELERATE_USE_FSDP"):
        return "fsdp2"
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return "ddp"
    return None


def _from_launch(kind: str | None) -> Strategy:
    if kind == "deepspeed":
        return _launched_deepspeed()
    if kind == "fsdp2":
        return _launched_fsdp()
    return DDPStrategy() if kind == "ddp" else SingleDeviceStrategy()


def _launched_fsdp() -> FSDP2Strategy:
    if os.environ.get("FSDP_VERSION", "1") != "2":
        raise ValueError(
            "the launch file asks for FSDP version 1, which acclight does not run (its flat parameters cannot be saved by name): "
            "set fsdp_version: 2, or convert the file with `accelerate to-fsdp2`"
        )
    policy = os.environ.get("FSDP_AUTO_WRAP_POLICY", "TRANSFORMER_BASED_WRAP")
    layers = os.environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP")
    return FSDP2Strategy(
        reshard_after_forward=_flag("FSDP_RESHARD_AFTER_FORWARD", default=True),
        cpu_offload=_flag("FSDP_OFFLOAD_PARAMS"),
        auto_wrap_policy=policy,
        transformer_cls_names_to_wrap=layers.split(",") if layers else None,
        min_num_params=int(os.environ["FSDP_MIN_NUM_PARAMS"]) if "FSDP_MIN_NUM_PARAMS" in os.environ else None,
        activation_checkpointing=_flag("FSDP_ACTIVATION_CHECKPOINTING"),
        ignored_modules=os.environ.get("FSDP_IGNORED_MODULES"),
        state_dict_type=os.environ.get("FSDP_STATE_DICT_TYPE", "SHARDED_STATE_DICT"),
        cpu_ram_efficient_loading=_flag("FSDP_CPU_RAM_EFFICIENT_LOADING"),
    )


def _launched_deepspeed() -> DeepSpeedStrategy:
    def text(name: str) -> str | None:
        value = os.environ.get(f"ACCELERATE_DEEPSPEED_{name}")
        return None if value in (None, "none", "None", "") else value

    init = text("ZERO3_INIT")
    clip = os.environ.get("ACCELERATE_GRADIENT_CLIPPING", "auto")
    strategy = DeepSpeedStrategy(
        stage=int(text("ZERO_STAGE") or 2),
        offload_optimizer_device=text("OFFLOAD_OPTIMIZER_DEVICE") or "none",
        offload_param_device=text("OFFLOAD_PARAM_DEVICE") or "none",
        offload_optimizer_nvme_path=text("OFFLOAD_OPTIMIZER_NVME_PATH"),
        offload_param_nvme_path=text("OFFLOAD_PARAM_NVME_PATH"),
        zero3_init_flag=None if init is None else init.lower() == "true",
        zero3_save_16bit_model=_flag("ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL"),
        ds_config=text("CONFIG_FILE"),
    )
    if clip != "auto":
        strategy.configured_clip = float(clip)
    return strategy


def _flag(name: str, *, default: bool = False) -> bool:
    value = os.environ.get(name)
    return default if value is None else value.strip().lower() in ("1", "true", "yes", "on")
