"""`acclight checkpoint inspect | verify | export | diff`: checkpoints without a Trainer, a device or the user's code."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from acclight import checkpoint
from acclight.checkpoint import format as layout
from acclight.checkpoint.comparison import compare
from acclight.checkpoint.stored import StoredTensor, stored_tensors

#: What `diff` shows of each folder, the largest differences first.
_SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The four actions."""
    actions = parser.add_subparsers(dest="action", metavar="action", required=True)

    def action(name: str, purpose: str) -> argparse.ArgumentParser:
        return actions.add_parser(name, help=purpose, description=purpose, allow_abbrev=False)

    inspect = action("inspect", "say what a checkpoint holds")
    inspect.add_argument("path", type=Path, help="its folder")
    inspect.add_argument("--tensors", action="store_true", help="list every tensor with its shape and type")
    verify = action("verify", "read every file and say what is wrong; status 1 when something is")
    verify.add_argument("paths", type=Path, nargs="+", metavar="path", help="the folder of a checkpoint")
    export = action("export", "write the weights as a Hugging Face folder, or as one file for plain PyTorch")
    export.add_argument("path", type=Path, help="the checkpoint's folder")
    export.add_argument("out", type=Path, help="a folder, or a file that ends in .safetensors")
    export.add_argument(
        "--prefix", help="only names that begin with it, without it (default: that of the model inside)"
    )
    export.add_argument(
        "--keep-tied", action="store_true", default=None, help="in a folder, too, write tied weights twice"
    )
    export.add_argument("--files", type=int, help="spread the weights of a folder over so many files")
    export.add_argument("--averaged", action="store_true", help="the averaged weights")
    diff = action("diff", "say in what two checkpoints differ; status 1 when they do")
    diff.add_argument("first", type=Path, help="a checkpoint's folder")
    diff.add_argument("second", type=Path, help="another's")
    diff.add_argument("--atol", type=float, default=0.0, help="values this far apart count as equal (default: 0)")


def run(arguments: argparse.Namespace) -> int:
    """Prints what was asked for; the exit status is 1 for something wrong, or different."""
    if arguments.action == "inspect":
        print("\n".join(described(arguments.path, tensors=arguments.tensors)))
        return 0
    if arguments.action == "verify":
        return max(_verify(path) for path in arguments.paths)
    if arguments.action == "export":
        out = checkpoint.export(
            arguments.path,
            arguments.out,
            prefix=arguments.prefix,
            keep_tied=arguments.keep_tied,
            files=arguments.files,
            averaged=arguments.averaged,
        )
        print(f"exported to {out}")
        return 0
    found = list(_differences(arguments.first, arguments.second, arguments.atol))
    print("\n".join(found) if found else "no difference")
    return int(bool(found))


def described(path: Path, *, tensors: bool = False) -> Iterator[str]:
    """What a checkpoint holds, line by line; read from its JSON files and the headers of its tensors."""
    trainer = checkpoint.read_trainer(path)
    files = layout.read_manifest(path)
    committed = datetime.fromtimestamp(layout.created(path) / 1e9, UTC)
    yield f"checkpoint: {path}"
    yield f"committed: {committed:%Y-%m-%d %H:%M:%S} UTC"
    yield f"step {trainer['global_step']}, epoch {trainer['epoch']}" + (
        ", weights only" * bool(trainer["weights_only"])
    )
    written_by = f"{trainer['strategy']}, {_several(trainer['world_size'], 'process', 'es')}, {trainer['precision']}"
    yield f"written by: {written_by}"
    yield f"versions: {', '.join(f'{name} {number}' for name, number in trainer['versions'].items())}"
    for name in ("model", "averaged", "optimizer"):
        held = stored_tensors(path / name)
        if held:
            yield f"{name}: {_summed(held)}"
        for one, stored in sorted(held.items()) if tensors else ():
            yield f"  {one} {list(stored.shape)} {_type(stored)}"
    for alias, kept in trainer["tied"].items():
        yield f"tied: {alias} is {kept}"
    for name in ("hparams", "callbacks"):
        for key, value in trainer[name].items():
            yield f"{name}: {key} = {_short(value)}"
    yield f"files: {len(files)}, {_size(sum(entry['size'] for entry in files.values()))}"


def _verify(path: Path) -> int:
    problems = checkpoint.verify(path)
    print("\n".join(problems) if problems else f"{path} is good")
    return int(bool(problems))


def _differences(first: Path, second: Path, atol: float) -> Iterator[str]:
    one, other = checkpoint.read_trainer(first), checkpoint.read_trainer(second)
    yield from _values("trainer", one, other)
    for folder in (layout.MODEL_FOLDER, layout.AVERAGED_FOLDER, layout.OPTIMIZER_FOLDER):
        found = compare(first / folder, second / folder, atol=atol)
        found.sort(key=lambda difference: (-difference.largest, difference.name))
        yield from (f"{folder}: {difference}" for difference in found[:_SHOWN])
        if len(found) > _SHOWN:
            yield f"{folder}: and {len(found) - _SHOWN} more tensors differ"


def _values(where: str, one: Any, other: Any) -> Iterator[str]:
    """The plain values in which two trees differ, each with its place."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in sorted({*one, *other}, key=str):
            if key not in one or key not in other:
                yield f"{where}.{key}: only in the {'second' if key not in one else 'first'}"
            else:
                yield from _values(f"{where}.{key}", one[key], other[key])
    elif _short(one) != _short(other):
        yield f"{where}: {_short(one)} and {_short(other)}"


def _summed(held: Mapping[str, StoredTensor]) -> str:
    numbers = sum(math.prod(stored.shape) for stored in held.values())
    size = sum(math.prod(stored.shape) * stored.dtype.itemsize for stored in held.values())
    types = Counter(_type(stored) for stored in held.values())
    shown = ", ".join(f"{count} x {name}" for name, count in types.most_common())
    return f"{_several(len(held), 'tensor')} ({shown}), {numbers:,} numbers, {_size(size)}"


def _type(stored: StoredTensor) -> str:
    return str(stored.dtype).removeprefix("torch.")


def _several(count: int, noun: str, ending: str = "s") -> str:
    return f"{count} {noun}{'' if count == 1 else ending}"


def _size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 200 else f"{text[:197]}..."
