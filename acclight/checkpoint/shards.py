"""Tensors between this job's ranks and a folder of safetensors files, through torch.distributed.checkpoint.

Checked against torch 2.13. Importing this module costs most of a second, so it is imported when a save or load begins.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._hf_utils import (
    CUSTOM_METADATA_KEY,
    DCP_VERSION_KEY,
    FORMAT_KEY,
    FORMAT_VALUE,
    HF_DCP_VERSION,
    SAVED_OFFSETS_KEY,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load

from acclight.checkpoint import files
from acclight.checkpoint.errors import CheckpointError
from acclight.checkpoint.ranks import agree, decide, describe, rank_and_size


@dataclass(frozen=True)
class Piece:
    """A part of a tensor that this rank writes.

    Attributes:
        name: The tensor's.
        offsets: Where the part begins in the whole tensor, one number per dimension.
        values: The part, which shares memory with what was given, or a copy on the CPU.
    """

    name: str
    offsets: tuple[int, ...]
    values: torch.Tensor

    def copied(self) -> Piece:
        """The same with a copy of the values, on the CPU."""
        return replace(self, values=self.values.to("cpu", copy=True, memory_format=torch.contiguous_format))


def pieces(given: Sequence[tuple[Mapping[str, torch.Tensor], bool]]) -> list[tuple[list[Piece], set[str]]]:
    """Decide which rank writes which part of some tensors. Collective.

    Args:
        given: Sets of DTensors (each rank writes its own shard) and plain tensors (written once, by one of the ranks that
            give that name). With each set: whether its plain tensors are written by the lowest rank that gives them, for
            values that may differ by rank (buffers); else the work is spread over the ranks.

    Returns:
        For each set what this rank writes, and, on rank 0, the names of all ranks.
    """
    rank, _ = rank_and_size()
    # Names are taken as they are.
    planners = [DefaultSavePlanner(flatten_state_dict=False, dedup_save_to_lowest_rank=lowest) for _, lowest in given]

    def local() -> list[SavePlan]:
        for planner, (tensors, _) in zip(planners, given, strict=True):
            planner.set_up_planner(dict(tensors), is_coordinator=rank == 0)
        return [planner.create_local_plan() for planner in planners]

    def decided(plans: list[list[SavePlan]]) -> list[Any]:
        by_set = [
            planner.create_global_plan([*own]) for planner, own in zip(planners, zip(*plans, strict=True), strict=True)
        ]
        names.extend(set(metadata.state_dict_metadata) for _, metadata in by_set)
        return [*zip(*(plans for plans, _ in by_set), strict=True)]

    names: list[set[str]] = []
    plans = decide("planning who writes what", agree("planning what to write", local), decided)
    return [
        ([_piece(planner, item) for item in plan.items], names[position] if names else set())
        for position, (planner, plan) in enumerate(zip(planners, plans, strict=True))
    ]


def _piece(planner: DefaultSavePlanner, item: WriteItem) -> Piece:
    assert item.tensor_data is not None
    values = planner.lookup_object(item.index).detach()
    return Piece(item.index.fqn, tuple(item.tensor_data.chunk.offsets), values)


def write_pieces(folder: Path, rank: int, parts: Sequence[Piece]) -> dict[str, dict[str, Any]]:
    """Write what `pieces` gave this rank as one file, in the form of torch.distributed.checkpoint's Hugging Face storage.

    Returns:
        The file's entry in the manifest, by its name; empty where there is nothing to write.
    """
    if not parts:
        return {}
    places = {part.name: {SAVED_OFFSETS_KEY: list(part.offsets)} for part in parts}
    if len(places) != len(parts):
        raise CheckpointError(f"cannot write {folder}: one rank holds several parts of one tensor.")
    file = folder / shard_name(rank)
    metadata = {CUSTOM_METADATA_KEY: json.dumps(places), DCP_VERSION_KEY: str(HF_DCP_VERSION), FORMAT_KEY: FORMAT_VALUE}
    folder.mkdir(exist_ok=True)
    return {f"{folder.name}/{file.name}": files.write_tensors(file, {p.name: p.values for p in parts}, metadata)}


def load_tensors(folder: Path, into: Mapping[str, torch.Tensor]) -> None:
    """Fill the tensors of `into`, in place, with what `folder` holds under their names. Collective."""
    storage = HuggingFaceStorageReader(str(folder))
    with _named_errors(folder):
        load(
            dict(into),
            storage_reader=storage,
            planner=DefaultLoadPlanner(flatten_state_dict=False),
            no_dist=rank_and_size()[1] == 1,
        )


@contextmanager
def _named_errors(folder: Path) -> Iterator[None]:
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
        raise CheckpointError(f"cannot read {named}") from (own or exc)


def shard_name(rank: int) -> str:
    """The file that HuggingFaceStorageWriter(save_distributed=True) gives a rank."""
    return f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
