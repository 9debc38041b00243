"""The prediction loop: what predict_step returns, in the dataset's order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from acclight.loops.evaluate import step_arguments
from acclight.loops.pause import inference
from acclight.loops.reading import warn_if_empty
from acclight.loops.rounds import rounds
from acclight.loops.throwaway import thrown_away

if TYPE_CHECKING:
    from acclight.data import EvalData
    from acclight.trainer import Trainer


def predict(trainer: Trainer, loaders: dict[str, EvalData], keep: bool) -> list[list[Any]]:
    """Runs predict_step over all loaders.

    Args:
        trainer: Whose core, module and hooks are used; within `paused_training`.
        loaders: What this rank reads, by name.
        keep: Gather what predict_step returned; False keeps nothing in memory.

    Returns:
        Per loader the outputs of all batches of all ranks in the dataset's order, on every rank; tensors on the CPU.
    """
    core, hooks = trainer.core, trainer.hooks
    if core.data_world_size != core.world_size:
        raise ValueError(
            f"predict cannot run with {core.world_size} processes that share {core.data_world_size} batches (parallelism with "
            "tp_size or cp_size above 1): predict without parallelism, from a checkpoint"
        )
    step, takes = step_arguments(trainer, "predict_step", len(loaders))
    # Where self.log says that there are no metrics.
    run = trainer.metrics.within(step, core.evaluate)
    results: list[list[Any]] = []
    try:
        with inference(trainer):
            for call in hooks.on_predict_start:
                call()
            for call in hooks.on_predict_epoch_start:
                call()
            for position, (name, data) in enumerate(loaders.items()):
                which = (position,) if len(loaders) > 1 else ()
                kept: list[Any] = []
                read = 0
                for index, batch, own in rounds(trainer, data, position):
                    arguments = (batch, index, *which)
                    if not own:
                        with thrown_away(trainer):
                            run(step, *arguments[:takes])
                        continue
                    read += 1
                    trainer.batch_indices = data.indices(index)
                    for call in hooks.on_predict_batch_start:
                        call(*arguments)
                    outputs = run(step, *arguments[:takes])
                    for call in hooks.on_predict_batch_end:
                        call(outputs, *arguments)
                    if keep:
                        kept.append(_to_keep(outputs))
                trainer.batch_indices = None
                warn_if_empty(trainer, "predict", name, data, read)
                with torch.inference_mode(False):
                    results.append(_in_order(core.gather_objects(kept)) if keep else [])
            for call in hooks.on_predict_epoch_end:
                call()
            core.strategy.settle()
    finally:
        trainer.batch_indices = None
    return results


def _in_order(ranks: list[list[Any]]) -> list[Any]:
    # Batches go to the ranks in turn, so that round by round, rank by rank is the dataset's order.
    longest = max(map(len, ranks))
    return [outputs[i] for i in range(longest) for outputs in ranks if i < len(outputs)]


def _to_keep(outputs: Any) -> Any:
    """The outputs on the CPU, without what they are a part of, and usable outside of inference mode."""
    from lightning_utilities.core.apply_func import apply_to_collection

    def own(tensor: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode(False):
            return tensor.detach().clone() if tensor.device.type == "cpu" else tensor.detach().cpu()

    return apply_to_collection(outputs, torch.Tensor, own)
