"""What of a Trainer goes into a checkpoint, and how it comes back."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

import acclight
from acclight.checkpoint.accelerate_state import AccelerateFolder, holds_weights, refuse_shards
from acclight.checkpoint.errors import CheckpointError
from acclight.checkpoint.foreign import WeightsFile, is_extra_state
from acclight.checkpoint.format import MANIFEST, default_folders
from acclight.checkpoint.ranks import agree, meet
from acclight.checkpoint.reader import Reader, Source
from acclight.checkpoint.writer import Writing, begin
from acclight.messages import info, warn

if TYPE_CHECKING:
    from acclight.trainer import Trainer


@runtime_checkable
class Averaging(Protocol):
    """A callback that averages the weights, and lets evaluations run with the average in the model's place."""

    #: How often the average was updated.
    updates: int

    def averaged_state(self, trainer: Trainer) -> dict[str, torch.Tensor]:
        """The average as a checkpoint takes it, by name; what is not there is as in the model. Collective."""

    def raw_state(self, trainer: Trainer) -> dict[str, torch.Tensor]:
        """Likewise the weights that training goes on with, while the average is in their place; else empty. Collective."""

    def load_averaged_state(
        self, trainer: Trainer, updates: int, read: Callable[[dict[str, torch.Tensor]], set[str]]
    ) -> None:
        """Takes the average back; `read(into)` fills those of a mapping of tensors that were saved. Collective."""

    def forget(self) -> None:
        """The model has got other weights: there is no average of them."""


def _averaging(trainer: Trainer) -> Averaging | None:
    return next((callback for callback in trainer.callbacks if isinstance(callback, Averaging)), None)


def take(trainer: Trainer, path: Path, *, weights_only: bool, copy: bool) -> Writing:
    """Takes the Trainer's whole state, to be written as a checkpoint. Collective.

    Args:
        trainer: In fit, at the end of a window or in an evaluation.
        path: The folder to make.
        weights_only: Leave out optimizers, schedulers and random state.
        copy: Training goes on before it is written.
    """
    module, strategy = trainer.module, trainer.core.strategy
    path = Path(os.path.abspath(path))
    what, loop = f"saving {path}", trainer._loop
    # Before the first collective: some strategies gather the state in one.
    meet(what, str(path), hurried=lambda: loop is not None and loop.watch.received is not None)
    whole = strategy.model_state(module)
    averaging = _averaging(trainer)
    averaged = {} if averaging is None else averaging.averaged_state(trainer)
    # A save from inside a validation still holds what training goes on with.
    whole |= {} if averaging is None else averaging.raw_state(trainer)
    extra_state = {name: whole.pop(name) for name in list(whole) if is_extra_state(name)}
    model, tied = _untie(trainer, whole)
    state = {} if weights_only else strategy.optimizer_state(module, trainer.optimizers)
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    # What the user's own hooks raise on one rank, all ranks hear of.
    document = agree(what, lambda: _document(trainer, tied, extra_state, weights_only=weights_only))
    return begin(
        path,
        model=model,
        optimizer=tensors,
        optimizer_meta={} if weights_only else _optimizer_meta(trainer, state, tensors),
        trainer=document,
        schedulers=[] if weights_only else [dict(c.scheduler.state_dict()) for c in trainer.lr_scheduler_configs],
        data=trainer.data.state_dict() if trainer.data is not None else {},
        rng={} if weights_only else _of_this_rank(trainer),
        averaged=averaged,
        copy=copy,
    )


def _document(
    trainer: Trainer, tied: dict[str, str], extra_state: dict[str, Any], *, weights_only: bool
) -> dict[str, Any]:
    """The top level of trainer.json."""
    module, strategy = trainer.module, trainer.core.strategy
    document: dict[str, Any] = {
        "global_step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "progress": trainer.progress.state_dict(),
        "hparams": module.storable_hparams,
        "hparams_holder": module._hparams_holder,
        "callbacks": {c.state_key: own for c in trainer.callbacks if (own := c.state_dict())},
        "datamodule": trainer.datamodule.state_dict() if trainer.datamodule is not None else {},
        "loggers": {one.state_key: own for one in trainer.loggers if (own := one.state_dict())},
        "strategy": strategy.name,
        "export_files": trainer.world_size if strategy.exports_by_rank else 1,
        "world_size": trainer.world_size,
        "precision": trainer.core.precision,
        "scaler": strategy.scaler_state(),
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "weights_only": weights_only,
        "averaged_updates": averaging.updates if (averaging := _averaging(trainer)) is not None else None,
        "tied": tied,
        "extra_state": extra_state,
        "versions": {"acclight": acclight.__version__} | {name: version(name) for name in ("accelerate", "torch")},
    }
    document |= _hugging_face(module)
    extra: dict[str, Any] = {}
    for callback in trainer.callbacks:
        callback.on_save_checkpoint(trainer, module, extra)
    module.on_save_checkpoint(extra)
    document["extra"] = extra
    return document


def restore(trainer: Trainer, reader: Source) -> None:
    """Brings a fit back to where a checkpoint was written. Collective.

    Args:
        trainer: In fit, with the model prepared.
        reader: The opened checkpoint.
    """
    module, strategy = trainer.module, trainer.core.strategy
    document = reader.trainer
    restore_weights(trainer, reader)
    if document.get("weights_only"):
        warn(f"{reader.path} holds weights only: optimizers, step and data start anew")
        return
    reader.name_state(trainer)
    for sentence in reader.left_out:
        warn(sentence)
    saved = {name: (tuple(t.shape), t.dtype) for name, t in reader.optimizer_tensors.items()}
    groups = reader.optimizer_meta["groups"]
    _restore_groups(trainer, groups)
    strategy.load_optimizer_state(
        module, trainer.optimizers, saved, reader.optimizer_meta["plain"], reader.load_optimizer
    )
    if len(reader.schedulers) != len(trainer.lr_scheduler_configs):
        raise ValueError(
            f"{reader.path} holds {len(reader.schedulers)} schedulers, but configure_optimizers gave "
            f"{len(trainer.lr_scheduler_configs)}"
        )
    for config, state in zip(trainer.lr_scheduler_configs, reader.schedulers, strict=True):
        config.scheduler.load_state_dict(state)
    strategy.load_scaler_state(document["scaler"])
    for callback in trainer.callbacks:
        if callback.state_key in document["callbacks"]:
            callback.load_state_dict(document["callbacks"][callback.state_key])
    averaging = _averaging(trainer)
    if averaging is not None and reader.averaged_tensors:
        averaging.load_averaged_state(trainer, document["averaged_updates"], reader.load_averaged)
    for logger in trainer.loggers:
        if logger.state_key in document.get("loggers", {}):
            logger.load_state_dict(document["loggers"][logger.state_key])
        # Where the run lies may have another path on another machine.
        if logger.version != (decided := trainer.core.broadcast_object(logger.version)):
            logger.version = decided
    if trainer.datamodule is not None and "datamodule" in document:
        trainer.datamodule.load_state_dict(document["datamodule"])
    restore_position(trainer, reader)
    if trainer.world_size > document.get("world_size", trainer.world_size):
        # Rank 0, which alone warns, has a state of its own.
        warn(
            f"{reader.path} holds the random states of {document['world_size']} of the {trainer.world_size} ranks; the others "
            "start from the seed"
        )
    state = reader.rng(trainer.global_rank)
    if state is not None:
        set_random_state(state)
        if (
            trainer.data is not None
            and trainer.world_size == document["world_size"]
            and not _loaders_come_anew(trainer)
        ):
            trainer.data.load_own_state(state.get("data"))


def restore_position(trainer: Trainer, reader: Source) -> None:
    """Goes to the step, the epoch and the place in the data where a checkpoint was written, unless it holds weights only."""
    if reader.trainer.get("weights_only"):
        return
    trainer.progress.load_state_dict(reader.trainer["progress"])
    if trainer.data is None or not reader.data:
        return
    if _loaders_come_anew(trainer):
        # The loader of the next epoch may well be another one.
        trainer.data.seed = reader.data["seed"]
    else:
        trainer.data.load_state_dict(reader.data)


def _loaders_come_anew(trainer: Trainer) -> bool:
    return trainer.progress.epoch_done and bool(trainer.reload_dataloaders_every_n_epochs)


def _of_this_rank(trainer: Trainer) -> dict[str, Any]:
    """What differs between the ranks: the random state, and where the loader or the dataset itself says that it is."""
    place = None if trainer.data is None else trainer.data.own_state()
    return {**(trainer.paused_random_state or random_state()), **({} if place is None else {"data": place})}


def find(trainer: Trainer, ckpt_path: str | Path | None) -> Source | None:
    """Opens what `ckpt_path` names: a path, "last", "best" or "auto" (None when there is nothing yet). Collective."""
    if ckpt_path is None:
        return None
    if ckpt_path == "best":
        best = getattr(trainer.checkpoint_callback, "best_model_path", "")
        if not best:
            raise ValueError("ckpt_path='best', but no ModelCheckpoint of this Trainer has saved anything yet")
        return Reader(best)
    if ckpt_path not in ("auto", "last"):
        return _open(trainer, Path(ckpt_path))
    folders = _folders(trainer)
    reader = Reader.latest(*folders)
    if reader is None and ckpt_path == "last":
        raise ValueError(f"ckpt_path='last', but there is no good checkpoint in {', '.join(map(str, folders))}")
    return reader


def _open(trainer: Trainer, path: Path) -> Source:
    """Opens a checkpoint, or what others have written. Collective."""
    kind = agree("looking at ckpt_path", lambda: _kind(path))
    if kind is WeightsFile:
        return WeightsFile(path, trainer.module)
    return AccelerateFolder(path, trainer) if kind is AccelerateFolder else Reader(path)


def _kind(path: Path) -> type[Source]:
    """What wrote a path; raises CheckpointError for what cannot be loaded at all, and says what to give instead."""
    given = f"ckpt_path={str(path)!r}"
    if not path.exists():
        raise CheckpointError(f"{given} does not exist: give a checkpoint's folder, 'last', 'best' or 'auto'")
    if not path.is_dir():
        return WeightsFile
    if (path / MANIFEST).exists():
        return Reader
    refuse_shards(path)
    if holds_weights(path):
        return AccelerateFolder
    if (path / "config.json").exists():
        raise CheckpointError(
            f"{given} is a Hugging Face folder, which cannot be resumed: give it to TransformersModule or from_pretrained"
        )
    raise CheckpointError(
        f"{given} holds no {MANIFEST}, so that it is no checkpoint, or was never committed: give a checkpoint's folder, one that "
        "Accelerator.save_state has written, a file with weights, 'last', 'best' or 'auto'"
    )


def _folders(trainer: Trainer) -> list[Path]:
    """Where checkpoints of this and of earlier runs lie: where the callbacks say, else below default_root_dir."""
    asked = [c.search_folders() for c in trainer.callbacks if hasattr(c, "search_folders")]
    root = trainer.default_root_dir
    folders = [folder for own in asked for folder in own] or default_folders(root)
    return list(dict.fromkeys(path.resolve() for path in folders))


def restore_weights(trainer: Trainer, reader: Source) -> None:
    """Loads the weights alone, and lets the module and the callbacks see what they added. Collective.

    An evaluation gets the averaged weights, where the checkpoint has them and a callback of the Trainer averages.
    """
    extra = reader.trainer.get("extra", {})
    trainer.module.on_load_checkpoint(extra)
    for callback in trainer.callbacks:
        callback.on_load_checkpoint(trainer, trainer.module, extra)
    takers, saved = _takers_of_extra_state(trainer.module), reader.trainer.get("extra_state", {})
    if odd := sorted(takers.keys() ^ saved.keys()):
        missing = "not in the checkpoint" if odd[0] in takers else "only in the checkpoint, or without set_extra_state"
        raise CheckpointError(f"{reader.path} does not fit; {missing}: {odd[0]}.")
    averaging = _averaging(trainer)
    averaged = averaging is not None and trainer.state != "fit" and bool(reader.trainer.get("averaged_updates"))

    def read(into: dict[str, torch.Tensor]) -> None:
        own = {name: tensor for name, tensor in into.items() if not is_extra_state(name)}
        reader.load_model(own)
        if averaged:
            reader.load_averaged(own)

    trainer.core.strategy.load_model_state(trainer.module, read)
    if averaging is not None:
        averaging.forget()
    if averaged:
        info(f"{trainer.state}: the averaged weights of {reader.path}")
    for name, part in takers.items():
        part.set_extra_state(saved[name])


def _takers_of_extra_state(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The parts that take an extra state back, by the name that it has in a state_dict."""
    from acclight.strategies.strategy import canonical_name

    return {
        canonical_name(f"{name}.{_EXTRA_STATE_KEY_SUFFIX}" if name else _EXTRA_STATE_KEY_SUFFIX): part
        for name, part in module.named_modules(remove_duplicate=False)
        if type(part).set_extra_state is not torch.nn.Module.set_extra_state
    }


def _untie(trainer: Trainer, state: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """One name per parameter, and the other names of those that have several."""
    from acclight.strategies.strategy import tied_names

    tied: dict[str, str] = {}
    for names in tied_names(trainer.module):
        saved = [name for name in names if name in state]
        tied |= dict.fromkeys(saved[1:], saved[0])
    return {name: value for name, value in state.items() if name not in tied}, tied


def _optimizer_meta(trainer: Trainer, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    names = trainer.core.strategy.param_group_names(trainer.module, trainer.optimizers)
    groups = [
        [
            {**group, "params": group_names}
            for group_names, group in zip(optimizer_names, optimizer.param_groups, strict=True)
        ]
        for optimizer_names, optimizer in zip(names, trainer.optimizers, strict=True)
    ]
    return {"groups": groups, "plain": {name: value for name, value in state.items() if name not in tensors}}


def _restore_groups(trainer: Trainer, saved: list[list[dict[str, Any]]]) -> None:
    names = trainer.core.strategy.param_group_names(trainer.module, trainer.optimizers)
    if [len(groups) for groups in saved] != [len(o.param_groups) for o in trainer.optimizers]:
        raise ValueError(
            f"the checkpoint has {[len(g) for g in saved]} parameter groups per optimizer, configure_optimizers gave "
            f"{[len(o.param_groups) for o in trainer.optimizers]}"
        )
    for optimizer, groups, group_names in zip(trainer.optimizers, saved, names, strict=True):
        for group, values, own in zip(optimizer.param_groups, groups, group_names, strict=True):
            if set(values["params"]) != set(own):
                odd = sorted(set(values["params"]) ^ set(own))
                raise ValueError(
                    f"a parameter group of the checkpoint holds other parameters than now, such as {odd[0]!r}"
                )
            for key, value in values.items():
                if key == "params":
                    continue
                if isinstance(group.get(key), torch.Tensor):
                    group[key].fill_(float(value))
                else:
                    group[key] = tuple(value) if isinstance(group.get(key), tuple) else value


def _hugging_face(module: torch.nn.Module) -> dict[str, Any]:
    """Configuration and name prefix of the transformers model inside, for exports that `from_pretrained` reads."""
    for name, part in module.named_modules():
        config = getattr(part, "config", None)
        if config is not None and hasattr(config, "to_json_string") and hasattr(config, "model_type"):
            plain = json.loads(config.to_json_string(use_diff=False)) | {"architectures": [type(part).__name__]}
            return {"hf_config": plain, "hf_prefix": f"{name}." if name else ""}
    return {}


def random_state() -> dict[str, Any]:
    """This process's random states of Python, NumPy, torch and the devices, as plain values and tensors."""
    kind, keys, gauss = random.getstate()
    name, words, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": {"version": kind, "keys": torch.tensor(keys, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "name": str(name),
            "words": torch.from_numpy(np.asarray(words).astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Puts back what `random_state` gave."""
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["keys"].tolist()), python["gauss"]))
    words = numpy["words"].numpy().astype(np.uint32)
    np.random.set_state((numpy["name"], words, numpy["position"], numpy["has_gauss"], numpy["cached"]))
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
