"""Progress: where a training stands, as plain counts that a checkpoint holds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Progress:
    """The counts of a training.

    Attributes:
        global_step: Windows trained on, also those whose fp16 step was skipped.
        epoch: The epoch that runs, or that has just ended, from 0.
        epoch_done: Everything of `epoch` has happened: its batches, validation, hooks and schedulers.
        skipped_steps: Steps that fp16 loss scaling skipped.
        empty_steps: Windows in which no rank had a loss, so that there was no step.
        validated_at: The global_step of the newest validation that is through; -1 before the first.
        ended_at: The global_step at which the newest epoch has ended, whole or cut short by a limit; -1 before the first.
    """

    global_step: int = 0
    epoch: int = 0
    epoch_done: bool = False
    skipped_steps: int = 0
    empty_steps: int = 0
    validated_at: int = -1
    ended_at: int = -1

    @property
    def steps_taken(self) -> int:
        """Steps that have changed the parameters."""
        return self.global_step - self.skipped_steps - self.empty_steps

    def state_dict(self) -> dict[str, Any]:
        """The counts by name."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes them back."""
        # A checkpoint that does not know of ended_at owes nothing of an end.
        for name, value in ({"ended_at": state["global_step"], "empty_steps": 0} | state).items():
            setattr(self, name, value)
