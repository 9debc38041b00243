"""Reading a checkpoint back: verified first, into tensors of any strategy and world size."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from acclight.checkpoint import format as layout
from acclight.checkpoint.errors import CheckpointError
from acclight.checkpoint.ranks import agree, gather, rank_and_size, warn
from acclight.checkpoint.stored import (
    StoredTensor,
    averaged_tensors,
    read_document,
    read_tensors,
    stored_tensors,
    tied_names,
)

if TYPE_CHECKING:
    from acclight.trainer import Trainer


class Source(ABC):
    """What a fit goes on from, or an evaluation takes its weights from, opened on all ranks. `load_*` are collective.

    Attributes:
        path: The folder or file.
        trainer: What trainer.json holds, with its tensors whole and on the CPU.
        optimizer_meta: What optimizer.json holds.
        schedulers: Their states, in the order of configure_optimizers.
        data: The place in the data; empty where that is not known.
        model_tensors: name -> shape and dtype of what `load_model` reads.
        optimizer_tensors: likewise for `load_optimizer`.
        averaged_tensors: likewise for `load_averaged`; empty where no weights were averaged.
        left_out: What a resumed fit does not get back and a user would expect, one sentence each.
    """

    path: Path
    trainer: dict[str, Any]
    optimizer_meta: dict[str, Any]
    schedulers: list[Any]
    data: dict[str, Any]
    model_tensors: dict[str, StoredTensor]
    optimizer_tensors: dict[str, StoredTensor]
    averaged_tensors: dict[str, StoredTensor]
    left_out: Sequence[str] = ()
    _tied: dict[str, str]

    def name_state(self, trainer: Trainer) -> None:  # noqa: B027  # a checkpoint that holds all names has nothing to do
        """Gives what the source holds by number the names of this run, whose optimizers and weights are there. Collective."""

    def load_model(self, into: Mapping[str, torch.Tensor]) -> None:
        """Fill `into` (name -> DTensor or plain tensor, on any device) in place with the model's tensors. Collective.

        A tied weight may be given under its kept name, an alias, or both. Values are converted to the dtype of `into`.

        Raises:
            CheckpointError: on every rank and before anything is loaded, naming what is missing, unexpected, or of
                another shape.
        """
        self._load(self.path / layout.MODEL_FOLDER, into, self.model_tensors, self._tied)

    def load_optimizer(self, into: Mapping[str, torch.Tensor]) -> None:
        """Fill `into` ("<parameter name>/<state key>" -> tensor) in place; otherwise as `load_model`. Collective."""
        self._load(self.path / layout.OPTIMIZER_FOLDER, into, self.optimizer_tensors, {})

    def load_averaged(self, into: Mapping[str, torch.Tensor]) -> set[str]:
        """Fill those tensors of `into` in place of which the checkpoint holds averaged values. Collective.

        Returns:
            Their names in `into`.
        """
        known = {name: tensor for name, tensor in into.items() if self._tied.get(name, name) in self.averaged_tensors}
        wanted = {self._tied.get(name, name) for name in known}
        stored = {name: tensor for name, tensor in self.averaged_tensors.items() if name in wanted}
        self._load(self.path / layout.AVERAGED_FOLDER, known, stored, self._tied)
        return set(known)

    def _load(
        self, path: Path, into: Mapping[str, torch.Tensor], stored: Mapping[str, StoredTensor], tied: Mapping[str, str]
    ) -> None:
        rounds = agree(f"loading {path}", lambda: _match(path, into, stored, tied))
        for number in range(max(gather(len(rounds)))):
            self._fill(path, rounds[number] if number < len(rounds) else {})

    @abstractmethod
    def _fill(self, path: Path, into: Mapping[str, torch.Tensor]) -> None:
        """Fill tensors in place with what `path`, a part of this source, holds under their names. Collective."""

    def rng(self, rank: int) -> dict[str, Any] | None:
        """The random state that `rank` gave; None when the checkpoint was written by fewer ranks."""
        return None


class Reader(Source):
    """A checkpoint of acclight's own. Making one is collective.

    Args:
        path: the checkpoint's folder.
        verify: compare every file with its SHA-256, each on one rank. Form, sizes and names are always checked.

    Raises:
        CheckpointError: on every rank, naming the file and what is wrong with it.
    """

    def __init__(self, path: str | os.PathLike[str], *, verify: bool = True) -> None:
        self.path = Path(path)
        problems = _problems(self.path, verify)
        if problems:
            raise CheckpointError(f"cannot load {self.path}: " + " ".join(problems[:5]))
        agree(f"opening {self.path}", self._open)

    @classmethod
    def latest(cls, *directories: str | os.PathLike[str]) -> Reader | None:
        """Open the newest good checkpoint of some folders, or None; damaged ones are named in a warning. Collective."""
        found = layout.candidates(*map(Path, directories)) if rank_and_size()[0] == 0 else ([], [])
        folders, skipped = gather(found)[0]
        for problem in skipped:
            warn(f"Skipped a damaged checkpoint: {problem}")
        for folder in folders:
            try:
                return cls(folder)
            except CheckpointError as exc:  # the same on every rank
                warn(f"Skipped a damaged checkpoint: {exc}")
        return None

    def _open(self) -> None:
        tensors = read_tensors(self.path / layout.TENSORS_FOLDER)
        documents = {name: read_document(self.path / name, kind, tensors) for name, kind in layout.DOCUMENTS.items()}
        self.trainer = documents[layout.TRAINER]
        self.optimizer_meta = documents[layout.OPTIMIZER]
        self.schedulers = documents[layout.SCHEDULERS]
        self.data = documents[layout.DATA]
        self.model_tensors = stored_tensors(self.path / layout.MODEL_FOLDER)
        self.optimizer_tensors = stored_tensors(self.path / layout.OPTIMIZER_FOLDER)
        self.averaged_tensors = averaged_tensors(self.path / layout.AVERAGED_FOLDER, self.model_tensors)
        self._tied = tied_names(self.trainer, self.model_tensors, self.path / layout.TRAINER)

    def _fill(self, path: Path, into: Mapping[str, torch.Tensor]) -> None:
        from acclight.checkpoint.shards import load_tensors

        load_tensors(path, into)

    def rng(self, rank: int) -> dict[str, Any] | None:
        return layout.read_rng(self.path, rank)


def _problems(path: Path, verify: bool) -> list[str]:
    """What is wrong with a checkpoint, the same on every rank; the hashing is spread over the ranks. Collective."""
    rank, size = rank_and_size()

    def own_part() -> list[str]:
        problems = layout.structure_problems(path)
        if problems or not verify:
            return problems
        files = layout.read_manifest(path)
        largest_first = sorted(files, key=lambda name: (-files[name]["size"], name))
        return layout.digest_problems(path, {name: files[name] for name in largest_first[rank::size]})

    parts = gather(agree(f"verifying {path}", own_part))
    return sorted({problem for part in parts for problem in part})


def _match(
    path: Path, into: Mapping[str, torch.Tensor], stored: Mapping[str, StoredTensor], tied: Mapping[str, str]
) -> list[dict[str, torch.Tensor]]:
    """Which stored name fills which tensor. A stored name that fills two tensors needs a second round."""
    rounds: list[dict[str, torch.Tensor]] = [{}] if into else []
    used: set[str] = set()
    missing, shapes = [], []
    for name, tensor in into.items():
        source = name if name in stored else tied.get(name)
        if source is None:
            missing.append(name)
            continue
        used.add(source)
        if stored[source].shape != tuple(tensor.shape):
            shapes.append(f"{name!r} is {tuple(tensor.shape)} here and {stored[source].shape} in the checkpoint")
        elif tensor.is_meta:
            raise CheckpointError(f"{name!r} has no memory to load into: it is on the meta device.")
        else:
            place = next((entry for entry in rounds if source not in entry), None)
            if place is None:
                rounds.append(place := {})
            place[source] = tensor
    unexpected = [name for name in stored if name not in used]
    problems = []
    if missing:
        problems.append(f"not in the checkpoint: {_few(missing)}")
    if unexpected:
        problems.append(f"only in the checkpoint: {_few(unexpected)}")
    if shapes:
        problems.append(f"other shapes: {_few(shapes)}")
    if problems:
        raise CheckpointError(f"{path} does not fit; " + "; ".join(problems) + ".")
    return rounds


def _few(names: list[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
