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
from acclight.checkpoint.foreign import read_weights
from acclight.checkpoint.stored import SUFFIX, read_document, read_tensors, stored_tensors, tied_names
from acclight.checkpoint.values import decode

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
_HOW_TO_AVERAGE = "train with the callback EMAWeightAveraging or WeightAveraging, or leave out averaged=True."


def load_weights(path: str | os.PathLike[str], *, averaged: bool = False) -> dict[str, Any]:
    """The model's tensors on the CPU, whole, under the module's own names; loads strictly into the plain module.

    Works in one process whatever strategy and world size wrote the checkpoint. Names that were tied share one tensor.
    Takes the memory of one model. What a module's `get_extra_state` gave is there too, as plain values and tensors.

    Args:
        path: the checkpoint; or a file with weights that others have written: a .ckpt of Lightning's, a state_dict saved by
            torch, or a .safetensors file. Nothing in it is imported or called.
        averaged: the weights that a callback (`EMAWeightAveraging`, `WeightAveraging`) has averaged, in place of those
            that training goes on with; in the types of the latter.

    Raises:
        CheckpointError: the checkpoint is damaged (the message names the file), holds no averaged weights, or is a file with
            more in it than tensors and plain values.
    """
    path = layout.as_folder(path)
    if path.is_file():
        if averaged:
            raise CheckpointError(
                f"{path} is no checkpoint of acclight's and has no averaged weights: leave out averaged=True."
            )
        return read_weights(path)[0]
    weights, tied, _ = _read(path, averaged=averaged)
    tensors = read_tensors(path / layout.TENSORS_FOLDER, prefix="trainer.extra_state.")
    extra_state: dict[str, Any] = decode(read_json(path / layout.TRAINER).get("extra_state", {}), tensors)
    return weights | {alias: weights[kept] for alias, kept in tied.items()} | extra_state


def read_trainer(path: str | os.PathLike[str]) -> dict[str, Any]:
    """trainer.json of a checkpoint, with its tensors whole and on the CPU; in one process, without the weights.

    Raises:
        CheckpointError: these files or the checkpoint's form are damaged; the message names the file.
    """
    path = layout.as_folder(path)
    problems = layout.structure_problems(path)
    if not problems:
        listed = layout.read_manifest(path)
        own = {name: listed[name] for name in listed if name.startswith((layout.TRAINER, f"{layout.TENSORS_FOLDER}/"))}
        problems = layout.digest_problems(path, own)
    _raise_if(path, problems)
    trainer: dict[str, Any] = read_document(path / layout.TRAINER, dict, read_tensors(path / layout.TENSORS_FOLDER))
    return trainer


def export(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    prefix: str | None = None,
    keep_tied: bool | None = None,
    files: int | None = None,
    averaged: bool = False,
) -> Path:
    """Write a checkpoint's model as one Hugging Face folder: model.safetensors and, where it is known, config.json.

    Or as one file under the module's own names, where `out` ends in ".safetensors": what `load_state_dict` of the plain
    module takes from `safetensors.torch.load_file`.

    With more files than one they are model-00001-of-0000n.safetensors and so on, with the index that `from_pretrained` reads.

    The configuration is trainer.json's "hf_config". Takes the memory of one model, in one process. The extra state of a
    module's `get_extra_state`, which a Hugging Face folder has no place for, is left out.

    Args:
        path: the checkpoint.
        out: the folder, made when missing, or the file. Files are never written over.
        prefix: export only the names that begin with it, without it ("model." for a module that holds the
            transformer as `self.model`). Default: trainer.json's "hf_prefix", else ""; for a file "".
        keep_tied: also write the aliases of tied weights. Without them, `from_pretrained` ties the weights again. Default: in
            a file alone.
        files: how many files the weights are spread over, in equal parts. Default: trainer.json's "export_files", else 1.
        averaged: the averaged weights, as for `load_weights`.

    Returns:
        `out`.

    Raises:
        CheckpointError: the checkpoint is damaged, a file is in the way, no name begins with `prefix`, or there are no
            averaged weights.
    """
    out = Path(out)
    alone = out.suffix == SUFFIX
    if alone and (files or 1) > 1:
        raise CheckpointError(f"files={files}, but {out} is one file: give a folder for several.")
    for file in [out] if alone else [out / name for name in (WEIGHTS, INDEX, CONFIG)]:
        if os.path.lexists(file):
            raise CheckpointError(f"{file} exists, and is not written over: give another path or remove it.")
    weights, tied, trainer = _read(layout.as_folder(path), averaged=averaged)
    if prefix is None:
        prefix = "" if alone else str(trainer["hf_prefix"] or "")
    if alone if keep_tied is None else keep_tied:
        weights |= {alias: weights[kept].clone() for alias, kept in tied.items()}
    chosen = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
    if not chosen or "" in chosen:
        raise CheckpointError(
            f"prefix {prefix!r} does not fit the model's names: {', '.join(sorted(weights)[:5])}, ..."
        )
    if alone:
        folder, parts, config = out.parent, {out.name: chosen}, None
    else:
        folder, config = out, trainer["hf_config"]
        parts = _spread(chosen, int(trainer["export_files"] or 1) if files is None else files)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, tensors in parts.items():
            safetensors.torch.save_file(tensors, folder / f".{name}.saving", metadata={"format": "pt"})
        if config is not None:
            (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        for name in parts:
            os.replace(folder / f".{name}.saving", folder / name)
        if len(parts) > 1:
            total = sum(tensor.nbytes for tensor in chosen.values())
            where = {tensor: name for name, tensors in parts.items() for tensor in tensors}
            index = {"metadata": {"total_size": total}, "weight_map": where}
            (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    except OSError as exc:
        raise CheckpointError(f"cannot export to {out}: {exc}") from exc
    return out


def _spread(tensors: dict[str, torch.Tensor], files: int) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors by file, each file about as large as the others and none empty."""
    files = min(files, len(tensors))
    if files <= 1:
        return {WEIGHTS: tensors}
    groups: list[dict[str, torch.Tensor]] = [{} for _ in range(files)]
    sizes = [0] * files
    for name in sorted(tensors, key=lambda one: (-tensors[one].nbytes, one)):
        least = min(range(files), key=lambda i: (len(groups[i]) > 0, sizes[i]))
        groups[least][name] = tensors[name]
        sizes[least] += tensors[name].nbytes
    return {f"model-{i:05d}-of-{files:05d}.safetensors": group for i, group in enumerate(groups, 1)}


def _read(path: Path, *, averaged: bool) -> tuple[dict[str, torch.Tensor], dict[str, str], dict[str, Any]]:
    _raise_if(path, layout.verify(path))
    folder, file = path / layout.MODEL_FOLDER, path / layout.TRAINER
    document = read_json(file)
    if not isinstance(document, dict):
        raise CheckpointError(f"{file} holds no mapping.")
    # Only these: the rest may refer to tensors that are not wanted in memory here.
    trainer = {key: decode(document.get(key), {}) for key in ("tied", "hf_config", "hf_prefix", "export_files")}
    tied = tied_names(trainer, stored_tensors(folder), file)
    weights = read_tensors(folder)
    if averaged:
        if not document.get("averaged_updates"):
            raise CheckpointError(
                f"{path} holds no averaged weights: "
                + ("they were not updated yet." if document.get("averaged_updates") == 0 else _HOW_TO_AVERAGE)
            )
        for name, tensor in read_tensors(path / layout.AVERAGED_FOLDER).items():
            weights[name].copy_(tensor)
    return weights, tied, trainer


def _raise_if(path: Path, problems: list[str]) -> None:
    if problems:
        raise CheckpointError(f"cannot load {path}: " + " ".join(problems[:5]))
