"""seed_everything: the same random numbers in every run."""

from __future__ import annotations

import random

import numpy as np
import torch

#: What `seed_everything` was called with last.
given: int | None = None


def seed_everything(seed: int, workers: bool = True) -> int:
    """Seeds Python, NumPy and torch (all devices) alike on every rank; the order of the training samples follows it too.

    Args:
        seed: In [0, 2**32).
        workers: As in Lightning; must be True, because data loaders' worker processes are always seeded, by epoch and rank.

    Returns:
        The seed.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed}: give a whole number from 0 to {2**32 - 1}")
    if not workers:
        raise ValueError("workers=False: worker processes are always seeded, or a resumed run could not draw as before")
    global given
    given = seed
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return seed
