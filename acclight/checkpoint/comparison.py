"""In what the tensors of two folders differ: by name, shape, type and value, one tensor in memory at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from acclight.checkpoint.stored import StoredTensor, read_tensor, stored_tensors


@dataclass(frozen=True)
class Difference:
    """One tensor that two folders do not have in common.

    Attributes:
        name: The tensor's.
        what: In what way, in words.
        largest: How far its values are apart at most; infinite where they cannot be compared.
    """

    name: str
    what: str
    largest: float = math.inf

    def __str__(self) -> str:
        return f"{self.name} {self.what}"


def compare(first: Path, second: Path, *, atol: float = 0.0) -> list[Difference]:
    """The tensors in which two folders differ.

    Args:
        first: A folder of safetensors files; one that is not there holds no tensors.
        second: Another one.
        atol: Values that are this far apart, or nearer, count as equal. NaN equals NaN.

    Raises:
        CheckpointError: a file is malformed.
    """
    one, other = stored_tensors(first), stored_tensors(second)
    found = [Difference(name, "is only in the first") for name in sorted(one.keys() - other.keys())]
    found += [Difference(name, "is only in the second") for name in sorted(other.keys() - one.keys())]
    for name in sorted(one.keys() & other.keys()):
        if one[name] != other[name]:
            found.append(Difference(name, f"is {_described(one[name])} and {_described(other[name])}"))
        elif difference := _values(name, read_tensor(first, name), read_tensor(second, name), atol):
            found.append(difference)
    return found


def _values(name: str, one: torch.Tensor, other: torch.Tensor, atol: float) -> Difference | None:
    if torch.equal(one, other):
        return None
    a, b = (tensor.to(torch.complex128 if tensor.is_complex() else torch.float64) for tensor in (one, other))
    same = (a == b) | (a.isnan() & b.isnan())
    apart = torch.where(same, 0.0, (a - b).abs())
    # An infinity, or NaN in one of them alone, is as far apart as can be.
    apart = torch.where(apart.isnan(), math.inf, apart)
    largest = float(apart.max()) if apart.numel() else 0.0
    if largest <= atol:
        return None
    count = int((apart > atol).sum())
    return Difference(name, f"differs in {count} of {apart.numel()} values, at most by {largest:.3g}", largest)


def _described(stored: StoredTensor) -> str:
    return f"{str(stored.dtype).removeprefix('torch.')} {list(stored.shape)}"
