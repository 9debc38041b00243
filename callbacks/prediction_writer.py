"""BasePredictionWriter: hands predictions, with the dataset's indices of their samples, to code that stores them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from acclight import Callback

if TYPE_CHECKING:
    from acclight import Trainer, TrainModule

_INTERVALS = ("batch", "epoch", "batch_and_epoch")


class BasePredictionWriter(Callback):
    """Subclass this and override `write_on_batch_end`, `write_on_epoch_end` or both.

    Each rank writes what it has predicted itself: every sample comes to exactly one rank. With "batch" and
    `Trainer.predict(return_predictions=False)` nothing is kept in memory.

    Args:
        write_interval: "batch", "epoch" (default: "batch") or "batch_and_epoch".

    Raises:
        ValueError: For another interval.
    """

    def __init__(self, write_interval: str = "batch") -> None:
        if write_interval not in _INTERVALS:
            raise ValueError(f"write_interval={write_interval!r}: use one of {', '.join(map(repr, _INTERVALS))}")
        self.write_interval = write_interval
        self._predictions: list[list[Any]] = []
        self._indices: list[list[Any]] = []

    def write_on_batch_end(
        self,
        trainer: Trainer,
        module: TrainModule,
        prediction: Any,
        batch_indices: list[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Stores one batch.

        Args:
            trainer: The Trainer.
            module: The module.
            prediction: What predict_step returned, on the device.
            batch_indices: The dataset's indices of the batch's samples, in their order; None for streams, which have none.
            batch: The batch.
            batch_idx: Its number on this rank.
            dataloader_idx: The position of its loader; 0 for a single one.
        """

    def write_on_epoch_end(
        self,
        trainer: Trainer,
        module: TrainModule,
        predictions: list[list[Any]],
        batch_indices: list[list[list[int] | None]],
    ) -> None:
        """Stores all of this rank's predictions.

        Args:
            trainer: The Trainer.
            module: The module.
            predictions: Per loader what predict_step returned for each batch, on the device.
            batch_indices: Likewise the dataset's indices of the samples.
        """

    def on_predict_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Begins anew."""
        self._predictions, self._indices = [], []

    def on_predict_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Writes the batch, or keeps it for the end."""
        indices = trainer.batch_indices
        if self.write_interval != "epoch":
            self.write_on_batch_end(trainer, module, outputs, indices, batch, batch_idx, dataloader_idx)
        if self.write_interval != "batch":
            while len(self._predictions) <= dataloader_idx:
                self._predictions.append([])
                self._indices.append([])
            self._predictions[dataloader_idx].append(outputs)
            self._indices[dataloader_idx].append(indices)

    def on_predict_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Writes all, where that was asked for."""
        if self.write_interval != "batch":
            self.write_on_epoch_end(trainer, module, self._predictions, self._indices)
        self._predictions, self._indices = [], []
