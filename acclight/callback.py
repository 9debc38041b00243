"""Callback: every hook, in the order in which it runs; and how the loops call only those that somebody has written."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from acclight.module import TrainModule
    from acclight.trainer import Trainer


class Callback:
    """Base class of callbacks: override the hooks that you need.

    The order of one `fit` (callbacks run in the order of the list, then the module's hook of the same name):

    .. code-block:: text

        setup, on_fit_start
        on_sanity_check_start, <validation>, on_sanity_check_end
        on_train_start
        for each epoch:
            on_train_epoch_start
            for each window of accumulate_grad_batches batches:
                for each batch:
                    on_train_batch_start, training_step
                    on_before_zero_grad                       (first batch of the window)
                    on_before_backward, on_after_backward
                    on_train_batch_end                        (the window's last batch: after on_step)
                on_before_optimizer_step, the optimizer's step
                on_step                                       (global_step is already counted)
                <validation>, <checkpoints> when they are due; on_checkpoint after each commit
            <validation> when it is due at the end of the epoch
            on_train_epoch_end
        on_train_end, on_fit_end, teardown

    and of one validation (test and predict likewise):

    .. code-block:: text

        on_validation_start, on_validation_epoch_start
        for each batch: on_validation_batch_start, validation_step, on_validation_batch_end
        on_validation_epoch_end, on_validation_end

    `on_exception` runs when anything raises, before `teardown`.
    """

    #: Comes after all others, and after the module: for callbacks that save what the others have done.
    runs_last: bool = False

    @property
    def state_key(self) -> str:
        """The key of this callback's state in a checkpoint."""
        return type(self).__qualname__

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """At the beginning of fit, validate, test and predict, on every rank; before the model is configured."""

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """At the end of fit, validate, test and predict, also after an exception."""

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        """The model is wrapped, the optimizers exist, the checkpoint is loaded."""

    def on_fit_end(self, trainer: Trainer, module: TrainModule) -> None:
        """The last hook of a fit that ended well, before teardown."""

    def on_sanity_check_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Before the validation batches that are tried before training."""

    def on_sanity_check_end(self, trainer: Trainer, module: TrainModule) -> None:
        """After them."""

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Training begins."""

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Training has ended."""

    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        """An epoch begins, or goes on after a resume."""

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        """An epoch has ended; the values that were logged with on_epoch are reduced afterwards."""

    def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> None:
        """Before a training_step."""

    def on_before_zero_grad(self, trainer: Trainer, module: TrainModule, optimizer: torch.optim.Optimizer) -> None:
        """Before the gradients of the last window are cleared, once per window."""

    def on_before_backward(self, trainer: Trainer, module: TrainModule, loss: torch.Tensor) -> None:
        """Before a backward, with the loss as the user returned it."""

    def on_after_backward(self, trainer: Trainer, module: TrainModule) -> None:
        """After a backward."""

    def on_before_optimizer_step(self, trainer: Trainer, module: TrainModule, optimizer: torch.optim.Optimizer) -> None:
        """Before the gradients are clipped and the optimizer steps, once per window."""

    def on_step(self, trainer: Trainer, module: TrainModule) -> None:
        """Once per optimizer step, after it, with `global_step` already counted, under every strategy."""

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After a batch; `outputs` is what training_step returned, with the loss detached."""

    def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
        """A validation begins; the module is in evaluation mode."""

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        """A validation has ended; its metrics are in `trainer.callback_metrics`."""

    def on_validation_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        """After on_validation_start."""

    def on_validation_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        """After the last validation batch; what is logged here still belongs to this validation."""

    def on_validation_batch_start(
        self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Before a validation_step."""

    def on_validation_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """After a validation_step, with what it returned."""

    def on_test_start(self, trainer: Trainer, module: TrainModule) -> None:
        """A test run begins."""

    def on_test_end(self, trainer: Trainer, module: TrainModule) -> None:
        """A test run has ended."""

    def on_test_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        """After on_test_start."""

    def on_test_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        """After the last test batch."""

    def on_test_batch_start(
        self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Before a test_step."""

    def on_test_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """After a test_step, with what it returned."""

    def on_predict_start(self, trainer: Trainer, module: TrainModule) -> None:
        """A prediction run begins."""

    def on_predict_end(self, trainer: Trainer, module: TrainModule) -> None:
        """A prediction run has ended."""

    def on_predict_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        """After on_predict_start."""

    def on_predict_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        """After the last batch of a prediction run."""

    def on_predict_batch_start(
        self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Before a predict_step."""

    def on_predict_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """After a predict_step, with what it returned."""

    def on_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: Path) -> None:
        """On every rank, once a checkpoint is committed and readable."""

    def on_save_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]) -> None:
        """May add plain values and tensors to what a checkpoint holds (its `trainer.json`)."""

    def on_load_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]) -> None:
        """Sees what on_save_checkpoint has written, before anything else of the checkpoint is used."""

    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        """Something raised; the exception goes on to the caller afterwards."""

    def state_dict(self) -> dict[str, Any]:
        """This callback's state for a checkpoint: plain values and tensors."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the state back."""


#: Every hook that the loops call, in the order of the class above.
HOOKS: tuple[str, ...] = tuple(
    name
    for name, value in vars(Callback).items()
    if inspect.isfunction(value) and name not in ("state_dict", "load_state_dict") and not name.startswith("__")
)
# With these a module sees the checkpoint, not itself as an argument; the checkpoint protocol calls them by name.
_OTHER_SIGNATURE = ("setup", "teardown", "on_save_checkpoint", "on_load_checkpoint")


class Hooks:
    """Per hook name the bound methods that somebody has really written, found once per run.

    A hook that nobody overrides is an empty tuple: it costs the loop one attribute and a truth test per step.
    """

    def __init__(self, trainer: Trainer, module: TrainModule, callbacks: Iterable[Callback]) -> None:
        callbacks = list(callbacks)
        for name in HOOKS:
            written = [c for c in callbacks if _overrides(c, name)]
            calls = [_of_callback(getattr(c, name), trainer, module) for c in written if not c.runs_last]
            if name not in _OTHER_SIGNATURE and _module_overrides(module, name):
                calls.append(getattr(module, name))
            last = [_of_callback(getattr(c, name), trainer, module) for c in written if c.runs_last]
            if name in ("on_step", "on_train_epoch_end"):
                # Between the two come the values that are shown then, which the hook can add to and a save must hold.
                setattr(self, f"{name}_last", tuple(last))
                last = []
            setattr(self, name, (*calls, *last))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Sequence[Callable[..., Any]]: ...


def _overrides(callback: Callback, name: str) -> bool:
    return getattr(type(callback), name, None) is not getattr(Callback, name) or name in vars(callback)


def _module_overrides(module: TrainModule, name: str) -> bool:
    from acclight.module import TrainModule

    written = getattr(type(module), name, None)
    return (written is not None and written is not getattr(TrainModule, name, None)) or name in vars(module)


def _of_callback(method: Callable[..., Any], trainer: Trainer, module: TrainModule) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        return method(trainer, module, *args)

    return call
