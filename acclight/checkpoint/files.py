"""The single files of a checkpoint: written so that they last, read with a bound, hashed."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import _TYPES

from acclight.checkpoint.errors import CheckpointError

MAX_JSON_BYTES = 256 * 2**20
MAX_HEADER_BYTES = 100_000_000  # what the safetensors library itself accepts
_DTYPE_NAMES = {dtype: name for name, dtype in _TYPES.items()}
_AT_ONCE = 8 * 2**20


class NewFile:
    """A file that is written once, hashed meanwhile, and forced to the disk; errors name it.

    Args:
        path: Where nothing is yet.

    Attributes:
        size: Bytes written so far.
        sha256: Of what was written, in hexadecimal; there once the context has ended.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self.sha256 = ""
        self._hash = hashlib.sha256()

    def __enter__(self) -> NewFile:
        try:
            self._file = open(self.path, "xb", buffering=0)  # closed by __exit__
        except OSError as exc:
            raise self._error(exc) from exc
        return self

    def write(self, content: bytes | memoryview) -> None:
        """Adds to the file."""
        left = memoryview(content)
        try:
            while left:
                written = self._file.write(left[:_AT_ONCE])
                self._hash.update(left[:written])
                self.size += written
                left = left[written:]
        except OSError as exc:
            raise self._error(exc) from exc

    def __exit__(self, *error: object) -> None:
        try:
            with self._file:
                if error[0] is None:
                    os.fsync(self._file.fileno())
        except OSError as exc:
            raise self._error(exc) from exc
        self.sha256 = self._hash.hexdigest()

    def _error(self, exc: OSError) -> CheckpointError:
        return CheckpointError(f"cannot write {self.path}: {exc}")


def write_file(path: Path, content: bytes) -> dict[str, Any]:
    """Write a new file and force it to the disk; an error names the file.

    Returns:
        Its entry in the manifest.
    """
    with NewFile(path) as file:
        file.write(content)
    return {"size": file.size, "sha256": file.sha256}


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> dict[str, Any]:
    """Write a new safetensors file from the tensors' own memory, so that no second copy of them ever exists.

    The library's own writer makes one: it takes a file's content as a whole. The format is that of
    https://github.com/huggingface/safetensors: the header's length (8 bytes, little-endian), the header (JSON), the data.

    Args:
        path: Where nothing is yet.
        tensors: On any device; one that is not on the CPU is copied there while it is written.
        metadata: Of the whole file.

    Returns:
        Its entry in the manifest.
    """
    # The widest elements first, as the library does, so that every tensor is aligned.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    begin = 0
    for name in order:
        tensor = tensors[name]
        end = begin + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with NewFile(path) as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for name in order:
            if tensors[name].numel():
                plain = tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                file.write(plain.numpy().data)
    return {"size": file.size, "sha256": file.sha256}


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
