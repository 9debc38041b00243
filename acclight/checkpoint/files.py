"""The single files of a checkpoint: written so that they last, read with a bound, hashed."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from acclight.checkpoint.errors import CheckpointError

MAX_JSON_BYTES = 256 * 2**20
MAX_HEADER_BYTES = 100_000_000  # what the safetensors library itself accepts


def write_file(path: Path, content: bytes) -> None:
    """Write a new file and force it to the disk; an error names the file."""
    try:
        with open(path, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as exc:
        raise CheckpointError(f"cannot write {path}: {exc}") from exc


def sync_folder(path: Path) -> None:
    """Force a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as exc:
        if exc.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems without such a thing (CIFS, some FUSE)
            raise
    finally:
        os.close(descriptor)


def to_json(value: Any) -> bytes:
    """JSON as the checkpoint's files hold it."""
    return (json.dumps(value, indent=1) + "\n").encode()


def read_json(path: Path) -> Any:
    """The content of a JSON file of a checkpoint; CheckpointError, naming the file, when it cannot be had."""
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_JSON_BYTES + 1)
        if len(content) > MAX_JSON_BYTES:
            raise CheckpointError(f"{path} is larger than {MAX_JSON_BYTES} bytes.")
        return json.loads(content)
    except (OSError, ValueError, RecursionError) as exc:
        if isinstance(exc, CheckpointError):
            raise
        raise CheckpointError(f"cannot read {path}: {exc}") from exc


def digest(path: Path) -> str:
    """The SHA-256 of a file in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def limit_problem(file: Path, size: int) -> str | None:
    """Why a JSON or safetensors file of `size` bytes must not be opened with their libraries, or None."""
    if file.suffix == ".json":
        return f"{file} is larger than {MAX_JSON_BYTES} bytes." if size > MAX_JSON_BYTES else None
    try:
        with open(file, "rb") as stream:
            header = int.from_bytes(stream.read(8), "little")
    except OSError as exc:
        return f"cannot read {file}: {exc}"
    if size < 8 or header > size - 8 or header > MAX_HEADER_BYTES:
        return f"{file}: a header of {header} bytes is more than the file or the format can hold."
    return None
