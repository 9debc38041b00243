"""A checkpoint outside of training: its weights, its trainer.json, and the Hugging Face folder made of it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from acclight.checkpoint import format as layout
from acclight.checkpoint.errors import CheckpointError
from acclight.checkpoint.files import read_json
from acclight.checkpoint.stored import read_document, read_tensors, stored_tensors, tied_names
from acclight.checkpoint.values import decode

WEIGHTS = "model.safetensors"
CONFIG = "config.json"


def load_weights(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The model's tensors on the CPU, whole, under the module's own names; loads strictly into the plain module.

    Works in one process whatever strategy and world size wrote the checkpoint. Names that were tied share one tensor.
    Takes the memory of one model. What a module's `get_extra_state` gave is there too, as plain values and tensors.

    Raises:
        CheckpointError: the checkpoint is damaged; the message names the file.
    """
    path = Path(path)
    weights, tied, _ = _read(path)
    tensors = read_tensors(path / layout.TENSORS_FOLDER, prefix="trainer.extra_state.")
    extra_state: dict[str, Any] = decode(read_json(path / layout.TRAINER).get("extra_state", {}), tensors)
    return weights | {alias: weights[kept] for alias, kept in tied.items()} | extra_state


def read_trainer(path: str | os.PathLike[str]) -> dict[str, Any]:
    """trainer.json of a checkpoint, with its tensors whole and on the CPU; in one process, without the weights.

    Raises:
        CheckpointError: these files or the checkpoint's form are damaged; the message names the file.
    """
    path = Path(path)
    problems = layout.structure_problems(path)
    if not problems:
        listed = layout.read_manifest(path)
        own = {name: listed[name] for name in listed if name.startswith((layout.TRAINER, f"{layout.TENSORS_FOLDER}/"))}
        problems = layout.digest_problems(path, own)
    _raise_if(path, problems)
    trainer: dict[str, Any] = read_document(path / layout.TRAINER, dict, read_tensors(path / layout.TENSORS_FOLDER))
    return trainer


def export(
    path: str | os.PathLike[str], out: str | os.PathLike[str], *, prefix: str | None = None, keep_tied: bool = False
) -> Path:
    """Write a checkpoint's model as one Hugging Face folder: model.safetensors and, where it is known, config.json.

    The configuration is trainer.json's "hf_config". Takes the memory of one model, in one process. The extra state of a
    module's `get_extra_state`, which a Hugging Face folder has no place for, is left out.

    Args:
        path: the checkpoint.
        out: the folder; made when missing. Files in it are never written over.
        prefix: export only the names that begin with it, without it ("model." for a module that holds the
            transformer as `self.model`). Default: trainer.json's "hf_prefix", else "".
        keep_tied: also write the aliases of tied weights. Without them, `from_pretrained` ties the weights again.

    Returns:
        `out`.

    Raises:
        CheckpointError: the checkpoint is damaged, a file is in the way, or no name begins with `prefix`.
    """
    out = Path(out)
    for name in (WEIGHTS, CONFIG):
        if os.path.lexists(out / name):
            raise CheckpointError(f"{out / name} exists, and is not written over: give another folder or remove it.")
    weights, tied, trainer = _read(Path(path))
    if prefix is None:
        prefix = str(trainer["hf_prefix"] or "")
    if keep_tied:
        weights |= {alias: weights[kept].clone() for alias, kept in tied.items()}
    chosen = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
    if not chosen or "" in chosen:
        raise CheckpointError(
            f"prefix {prefix!r} does not fit the model's names: {', '.join(sorted(weights)[:5])}, ..."
        )
    config = trainer["hf_config"]
    try:
        out.mkdir(parents=True, exist_ok=True)
        temporary = out / f".{WEIGHTS}.saving"
        safetensors.torch.save_file(chosen, temporary, metadata={"format": "pt"})
        if config is not None:
            (out / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        os.replace(temporary, out / WEIGHTS)
    except OSError as exc:
        raise CheckpointError(f"cannot export to {out}: {exc}") from exc
    return out


def _read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str], dict[str, object]]:
    _raise_if(path, layout.verify(path))
    folder, file = path / layout.MODEL_FOLDER, path / layout.TRAINER
    document = read_json(file)
    if not isinstance(document, dict):
        raise CheckpointError(f"{file} holds no mapping.")
    # Only these: the rest may refer to tensors (averaged weights of a callback) that are not wanted in memory here.
    trainer = {key: decode(document.get(key), {}) for key in ("tied", "hf_config", "hf_prefix")}
    return read_tensors(folder), tied_names(trainer, stored_tensors(folder), file), trainer


def _raise_if(path: Path, problems: list[str]) -> None:
    if problems:
        raise CheckpointError(f"cannot load {path}: " + " ".join(problems[:5]))
