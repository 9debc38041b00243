"""The layout of a checkpoint folder: its manifest, what makes it good, which is the newest, and how one is removed.

```
step-00000120/
  manifest.json                    every file with size and SHA-256; written last, so its presence is the commit
  trainer.json  optimizer.json  schedulers.json  data.json
  model/  optimizer/  tensors/     *.safetensors; tensors/ holds what the JSON files refer to
  averaged/                        *.safetensors, where weights were averaged: those that differ from the ones in model/
  rng/rank-00000.json              and .safetensors, one per rank: its random state, and the place of its own loader or dataset
```
Only JSON and safetensors; nothing here is ever imported, called or unpickled.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from acclight.checkpoint.errors import CheckpointError
from acclight.checkpoint.files import digest, limit_problem, read_json, sync_folder, to_json, write_file
from acclight.checkpoint.ranks import warn
from acclight.checkpoint.stored import averaged_tensors, read_document, read_file, stored_tensors, tied_names

FORMAT = "acclight-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
TRAINER = "trainer.json"
OPTIMIZER = "optimizer.json"
SCHEDULERS = "schedulers.json"
DATA = "data.json"
DOCUMENTS: dict[str, type] = {TRAINER: dict, OPTIMIZER: dict, SCHEDULERS: list, DATA: dict}
MODEL_FOLDER = "model"
OPTIMIZER_FOLDER = "optimizer"
TENSORS_FOLDER = "tensors"
AVERAGED_FOLDER = "averaged"
RNG_FOLDER = "rng"
FOLDERS = (MODEL_FOLDER, OPTIMIZER_FOLDER, TENSORS_FOLDER, AVERAGED_FOLDER, RNG_FOLDER)

# One folder deep, no leading dot, ASCII: leaves no room for absolute paths, "..", drives or anything but the two kinds.
_FILE_NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*/)?[A-Za-z0-9_][A-Za-z0-9_.-]*\.(?:json|safetensors)", re.ASCII)
_RNG_FILE = re.compile(RNG_FOLDER + r"/rank-(\d{5})\.json", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


def rng_name(rank: int) -> str:
    """The name of a rank's RNG file within the checkpoint, without its ending."""
    return f"{RNG_FOLDER}/rank-{rank:05d}"


def read_manifest(path: Path) -> dict[str, dict[str, Any]]:
    """The manifest's files: name -> {"size": bytes, "sha256": hexadecimal}, checked for form only.

    Raises:
        CheckpointError: there is no manifest, or it is malformed or of another format version.
    """
    manifest = _manifest(path)
    files = manifest.get("files")
    if not isinstance(files, dict):
        raise CheckpointError(f"{path / MANIFEST}: 'files' is not a mapping.")
    for name, entry in files.items():
        if not _FILE_NAME.fullmatch(name) or name == MANIFEST:
            raise CheckpointError(f"{path / MANIFEST}: {name!r} is not a name that a checkpoint's file can have.")
        size, sha256 = (entry.get("size"), entry.get("sha256")) if isinstance(entry, dict) else (None, None)
        if type(size) is not int or not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
            raise CheckpointError(f"{path / MANIFEST}: the entry of {name!r} has no size and SHA-256.")
    return files


def _manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    if not path.exists():
        raise CheckpointError(f"{path} does not exist.")
    if file.is_symlink() or not file.is_file():
        raise CheckpointError(f"{path} holds no {MANIFEST}: it is not a checkpoint, or was never committed.")
    manifest = read_json(file)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{file} is not the manifest of an acclight checkpoint.")
    if manifest.get("version") != VERSION:
        raise CheckpointError(f"{file}: format version {manifest.get('version')!r}, this acclight reads {VERSION}.")
    if type(manifest.get("created")) is not int:
        raise CheckpointError(f"{file}: 'created' is not a number.")
    return manifest


def created(path: Path) -> int:
    """When the checkpoint was committed, in nanoseconds since 1970; later ones of a folder always have more."""
    moment: int = _manifest(path)["created"]
    return moment


def write_manifest(path: Path, files: dict[str, dict[str, Any]], moment: int) -> None:
    """Write the manifest, the last file of a checkpoint. `moment`: what `created` returns."""
    manifest = {"format": FORMAT, "version": VERSION, "created": moment, "files": dict(sorted(files.items()))}
    write_file(path / MANIFEST, to_json(manifest))


def structure_problems(path: Path) -> list[str]:
    """What is wrong with a checkpoint that can be seen without reading the files' content through; empty when good."""
    try:
        files = read_manifest(path)
        found = dict(_walk(path))
    except (OSError, CheckpointError) as exc:
        return [str(exc)]
    problems = [f"{path / name} is missing from the manifest." for name in DOCUMENTS if name not in files]
    for name in found.keys() - files.keys() - {MANIFEST}:
        problems.append(f"{path / name} is not listed in the manifest.")
    for name, entry in files.items():
        if name not in found:
            problems.append(f"{path / name} is missing.")
        elif not stat.S_ISREG(found[name].st_mode):
            problems.append(f"{path / name} is a link or not a plain file.")
        elif found[name].st_size != entry["size"]:
            problems.append(f"{path / name} has {found[name].st_size} bytes, the manifest says {entry['size']}.")
        elif problem := limit_problem(path / name, entry["size"]):
            problems.append(problem)
    return sorted(problems)


def _walk(path: Path, prefix: str = "") -> Iterator[tuple[str, os.stat_result]]:
    """Everything below a folder but plain folders, by name; links are never followed."""
    with os.scandir(path) as entries:
        for entry in entries:
            name = prefix + entry.name
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(Path(entry.path), f"{name}/")
            else:
                yield name, entry.stat(follow_symlinks=False)


def digest_problems(path: Path, files: dict[str, dict[str, Any]]) -> list[str]:
    """Which of these files (name -> manifest entry) do not have the SHA-256 of their entry."""
    problems = []
    for name, entry in files.items():
        try:
            if digest(path / name) != entry["sha256"]:
                problems.append(f"{path / name} does not have the SHA-256 of the manifest: its content has changed.")
        except OSError as exc:
            problems.append(f"cannot read {path / name}: {exc}")
    return problems


def content_problems(path: Path) -> list[str]:
    """What is wrong with a checkpoint whose files are those of the manifest: what they say cannot be understood."""
    try:
        tensors = stored_tensors(path / TENSORS_FOLDER)
        documents = {name: read_document(path / name, kind, tensors) for name, kind in DOCUMENTS.items()}
        model = stored_tensors(path / MODEL_FOLDER)
        tied_names(documents[TRAINER], model, path / TRAINER)
        averaged_tensors(path / AVERAGED_FOLDER, model)
        stored_tensors(path / OPTIMIZER_FOLDER)
        for name in read_manifest(path):
            if match := _RNG_FILE.fullmatch(name):
                read_rng(path, int(match[1]))
    except CheckpointError as exc:
        return [str(exc)]
    return []


def read_rng(path: Path, rank: int) -> dict[str, Any] | None:
    """A rank's random state, or None where there is none."""
    document, tensors = path / f"{rng_name(rank)}.json", path / f"{rng_name(rank)}.safetensors"
    if not document.exists():
        return None
    state: dict[str, Any] = read_document(document, dict, read_file(tensors) if tensors.exists() else {})
    return state


def verify(path: str | os.PathLike[str]) -> list[str]:
    """What is wrong with a checkpoint; empty when it is good. Reads every file, in this process alone."""
    path = as_folder(path)
    return structure_problems(path) or digest_problems(path, read_manifest(path)) or content_problems(path)


def candidates(*directories: Path) -> tuple[list[Path], list[str]]:
    """The committed checkpoints in some folders, newest first, and what is wrong with those that have no place in it.

    Temporary folders of saves under way, or of runs that died in one, have a leading dot and are passed over;
    so are links, which name a checkpoint a second time.
    """
    dated: list[tuple[int, Path]] = []
    problems: list[str] = []
    for folder in (f for directory in directories if directory.is_dir() for f in sorted(directory.iterdir())):
        if (
            folder.name.startswith(".")
            or folder.is_symlink()
            or not folder.is_dir()
            or not _looks_like_checkpoint(folder)
        ):
            continue
        try:
            dated.append((created(folder), folder))
        except CheckpointError as exc:
            problems.append(str(exc))
    return [folder for _, folder in sorted(dated, reverse=True)], problems


def as_folder(path: str | os.PathLike[str] | None) -> Path:
    """The path of a checkpoint; TypeError for None, which `latest` gives where there is none."""
    if path is None:
        raise TypeError("the checkpoint's path is None: give its folder (latest(...) is None where no good one is)")
    return Path(path)


def default_folders(root: Path) -> list[Path]:
    """Where a Trainer with this default_root_dir writes checkpoints unless it is told otherwise, in all its runs."""
    return [root / "checkpoints", *sorted(root.glob("*/checkpoints")), *sorted(root.glob("*/*/checkpoints"))]


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """The newest committed checkpoint that verifies, in `directory` or where a Trainer with it as default_root_dir writes.

    Newest is the one committed last; None where there is none. Damaged ones are named in a warning and skipped.
    """
    folders, problems = candidates(Path(directory), *default_folders(Path(directory)))
    for problem in problems:
        warn(f"Skipped a damaged checkpoint: {problem}")
    for folder in folders:
        found = verify(folder)
        if not found:
            return folder
        warn(f"Skipped a damaged checkpoint: {found[0]}")
    return None


def _looks_like_checkpoint(path: Path) -> bool:
    return (path / MANIFEST).exists() or (path / TRAINER).exists() or (path / MODEL_FOLDER).is_dir()


def holds_only_checkpoint_files(path: Path) -> bool:
    """Whether nothing at the top of a folder is foreign to a checkpoint, so that all of it may be deleted."""
    return {entry.name for entry in path.iterdir()} <= {MANIFEST, *DOCUMENTS, *FOLDERS}


def remove(path: str | os.PathLike[str]) -> None:
    """Delete a checkpoint: its manifest first, so that a half-deleted one is never taken for a checkpoint.

    A path that is not there is left as it is. Call it on one rank.

    Raises:
        CheckpointError: the folder is a link, is no checkpoint, or holds something else too.
    """
    path = Path(path)
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_dir() or not holds_only_checkpoint_files(path):
        raise CheckpointError(f"{path} is not a folder with nothing but a checkpoint in it; not removed.")
    try:
        (path / MANIFEST).unlink(missing_ok=True)
        sync_folder(path)
        shutil.rmtree(path)
    except OSError as exc:
        raise CheckpointError(f"cannot remove {path}: {exc}") from exc


def prune(directory: str | os.PathLike[str], keep: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """Remove the committed checkpoints of `directory` that are not in `keep`; call it on one rank, after a commit.

    The newest good checkpoint stays whenever no good one is in `keep`.

    Returns:
        What was removed.
    """
    kept = {Path(path).resolve() for path in keep}
    folders, _ = candidates(Path(directory))
    doomed = [folder for folder in folders if folder.resolve() not in kept]
    if all(structure_problems(path) for path in kept):
        last_good = next((folder for folder in doomed if not verify(folder)), None)
        doomed = [folder for folder in doomed if folder != last_good]
    for folder in doomed:
        remove(folder)
    return doomed
