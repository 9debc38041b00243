"""The file that `accelerate launch` has read, for keys in it that the launcher drops without a word."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from acclight.messages import warn


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
    from accelerate.commands.config.config_args import default_config_file

    if command:
        yield Path(default_config_file)


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
    import yaml

    try:
        held = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return {}
    section = held.get(name) if isinstance(held, Mapping) else None
    return section if isinstance(section, Mapping) else {}
