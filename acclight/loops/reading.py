"""What the loops read: the user's loaders, shared out to the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch.utils.data import DataLoader

from acclight.data import EvalData, TrainData, rank_identity
from acclight.data.loader import in_dataset_order, size_of
from acclight.messages import info, warn

if TYPE_CHECKING:
    from acclight.accelerator_config import AcceleratorConfig
    from acclight.trainer import Trainer


def asked_for(trainer: Trainer, name: str) -> Any:
    """What the loader hook `name` of the data module gives, or without one that of the module; None where it is not defined."""
    owner: Any = trainer.datamodule if trainer.datamodule is not None else trainer.module
    make = getattr(owner, name, None)
    return make() if make is not None else None


def evaluation_loaders(trainer: Trainer, name: str, given: Any) -> dict[str, Any]:
    """The user's evaluation loaders by name; the name of a single one is empty.

    Args:
        trainer: In a session; only fit can do without any.
        name: "val", "test" or "predict".
        given: What the user gave in place of the hook's; None to ask the hook.
    """
    loaders = asked_for(trainer, f"{name}_dataloader") if given is None else given
    if loaders is None:
        if trainer.state == "fit":
            return {}
        raise ValueError(
            f"Trainer.{trainer.state} needs data: give dataloaders, or a datamodule with {name}_dataloader"
        )
    if isinstance(loaders, Mapping):
        return dict(loaders)
    if isinstance(loaders, (list, tuple)):
        return {"" if len(loaders) == 1 else f"dataloader_idx_{i}": loader for i, loader in enumerate(loaders)}
    return {"": loaders}


def training_data(trainer: Trainer, loader: Any, seed: int | None = None) -> TrainData:
    """What this rank reads of the training loader.

    Args:
        trainer: Whose limits are used.
        loader: The user's.
        seed: Of the order of the samples; None for rank 0's.
    """
    core, config = trainer.core, trainer.core.config
    if config.split_batches and core.data_world_size > 1:
        info(f"split_batches: the loader's batch size counts for all {core.data_world_size} processes together")
    data = TrainData(
        loader,
        seed=int(core.broadcast_object(_seed(config))) if seed is None else seed,
        limit=trainer.limits["train"],
        limit_name="overfit_batches" if trainer.overfit_batches else "limit_train_batches",
        even_batches=config.even_batches,
        **_sharing(trainer, loader, "training"),
    )
    # What is planned for the training, before its first epoch, has to be the same on every rank.
    counts = [data.num_batches] if data.ranks_agree else data.agree(core.gather_objects)
    if data.num_batches == 0 and trainer.limits["train"] != 0:
        where = f" on rank {counts.index(0)}" if any(counts) else ""
        warn(f"the training loader ({_described(loader)}) gives no batches{where}: nothing will be trained")
    return data


def unshuffled_in_fit(trainer: Trainer, stage: str, loader: Any) -> Any:
    """The loader as fit reads it: with overfit_batches, in the dataset's own order.

    Args:
        trainer: Whose argument counts.
        stage: "training" or "validation".
        loader: The user's; it is not changed.
    """
    if not trainer.overfit_batches:
        return loader
    plain = in_dataset_order(loader)
    if plain is not loader:
        warn(f"overfit_batches={trainer.overfit_batches}: the shuffling of the {stage} loader is turned off")
    return plain


def evaluation_data(trainer: Trainer, stage: str, loaders: Mapping[str, Any]) -> dict[str, EvalData]:
    """What this rank reads of some evaluation loaders, by name; nothing at all where all of them are empty.

    An empty loader is warned of. Collective.

    Args:
        trainer: Whose limits are used.
        stage: "validation", "test" or "predict".
        loaders: The user's loaders by name.
    """
    every = trainer.core.gather_objects(list(loaders))
    if any(names != every[0] for names in every):
        counts = ", ".join(f"rank {rank}: {len(names)}" for rank, names in enumerate(every))
        raise ValueError(
            f"the ranks were given different {stage} loaders ({counts}): give every rank as many, under the same names; a list "
            "or a tuple stands for several loaders"
        )
    limit, argument = trainer.limits[stage], f"limit_{'val' if stage == 'validation' else stage}_batches"
    if stage == "validation" and trainer.overfit_batches:
        argument = "overfit_batches"
    made = {
        name: EvalData(
            loader,
            limit=limit,
            limit_name=argument,
            **_sharing(trainer, loader, stage),
        )
        for name, loader in loaders.items()
    }
    for name, data in made.items():
        if data.rounds == 0 and limit != 0:
            _warn_of_empty(stage, name, data, loaders[name])
    # One that is empty keeps its place: users count loaders from 0 as they gave them.
    return made if any(data.rounds != 0 for data in made.values()) else {}


def warn_if_empty(trainer: Trainer, stage: str, name: str, data: EvalData, read: int) -> None:
    """Warns once of a loader that tells its length to nobody, and has turned out empty on all ranks. A collective for such.

    Args:
        trainer: Whose ranks are asked.
        stage: "validation", "test" or "predict".
        name: The loader's, if it has one.
        data: What this rank has read of it.
        read: How many batches.
    """
    if data.rounds is not None or trainer.sanity_checking:
        return
    if not any(count for rank in trainer.core.gather_values([float(read)]) for count in rank):
        _warn_of_empty(stage, name, data, data.loader)


_warned_of: WeakSet[EvalData] = WeakSet()


def _warn_of_empty(stage: str, name: str, data: EvalData, loader: Any) -> None:
    if data not in _warned_of:
        _warned_of.add(data)
        which = f" {name!r}" if name else ""
        warn(f"the {stage} loader{which} ({_described(loader)}) gives no batches and is skipped")


def _described(loader: Any) -> str:
    """A loader in words, with what can make it empty."""
    if not isinstance(loader, DataLoader):
        return type(loader).__name__
    samples = size_of(loader.dataset)
    length = f"{'unknown' if samples is None else samples} samples"
    return f"{type(loader).__name__}, {length}, batch_size={loader.batch_size}, drop_last={loader.drop_last}"


def _seed(config: AcceleratorConfig) -> int:
    """What the order of the training samples follows."""
    if config.data_seed is not None:
        return config.data_seed
    if config.use_seedable_sampler:
        return torch.initial_seed() % 2**31
    return int(torch.randint(2**31, ()))  # as torch's own RandomSampler draws it


def _sharing(trainer: Trainer, loader: Any, stage: str) -> dict[str, Any]:
    """How a loader is shared out, as arguments of `TrainData` and `EvalData`; said where it does not do what was asked for."""
    core, config = trainer.core, trainer.core.config
    if config.non_blocking and isinstance(loader, DataLoader) and not loader.pin_memory:
        warn(
            f"accelerator_config: non_blocking=True, but the {stage} loader has pin_memory=False, so that copies to the device "
            "still wait: set both"
        )
    return {
        "rank": core.data_rank,
        "world_size": core.data_world_size,
        "split_batches": config.split_batches,
        "own_share": _brings_its_own_share(trainer, loader, stage),
        "dispatch_batches": config.dispatch_batches,
        "scatter": core.scatter_objects,
        "differs": partial(_streams_differ, trainer, stage),
    }


def _brings_its_own_share(trainer: Trainer, loader: Any, stage: str) -> bool:
    """The ranks were given different data (a file each, say): then each keeps what it has."""
    if trainer.world_size == 1:
        return False
    identities = trainer.core.gather_objects(rank_identity(loader))
    differs = sorted(key for key in identities[0] if len({one.get(key) for one in identities}) > 1)
    if differs and not trainer.core.config.dispatch_batches:
        info(
            f"the {stage} data differs between the ranks (in {differs[0]}): each rank reads its own, none is shared out"
        )
    return bool(differs)


def _streams_differ(trainer: Trainer, stage: str, digest: str | None) -> bool:
    """Each rank's stream begins with other elements: it picks its own part. A collective.

    Args:
        trainer: Whose ranks are asked.
        stage: "training", "validation", "test" or "predict".
        digest: Of this rank's first elements; None where they cannot be compared.
    """
    digests = trainer.core.gather_objects(digest)
    if None in digests:
        warn(
            f"the elements of the {stage} stream cannot be compared between the ranks, and it is shared out as if every rank "
            "gave the same: should it pick its own part by its rank, give the dataset the attributes rank and num_replicas"
        )
        return False
    if len(set(digests)) == 1:
        return False
    info(
        f"the {stage} streams begin differently on the ranks: each rank reads its own, none is shared out. Should they be the "
        "same stream, draw what is random in them from the global generators"
    )
    return True
