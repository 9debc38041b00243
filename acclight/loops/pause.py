"""Pause: what training must find as it was when something else has run the module: modes and random state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import torch

from acclight.checkpoint.snapshot import random_state, set_random_state

if TYPE_CHECKING:
    from acclight.trainer import Trainer


@contextmanager
def paused_training(trainer: Trainer, stage: str) -> Iterator[None]:
    """Evaluation mode without gradients, and the state of training afterwards.

    Also after an exception, every submodule's mode and the random state of Python, NumPy, torch and the device are as before.
    A checkpoint that is written meanwhile holds the random state that training goes on with.

    Args:
        trainer: Whose module is evaluated.
        stage: "validation", "test" or "predict".
    """
    module, hooks = trainer.module, trainer.hooks
    modes = {part: part.training for part in module.modules()}
    state = trainer.paused_random_state = random_state()
    try:
        if own := getattr(hooks, f"on_{stage}_model_eval"):
            own[0]()
        else:
            module.eval()
        with torch.no_grad():
            yield
    finally:
        for part, training in modes.items():
            part.training = training
        set_random_state(state)
        trainer.paused_random_state = None
    if own := getattr(hooks, f"on_{stage}_model_train"):
        own[0]()


def inference(trainer: Trainer) -> AbstractContextManager[None]:
    """`torch.inference_mode` where the Trainer was asked for it and the strategy can, else `torch.no_grad`.

    Under inference mode FSDP2 and ZeRO-3 would gather parameters that no later training step may touch.
    """
    collective = trainer.core.strategy.collective_forward
    return torch.inference_mode() if trainer.inference_mode and not collective else torch.no_grad()
