"""The evaluation loop: validation and test, each sample counted once; and the state around it put back as it was."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

if TYPE_CHECKING:
    from acclight.data import EvalData
    from acclight.logging.store import Shown
    from acclight.trainer import Trainer


def evaluate(trainer: Trainer, stage: str, loaders: dict[str, EvalData]) -> Shown:
    """Runs one evaluation over all loaders.

    Args:
        trainer: Whose core, module, hooks and metrics are used.
        stage: "validation" or "test".
        loaders: What this rank reads, by name; a single loader's name is "".

    Returns:
        The metrics over all ranks. Modes and the random state are as before, also after an exception.
    """
    hooks, metrics = trainer.hooks, trainer.metrics
    step = f"{stage}_step"
    with quiet_module(trainer):
        metrics.begin_evaluation()
        try:
            for call in getattr(hooks, f"on_{stage}_start"):
                call()
            for call in getattr(hooks, f"on_{stage}_epoch_start"):
                call()
            for position, (name, data) in enumerate(loaders.items()):
                metrics.loader_name = name or None
                for index, batch, real in rounds(trainer, data):
                    extra = (position,) if len(loaders) > 1 else ()
                    metrics.muted = not real
                    if not real:
                        trainer.core.evaluate(step, batch, index, *extra)
                        continue
                    metrics.begin_batch(batch)
                    for call in getattr(hooks, f"on_{stage}_batch_start"):
                        call(batch, index, position)
                    outputs = trainer.core.evaluate(step, batch, index, *extra)
                    for call in getattr(hooks, f"on_{stage}_batch_end"):
                        call(outputs, batch, index, position)
            metrics.muted = False
            metrics.loader_name = None
            for call in getattr(hooks, f"on_{stage}_epoch_end"):
                call()
            return metrics.show_epoch()
        finally:
            metrics.end_evaluation()


def predict(trainer: Trainer, loaders: dict[str, EvalData], keep: bool) -> list[Any]:
    """Runs predict_step over all loaders.

    Args:
        trainer: Whose core, module and hooks are used.
        loaders: What this rank reads, by name.
        keep: Gather what predict_step returned; False keeps nothing in memory.

    Returns:
        Per loader the outputs of all batches of all ranks in the dataset's order, on every rank.
    """
    hooks, metrics = trainer.hooks, trainer.metrics
    results: list[Any] = []
    with quiet_module(trainer):
        metrics.refusal = "is not possible in a prediction run: return values from predict_step instead"
        try:
            for call in hooks.on_predict_start:
                call()
            for call in hooks.on_predict_epoch_start:
                call()
            for position, data in enumerate(loaders.values()):
                own: list[Any] = []
                for index, batch, real in rounds(trainer, data):
                    extra = (position,) if len(loaders) > 1 else ()
                    if not real:
                        trainer.core.evaluate("predict_step", batch, index, *extra)
                        continue
                    for call in hooks.on_predict_batch_start:
                        call(batch, index, position)
                    outputs = trainer.core.evaluate("predict_step", batch, index, *extra)
                    for call in hooks.on_predict_batch_end:
                        call(outputs, batch, index, position)
                    if keep:
                        own.append(_to_cpu(outputs))
                results.append(_in_order(trainer.core.gather_objects(own)) if keep else [])
            for call in hooks.on_predict_epoch_end:
                call()
            for call in hooks.on_predict_end:
                call()
        finally:
            metrics.refusal = None
    return results


def rounds(trainer: Trainer, data: EvalData) -> Iterator[tuple[int, Any, bool]]:
    """This rank's batches, and where every rank has to join each forward, throw-away ones until all ranks are through.

    Yields:
        (batch index, batch on the device, whether it is this rank's own).
    """
    core = trainer.core
    together = core.strategy.collective_forward and core.world_size > 1
    batches = iter(data)
    index = 0
    last: Any = None
    while True:
        batch = next(batches, _END)
        real = batch is not _END
        if not together:
            if not real:
                return
        else:
            present = core.gather_objects(real)
            if not any(present):
                return
            if index == 0 and not all(present):
                # A rank without any data borrows a batch, to have something to run.
                lender = present.index(True)
                borrowed = core.gather_objects(batch if core.global_rank == lender else None)[lender]
                batch = batch if real else borrowed
            elif not real:
                batch = last
        batch = last = trainer.to_device(batch) if real or index == 0 else batch
        yield index, batch, real
        index += 1


@contextmanager
def quiet_module(trainer: Trainer) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards every submodule's mode and the random state are as before."""
    module = trainer.module
    modes = {part: part.training for part in module.modules()}
    state = _random_state()
    # Under inference mode FSDP2 and ZeRO-3 would gather parameters that no later training step may touch.
    inference = trainer.inference_mode and not trainer.core.strategy.collective_forward
    module.eval()
    try:
        with torch.inference_mode() if inference else torch.no_grad():
            yield
    finally:
        _restore_modes(modes)
        _restore_random_state(state)


def _restore_modes(modes: dict[nn.Module, bool]) -> None:
    for part, training in modes.items():
        part.training = training


def _random_state() -> dict[str, Any]:
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def _restore_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])


def _in_order(ranks: list[list[Any]]) -> list[Any]:
    # Ranks take consecutive slices of each global batch, so that round by round, rank by rank is the dataset's order.
    longest = max(len(outputs) for outputs in ranks)
    return [outputs[i] for i in range(longest) for outputs in ranks if i < len(outputs)]


def _to_cpu(outputs: Any) -> Any:
    from lightning_utilities.core.apply_func import apply_to_collection

    return apply_to_collection(outputs, torch.Tensor, lambda tensor: tensor.detach().cpu())


_END = object()
