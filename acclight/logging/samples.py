"""How many samples a batch holds, where the loader does not say: the length on which the batch's parts agree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def count_samples(batch: Any) -> tuple[float, str | None]:
    """Guesses the number of samples of a batch.

    Args:
        batch: Anything a loader gives: a tensor, or dicts, tuples and lists of tensors and of other things.

    Returns:
        The number, and in words why it is a guess; None where the batch is clear.
    """
    if isinstance(batch, Tensor):
        return (float(batch.shape[0]), None) if batch.dim() else (1.0, None)
    lengths = _lengths(batch)
    if not lengths:
        return 1.0, f"a batch of type {type(batch).__name__} does not tell its number of samples; 1 is used"
    if len(set(lengths)) > 1:
        some = ", ".join(map(str, sorted(set(lengths))[:4]))
        return float(lengths[0]), f"the parts of a batch have different lengths ({some}); {lengths[0]} is used"
    return float(lengths[0]), None


def _lengths(batch: Any) -> list[int]:
    if isinstance(batch, Tensor):
        return [batch.shape[0]] if batch.dim() else []
    if isinstance(batch, Mapping):
        return [length for part in batch.values() for length in _lengths(part)]
    if isinstance(batch, tuple) or (isinstance(batch, list) and batch and isinstance(batch[0], Tensor)):
        return [length for part in batch for length in _lengths(part)]
    return [len(batch)] if isinstance(batch, list) else []
