"""The launch file that `accelerate config` writes and `accelerate launch` reads where no other is named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


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
