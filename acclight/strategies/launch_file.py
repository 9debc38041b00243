"""Accelerate's launch files: the default one, what they hold, and keys in them that the launcher drops without a word."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from acclight.messages import warn


def default_launch_file() -> Path:
    """Where it is, or would be."""
    from accelerate.commands.config.config_args import default_config_file

    return Path(default_config_file)


def read_launch_file(path: Path) -> Mapping[str, Any]:
    """What a launch file holds.

    Raises:
        OSError: When it cannot be read.
        ValueError: When it holds no names with values.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        held = json.loads(text)
    else:
        import yaml

        try:
            held = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(f"{path} is no YAML: {error}") from None
    if not isinstance(held, Mapping):
        raise ValueError(f"{path} holds a {type(held).__name__}, not names with values")
    return held


def warn_of_dropped_offload(offloads: bool) -> None:
    """Warns where a launch file says `fsdp_cpu_offload`, which Accelerate 1.15's launcher reads and does not pass on.

    Args:
        offloads: What the launcher did pass on, or the script asks for.
    """
    if offloads:
        return
    for path in _candidates():
        section = _section(path, "fsdp_config")
        for name in ("fsdp_cpu_offload", "cpu_offload"):
            if section.get(name) is True:
                warn(
                    f"{name}: true in {path} has no effect, because the launcher does not pass it on: write "
                    "fsdp_offload_params: true there, or FSDP2Strategy(cpu_offload=True) in the script"
                )
                return


def _candidates() -> Iterator[Path]:
    """The `--config_file` of the launcher among this process's parents; else the one that `accelerate config` writes."""
    command = _launch_command()
    for position, word in enumerate(command):
        if word == "--config_file" and position + 1 < len(command):
            yield Path(command[position + 1])
            return
        if word.startswith("--config_file="):
            yield Path(word.partition("=")[2])
            return
    if command:
        yield default_launch_file()


def _launch_command() -> list[str]:
    """The launcher's command line, with its working directory put before relative paths; empty where there is none."""
    process = os.getppid()
    for _ in range(4):  # a shell or a script of the user's may stand between
        try:
            words = Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace").split("\0")
            folder = os.readlink(f"/proc/{process}/cwd")
            parent = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):  # not Linux, or not ours to read
            return []
        if "launch" in words and any("accelerate" in word for word in words):
            return [str(Path(folder) / word) if word.endswith((".yaml", ".yml", ".json")) else word for word in words]
        process = parent
    return []


def _section(path: Path, name: str) -> Mapping[str, Any]:
    try:
        section = read_launch_file(path).get(name)
    except (OSError, ValueError):
        return {}
    return section if isinstance(section, Mapping) else {}
