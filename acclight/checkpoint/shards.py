"""Tensors between this job's ranks and a folder of safetensors files, through torch.distributed.checkpoint.

Checked against torch 2.13. Importing this module costs most of a second, so it is imported when a save or load begins.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from acclight.checkpoint.errors import CheckpointError
from acclight.checkpoint.ranks import describe, rank_and_size


class _SavePlanner(DefaultSavePlanner):
    """Names are taken as they are, and tensors are laid out as safetensors wants them."""

    def __init__(self, lowest_rank_writes: bool) -> None:
        super().__init__(flatten_state_dict=False, dedup_save_to_lowest_rank=lowest_rank_writes)
        self._memory: set[tuple[torch.device, int]] = set()

    def transform_object(self, write_item: WriteItem, object: Any) -> torch.Tensor:  # noqa: A002  # the name of the base class
        """One at a time while the file is written, so that no second copy of the model ever exists."""
        tensor: torch.Tensor = super().transform_object(write_item, object).detach().contiguous()
        memory = (tensor.device, tensor.untyped_storage().data_ptr())
        if (
            memory in self._memory and tensor.numel()
        ):  # safetensors refuses two names for one memory, as one shared step count
            tensor = tensor.clone()
        self._memory.add(memory)
        return tensor


def save_tensors(folder: Path, tensors: Mapping[str, torch.Tensor], *, lowest_rank_writes: bool) -> set[str]:
    """Write every rank's part of `tensors` into `folder`: one file per rank, forced to the disk. Collective.

    Args:
        folder: made when missing.
        tensors: DTensors (their local shard is written by each rank) and plain tensors (written once, by one of the
            ranks that give that name).
        lowest_rank_writes: plain tensors are written by the lowest rank that gives them, for values that may differ by
            rank (buffers); else the work is spread over the ranks.

    Returns:
        The names of all ranks.
    """
    storage = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    with _named_errors(folder, "write"):
        metadata = save(
            dict(tensors),
            storage_writer=storage,
            planner=_SavePlanner(lowest_rank_writes),
            no_dist=rank_and_size()[1] == 1,
        )
    return set(metadata.state_dict_metadata)


def load_tensors(folder: Path, into: Mapping[str, torch.Tensor]) -> None:
    """Fill the tensors of `into`, in place, with what `folder` holds under their names. Collective."""
    storage = HuggingFaceStorageReader(str(folder))
    with _named_errors(folder, "read"):
        load(
            dict(into),
            storage_reader=storage,
            planner=DefaultLoadPlanner(flatten_state_dict=False),
            no_dist=rank_and_size()[1] == 1,
        )


@contextmanager
def _named_errors(folder: Path, verb: str) -> Iterator[None]:
    """Turn the library's CheckpointException (a BaseException, the same on all ranks) into a CheckpointError."""
    rank, size = rank_and_size()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as exc:
        causes = {failed: cause for failed, (cause, _) in exc.failures.items()}
        own = causes.get(rank)
        if own is not None and not isinstance(own, Exception):  # KeyboardInterrupt, SystemExit
            raise own from exc
        named = "; ".join(
            f"{folder / shard_name(failed)} (rank {failed} of {size}): {describe(cause)}"
            for failed, cause in causes.items()
        )
        raise CheckpointError(f"cannot {verb} {named}") from (own or exc)


def shard_name(rank: int) -> str:
    """The file that HuggingFaceStorageWriter(save_distributed=True) gives a rank."""
    return f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
