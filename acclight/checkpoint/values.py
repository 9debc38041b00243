"""Plain values to JSON and back: what may stand in the JSON files of a checkpoint.

JSON has no tensors and only string keys. A tensor is kept in a safetensors file and leaves `{"__tensor__": name}`
behind; a mapping with other keys (a scheduler's milestones by step) becomes `{"__items__": [[key, value], ...]}`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from acclight.checkpoint.errors import CheckpointError

TENSOR = "__tensor__"
ITEMS = "__items__"


def encode(value: Any, where: str, tensors: dict[str, torch.Tensor]) -> Any:
    """The JSON form of `value`, with its tensors put into `tensors` by name.

    Path, Enum, Namespace, NumPy scalars and arrays become plain values; tuples become lists. NaN and infinity are kept.

    Args:
        value: a tree of mappings, lists, tuples, tensors and plain values.
        where: the name of the tree; errors and tensor names are built on it.
        tensors: filled in place.

    Raises:
        TypeError: a value cannot be represented; the message holds its key path.
    """
    if isinstance(value, Enum):
        return encode(value.value, where, tensors)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, np.generic) and not isinstance(value.item(), np.generic):
        return encode(value.item(), where, tensors)
    for plain in (str, int, float):
        if isinstance(value, plain):
            return plain(value)
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, torch.Tensor):
        name = where
        while name in tensors:
            name += "'"
        tensors[name] = value
        return {TENSOR: name}
    if isinstance(value, np.ndarray):
        return encode(value.tolist(), where, tensors)
    if isinstance(value, (argparse.Namespace, SimpleNamespace)):
        return _encode_items(vars(value).items(), where, tensors)
    if isinstance(value, Mapping):
        return _encode_items(value.items(), where, tensors)
    if isinstance(value, (list, tuple)):
        return [encode(item, f"{where}[{index}]", tensors) for index, item in enumerate(value)]
    raise TypeError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold: "
        "give numbers, strings, paths, lists, mappings or tensors, or leave it out."
    )


def _encode_items(items: Iterable[tuple[Any, Any]], where: str, tensors: dict[str, torch.Tensor]) -> Any:
    pairs: dict[Any, Any] = {}
    for given, item in items:
        key = encode(given, f"{where}: the key {given!r}", {})
        if isinstance(key, (list, dict)):
            raise TypeError(f"{where}: the key {given!r} is a {type(given).__name__}; keys are strings or numbers.")
        if key in pairs:
            raise TypeError(f"{where}: two keys become {key!r} once they are plain values.")
        pairs[key] = encode(item, f"{where}.{key}", tensors)
    if all(isinstance(key, str) for key in pairs) and not pairs.keys() & {TENSOR, ITEMS}:
        return pairs
    return {ITEMS: [[key, item] for key, item in pairs.items()]}


def decode(value: Any, tensors: Mapping[str, Any]) -> Any:
    """What `encode` was given, as plain dicts, lists and tensors.

    Raises:
        CheckpointError: a tensor that the tree refers to is not in `tensors`, or a marker is malformed.
    """
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {TENSOR}:
        name = value[TENSOR]
        if not isinstance(name, str) or name not in tensors:
            raise CheckpointError(f"the tensor {name!r} is referred to, but not in the files.")
        return tensors[name]
    if value.keys() == {ITEMS}:
        try:
            return {key: decode(item, tensors) for key, item in value[ITEMS]}
        except (TypeError, ValueError) as exc:
            if isinstance(exc, CheckpointError):
                raise
            raise CheckpointError(f"a mapping is malformed: {exc}") from exc
    return {key: decode(item, tensors) for key, item in value.items()}
