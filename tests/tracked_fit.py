"""A fit of 4 steps that is taken up again at step 2 and goes on to 6, written to a tracker: `python -m tests.tracked_fit wandb`.

The weight starts at 0 and goes half of its way to 1 in every step, so that step n has the loss 2**(1 - 2n).
"""

from __future__ import annotations

import sys
from typing import Any

from acclight import Callback, Trainer, TrainModule
from tests.scenarios import Scalar, repeated

LOSSES = {step: 2.0 ** (1 - 2 * step) for step in range(1, 7)}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "wandb": {"mode": "offline"},
    "comet_ml": {"online": False},
    "swanlab": {"mode": "offline"},
    "trackio": {"auto_log_cpu": False},
}


class Tracked(Scalar):
    def __init__(self, lr: float = 0.5, layers: tuple[int, ...] = (3, 5)) -> None:
        super().__init__(lr)
        self.save_hyperparameters()


class SaveAt(Callback):
    def __init__(self, step: int, path: str) -> None:
        self.step, self.path = step, path

    def on_step(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def fit(logger: Any, max_steps: int, *callbacks: Callback, **arguments: Any) -> Trainer:
    trainer = Trainer(
        strategy="single", max_steps=max_steps, log_every_n_steps=1, logger=logger, callbacks=list(callbacks),
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Tracked(), repeated([1.0] * 6, 1), **arguments)
    return trainer


def main(name: str) -> None:
    from acclight.loggers import TrackerLogger

    def logger() -> TrackerLogger:
        return TrackerLogger(name, project="halves", **ARGUMENTS.get(name, {}))

    fit(logger(), 4, SaveAt(2, "saved"))
    fit(logger(), 6, ckpt_path="saved")


if __name__ == "__main__":
    main(sys.argv[1])
