"""Writing a checkpoint: everything into a temporary sibling, then one rename that commits it."""

from __future__ import annotations

import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from acclight.checkpoint import files
from acclight.checkpoint import format as layout
from acclight.checkpoint.errors import CheckpointError
from acclight.checkpoint.ranks import agree, gather, meet, rank_and_size, warn
from acclight.checkpoint.values import encode

if TYPE_CHECKING:
    from acclight.checkpoint.shards import Piece

_ABANDONED_SECONDS = 24 * 3600


def write(path: str | os.PathLike[str], **contents: Any) -> Path:
    """Write and commit a checkpoint at `path`: `begin`, and at once `Writing.finish`. Collective.

    Args:
        path: The folder to make.
        contents: As `begin` takes them.

    Returns:
        The absolute path of the checkpoint.
    """
    return begin(path, **contents).finish()


def begin(
    path: str | os.PathLike[str],
    *,
    model: Mapping[str, torch.Tensor],
    optimizer: Mapping[str, torch.Tensor],
    optimizer_meta: Mapping[str, Any],
    trainer: Mapping[str, Any],
    schedulers: Sequence[Mapping[str, Any]],
    data: Mapping[str, Any],
    rng: Mapping[str, Any],
    averaged: Mapping[str, torch.Tensor] | None = None,
    copy: bool = False,
) -> Writing:
    """Take what belongs into a checkpoint, and make the temporary folder beside `path`. Collective.

    Every rank calls it with the same path. Temporary folders of runs that died are deleted by the next save beside them.

    Args:
        path: the folder to make. A good checkpoint there is never written over; a damaged one is replaced.
        model: name -> DTensor, or plain tensor. A plain tensor may be given by all ranks (rank 0's value is written) or
            by some only. One name for tied weights, with trainer["tied"] = {alias: that name}.
        optimizer: "<parameter name>/<state key>" -> tensor, likewise; plain tensors are equal on all ranks that give
            them.
        optimizer_meta: the groups and whatever else; this and the next three: rank 0's is written, tensors may be
            anywhere in it (DTensors on all ranks), other values as `values.encode` takes them.
        trainer: top-level keys of trainer.json.
        schedulers: one state per scheduler.
        data: the position in the data.
        rng: this rank's own random state.
        averaged: averaged values of some of the names in `model`, likewise.
        copy: take a copy, on the CPU, of what this rank writes, so that training may go on before `Writing.finish`.

    Raises:
        CheckpointError: the place is taken or cannot be written to, another rank failed, or (on rank 0) not every
            rank called.
        TypeError: a value cannot be represented; the message holds its key path.
    """
    from acclight.checkpoint import shards

    path = Path(os.path.abspath(path))
    rank, _ = rank_and_size()
    what = f"saving {path}"
    meet(what, str(path))
    tensors: dict[str, torch.Tensor] = {}
    own: dict[str, torch.Tensor] = {}
    documents: dict[str, Any] = {}

    def prepare() -> None:
        _refuse_unsavable(model, optimizer)
        documents[layout.TRAINER] = encode(dict(trainer), "trainer", tensors)
        documents[layout.OPTIMIZER] = encode(dict(optimizer_meta), "optimizer", tensors)
        documents[layout.SCHEDULERS] = encode(list(schedulers), "schedulers", tensors)
        documents[layout.DATA] = encode(dict(data), "data", tensors)
        documents[layout.rng_name(rank) + ".json"] = encode(dict(rng), "rng", own)

    agree(what, prepare)
    if rank != 0:  # of plain values rank 0's count; of a DTensor every rank has a part
        tensors = {name: tensor for name, tensor in tensors.items() if _is_dtensor(tensor)}
        documents = {name: value for name, value in documents.items() if name not in layout.DOCUMENTS}
    folders = (layout.MODEL_FOLDER, layout.OPTIMIZER_FOLDER, layout.TENSORS_FOLDER, layout.AVERAGED_FOLDER)
    planned = shards.pieces([(model, True), (optimizer, False), (tensors, True), (averaged or {}, True)])
    agree(what, lambda: _check_tied(trainer.get("tied"), planned[0][1]) if rank == 0 else None)
    temporary = gather(agree(what, lambda: _make_temporary(path) if rank == 0 else path))[0]
    writing = Writing(
        path,
        temporary,
        {folder: parts for folder, (parts, _) in zip(folders, planned, strict=True)},
        documents,
        {name: tensor.detach().cpu().clone() for name, tensor in own.items()},
    )
    try:
        agree(what, lambda: _check_shared(temporary))
        if copy:
            agree(what, writing.copy)
    except BaseException:
        writing.discard()
        raise
    return writing


class Writing:
    """A checkpoint whose content is fixed, and that is not on the disk yet; `begin` makes it.

    Attributes:
        path: Where it will be.
    """

    def __init__(
        self,
        path: Path,
        temporary: Path,
        parts: Mapping[str, list[Piece]],
        documents: Mapping[str, Any],
        own: Mapping[str, torch.Tensor],
    ) -> None:
        self.path = path
        self._temporary = temporary
        self._parts = dict(parts)
        self._documents = documents
        self._own = own

    def copy(self) -> None:
        """Let go of the tensors that were given: keep copies of this rank's parts, on the CPU."""
        self._parts = {folder: [part.copied() for part in parts] for folder, parts in self._parts.items()}

    def finish(self, gather: Callable[[Any], list[Any]] = gather) -> Path:
        """Write this rank's files, and commit on rank 0 once all ranks have theirs on the disk.

        Nothing is at the path until all of it is there. When any rank fails, the temporary folder is deleted and every rank
        raises.

        Args:
            gather: How the ranks learn of each other. Default: a collective.

        Returns:
            The absolute path of the checkpoint.

        Raises:
            CheckpointError: a file cannot be written, or another rank failed.
        """
        rank, what = rank_and_size()[0], f"saving {self.path}"
        try:
            entries = agree(what, lambda: self._write_files(rank), gather)
            every = {name: entry for part in gather(entries) for name, entry in part.items()}
            agree(what, lambda: _commit(self._temporary, self.path, every) if rank == 0 else None, gather)
        except BaseException:
            self.discard()
            raise
        return self.path

    def discard(self) -> None:
        """Delete what was written, where it is not committed."""
        if rank_and_size()[0] == 0:
            # A failing disk may refuse this too: the error that is raised says why, and the next save tries again.
            shutil.rmtree(self._temporary, ignore_errors=True)

    def _write_files(self, rank: int) -> dict[str, dict[str, Any]]:
        """Write this rank's files; returns their entries in the manifest."""
        from acclight.checkpoint.shards import write_pieces

        entries: dict[str, dict[str, Any]] = {}
        for folder, parts in self._parts.items():
            entries |= write_pieces(self._temporary / folder, rank, parts)
        self._parts.clear()  # copies are as large as the model
        for name, value in self._documents.items():
            entries[name] = files.write_file(self._temporary / name, files.to_json(value))
        if self._own:
            name = layout.rng_name(rank) + ".safetensors"
            entries[name] = files.write_tensors(self._temporary / name, self._own, {})
        return entries


def _refuse_unsavable(model: Mapping[str, torch.Tensor], optimizer: Mapping[str, torch.Tensor]) -> None:
    memory: dict[tuple[Any, ...], str] = {}
    for name, tensor in (*model.items(), *optimizer.items()):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name!r} is a {type(tensor).__name__}, not a tensor.")
        if (
            tensor.layout is not torch.strided
            or tensor.is_meta
            or tensor.is_quantized
            or tensor.dtype is torch.complex128
        ):
            raise TypeError(
                f"{name!r} ({tensor.dtype}, {tensor.layout}, {tensor.device}) cannot be stored in safetensors: "
                "give a dense tensor with data, of a dtype other than complex128."
            )
    for name, tensor in model.items():
        local: torch.Tensor = tensor.to_local() if _is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
        if not local.numel():
            continue
        place = (local.device, local.data_ptr(), local.shape, local.stride())
        other = memory.setdefault(place, name)
        if other != name:
            raise CheckpointError(
                f"the model gives {other!r} and {name!r} for one tied weight: give one of them, and the other in "
                "trainer['tied'] as {alias: kept name}."
            )


def _is_dtensor(tensor: torch.Tensor) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def _check_tied(tied: Any, names: set[str]) -> None:
    for alias, kept in (tied or {}).items():
        if alias in names or kept not in names:
            raise CheckpointError(
                f"trainer['tied'] ties {alias!r} to {kept!r}, but the model gives {sorted(names & {alias, kept})}."
            )


def _make_temporary(path: Path) -> Path:
    _check_place(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(path.parent)
        temporary = path.parent / f".saving-{os.getpid()}@{socket.gethostname()}@{path.name}"
        (temporary / layout.RNG_FOLDER).mkdir(parents=True)
    except OSError as exc:
        raise CheckpointError(f"cannot make a folder beside {path}: {exc}") from exc
    return temporary


def _check_shared(temporary: Path) -> None:
    if not temporary.is_dir():
        raise CheckpointError(
            f"rank 0 made {temporary}, which is not there: save to a file system that all ranks share."
        )


def _check_place(path: Path) -> None:
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_dir():
        raise CheckpointError(f"{path} exists and is not a folder.")
    problems = layout.verify(path)
    if not problems:
        raise CheckpointError(
            f"{path} already holds a good checkpoint, which is never written over: give another path."
        )
    if not (path / layout.MANIFEST).exists() and not layout.holds_only_checkpoint_files(path):
        raise CheckpointError(f"{path} exists and holds something other than a checkpoint.")
    warn(f"The save replaces a damaged checkpoint: {problems[0]}")


def _remove_abandoned(directory: Path) -> None:
    """Delete what saves that died left behind; of another machine, only what was not touched for a day."""
    abandoned = [folder for folder in directory.glob(".saving-*") if _is_abandoned(folder)]
    abandoned += [folder for folder in directory.glob(".damaged-*") if layout.holds_only_checkpoint_files(folder)]
    for folder in abandoned:
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:
            pass  # another run of the same folder was faster
        except OSError as exc:
            warn(f"Could not delete {folder}, which a save that died has left behind: {exc}")


def _is_abandoned(folder: Path) -> bool:
    match = re.fullmatch(r"\.saving-(\d+)@([^@]*)@.*", folder.name)
    if match is None or folder.is_symlink():
        return False
    pid, host = int(match[1]), match[2]
    if host == socket.gethostname() and (pid == os.getpid() or not _is_alive(pid)):
        return True
    return time.time() - folder.stat().st_mtime > _ABANDONED_SECONDS


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _commit(temporary: Path, path: Path, entries: dict[str, dict[str, Any]]) -> None:
    layout.write_manifest(temporary, entries, _created_now(path.parent))
    if problems := layout.structure_problems(temporary):
        raise CheckpointError(problems[0])
    try:
        for folder in (*(temporary / name for name in layout.FOLDERS), temporary):
            if folder.exists():
                files.sync_folder(folder)
        damaged = _move_aside(path)
        os.rename(temporary, path)
        files.sync_folder(path.parent)
    except OSError as exc:
        raise CheckpointError(f"cannot commit {path}: {exc}") from exc
    if damaged is not None and layout.holds_only_checkpoint_files(damaged):
        shutil.rmtree(damaged, ignore_errors=True)  # the checkpoint is committed; a leftover is no reason to fail
    elif damaged is not None:
        warn(f"The damaged checkpoint held other files too and was kept as {damaged}.")


def _created_now(directory: Path) -> int:
    """Nanoseconds since 1970, and later than every checkpoint in the folder even when the clock was set back."""
    folders, _ = layout.candidates(directory)
    return max([time.time_ns(), *(layout.created(folder) + 1 for folder in folders[:1])])


def _move_aside(path: Path) -> Path | None:
    if not path.exists():
        return None
    for number in range(1, 1000):
        aside = path.with_name(f".damaged-{number}-{path.name}")
        if not os.path.lexists(aside):
            os.rename(path, aside)
            return aside
    raise CheckpointError(f"{path.parent} holds a thousand damaged copies of {path.name}: remove them.")
