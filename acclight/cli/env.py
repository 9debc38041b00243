"""`acclight env`: what a bug report needs, as plain text."""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

import acclight
from acclight.startup import fields_in_force
from acclight.strategies.launch_file import default_launch_file, read_launch_file
from acclight.strategies.precision import resolve_precision
from acclight.strategies.resolve import launched_kind, resolve_strategy

_PACKAGES = ("accelerate", "torch", "transformers", "deepspeed")
_PREFIXES = ("ACCELERATE_", "FSDP_", "DEEPSPEED_", "DS_", "NCCL_", "GLOO_", "TORCH_NCCL_", "PYTORCH_")
_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
)  # fmt: skip
_SECRET = re.compile(r"key|token|secret|passw|credential|auth", re.IGNORECASE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """There are none."""


def run(arguments: argparse.Namespace) -> None:
    """Prints the report, under a launcher on rank 0."""
    if os.environ.get("RANK", "0") == "0":
        print("\n".join(report()))


def report() -> Iterator[str]:
    """The report, line by line. What cannot be found out says why in its place, and the rest is there all the same."""
    yield f"acclight: {acclight.__version__}"
    for name in _PACKAGES:
        yield f"{name}: {_installed(name)}"
    yield f"python: {platform.python_version()} ({sys.executable})"
    yield f"system: {platform.platform()}"
    yield f"devices: {'; '.join(_devices())}"
    variables = _launch_variables(os.environ)
    yield "launch environment:" if variables else "launch environment: nothing set"
    yield from (f"  {name}={value}" for name, value in variables.items())
    yield from _launch_file()
    yield from _strategy()


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _devices() -> Iterator[str]:
    yield f"cpu ({os.cpu_count()} cores)"
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        yield f"cuda:{index} {about.name}, {about.total_memory / 2**30:.1f} GiB"
    other = torch.accelerator.current_accelerator()
    if other is not None and other.type != "cuda":
        yield f"{torch.accelerator.device_count()} x {other.type}"


def _launch_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """What steers a launch, sorted; values that look like secrets are left out."""
    names = sorted(name for name in environment if name.startswith(_PREFIXES) or name in _VARIABLES)
    return {name: _harmless(name, environment[name]) for name in names}


def _harmless(name: str, value: Any) -> str:
    return "(hidden)" if _SECRET.search(name) else re.sub(r"://[^/@\s]+@", "://(hidden)@", str(value))


def _launch_file() -> Iterator[str]:
    path = default_launch_file()
    if not path.is_file():
        yield f"default launch file: none at {path}"
        return
    yield f"default launch file: {path}"
    try:
        held = read_launch_file(path)
    except (OSError, ValueError) as error:
        yield f"  cannot be read: {' '.join(str(error).split())}"
        return
    yield from _indented(held, "  ")


def _indented(values: Mapping[str, Any], indent: str) -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield f"{indent}{name}:"
            yield from _indented(value, indent + "  ")
        else:
            yield f"{indent}{name}: {_harmless(name, value)}"


def _strategy() -> Iterator[str]:
    """What a Trainer without arguments would use, started as this command was."""
    try:
        strategy = resolve_strategy("auto")
        precision = resolve_precision(None, strategy.configured_precision()).name
    except (ImportError, TypeError, ValueError) as error:
        yield f"strategy: {type(error).__name__}: {' '.join(str(error).split())}"
        return
    yield f"strategy: {strategy.name} ({'from the launcher' if launched_kind() else 'plain start'}), precision {precision}"
    yield from (f"  {name}={one}" for name, one in fields_in_force(strategy).items())
