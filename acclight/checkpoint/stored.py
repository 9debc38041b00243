"""What a folder of safetensors files holds, and how it becomes whole tensors on the CPU, without a process group.

Each file holds some ranks' pieces; where a piece belongs stands in the file's metadata under DCP_SHARDING_INFO, as
torch.distributed.checkpoint writes it. A file without that entry holds whole tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import _getdtype

from acclight.checkpoint.errors import CheckpointError
from acclight.checkpoint.files import read_json
from acclight.checkpoint.values import decode

SUFFIX = ".safetensors"
_PLACES = "DCP_SHARDING_INFO"


@dataclass(frozen=True)
class StoredTensor:
    """The whole tensor that the pieces under one name make up."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Piece:
    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def place(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + length) for start, length in zip(self.offset, self.shape, strict=True))


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Name -> shape and dtype of every tensor in `folder`; empty when there is no such folder.

    Raises:
        CheckpointError: a file is malformed, or the pieces under a name do not make up one tensor.
    """
    shapes: dict[str, list[int]] = {}
    dtypes: dict[str, torch.dtype] = {}
    filled: dict[str, int] = {}
    for file in _files(folder):
        for piece in _pieces(file):
            end = [start + length for start, length in zip(piece.offset, piece.shape, strict=True)]
            whole = shapes.setdefault(piece.name, end)
            if len(whole) != len(end) or dtypes.setdefault(piece.name, piece.dtype) != piece.dtype:
                raise CheckpointError(f"{file}: {piece.name!r} has other dimensions or another dtype in another file.")
            shapes[piece.name] = [max(a, b) for a, b in zip(whole, end, strict=True)]
            filled[piece.name] = filled.get(piece.name, 0) + math.prod(piece.shape)
    for name, shape in shapes.items():
        if filled[name] != math.prod(shape):
            raise CheckpointError(
                f"{folder}: the pieces of {name!r} fill {filled[name]} of {math.prod(shape)} elements."
            )
    return {name: StoredTensor(tuple(shape), dtypes[name]) for name, shape in shapes.items()}


def averaged_tensors(folder: Path, model: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """What `folder` holds of averaged weights, checked against the tensors of the model; empty when there is no such folder."""
    averaged = stored_tensors(folder)
    for name, stored in averaged.items():
        if name not in model or model[name].shape != stored.shape:
            raise CheckpointError(f"{folder}: {name!r} does not fit the model's files.")
    return averaged


def read_tensors(folder: Path, prefix: str = "") -> dict[str, torch.Tensor]:
    """Every tensor in `folder` whose name begins with `prefix`, whole and in memory of its own on the CPU."""
    tensors = {
        name: torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
        for name, stored in stored_tensors(folder).items()
        if name.startswith(prefix)
    }
    for file in _files(folder):
        for piece, part in _opened(file):
            if piece.name in tensors:
                tensors[piece.name][piece.place].copy_(part)
    return tensors


def read_tensor(folder: Path, name: str) -> torch.Tensor:
    """One tensor in `folder`, whole and in memory of its own on the CPU; the others are not read.

    Raises:
        CheckpointError: there is none of this name, or a file is malformed.
    """
    stored = stored_tensors(folder).get(name)
    if stored is None:
        raise CheckpointError(f"{folder} holds no tensor {name!r}.")
    tensor = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
    for file in _files(folder):
        for piece, part in _opened(file, only=name):
            tensor[piece.place].copy_(part)
    return tensor


def read_file(file: Path, *, mapped: bool = False) -> dict[str, torch.Tensor]:
    """The tensors of one safetensors file, each whole and in memory of its own, or with `mapped` in the file itself."""
    return {piece.name: tensor if mapped else tensor.clone() for piece, tensor in _opened(file)}


def read_document(file: Path, kind: type, tensors: Mapping[str, Any]) -> Any:
    """A JSON file with its tensors put back, of type `kind`; CheckpointError naming the file otherwise."""
    try:
        value = decode(read_json(file), tensors)
    except (CheckpointError, RecursionError) as exc:
        raise CheckpointError(f"cannot read {file}: {exc}") from exc
    if not isinstance(value, kind):
        raise CheckpointError(f"{file} holds a {type(value).__name__} where a {kind.__name__} belongs.")
    return value


def tied_names(trainer: Mapping[str, Any], model: Mapping[str, StoredTensor], file: Path) -> dict[str, str]:
    """trainer["tied"], alias -> kept name, checked against the names in `model`."""
    tied = trainer.get("tied") or {}
    if not isinstance(tied, dict) or any(alias in model or kept not in model for alias, kept in tied.items()):
        raise CheckpointError(f"{file}: 'tied' does not fit the names of the model's files.")
    return tied


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{SUFFIX}"))


def _pieces(file: Path) -> Iterator[_Piece]:
    with _named_errors(file), safe_open(file, framework="pt", device="cpu") as opened:
        places = json.loads((opened.metadata() or {}).get(_PLACES, "null"))
        for name in opened.keys():  # noqa: SIM118  # not a mapping
            stored = opened.get_slice(name)
            shape = tuple(stored.get_shape())
            yield _Piece(name, _offset(places, name, len(shape)), shape, _getdtype(stored.get_dtype()))


def _opened(file: Path, only: str | None = None) -> Iterator[tuple[_Piece, torch.Tensor]]:
    """Every piece of a file with its values, which may lie in the file itself: copy them before the file can change."""
    pieces = [piece for piece in _pieces(file) if only in (None, piece.name)]
    with _named_errors(file), safe_open(file, framework="pt", device="cpu") as opened:
        for piece in pieces:
            yield piece, opened.get_tensor(piece.name)


@contextmanager
def _named_errors(file: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError, KeyError, ValueError, RecursionError) as exc:
        raise CheckpointError(f"cannot read {file}: {exc!r}") from exc


def _offset(places: Any, name: str, dimensions: int) -> tuple[int, ...]:
    if places is None:
        return (0,) * dimensions
    try:
        offset = places[name]["saved_offsets"]
        if len(offset) == dimensions and all(type(start) is int and start >= 0 for start in offset):
            return tuple(offset)
    except (TypeError, KeyError):
        pass  # named below, together with an offset of the wrong form
    raise ValueError(f"the place of {name!r} is missing or malformed in {_PLACES}")
