"""Rounds: the batches of an evaluation, where every rank may have to join the forwards of the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from acclight.data import EvalData
    from acclight.trainer import Trainer

_END = object()


def rounds(trainer: Trainer, data: EvalData, position: int) -> Iterator[tuple[int, Any, bool]]:
    """This rank's batches, and where every rank has to join each forward, others' or earlier ones until all are through.

    Args:
        trainer: Whose strategy and device are used.
        data: What this rank reads.
        position: The loader's, for the module's transfer hooks.

    Yields:
        (batch index, batch on the device, whether it is this rank's own; the others are for throw-away forwards).
    """
    core = trainer.core
    if core.world_size == 1 or not core.strategy.collective_forward:
        for index, batch in enumerate(data):
            yield index, trainer.to_device(batch, position), True
        return
    batches = iter(data)
    spare: Any = None
    index = 0
    while True:
        batch = next(batches, _END)
        own = batch is not _END
        if not _goes_on(trainer, data, index, own):
            return
        if index == 0:
            spare = _borrowed(trainer, batch if own else None, own)
        if own:
            spare = batch
        # The batch as the loader gave it: a step may have taken its device copy apart.
        yield index, trainer.to_device(spare, position), own
        index += 1


def _goes_on(trainer: Trainer, data: EvalData, index: int, own: bool) -> bool:
    """Some rank still has a batch. The ranks ask each other only where their loaders do not tell."""
    if data.rounds is not None:
        return index < data.rounds
    return any(value for rank in trainer.core.gather_values([float(own)]) for value in rank)


def _borrowed(trainer: Trainer, batch: Any, own: bool) -> Any:
    """A batch for a rank without any, from the first rank that has one."""
    core = trainer.core
    present = [bool(rank[0]) for rank in core.gather_values([float(own)])]
    if all(present):
        return batch
    lender = present.index(True)
    return core.gather_objects(batch if core.global_rank == lender else None)[lender]
