"""How the ranks of one job agree on a checkpoint; without a process group each function is a plain call."""

from __future__ import annotations

import itertools
import json
import math
import threading
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
_AFTER_FAILURE_SECONDS = 15.0

_gathers = itertools.count()


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


def agree(what: str, action: Callable[[], T], gather: Callable[[Any], list[Any]] = gather) -> T:
    """Run `action` on every rank and return this rank's result, or raise on every rank.

    A rank whose action failed raises its own error; the others raise CheckpointError naming the ranks and their errors.

    Args:
        what: Is done, in words.
        action: This rank's part.
        gather: How the ranks learn of each other's errors.
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


def decide(what: str, value: T, action: Callable[[list[T]], list[T]]) -> T:
    """Rank 0 sees every rank's value, and gives every rank one in return.

    Args:
        what: Is done, in words.
        value: This rank's.
        action: From the values in rank order to those that the ranks get; run on rank 0.
    """
    rank, size = rank_and_size()
    if size == 1:
        return action([value])[0]
    values: list[T] = [value] * size
    dist.gather_object(value, values if rank == 0 else None)
    given = agree(what, lambda: action(values) if rank == 0 else [])
    own: list[T | None] = [None]
    dist.scatter_object_list(own, given if rank == 0 else None)
    return own[0]  # type: ignore[return-value]  # scatter_object_list fills it


class StoreGather:
    """`gather` for a thread that runs beside training: through the job's store, without a collective.

    Every rank makes one for the same purpose at the same point of the program, and calls it equally often.

    Args:
        given_up: Set by the main thread once nobody may be there any more to wait for.
    """

    def __init__(self, given_up: threading.Event) -> None:
        self._name = f"acclight/gather/{next(_gathers)}"
        self._turn = 0
        self._given_up = given_up

    def __call__(self, value: Any) -> list[Any]:
        """Every rank's value in rank order, on every rank.

        Args:
            value: Made of what JSON has.

        Raises:
            CheckpointError: The main thread has given up, or another rank has failed in training.
        """
        rank, size = rank_and_size()
        if size == 1:
            return [value]
        store = dist.distributed_c10d._get_default_store()
        name, former = f"{self._name}/{self._turn}", f"{self._name}/{self._turn - 1}"
        # Rank 0 alone asks for every rank's, so that the store is asked as often as there are ranks.
        store.set(f"{name}/{rank}", json.dumps(value))
        if rank == 0:
            keys = [f"{name}/{other}" for other in range(size)]
            self._wait(store, keys)
            store.set(f"{name}/all", "[" + ",".join(store.get(key).decode() for key in keys) + "]")
            # Who is here has read the answer of the turn before.
            for key in (*keys, *([f"{former}/all"] if self._turn else [])):
                store.delete_key(key)
        else:
            self._wait(store, [f"{name}/all"])
        self._turn += 1
        values: list[Any] = json.loads(store.get(f"{name}/all"))
        return values

    def _wait(self, store: Any, keys: list[str]) -> None:
        # Not by `store.wait`, which keeps the store from this process's other threads while it lasts.
        pause, leave_at = 0.005, math.inf
        while not store.check(keys):
            failure = process_group.failure_elsewhere()
            leave_at = min(leave_at, time.monotonic() + _AFTER_FAILURE_SECONDS) if failure else math.inf
            if self._given_up.wait(pause) or time.monotonic() > leave_at:
                raise CheckpointError(failure or "the training has ended before all ranks had written their files")
            pause = min(2 * pause, _LOOK_SECONDS)


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
