"""DataModule: where the data comes from, kept apart from the model."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from acclight.hyperparameters import Hyperparameters, choose, init_arguments

if TYPE_CHECKING:
    from acclight.trainer import Trainer


class DataModule:
    """Subclass this and hand it to `Trainer.fit(module, datamodule=...)`.

    `prepare_data` runs in one process per machine, before `setup`, which runs in all. The loaders are plain torch DataLoaders;
    how samples are spread over the ranks is the Trainer's affair.
    """

    trainer: Trainer | None = None
    _log_hparams: bool = True

    @property
    def hparams(self) -> Hyperparameters:
        """What `save_hyperparameters` kept, by key or by attribute."""
        own: Hyperparameters = self.__dict__.setdefault("_hparams", Hyperparameters())
        return own

    def save_hyperparameters(self, *args: Any, ignore: str | Sequence[str] = (), logger: bool = True) -> None:
        """Keeps the arguments of `__init__` in `hparams`, and shows them to the loggers beside the module's.

        Args:
            args: Names of arguments, or one mapping or Namespace that holds the hyper-parameters. Default: all arguments.
            ignore: Names that are left out.
            logger: Show them to the loggers. Default True.

        Raises:
            RuntimeError: Outside of `__init__`.
            ValueError: For a name that is no argument.
        """
        frame = inspect.currentframe()
        given = init_arguments(self, frame.f_back if frame is not None else None)
        kept, _ = choose(given, args, (ignore,) if isinstance(ignore, str) else tuple(ignore))
        self.hparams.update(kept)
        self._log_hparams = logger

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
