"""DataModule: where the data comes from, kept apart from the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from acclight.trainer import Trainer


class DataModule:
    """Subclass this and hand it to `Trainer.fit(module, datamodule=...)`.

    `prepare_data` runs in one process per machine, before `setup`, which runs in all. The loaders are plain torch DataLoaders;
    how samples are spread over the ranks is the Trainer's affair.
    """

    trainer: Trainer | None = None

    def prepare_data(self) -> None:
        """Downloads, tokenizes, writes to disk; one process per machine. Keep no state on `self`: other ranks do not see it."""

    def setup(self, stage: str) -> None:
        """Opens the data, on every rank; `stage` is "fit", "validate", "test" or "predict"."""

    def teardown(self, stage: str) -> None:
        """At the end of fit, validate, test and predict."""

    def train_dataloader(self) -> Any:
        """The training loader."""
        raise NotImplementedError(f"{type(self).__name__} needs a train_dataloader to be fitted")

    def val_dataloader(self) -> Any:
        """One validation loader, a list, a dict of them, or None for no validation."""
        return None

    def test_dataloader(self) -> Any:
        """One test loader, a list or a dict of them."""
        raise NotImplementedError(f"{type(self).__name__} needs a test_dataloader for Trainer.test")

    def predict_dataloader(self) -> Any:
        """One prediction loader, a list or a dict of them."""
        raise NotImplementedError(f"{type(self).__name__} needs a predict_dataloader for Trainer.predict")

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint: plain values and tensors."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the state back."""
