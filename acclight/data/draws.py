"""Random draws that are a pure function of a seed and leave the global generators as they were."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator


def derive_seed(*parts: int | str) -> int:
    """One seed of 63 bits from several parts; unlike a sum, (1, 0) and (0, 1) give different ones."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def seed_global_generators(seed: int) -> None:
    """Sets Python's, NumPy's and torch's global CPU generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


class OwnDraws:
    """Context in which Python's, NumPy's and torch's global CPU generators draw from streams of their own.

    Entered again, the streams go on where they stopped. Outside, the global generators are as if nothing had been
    drawn, but for the second value of a pair that NumPy keeps after an odd number of normal ones: it is forgotten.
    Copying NumPy's whole state would keep it, and take ten times as long as all the rest.

    Args:
        seed: Starts the streams.
        generators: The user's own torch generators that the same draws come from; treated like the global one.
    """

    def __init__(self, seed: int, generators: Iterable[torch.Generator] = ()) -> None:
        self._seed = seed
        self._generators = [torch.default_generator, *generators]
        self._numpy = np.random.MT19937(seed)
        self._inner: tuple[Any, list[torch.Tensor]] | None = None
        self._outer: tuple[Any, list[torch.Tensor]] | None = None
        self._outer_numpy: Any = None

    def reseed(self, seed: int) -> None:
        """Starts the streams again from another seed; inside the context only."""
        seed_global_generators(seed)
        for generator in self._generators:
            generator.manual_seed(seed)

    def forget_pair(self) -> None:
        """Forgets NumPy's kept second value, so that later draws do not depend on where the context is left."""
        set_bit_generator(self._numpy)

    def __enter__(self) -> OwnDraws:
        self._outer = self._capture()
        self._outer_numpy = get_bit_generator()
        set_bit_generator(self._numpy)
        if self._inner is None:
            self.reseed(self._seed)
        else:
            self._restore(self._inner)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._outer is not None
        self._inner = self._capture()
        self._restore(self._outer)
        set_bit_generator(self._outer_numpy)

    def _capture(self) -> tuple[Any, list[torch.Tensor]]:
        return random.getstate(), [generator.get_state() for generator in self._generators]

    def _restore(self, states: tuple[Any, list[torch.Tensor]]) -> None:
        random.setstate(states[0])
        for generator, state in zip(self._generators, states[1], strict=True):
            generator.set_state(state)
