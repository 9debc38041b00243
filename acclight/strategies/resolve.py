"""Settles which strategy runs: what the script asks for, what the launcher has put into the environment, or neither."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Any

from accelerate.state import AcceleratorState

from acclight import strategies
from acclight.messages import info
from acclight.strategies.ds_config import read as read_ds_config
from acclight.strategies.fields import as_flag
from acclight.strategies.launch_file import warn_of_dropped_offload
from acclight.strategies.strategy import Strategy

_CLASSES = {
    "single": "SingleDeviceStrategy",
    "ddp": "DDPStrategy",
    "fsdp2": "FSDP2Strategy",
    "deepspeed": "DeepSpeedStrategy",
}
_NAMES: dict[str, tuple[str, dict[str, Any]]] = {
    "single": ("single", {}),
    "ddp": ("ddp", {}),
    "fsdp2": ("fsdp2", {}),
    **{f"deepspeed_stage_{stage}": ("deepspeed", {"stage": stage}) for stage in (1, 2, 3)},
}


def _class_of(kind: str) -> type[Strategy]:
    """Imported only now: a run needs one of them."""
    return getattr(strategies, _CLASSES[kind])  # type: ignore[no-any-return]


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
        kind, fields = _NAMES[strategy]
        if launch == kind and launch in ("fsdp2", "deepspeed"):
            chosen = _from_launch(launch)
            if chosen.name != strategy:
                raise ValueError(
                    f"strategy={strategy!r}, but the launcher set up {chosen.name!r}: change one of them, or use strategy='auto'"
                )
        else:
            chosen = _class_of(kind)(**fields)
    else:
        near = difflib.get_close_matches(strategy, ["auto", *_NAMES], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"strategy={strategy!r} is unknown{hint} Known are: {', '.join(['auto', *_NAMES])}")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if launch in ("fsdp2", "deepspeed") and chosen.kind != launch:
        raise ValueError(
            f"strategy={chosen.name!r}, but the launcher set up {launch!r}: change one of them, or use strategy='auto'"
        )
    if isinstance(strategy, Strategy) and launch in ("fsdp2", "deepspeed"):
        _complete_from_launch(strategy)
    if chosen.kind == "single" and world > 1:
        raise ValueError(
            f"strategy='single', but the launcher started {world} processes: start one, or use strategy='ddp'"
        )
    return chosen


def launched_kind() -> str | None:
    """The kind "fsdp2", "deepspeed" or "ddp" where a launcher says so (accelerate launch, torchrun); None for a plain start."""
    if _flag("ACCELERATE_USE_DEEPSPEED") and not _made_by_hand("DEEPSPEED", "ACCELERATE_DEEPSPEED_ZERO_STAGE"):
        return "deepspeed"
    if _flag("ACCELERATE_USE_FSDP") and not _made_by_hand("FSDP", "FSDP_VERSION"):
        return "fsdp2"
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return "ddp"
    return None


def launched_accumulation() -> int:
    """The accumulation that a launcher asks for; 1 where it does not."""
    asked = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    return int(asked) if asked.isdigit() else 1


def _made_by_hand(kind: str, launchers: str) -> bool:
    """An Accelerator of the script's own has announced this kind, by the variable that a launcher uses.

    Args:
        kind: Accelerate's DistributedType.
        launchers: What a launcher sets besides.
    """
    made = AcceleratorState._shared_state.get("distributed_type")
    return launchers not in os.environ and made is not None and made.value == kind


def _from_launch(kind: str | None) -> Strategy:
    if kind == "fsdp2":
        fields = _launched_fsdp()
        warn_of_dropped_offload(bool(fields.get("cpu_offload")))
        strategy = _class_of(kind)(**fields)
    elif kind == "deepspeed":
        strategy = _with_launched_clip(_class_of(kind)(**_launched_deepspeed()))
    else:
        return _class_of(kind or "single")()
    strategy.field_sources = dict.fromkeys(strategy.given_fields, "launcher")
    return strategy


def _complete_from_launch(strategy: Strategy) -> None:
    """Gives a script's strategy the launcher's fields where the script says nothing; where both do, the script wins."""
    launched = _launched_fsdp() if strategy.kind == "fsdp2" else _launched_deepspeed()
    launched.pop("version", None)
    given = dict(strategy.given_fields)
    if strategy.kind == "deepspeed":
        launched = _beside_ds_config(launched, given)
    if strategy.kind == "fsdp2":
        warn_of_dropped_offload(bool(launched.get("cpu_offload")) or "cpu_offload" in given)
    for name in given.keys() & launched.keys():
        if given[name] != launched[name]:
            info(f"{name}={given[name]!r} of the script's strategy wins over {launched[name]!r} of the launcher")
    if type(strategy) is _class_of(strategy.kind):
        sources = {**dict.fromkeys(launched, "launcher"), **strategy.field_sources}
        type(strategy).__init__(strategy, **{**launched, **given})
        strategy.field_sources = sources
    _with_launched_clip(strategy)


def _beside_ds_config(launched: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What the launcher says of DeepSpeed where a script's ds_config does not; a line says where that wins."""
    own = read_ds_config(given.get("ds_config"))
    stage = own.get("zero_optimization", {}).get("stage", "auto")
    if stage != "auto" and launched.get("stage", stage) != stage:
        info(
            f"ds_config zero_optimization.stage={stage} of the script wins over stage={launched['stage']} of the launcher"
        )
    clip, launched_clip = own.get("gradient_clipping", "auto"), os.environ.get("ACCELERATE_GRADIENT_CLIPPING", "auto")
    if "auto" not in (clip, launched_clip) and float(clip) != float(launched_clip):
        info(
            f"ds_config gradient_clipping={clip} of the script wins over gradient_clipping={launched_clip} of the launcher"
        )
    return {name: value for name, value in launched.items() if name != "stage" or stage == "auto"}


def _with_launched_clip(strategy: Strategy) -> Strategy:
    clip = os.environ.get("ACCELERATE_GRADIENT_CLIPPING", "auto")
    if strategy.kind == "deepspeed" and strategy.configured_clip is None and clip != "auto":
        strategy.configured_clip, strategy.clip_source = float(clip), "launcher"
    return strategy


def _launched_fsdp() -> dict[str, Any]:
    """The fields of FSDP2Strategy that the launcher has put into the environment."""
    fields: dict[str, Any] = {
        "version": int(os.environ.get("FSDP_VERSION", "1")),
        "reshard_after_forward": _flag("FSDP_RESHARD_AFTER_FORWARD"),
        "cpu_offload": _flag("FSDP_OFFLOAD_PARAMS"),
        "auto_wrap_policy": os.environ.get("FSDP_AUTO_WRAP_POLICY"),
        "transformer_cls_names_to_wrap": os.environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP"),
        "activation_checkpointing": _flag("FSDP_ACTIVATION_CHECKPOINTING"),
        "activation_checkpointing_offload": _flag("FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD"),
        "ignored_modules": os.environ.get("FSDP_IGNORED_MODULES"),
        "state_dict_type": os.environ.get("FSDP_STATE_DICT_TYPE"),
        "cpu_ram_efficient_loading": _flag("FSDP_CPU_RAM_EFFICIENT_LOADING"),
    }
    if (fields["auto_wrap_policy"] or "").upper() == "SIZE_BASED_WRAP":
        # The launcher always gives a number, which means nothing under another policy.
        fields["min_num_params"] = int(os.environ.get("FSDP_MIN_NUM_PARAMS", "0"))
    return {name: value for name, value in fields.items() if value is not None}


def _launched_deepspeed() -> dict[str, Any]:
    """The fields of DeepSpeedStrategy that the launcher has put into the environment."""

    def text(name: str) -> str | None:
        value = os.environ.get(f"ACCELERATE_DEEPSPEED_{name}")
        return None if value in (None, "none", "None", "") else value

    stage = text("ZERO_STAGE")
    fields: dict[str, Any] = {
        "stage": None if stage is None else int(stage),
        "offload_optimizer_device": text("OFFLOAD_OPTIMIZER_DEVICE"),
        "offload_param_device": text("OFFLOAD_PARAM_DEVICE"),
        "offload_optimizer_nvme_path": text("OFFLOAD_OPTIMIZER_NVME_PATH"),
        "offload_param_nvme_path": text("OFFLOAD_PARAM_NVME_PATH"),
        "zero3_init_flag": _flag("ACCELERATE_DEEPSPEED_ZERO3_INIT"),
        "zero3_save_16bit_model": _flag("ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL"),
        "transformer_moe_cls_names": text("MOE_LAYER_CLS_NAMES"),
        "ds_config": text("CONFIG_FILE"),
    }
    if "stage" in read_ds_config(fields["ds_config"]).get("zero_optimization", {}):
        fields["stage"] = None  # the file's
    return {name: value for name, value in fields.items() if value is not None}


def _flag(name: str) -> bool | None:
    value = os.environ.get(name)
    if value is None:
        return None
    flag = as_flag(value)
    if flag is None:
        old = " (a sharding strategy of FSDP 1)" if name == "FSDP_RESHARD_AFTER_FORWARD" else ""
        raise ValueError(f"the launcher has set {name}={value!r}{old}: give true or false")
    return flag
