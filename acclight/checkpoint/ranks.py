"""How the ranks of one job agree on a checkpoint; without a process group each function is a plain call."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from acclight.checkpoint.errors import CheckpointError
from acclight.strategies import process_group

T = TypeVar("T")

MEET_SECONDS = 45.0
#: How long it still waits once a signal has come: a launcher kills 30 s after its own.
HURRIED_MEET_SECONDS = 10.0
_LOOK_SECONDS = 0.25


def rank_and_size() -> tuple[int, int]:
    """This process's rank and the number of ranks; (0, 1) without a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def gather(value: T) -> list[T]:
    """Every rank's value in rank order, on every rank."""
    _, size = rank_and_size()
    if size == 1:
        return [value]
    values: list[T | None] = [None] * size
    dist.all_gather_object(values, value)
    return values  # type: ignore[return-value]  # all_gather_object fills every place


def agree(what: str, action: Callable[[], T]) -> T:
    """Run `action` on every rank and return this rank's result, or raise on every rank.

    A rank whose action failed raises its own error; the others raise CheckpointError naming the ranks and their errors.
    """
    rank, size = rank_and_size()
    if size == 1:
        return action()
    error: BaseException | None = None
    try:
        result = action()
    except BaseException as exc:  # the other ranks wait in the gather, so even a KeyboardInterrupt has to pass it first
        error = exc
    failures = {
        failed: text
        for failed, text in enumerate(gather(None if error is None else describe(error)))
        if text is not None
    }
    if error is not None:
        error.add_note(f"on rank {rank} of {size}, while {what}")
        raise error
    if failures:
        named = "; ".join(f"rank {failed}: {text}" for failed, text in failures.items())
        raise CheckpointError(f"{what} failed on {named}")
    return result


def describe(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}"


def meet(what: str, key: str, hurried: Callable[[], bool] = lambda: False) -> None:
    """Let rank 0 wait for the others outside of any collective, for MEET_SECONDS at most.

    A save that only rank 0 calls would wait in its first collective until the backend gives up (10 to 30 minutes). The
    other ranks do not wait here: they may be early by as long as rank 0 is busy with work of its own.

    Args:
        what: names what is done, in errors.
        key: the same on every rank, for one save at a time.
        hurried: says, each time it is called, whether this process has been told to end, and may wait a few seconds only.

    Raises:
        CheckpointError: on rank 0, when some rank has not called, or has failed meanwhile.
    """
    rank, size = rank_and_size()
    if size == 1:
        return
    store = dist.distributed_c10d._get_default_store()  # the only way to wait with a limit under every backend
    arrivals = store.add(f"acclight/checkpoint/{key}", 1)
    turn = (arrivals - 1) // size
    complete = f"acclight/checkpoint/{key}/{turn}"
    if arrivals % size == 0:
        store.set(complete, "1")
    if rank != 0:
        return
    begun, seconds = time.monotonic(), MEET_SECONDS
    while not _came(store, complete):  # in short waits, between which Python handles signals
        failure = process_group.failure_elsewhere()
        if hurried():
            seconds = min(seconds, time.monotonic() - begun + HURRIED_MEET_SECONDS)
            hurried = lambda: False  # noqa: E731  # the limit is set once
        if failure is None and time.monotonic() - begun < seconds:
            continue
        present = store.add(f"acclight/checkpoint/{key}", -1) + 1 - turn * size
        if failure is not None:
            raise CheckpointError(f"{what}: {failure}")
        raise CheckpointError(
            f"{what}: only {present} of {size} ranks called within {seconds:.3g} s. Every rank has to call "
            "save_checkpoint: take the call out of the `is_global_zero` (or rank 0) guard."
        )


def _came(store: Any, key: str) -> bool:
    try:
        store.wait([key], timedelta(seconds=min(_LOOK_SECONDS, MEET_SECONDS)))
    except dist.DistNetworkError:
        raise
    except RuntimeError:  # DistStoreError of a TCP store, a plain RuntimeError of a file store
        return False
    return True


def warn(message: str) -> None:
    """Warn once per job: on rank 0."""
    if rank_and_size()[0] == 0:
        warnings.warn(message, stacklevel=3)
