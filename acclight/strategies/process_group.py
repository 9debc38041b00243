"""Joins and leaves torch.distributed: once per process, in order, whatever the number of Trainers."""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import time
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist

_FAREWELL_SECONDS = 20.0
_FAREWELL_AFTER_FAILURE_SECONDS = 2.0
_notes = itertools.count()
_runs = itertools.count()
#: The run that is under way on this rank, until it ends or fails.
_underway: int | None = None
_ended_well = True


def launched() -> bool:
    """True when a launcher (accelerate launch, torchrun) has given this process a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def default_backend(device_type: str) -> str:
    """The backend for a device type; accelerators get gloo beside theirs, for objects and checkpoints on the CPU."""
    native = {"cuda": "nccl", "xpu": "xccl", "hpu": "hccl", "npu": "hccl", "mlu": "cncl", "musa": "mccl"}.get(
        device_type
    )
    return f"{device_type}:{native},cpu:gloo" if native else "gloo"


def check_backend(backend: str) -> None:
    """Raises ValueError for a backend that this torch, or a group that exists already, does not have; it names one that is."""
    there = [
        name for name in ("nccl", "gloo", "mpi", "xccl", "hccl", "cncl", "mccl") if dist.is_backend_available(name)
    ]
    if backend not in there:
        raise ValueError(f"backend={backend!r} is not available here; use {' or '.join(map(repr, there))}")
    if dist.is_initialized() and backend not in dist.get_backend_config():
        raise ValueError(
            f"backend={backend!r}, but this process is in a group with {dist.get_backend_config()!r} already: give no backend"
        )


def join(backend: str, timeout: timedelta) -> None:
    """Joins the launcher's group, or makes a group of one where nothing was launched. Does nothing when already in one.

    Args:
        backend: As for `torch.distributed.init_process_group`.
        timeout: How long a collective may wait.
    """
    if dist.is_initialized():
        return
    if launched():
        device = None
        if "nccl" in backend:
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % max(torch.cuda.device_count(), 1))
            torch.cuda.set_device(device)
        dist.init_process_group(backend, timeout=timeout, device_id=device)
    else:
        # A store in memory: a group of one needs no port and leaves no trace in the environment.
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    atexit.register(_leave)


def _leave() -> None:
    """Meets the other ranks and destroys the group: a gloo process that skips this aborts in about a third of its exits."""
    if not dist.is_initialized():
        return
    try:
        # After an unhandled exception nobody may be there to meet, and the launcher is about to take the job down.
        if dist.get_world_size() > 1 and not hasattr(sys, "last_value"):
            _say_farewell()
    finally:
        dist.destroy_process_group()


def _say_farewell() -> None:
    """Waits for the other ranks, in the store, where every rank's wait has a limit; `monitored_barrier` limits rank 0's alone."""
    rank, size = dist.get_rank(), dist.get_world_size()
    notes = SharedNotes(size, "farewell")
    # After a failure that the script has handled (or a `sys.exit` in a hook) the others may wait for this rank in a collective,
    # which its exit ends; those that failed as well are here at once.
    seconds = _FAREWELL_SECONDS if _ended_well else _FAREWELL_AFTER_FAILURE_SECONDS
    reason = f"they did not come within {seconds:g} s"
    try:
        met = notes.agree("here", seconds)
        if met and rank == 0:
            # The store may live in this process: the others have to read there that all have come.
            notes.agree("read", _FAREWELL_AFTER_FAILURE_SECONDS)
        elif met:
            notes.add("read")
    except dist.DistError as error:
        met, reason = False, str(error)
    if not met and _ended_well:
        warnings.warn(f"rank {rank} leaves without the other ranks: {reason}", stacklevel=1)


class SharedNotes:
    """Counters in the group's store: what one rank may have to tell the others, without a collective on the ranks that do not.

    Every rank makes its notes at the same point of the program, so that the ranks' notes are the same.

    Args:
        world_size: How many ranks share them; 1 for none.
        name: Of notes that a process makes once; without a name they are numbered.
    """

    def __init__(self, world_size: int, name: str | None = None) -> None:
        self._world_size = world_size
        if world_size > 1:
            self._prefix = f"acclight/notes/{next(_notes) if name is None else name}"

    def add(self, name: str) -> int:
        """Counts this rank; returns how many ranks have counted themselves."""
        if self._world_size == 1:
            return 1
        store = dist.distributed_c10d._get_default_store()
        return int(store.add(f"{self._prefix}/{name}", 1))

    def count(self, name: str) -> int:
        """How many ranks have counted themselves so far."""
        if self._world_size == 1:
            return 0
        store = dist.distributed_c10d._get_default_store()
        return int(store.add(f"{self._prefix}/{name}", 0))

    def meet(self, name: str, seconds: float) -> bool:
        """`agree`, but with one answer for all ranks: nobody takes the others for late who hold that everybody has come."""
        answer = "all" if self.agree(name, seconds) else "late"
        if self._world_size == 1:
            return True
        store = dist.distributed_c10d._get_default_store()
        return bool(store.compare_set(f"{self._prefix}/{name}/answer", "", answer) == b"all")

    def agree(self, name: str, seconds: float) -> bool:
        """Counts this rank, and waits until all ranks have; False when that has not happened in time."""
        there, deadline = self.add(name), time.monotonic() + seconds
        while there < self._world_size:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
            there = self.count(name)
        return True


def begin_run() -> int:
    """A number for a run that all ranks begin now; failures are told within it, and a later run knows nothing of them."""
    global _underway, _ended_well
    _underway, _ended_well = next(_runs), False
    return _underway


def end_run() -> None:
    """The newest run has ended on this rank, its clean-up included, without an exception."""
    global _underway, _ended_well
    _underway, _ended_well = None, True


def failure_elsewhere() -> str | None:
    """What the first rank to fail in the run under way has said; for a rank that waits for the others outside of a collective."""
    if _underway is None:
        return None
    store, key = dist.distributed_c10d._get_default_store(), f"acclight/failure/{_underway}"
    return store.get(key).decode() if store.check([key]) else None


def report_failure(run: int, error: BaseException) -> str | None:
    """Tells the other ranks that this one fails, so that theirs can name the cause.

    Args:
        run: As `begin_run` gave it.
        error: What ends the run on this rank.

    Returns:
        What the first rank to fail said; None when this is the first, or when nobody can be reached any more.
    """
    global _underway
    _underway = None
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    # A data loader's worker puts its whole traceback into the message, which one rank prints already.
    lines = str(error).strip().splitlines() or [""]
    message = lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"
    text = f"rank {dist.get_rank()} failed first with {type(error).__name__}: {message}"
    try:
        store = dist.distributed_c10d._get_default_store()
        first = store.compare_set(f"acclight/failure/{run}", "", text).decode()
    except dist.DistError:
        return None
    return None if first == text else first
