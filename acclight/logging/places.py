"""Where `self.log` may be called, and what it means there when nothing else is said: Lightning's rules."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from acclight.logging.meter import Meter

_IN_TRAINING_BATCHES = (
    "on_train_batch_start", "training_step", "on_before_zero_grad", "on_before_backward", "on_after_backward",
    "on_before_optimizer_step", "on_step", "on_train_batch_end",
)  # fmt: skip
_AROUND_TRAINING_BATCHES = ("on_train_start", "on_train_epoch_start", "on_train_epoch_end")
_ELSEWHERE = "log in training_step, validation_step or test_step, or in the hooks of their batches and epochs"
_WHY_NOT = {
    "on_train_end": "the last values are shown already: log in on_train_epoch_end",
    "on_validation_end": "the values of this validation are shown already: log in on_validation_epoch_end",
    "on_test_end": "the values of this test run are shown already: log in on_test_epoch_end",
}


class Place:
    """One hook or step, and the meters of what is logged in it.

    Attributes:
        hook: Its name.
        stage: "train", "validation" or "test"; empty where nothing can be logged.
        by_batch: It runs once per batch, or per optimizer step, so that single values can be shown.
        refusal: Why nothing can be logged here, and where else; None where it can.
        meters: By the key with the evaluation loader's name.
    """

    __slots__ = ("by_batch", "hook", "meters", "refusal", "stage")

    def __init__(self, hook: str, stage: str, by_batch: bool, refusal: str | None = None) -> None:
        self.hook = hook
        self.stage = stage
        self.by_batch = by_batch
        self.refusal = refusal
        self.meters: dict[str, Meter] = {}

    @property
    def step_by_default(self) -> bool:
        """Values are shown per optimizer step, unless the user says otherwise; else per epoch."""
        return self.by_batch and self.stage == "train"


def logging_places() -> dict[str, Place]:
    """A place for every hook in which something can be logged."""
    places = [Place(hook, "train", True) for hook in _IN_TRAINING_BATCHES]
    places += [Place(hook, "train", False) for hook in _AROUND_TRAINING_BATCHES]
    for stage in ("validation", "test"):
        for hook in (f"on_{stage}_batch_start", f"{stage}_step", f"on_{stage}_batch_end"):
            places.append(Place(hook, stage, True))
        for hook in (f"on_{stage}_start", f"on_{stage}_epoch_start", f"on_{stage}_epoch_end"):
            places.append(Place(hook, stage, False))
    return {place.hook: place for place in places}


def refusing(hook: str, reason: str | None = None) -> Place:
    """A place for a hook in which nothing can be logged."""
    if reason is None and "predict" in hook:
        reason = "a prediction run has no metrics: return values from predict_step"
    return Place(hook, "", False, reason or _WHY_NOT.get(hook, _ELSEWHERE))
