"""The evaluation loop: validation and test, each sample counted once."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from acclight.logging.torchmetric import exact_over_ranks, leave_inference_mode, metrics_in
from acclight.loops.pause import inference
from acclight.loops.reading import warn_if_empty
from acclight.loops.rounds import rounds
from acclight.loops.throwaway import thrown_away

if TYPE_CHECKING:
    from acclight.data import EvalData
    from acclight.logging import Shown
    from acclight.trainer import Trainer


def evaluate(trainer: Trainer, stage: str, loaders: dict[str, EvalData]) -> Shown:
    """Runs one evaluation over all loaders, up to the hook of its epoch's end.

    Args:
        trainer: Whose core, module, hooks and metrics are used; within `paused_training`.
        stage: "validation" or "test".
        loaders: What this rank reads, by name; a single loader's name is "".

    Returns:
        The metrics over all ranks.
    """
    core, hooks, metrics = trainer.core, trainer.hooks, trainer.metrics
    step, takes = step_arguments(trainer, f"{stage}_step", len(loaders))
    several = len(loaders) > 1
    measures = metrics_in(trainer.module)
    try:
        with inference(trainer), metrics.evaluation(stage), exact_over_ranks(measures, core.gather_objects):
            for call in getattr(hooks, f"on_{stage}_start"):
                call()
            for call in getattr(hooks, f"on_{stage}_epoch_start"):
                call()
            for position, (name, data) in enumerate(loaders.items()):
                which = (position,) if several else ()
                metrics.begin_loader(name, position)
                read = 0
                for index, batch, own in rounds(trainer, data, position):
                    arguments = (batch, index, *which)
                    if not own:
                        with thrown_away(trainer):
                            core.evaluate(step, *arguments[:takes])
                        continue
                    read += 1
                    trainer.batch_indices = data.indices(index)
                    metrics.begin_evaluation_batch(
                        batch, data.samples(index), index * core.world_size + core.global_rank
                    )
                    for call in getattr(hooks, f"on_{stage}_batch_start"):
                        call(*arguments)
                    outputs = core.evaluate(step, *arguments[:takes])
                    for call in getattr(hooks, f"on_{stage}_batch_end"):
                        call(outputs, *arguments)
                trainer.batch_indices = None
                metrics.end_loader(stage, several=several)
                warn_if_empty(trainer, stage, name, data, read)
            trainer.publish(metrics.show_epoch_so_far(stage))
            for call in getattr(hooks, f"on_{stage}_epoch_end"):
                call()
            core.strategy.settle()
            return metrics.show_epoch(stage, rehearsal=trainer.sanity_checking)
    finally:
        leave_inference_mode(measures)
        trainer.batch_indices = None


def step_arguments(trainer: Trainer, step: str, loaders: int) -> tuple[str, int]:
    """How many of (batch, batch_idx, dataloader_idx) the user's step takes; Lightning lets the later ones be left out.

    Raises:
        TypeError: There are several loaders, and the step does not take dataloader_idx.
    """
    module: Any = trainer.module
    parameters = inspect.signature(getattr(module, step)).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        return step, 3
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    takes = len([p for p in parameters if p.kind in positional])
    if loaders > 1 and takes < 3:
        raise TypeError(
            f"there are {loaders} loaders, but {type(module).__name__}.{step} has no argument for which one a batch is from: "
            "write (self, batch, batch_idx, dataloader_idx=0)"
        )
    return step, takes
