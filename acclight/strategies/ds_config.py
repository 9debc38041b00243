"""The DeepSpeed configuration: the user's, completed by what the Trainer says; plain dictionaries, without DeepSpeed."""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from acclight.strategies.precision import Precision

#: Sections of DeepSpeed's own 16-bit modes, their type, and the Trainer's name for the precision.
_MODES = {"bf16": (torch.bfloat16, "bf16-mixed"), "fp16": (torch.float16, "16-mixed")}
#: DeepSpeed 0.19 ignores a top-level key that it does not know. One of another version's is left to it, unless it looks like one
#: of these.
_KEYS = (
    "activation_checkpointing", "aio", "amp", "autotuning", "bf16", "checkpoint", "comet", "comms_logger",
    "communication_data_type", "compile", "compression_training", "csv_monitor", "curriculum_learning", "data_efficiency",
    "data_types", "dump_state", "elasticity", "flops_profiler", "fp16", "gradient_accumulation_steps", "gradient_clipping",
    "gradient_predivide_factor", "hybrid_engine", "memory_breakdown", "nebula", "optimizer", "pipeline", "prescale_gradients",
    "scheduler", "seq_parallel_communication_data_type", "sparse_attention", "sparse_gradients", "steps_per_print",
    "tensor_parallel", "tensorboard", "timers", "torch_autocast", "train_batch_size", "train_micro_batch_size_per_gpu", "wandb",
    "wall_clock_breakdown", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "zero_optimization",
)  # fmt: skip
#: Sections that do what a part of acclight does, which they would do beside it -> what to use.
_ELSEWHERE = {
    "scheduler": "it would set the learning rate beside your own; return the scheduler from configure_optimizers",
    "optimizer": "configure_optimizers returns the optimizer",
    "torch_autocast": "it would cast beside the Trainer; give Trainer(precision=...)",
}
#: Keys of "zero_optimization" that "auto" leaves to the model's width, as Accelerate 1.15 computes them from it.
_BY_WIDTH: dict[str, Callable[[int], int]] = {
    "reduce_bucket_size": lambda width: width * width,
    "stage3_prefetch_bucket_size": lambda width: int(0.9 * width * width),
    "stage3_param_persistence_threshold": lambda width: 10 * width,
}
#: What a launcher says about DeepSpeed, in the environment.
LAUNCHER_VARIABLES = (
    *(f"ACCELERATE_DEEPSPEED_{name}" for name in (
        "CONFIG_FILE", "ZERO_STAGE", "OFFLOAD_OPTIMIZER_DEVICE", "OFFLOAD_PARAM_DEVICE", "OFFLOAD_OPTIMIZER_NVME_PATH",
        "OFFLOAD_PARAM_NVME_PATH", "ZERO3_INIT", "ZERO3_SAVE_16BIT_MODEL", "MOE_LAYER_CLS_NAMES",
    )),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "ACCELERATE_GRADIENT_CLIPPING", "ACCELERATE_CONFIG_DS_FIELDS", "ACCELERATE_USE_CPU",
)  # fmt: skip


def read(config: Mapping[str, Any] | str | Path | None) -> dict[str, Any]:
    """A user's ds_config, from a dict or a JSON file.

    Raises:
        ValueError: When there is no such file, or it holds no JSON object.
    """
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return copy.deepcopy(dict(config))
    path = Path(config)
    if not path.is_file():
        raise ValueError(f"ds_config={str(config)!r}: there is no such file; give a dict or the path of a JSON file")
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"ds_config={str(config)!r} is no JSON: {error}") from None
    if not isinstance(loaded, dict):
        raise ValueError(f"ds_config={str(config)!r}: the file holds a {type(loaded).__name__}, not a JSON object")
    return loaded


def check(config: Mapping[str, Any]) -> None:
    """Looks for what DeepSpeed would silently leave out, or do beside the Trainer.

    Raises:
        ValueError: For a key that is misspelt, or a section that belongs elsewhere.
    """
    for key in config:
        near = difflib.get_close_matches(key, _KEYS, n=1, cutoff=0.75) if key not in _KEYS else []
        if near:
            raise ValueError(f"ds_config has no key {key!r}; did you mean {near[0]!r}?")
    for section in ("bf16", "fp16", "zero_optimization"):
        if not isinstance(config.get(section, {}), Mapping):
            raise ValueError(
                f"ds_config {section}={config[section]!r}: give a section, such as {{'enabled': True}} or {{'stage': 2}}"
            )
    clip = config.get("gradient_clipping", "auto")
    if clip != "auto" and (isinstance(clip, bool) or not isinstance(clip, (int, float)) or not clip >= 0):
        raise ValueError(f"ds_config gradient_clipping={clip!r}: give a number, 0 or more, or 'auto'")
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        count = config.get(key, "auto")
        if count != "auto" and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise ValueError(f"ds_config {key}={count!r}: give a whole number, 1 or more, or 'auto'")
    for section, instead in _ELSEWHERE.items():
        given = config.get(section)
        if given is not None and not (isinstance(given, Mapping) and given.get("enabled") is False):
            raise ValueError(
                f"ds_config has a section {section!r}, which is not used: {instead}, and leave the section out"
            )


def by_width(zero: Mapping[str, Any], width: int | None) -> dict[str, Any]:
    """What "auto" means in the section "zero_optimization" for a model of this width; nothing where it is not known.

    Args:
        zero: The user's section.
        width: The `hidden_size` of the transformers model inside.
    """
    if width is None:
        return {}
    return {key: compute(width) for key, compute in _BY_WIDTH.items() if zero.get(key) == "auto"}


def with_fields(config: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The configuration with some fields of the strategy's, where they say something and it does not.

    Raises:
        ValueError: Both say something else.
    """
    said = {name: value for name, value in fields.items() if value not in (None, "auto")}
    for name, value in said.items():
        if config.get(name, "auto") not in ("auto", value):
            raise ValueError(f"{name}={value!r} contradicts ds_config {name}={config[name]!r}; set one of them")
    return {**said, **{name: value for name, value in config.items() if name not in said or value != "auto"}}


def clip_of(config: Mapping[str, Any]) -> float | None:
    """The largest gradient norm that a ds_config gives as a number; None where it leaves that to the Trainer."""
    given = config.get("gradient_clipping", "auto")
    return None if given == "auto" else float(given)


def check_window(config: Mapping[str, Any], *, accumulate: int, batch_size: int | None, world_size: int) -> None:
    """Holds a ds_config's numbers against the Trainer's and the loader's.

    Raises:
        ValueError: When they contradict each other; it names both.
    """
    said = {"gradient_accumulation_steps": (accumulate, f"accumulate_grad_batches={accumulate}")}
    if batch_size is not None:
        every = batch_size * accumulate * world_size
        words = f"batch {batch_size} x accumulation {accumulate} x {world_size} ranks = {every}"
        said["train_micro_batch_size_per_gpu"] = (batch_size, f"the loader's batch size {batch_size}")
        said["train_batch_size"] = (every, words)
    for key, (value, words) in said.items():
        given = config.get(key, "auto")
        if given not in ("auto", value):
            raise ValueError(
                f"ds_config {key}={given} contradicts {words}; set one of them, or write 'auto' in ds_config"
            )


def precision_of(config: Mapping[str, Any]) -> str | None:
    """The precision that a ds_config switches on, by the Trainer's name; None where it leaves that to the Trainer."""
    for section, (_, name) in _MODES.items():
        if config.get(section, {}).get("enabled") is True:
            return name
    return None


def own_mode(config: Mapping[str, Any], precision: Precision) -> str | None:
    """Which of DeepSpeed's own 16-bit modes runs: "bf16", "fp16", or None for float32 parameters (autocast is the core's).

    Raises:
        ValueError: When ds_config and the Trainer's precision contradict each other, or DeepSpeed has no such mode.
    """
    if precision.parameters is torch.float64:
        raise ValueError("precision='64-true' cannot be used with DeepSpeed, whose master weights are float32")
    chosen = None
    for section, (dtype, _) in _MODES.items():
        asked = dtype in (precision.parameters, precision.autocast)
        enabled = config.get(section, {}).get("enabled", "auto")
        if enabled != "auto" and enabled is not asked:
            raise ValueError(
                f"ds_config {section}.enabled={enabled} contradicts precision={precision.name!r}; "
                "set one of them, or write 'auto' in ds_config"
            )
        if asked and (section in config or dtype is precision.parameters):
            chosen = section
    return chosen


def complete(
    config: Mapping[str, Any], zero: Mapping[str, Any], *, mode: str | None, clip: float, micro_batch_size: int
) -> dict[str, Any]:
    """The whole configuration, with nothing left for Accelerate to fill in.

    Accelerate 1.15 turns a clipping of 0.0 into "auto", and that into 1.0, unless the configuration holds a number.

    Args:
        config: The user's.
        zero: The section "zero_optimization" as the strategy's arguments say; the user's keys come on top.
        mode: What `own_mode` gave.
        clip: Largest gradient norm; 0 for none.
        micro_batch_size: For the engine's throughput timer.

    Raises:
        ValueError: When the clipping contradicts the Trainer's.
    """
    whole = copy.deepcopy(dict(config))
    for section in _MODES:
        whole[section] = {**whole.get(section, {}), "enabled": section == mode}
    given = clip_of(config)
    if given not in (None, clip):
        raise ValueError(f"ds_config gradient_clipping={given} contradicts gradient_clip_val={clip}; set one of them")
    whole["gradient_clipping"] = clip
    if whole.get("train_micro_batch_size_per_gpu", "auto") == "auto":
        whole["train_micro_batch_size_per_gpu"] = micro_batch_size
    whole.setdefault("zero_allow_untested_optimizer", True)
    # The loop owns the window: it weights every loss itself and says where the window ends.
    whole["gradient_accumulation_steps"] = 1
    whole.pop("train_batch_size", None)
    given_zero = whole.get("zero_optimization", {})
    # What the model's width decides is DeepSpeed's default as long as there is no model.
    whole["zero_optimization"] = {
        **zero, **{key: value for key, value in given_zero.items() if key not in _BY_WIDTH or value != "auto"},
    }  # fmt: skip
    return whole


def zero_section(stage: int, offload: Mapping[str, tuple[str, str | None]], *, save_16bit: bool) -> dict[str, Any]:
    """The section "zero_optimization" as a strategy's arguments say.

    Args:
        stage: 1, 2 or 3.
        offload: "optimizer" and "param" -> device ("none", "cpu", "nvme") and the folder for "nvme".
        save_16bit: Stage 3: DeepSpeed gathers 16-bit weights when it saves a model itself.

    Raises:
        ValueError: For an unknown device, "nvme" without a folder, or parameters offloaded below stage 3.
    """
    zero: dict[str, Any] = {"stage": stage}
    for role, (device, path) in offload.items():
        argument = f"offload_{role}_device={device!r}"
        if device not in ("none", "cpu", "nvme"):
            raise ValueError(f"{argument}: use 'none', 'cpu' or 'nvme'")
        if device == "none":
            continue
        if role == "param" and stage != 3:
            raise ValueError(f"{argument} needs stage=3: only there are parameters sharded (stage={stage})")
        zero[f"offload_{role}"] = {"device": device}
        if device == "nvme":
            if not path:
                raise ValueError(f"{argument} needs offload_{role}_nvme_path, a folder on the device")
            zero[f"offload_{role}"]["nvme_path"] = path
    if stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = save_16bit
    return zero
