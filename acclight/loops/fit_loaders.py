"""The loaders of a fit: where they come from, and when they are asked for again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from acclight.loops.reading import asked_for, evaluation_loaders, training_data, unshuffled_in_fit
from acclight.loops.validation import FitValidation

if TYPE_CHECKING:
    from acclight.loops.progress import Progress
    from acclight.trainer import Trainer


class FitLoaders:
    """Asks for the training and validation loaders of one fit, and again where the Trainer's arguments say so.

    Args:
        trainer: In the session of a fit.
        train: The training loader that fit was given; None to ask the data module, or the module.
        val: Likewise those of the validations.
    """

    def __init__(self, trainer: Trainer, train: Any, val: Any) -> None:
        self.trainer = trainer
        self.train = train
        self.val = val
        self.every_n_epochs = trainer.reload_dataloaders_every_n_epochs
        #: The epoch at whose start they were made.
        self.made_at = 0

    def load(self, counts: Progress) -> None:
        """Asks for them the first time.

        Args:
            counts: Where training will begin. Where loaders are made anew every n epochs, the hooks see the epoch in which a run
                without a break would have called them.
        """
        with self._as_at_last_reload(counts):
            self._load_training()
            self._load_validation()

    def reload_if_due(self) -> bool:
        """At the start of an epoch: calls the loader hooks again, where the epoch is one to do so. Collective."""
        trainer = self.trainer
        epoch = self._reload_epoch(trainer.current_epoch)
        if epoch == self.made_at or (self.train is not None and self.val is not None):
            return False
        self.made_at = epoch
        assert trainer.data is not None
        if self.train is None:
            trainer.data.close()
            self._load_training(seed=trainer.data.seed)
        for data in trainer.eval_data.values():
            data.close()
        # With loaders that were given, too: a fraction of an epoch may be another number of steps now.
        self._load_validation()
        return True

    def _reload_epoch(self, epoch: int) -> int:
        """The newest epoch, up to this one, at whose start loaders are made."""
        return epoch // self.every_n_epochs * self.every_n_epochs if self.every_n_epochs else 0

    @contextmanager
    def _as_at_last_reload(self, counts: Progress) -> Iterator[None]:
        if not self.every_n_epochs:
            yield
            return
        before = self.trainer.progress
        self.made_at = self._reload_epoch(counts.epoch + counts.epoch_done)
        self.trainer.progress = replace(counts, epoch=self.made_at, epoch_done=False)
        try:
            yield
        finally:
            self.trainer.progress = before

    def _load_training(self, seed: int | None = None) -> None:
        """Asks for the training loader.

        Args:
            seed: Of the order, which goes on; None for a new one.
        """
        trainer = self.trainer
        loader = asked_for(trainer, "train_dataloader") if self.train is None else self.train
        if loader is None:
            raise ValueError("fit needs training data: give train_dataloaders or a datamodule with train_dataloader")
        trainer.data = training_data(trainer, unshuffled_in_fit(trainer, "training", loader), seed)
        trainer.core.check_window(trainer.accumulate_grad_batches, trainer.data.batch_size)

    def _load_validation(self) -> None:
        """Asks for the validation loaders."""
        trainer = self.trainer
        loaders = evaluation_loaders(trainer, "val", self.val)
        loaders = {name: unshuffled_in_fit(trainer, "validation", loader) for name, loader in loaders.items()}
        trainer.validation = FitValidation(trainer, loaders)
        trainer.eval_data = trainer.validation.data
