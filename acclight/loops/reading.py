"""What the loops read: the user's loaders, shared out to the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from acclight.data import EvalData, TrainData, rank_identity
from acclight.messages import info, warn

if TYPE_CHECKING:
    from acclight.trainer import Trainer


def training_data(trainer: Trainer, loader: Any) -> TrainData:
    """What this rank reads of the training loader; the order of the samples follows torch's seed on rank 0."""
    data = TrainData(
        loader,
        rank=trainer.global_rank,
        world_size=trainer.world_size,
        seed=int(trainer.core.broadcast_object(torch.initial_seed() % 2**31)),
        limit=trainer.limits["train"],
        own_share=_brings_its_own_share(trainer, loader, "training"),
    )
    if data.num_batches == 0 and trainer.limits["train"] != 0:
        samples = getattr(getattr(loader, "dataset", None), "__len__", lambda: "unknown")()
        warn(
            f"the training loader ({type(loader).__name__}, {samples} samples, batch_size {getattr(loader, 'batch_size', None)}, "
            f"drop_last {getattr(loader, 'drop_last', None)}) gives no batches: nothing will be trained"
        )
    return data


def evaluation_data(trainer: Trainer, stage: str, loaders: Mapping[str, Any]) -> dict[str, EvalData]:
    """What this rank reads of some evaluation loaders, by name; an empty one is left out, with a warning.

    Args:
        trainer: Whose limits are used.
        stage: "validation", "test" or "predict".
        loaders: The user's loaders by name.
    """
    limit, argument = trainer.limits[stage], f"limit_{'val' if stage == 'validation' else stage}_batches"
    made = {
        name: EvalData(
            loader,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            limit=limit,
            limit_name=argument,
            own_share=_brings_its_own_share(trainer, loader, stage),
        )
        for name, loader in loaders.items()
    }
    for name, data in made.items():
        if data.rounds == 0 and limit != 0:
            warn(f"the {stage} loader{f' {name!r}' if name else ''} has no batches and is skipped")
    return {name: data for name, data in made.items() if data.rounds != 0}


def _brings_its_own_share(trainer: Trainer, loader: Any, stage: str) -> bool:
    """The ranks were given different data (a file each, say): then each keeps what it has."""
    if trainer.world_size == 1:
        return False
    identities = trainer.core.gather_objects(rank_identity(loader))
    differs = sorted(key for key in identities[0] if len({one.get(key) for one in identities}) > 1)
    if differs:
        info(
            f"the {stage} data differs between the ranks (in {differs[0]}): each rank reads its own, none is shared out"
        )
    return bool(differs)
