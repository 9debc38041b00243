"""TrainModule: the model, its steps and its optimizers, written once for every strategy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from acclight.loggers import Logger
    from acclight.trainer import Trainer


class LossSum(NamedTuple):
    """A loss given as a sum and what it sums over.

    The gradient of the window is that of (sum of totals) / (sum of counts) over all its micro-batches and all ranks.

    Attributes:
        total: Summed loss, a scalar tensor with a graph.
        count: How many items (tokens, pixels, samples) it sums over; a number or a scalar tensor.
    """

    total: Tensor
    count: int | float | Tensor  # type: ignore[assignment]  # hides tuple.count, which nobody calls


class TrainModule(nn.Module):
    """Subclass this: `training_step` and `configure_optimizers` are enough to fit.

    The Trainer moves, wraps and compiles the module; the steps hold no device code.
    """

    def __init__(self) -> None:
        super().__init__()
        self._trainer: Trainer | None = None
        self._hparams: dict[str, Any] = {}
        self.automatic_optimization = True

    # -- what the user writes ---------------------------------------------------------------------------------------------

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """One micro-batch of training.

        Returns:
            The mean loss (a scalar tensor, or a dict with "loss"), a `LossSum`, or None to contribute nothing.
        """
        raise NotImplementedError(
            f"{type(self).__name__} needs a training_step(batch, batch_idx) that returns the loss"
        )

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        """One batch of validation; log with `self.log`."""
        raise NotImplementedError(f"{type(self).__name__} needs a validation_step to use validation data")

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        """One batch of a test run."""
        raise NotImplementedError(f"{type(self).__name__} needs a test_step for Trainer.test")

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        """One batch of a prediction run. Default: `self(batch)`."""
        return self(batch)

    def configure_model(self) -> None:
        """Creates the parts of the model that should be born sharded; runs once the strategy is there."""

    def configure_optimizers(self) -> Any:
        """Returns the optimizer(s) and schedulers: any of Lightning's forms, or None for no optimizer."""
        raise NotImplementedError(f"{type(self).__name__} needs configure_optimizers to be fitted")

    def count_items(self, batch: Any) -> int | float | Tensor:
        """How many items `batch` holds (say, labels that are not -100); weights its mean loss in the window. Optional."""
        raise NotImplementedError

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Moves a batch to the device: tensors in dicts, lists, tuples, dataclasses, and whatever has `.to(device)`."""
        from lightning_utilities.core.apply_func import apply_to_collection

        return apply_to_collection(batch, _Movable, lambda part: part.to(device))

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """May change a batch before it is moved to the device."""
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """May change a batch after it was moved to the device."""
        return batch

    def setup(self, stage: str) -> None:
        """At the beginning of fit ("fit"), validate, test and predict, on every rank."""

    def teardown(self, stage: str) -> None:
        """At the end of fit, validate, test and predict."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """May add plain values and tensors to a checkpoint."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Sees them again on a resume."""

    # -- what the user calls ------------------------------------------------------------------------------------------------

    @property
    def trainer(self) -> Trainer:
        """The Trainer that runs this module.

        Raises:
            RuntimeError: Outside of fit, validate, test and predict.
        """
        if self._trainer is None:
            raise RuntimeError(f"{type(self).__name__} is not attached to a Trainer: call trainer.fit(module) first")
        return self._trainer

    @property
    def device(self) -> torch.device:
        """The device that this process trains on."""
        if self._trainer is not None:
            return self._trainer.device
        return next((p.device for p in self.parameters()), torch.device("cpu"))

    @property
    def global_step(self) -> int:
        """Optimizer steps done."""
        return self._trainer.global_step if self._trainer is not None else 0

    @property
    def current_epoch(self) -> int:
        """The epoch that runs, from 0."""
        return self._trainer.current_epoch if self._trainer is not None else 0

    @property
    def global_rank(self) -> int:
        """This process's rank among all."""
        return self.trainer.global_rank

    @property
    def logger(self) -> Logger | None:
        """The first logger, or None."""
        loggers = self.trainer.loggers
        return loggers[0] if loggers else None

    def log(
        self,
        name: str,
        value: Any,
        *,
        prog_bar: bool = False,
        logger: bool = True,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str = "mean",
        batch_size: int | None = None,
        sync_dist: bool = True,
        add_dataloader_idx: bool = True,
    ) -> None:
        """Logs a value; it is reduced over micro-batches and ranks only when it is shown.

        Args:
            name: Key; with both on_step and on_epoch it becomes `name_step` and `name_epoch`.
            value: A number or a scalar tensor, no graph is kept.
            prog_bar: Show it in the progress display too.
            logger: Hand it to the loggers.
            on_step: Show the value of an optimizer step (mean over its micro-batches and the ranks). Default: True in training.
            on_epoch: Show the value of the epoch or evaluation. Default: True in evaluation.
            reduce_fx: "mean" (weighted by samples), "sum", "min" or "max".
            batch_size: Samples that the value stands for. Default: the batch's size.
            sync_dist: Accepted as in Lightning; values are always those of all ranks.
            add_dataloader_idx: With several evaluation loaders, put the loader's name into the key.
        """
        trainer = self.trainer
        trainer.metrics.log(
            name,
            value,
            prog_bar=prog_bar,
            logger=logger,
            on_step=on_step,
            on_epoch=on_epoch,
            reduce_fx=reduce_fx,
            batch_size=batch_size,
            add_dataloader_idx=add_dataloader_idx,
        )

    def log_dict(self, dictionary: Mapping[str, Any], **kwargs: Any) -> None:
        """Logs every entry as `log` does."""
        for name, value in dictionary.items():
            self.log(name, value, **kwargs)

    def optimizers(self) -> Any:
        """The torch optimizer, or the list of them when configure_optimizers returned several."""
        optimizers = self.trainer.optimizers
        return optimizers[0] if len(optimizers) == 1 else optimizers

    def lr_schedulers(self) -> Any:
        """The scheduler, the list of them when there are several, or None."""
        schedulers = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        return schedulers[0] if len(schedulers) == 1 else (schedulers or None)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints on rank 0."""
        if self._trainer is None or self._trainer.is_global_zero:
            print(*args, **kwargs)

    @property
    def hparams(self) -> dict[str, Any]:
        """What `save_hyperparameters` kept; also readable by attribute."""
        return self._hparams

    def save_hyperparameters(self, *names: str, ignore: Sequence[str] = ()) -> None:
        """Keeps the arguments of the calling `__init__` (or those named) in `hparams`, loggers and checkpoints.

        Args:
            names: Only these arguments. Default: all.
            ignore: Not these.
        """
        frame = inspect.currentframe()
        caller = frame.f_back if frame is not None else None
        if caller is None or "self" not in caller.f_locals:
            raise RuntimeError("save_hyperparameters() must be called inside __init__")
        signature = inspect.signature(type(self).__init__)
        given: dict[str, Any] = {}
        for name, parameter in signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                given.update(caller.f_locals.get(name, {}))
            elif name != "self" and parameter.kind is not inspect.Parameter.VAR_POSITIONAL:
                given[name] = caller.f_locals.get(name, parameter.default)
        unknown = [name for name in names if name not in given]
        if unknown:
            raise ValueError(
                f"save_hyperparameters: {unknown[0]!r} is no argument of __init__; there are {sorted(given)}"
            )
        kept = {k: v for k, v in given.items() if (not names or k in names) and k not in ignore}
        self._hparams = _Hyperparameters(kept)

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: str | Path, *, strict: bool = True, **overrides: Any) -> Any:
        """A module with the hyper-parameters and weights of a checkpoint.

        Args:
            checkpoint_path: A checkpoint folder.
            strict: Names of the checkpoint and of the module must be the same. Default True.
            overrides: Arguments of `__init__` that replace or complete the saved ones.
        """
        from acclight import checkpoint

        saved = checkpoint.read_trainer(checkpoint_path).get("hparams", {})
        accepted = inspect.signature(cls.__init__).parameters
        takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
        arguments = {k: v for k, v in {**saved, **overrides}.items() if takes_all or k in accepted}
        module = cls(**arguments)
        module.configure_model()
        module.load_state_dict(checkpoint.load_weights(checkpoint_path), strict=strict)
        return module


class _Hyperparameters(dict[str, Any]):
    """A dict whose entries can be read as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"there is no hyper-parameter {name!r}; there are {sorted(self)}") from None


class _MovableMeta(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return callable(getattr(instance, "to", None))


class _Movable(metaclass=_MovableMeta):
    """Everything that has `.to(device)`."""


#: Signature of a step method.
Step = Callable[..., Any]
