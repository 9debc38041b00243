"""Questions about the user's loader, and the copy of it that reads other indices."""

from __future__ import annotations

import copy
import hashlib
import json
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import NoneType
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from acclight.data.draws import derive_seed

Limit = int | float
"""A number of batches (int), or a fraction of them (float; 1.0 is all)."""


Differs = Callable[[str | None], bool]
"""Whether the ranks' digests of their streams differ; None is a stream without one. A collective."""


class Dealt(NamedTuple):
    """What one rank gets of one round, a round being one batch for every rank.

    Attributes:
        entry: What the index sampler gives for this rank's batch: a list of indices, or one index where the loader
            does not batch; None where there are no indices (streams).
        samples: Samples of the round over all ranks, repeated ones not counted.
        state: Where the rank's loader or dataset says that it is afterwards, for `Reader.restore`; None where it says nothing.
    """

    entry: Any
    samples: int
    state: Any = None


class Reader(Protocol):
    """Reads one kind of loader for one rank. Positions count samples over all ranks, from the start of the epoch."""

    def begin(self, seed: int, epoch: int) -> None:
        """Makes (seed, epoch) the one whose order is read."""

    def count(self, start: int) -> int | None:
        """This rank's batches from position `start` on; None when unknown."""

    def batches_before(self, start: int) -> int:
        """This rank's batches up to position `start`."""

    def read(self, start: int, at_most: int | None) -> Iterator[tuple[Any, Dealt]]:
        """This rank's batches from position `start` on, `at_most` so many."""

    def restore(self, state: Any) -> None:
        """The next `read` begins where a `Dealt.state` of this rank was taken, which goes there at once where it can."""

    def close(self) -> None:
        """Ends the worker processes that are kept between epochs."""


def keeps_state(part: object) -> bool:
    """Whether a loader or a dataset can say where it is, and go there again: by `state_dict` and `load_state_dict`."""
    return callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None))


def size_of(thing: object) -> int | None:
    """`len(thing)`, or None where it has none (some samplers define `__len__` only to raise)."""
    try:
        return len(thing)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def parts_of(loader: object) -> list[object]:
    """The loader, its samplers and its dataset, with what these wrap, each once."""
    parts: list[object] = []
    waiting = [loader]
    while waiting:
        part = waiting.pop(0)
        if part is None or any(part is known for known in parts):
            continue
        parts.append(part)
        waiting += [getattr(part, name, None) for name in ("batch_sampler", "sampler", "dataset")]
    return parts


def samples_of(entry: Any) -> int | None:
    """Number of samples of a `Dealt.entry`; None where it is no batch of indices: a single one may stand for a whole batch."""
    return len(entry) if isinstance(entry, (list, tuple)) else None


def set_epoch(loader: object, epoch: int) -> None:
    """Calls `set_epoch(epoch)` on every part of the loader that has it."""
    for part in parts_of(loader):
        reach = getattr(part, "set_epoch", None)
        if callable(reach):
            reach(epoch)


def divides_itself(part: object, rank: int, world_size: int) -> bool:
    """Whether a sampler or dataset already gives this rank its own share.

    It says so as torch's `DistributedSampler` does, with the attributes `rank` and `num_replicas` (or `world_size`);
    for Hugging Face datasets that is what `split_dataset_by_node` leaves behind.

    Raises:
        ValueError: It was made for another rank or world size.
    """
    placed = getattr(part, "_distributed", part)
    own_rank = getattr(placed, "rank", None)
    own_world = getattr(placed, "num_replicas", getattr(placed, "world_size", None))
    if not isinstance(own_rank, int) or not isinstance(own_world, int) or own_world == 1:
        return False
    if (own_rank, own_world) != (rank, world_size):
        raise ValueError(
            f"{type(part).__name__} was made for rank {own_rank} of {own_world}, but this process is rank {rank} of "
            f"{world_size}; give it rank={rank} and num_replicas={world_size}, or a sampler that is not distributed"
        )
    return True


def rank_identity(loader: object) -> dict[str, str]:
    """What may tell this rank's loader from another rank's; ranks where it differs were each given data of their own.

    That is the length of a map-style dataset, as ranks cannot share an order if lengths differ, and the length and the
    plain attributes of a stream (IterableDataset) that keeps no state: those of one that does may say where this rank is.
    Empty for plain iterables, which are each rank's own anyway.
    """
    if not isinstance(loader, DataLoader):
        return {}
    dataset = loader.dataset
    attributes: dict[str, Any] = {"len()": size_of(dataset)}
    if isinstance(dataset, IterableDataset) and not keeps_state(dataset):
        attributes.update(vars(dataset))
    return {name: _short_text(value) for name, value in attributes.items()}


def digest(elements: list[Any]) -> str | None:
    """A short text that is the same for equal elements, in any process; None where an element cannot be told from others."""
    seen = hashlib.blake2b(digest_size=16)
    try:
        for part in elements:
            _add_to(seen, part)
    except Exception:  # whatever an object raises that cannot be pickled
        return None
    return seen.hexdigest()


def _add_to(seen: Any, part: Any) -> None:
    if isinstance(part, torch.Tensor):
        part = part.detach().cpu()
        seen.update(f"{part.dtype} {tuple(part.shape)}".encode())
        seen.update(part.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(part, np.ndarray) and not part.dtype.hasobject:
        seen.update(f"{part.dtype} {part.shape}".encode() + part.tobytes())
    elif isinstance(part, Mapping):
        _add_to(seen, list(part.items()))
    elif isinstance(part, (list, tuple)):
        seen.update(f"{len(part)} of".encode())
        for inner in part:
            _add_to(seen, inner)
    elif isinstance(part, (set, frozenset)):
        _add_to(seen, sorted(map(repr, part)))
    else:
        seen.update(pickle.dumps(part))


def _short_text(value: Any) -> str:
    try:
        text = json.dumps(value, skipkeys=True, default=lambda part: [type(part).__name__, size_of(part)])
    except ValueError:  # it holds itself
        text = type(value).__name__
    return text if len(text) <= 80 else f"{text[:40]}... ({derive_seed(text):x})"


def checked(loader: object, rank: int, world_size: int) -> tuple[Any, bool]:
    """The loader, and whether it (a sampler or the dataset of it) says that it gives this rank its own share already.

    Raises:
        TypeError: Several loaders, or nothing that can be iterated over.
        ValueError: The rank is none of the world, the loader gives batches in no fixed order, or a part was made for
            another rank or world size.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} is none of world_size={world_size}")
    inner = loader.values() if isinstance(loader, Mapping) else loader if isinstance(loader, (list, tuple)) else ()
    if any(isinstance(part, DataLoader) for part in inner):
        raise TypeError(
            f"a {type(loader).__name__} of DataLoaders is not one loader: join their datasets with ConcatDataset"
        )
    if isinstance(loader, Mapping) or not isinstance(loader, Iterable):
        raise TypeError(f"{type(loader).__name__} is no loader: give a DataLoader or an iterable of batches")
    if isinstance(loader, DataLoader) and not loader.in_order:
        raise ValueError(
            "DataLoader(in_order=False) gives batches in no fixed order, so that neither a resume nor a prediction can "
            "know which samples they are; give in_order=True"
        )
    return loader, any(divides_itself(part, rank, world_size) for part in parts_of(loader))


def check_limit(limit: Limit, name: str) -> None:
    """Raises ValueError when a limit is neither a number of batches nor a fraction."""
    number = isinstance(limit, int) and not isinstance(limit, bool) and limit >= 0
    if not number and not (isinstance(limit, float) and 0.0 <= limit <= 1.0):
        raise ValueError(
            f"{name}={limit!r}: give a number of batches (int, 0 or more) or a fraction (float, 0.0 to 1.0)"
        )


def limited(total: int | None, limit: Limit, name: str) -> int | None:
    """`total` batches after the limit; None when unknown.

    Raises:
        ValueError: The limit is a fraction of an unknown number, or leaves nothing of something.
    """
    if limit == 0:
        return 0
    if isinstance(limit, int):
        return None if total is None else min(limit, total)
    if limit == 1.0:
        return total
    if total is None:
        raise ValueError(f"{name}={limit}: a fraction needs a loader with a length; give a number of batches")
    kept = int(total * limit + 1e-9)  # 0.29 * 100 is 28.999999999999996
    if total and not kept:
        raise ValueError(f"{name}={limit} of {total} batches leaves none; raise it, or give 0 to leave the loader out")
    return kept


def in_dataset_order(loader: Any) -> Any:
    """The loader with a sequential sampler; itself where it has one, or a batch sampler of the user's, or is a stream."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return loader
    if type(loader.sampler) is SequentialSampler or type(loader.batch_sampler) not in (BatchSampler, NoneType):
        return loader
    changes: dict[str, Any] = {"sampler": SequentialSampler(loader.dataset)}  # type: ignore[arg-type]  # it is Sized
    if loader.batch_sampler is not None:
        size = loader.batch_size or loader.batch_sampler.batch_size  # type: ignore[attr-defined]  # a BatchSampler's
        drops = loader.drop_last or loader.batch_sampler.drop_last  # type: ignore[attr-defined]
        changes["batch_sampler"] = BatchSampler(changes["sampler"], size, drops)
    return reading_copy(loader, **changes)


def reading_copy(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """A copy of the user's loader, subclass and all, that reads other indices or another dataset.

    A copy, as rebuilding from arguments loses what a subclass holds; past `DataLoader.__setattr__`, which refuses
    changes to `batch_sampler`, `sampler` and `dataset`. It has a generator of its own, so that making an iterator
    does not draw from the global one.
    """
    clone = copy.copy(loader)
    clone._iterator = None
    clone.generator = torch.Generator()
    for name, value in changes.items():
        object.__setattr__(clone, name, value)
    return clone
