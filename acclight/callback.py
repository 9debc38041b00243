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

    The order of a run. Each hook runs on every rank: first the callbacks' in the order of the list, then the module's of the
    same name, then those of callbacks with `runs_last`. (setup and teardown: all callbacks', then the module's; prepare_data: in
    one process per machine.) Steps and other methods of the module stand where they are called.

    .. code-block:: text

        fit:
            configure_callbacks, prepare_data, setup, train_dataloader, val_dataloader
            configure_model, configure_optimizers
            on_fit_start
            sanity check:
                on_sanity_check_start
                validation
                on_sanity_check_end
            on_train_start
            each epoch:
                on_train_epoch_start
                each window of accumulate_grad_batches batches:
                    each batch:
                        on_before_batch_transfer, transfer_batch_to_device, on_after_batch_transfer
                        on_train_batch_start
                        training_step
                        first batch:
                            on_before_zero_grad
                        on_before_backward, on_after_backward
                        last batch:
                            on_before_optimizer_step, configure_gradient_clipping
                            lr_scheduler_step (of schedulers that count steps)
                            on_step
                        on_train_batch_end
                    on_step (of callbacks with runs_last)
                    save (what was asked for inside the window)
                    when due inside the epoch:
                        on_validation_model_zero_grad
                        validation
                when due at the end of the epoch:
                    on_validation_model_zero_grad
                    validation
                on_train_epoch_end
                lr_scheduler_step (of schedulers that count epochs; with automatic optimization)
                on_train_epoch_end (of callbacks with runs_last)
            on_train_end, on_fit_end, teardown

        each batch with manual optimization:
            on_before_batch_transfer, transfer_batch_to_device, on_after_batch_transfer
            on_train_batch_start
            training_step
            each optimizer of which training_step calls zero_grad, manual_backward and step:
                on_before_zero_grad
                on_before_backward, on_after_backward
                on_before_optimizer_step
            on_step
            on_train_batch_end

        validation:
            on_validation_model_eval
            on_validation_start, on_validation_epoch_start
            each batch:
                on_before_batch_transfer, transfer_batch_to_device, on_after_batch_transfer
                on_validation_batch_start
                validation_step
                on_validation_batch_end
            on_validation_epoch_end, on_validation_end
            on_validation_model_train

        save:
            on_save_checkpoint, on_checkpoint

    `validate`, `test` and `predict` run the first two lines of fit with their own loader and without configure_optimizers,
    then what stands under "validation" with their own name in place of "validation", then teardown. A resume calls
    on_load_checkpoint, the module's first, before on_fit_start. An epoch that a limit or `should_stop` cuts short has its
    on_train_epoch_end, but no validation at its end and no step of schedulers that count epochs.
    `on_exception` runs when anything raises, before teardown. Where training goes on while a checkpoint is written,
    on_checkpoint comes after a later step.

    Where this differs from Lightning 2.6:

    - `on_step` and `on_checkpoint` are acclight's own; a module has on_sanity_check_start, on_sanity_check_end, on_exception too.
    - The loss of on_before_backward and of `outputs` is the one that training_step returned. Lightning's is divided by
      accumulate_grad_batches, and under fp16 multiplied by the loss scale.
    - on_before_zero_grad runs before the user's own zero_grad as well; Lightning leaves it out in manual optimization.
    - The loaders are made before configure_model, so that configure_optimizers knows `trainer.estimated_stepping_batches`.
    - A checkpoint is read once the model is wrapped, so that on_load_checkpoint comes after configure_optimizers.
    - Schedulers that count epochs step at the very end of the epoch. Lightning steps them before the epoch's last
      on_train_batch_end, so that the validation at the end of an epoch sees the next epoch's learning rate.
    - on_train_batch_start that returns -1 leaves out the rest of the epoch's training; its validation still runs.
    - A window of which no rank has a loss takes no step: on_before_optimizer_step and configure_gradient_clipping do not run.
    - configure_callbacks runs once for a module, not in every run, so that its callbacks keep their state.
    - EarlyStopping, ModelCheckpoint and what else has `runs_last` come after the module in every hook.
    - teardown runs after an exception too.
    - Several optimizers are allowed with automatic optimization: all step at the end of the window.

    Methods of Lightning that acclight does not call are refused when fit begins, each with the way to go: see `REFUSED`.
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
        """Before a training_step. The module's may return -1 to leave out the rest of this epoch, on all ranks."""

    def on_before_zero_grad(self, trainer: Trainer, module: TrainModule, optimizer: torch.optim.Optimizer) -> None:
        """Before an optimizer's gradients of the last window are cleared, once per window."""

    def on_before_backward(self, trainer: Trainer, module: TrainModule, loss: torch.Tensor) -> None:
        """Before a backward, with the loss as the user returned it."""

    def on_after_backward(self, trainer: Trainer, module: TrainModule) -> None:
        """After a backward."""

    def on_before_optimizer_step(self, trainer: Trainer, module: TrainModule, optimizer: torch.optim.Optimizer) -> None:
        """Before the gradients, free of any loss scale, are clipped and the optimizer steps; once per window and optimizer."""

    def on_step(self, trainer: Trainer, module: TrainModule) -> None:
        """Once per optimizer step, after it, with `global_step` already counted, under every strategy."""

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After a batch; `outputs` is a dict of what training_step returned, with the loss detached; empty for None."""

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
        """On every rank, once a checkpoint is committed and readable.

        Of one that is written while training goes on, it comes after a later step, the same on every rank, and at the latest
        before the next save begins or the training ends.
        """

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


#: Every hook of a callback that the loops call, in the order of the class above; a module may have each of them too.
HOOKS: tuple[str, ...] = tuple(
    name
    for name, value in vars(Callback).items()
    if inspect.isfunction(value) and name not in ("state_dict", "load_state_dict") and not name.startswith("__")
)
#: Hooks that only a module has, and that the loops call only when it has written them.
MODULE_HOOKS = (
    "configure_gradient_clipping",
    "on_validation_model_zero_grad",
    *(f"on_{stage}_model_{mode}" for stage in ("validation", "test", "predict") for mode in ("eval", "train")),
)
# With these a module sees the checkpoint, not itself as an argument; the checkpoint protocol calls them by name.
_OTHER_SIGNATURE = ("setup", "teardown", "on_save_checkpoint", "on_load_checkpoint")

_USE_STEP_HOOKS = (
    "change gradients in on_before_optimizer_step, learning rates with a scheduler of interval 'step' and weights in on_step, "
    "or set automatic_optimization = False and step in training_step"
)
_KEEP_OUTPUTS = "keep what you need of the steps on the module, and use on_{}_epoch_end"
#: Lightning's methods that acclight does not call, and what to do instead.
REFUSED: dict[str, str] = {
    "optimizer_step": _USE_STEP_HOOKS,
    "optimizer_zero_grad": "the loop sets gradients to None once per window: remove it, or use on_before_zero_grad",
    "backward": "use on_before_backward and on_after_backward, or set automatic_optimization = False and call manual_backward",
    "configure_sharded_model": "rename it to configure_model",
    "training_epoch_end": _KEEP_OUTPUTS.format("train"),
    "validation_epoch_end": _KEEP_OUTPUTS.format("validation"),
    "test_epoch_end": _KEEP_OUTPUTS.format("test"),
    "training_step_end": "do it at the end of training_step: each process has its whole batch there",
    "validation_step_end": "do it at the end of validation_step: each process has its whole batch there",
    "test_step_end": "do it at the end of test_step: each process has its whole batch there",
    "tbptt_split_batch": "split the batch in training_step, with automatic_optimization = False",
    "on_epoch_start": "use on_train_epoch_start, on_validation_epoch_start, ...",
    "on_epoch_end": "use on_train_epoch_end, on_validation_epoch_end, ...",
    "on_batch_start": "use on_train_batch_start",
    "on_batch_end": "use on_train_batch_end",
    "on_pretrain_routine_start": "use on_fit_start",
    "on_pretrain_routine_end": "use on_fit_start",
    "on_keyboard_interrupt": "use on_exception, which gets the KeyboardInterrupt",
}


#: Arguments that Lightning's training_step has, or had.
_REFUSED_ARGUMENTS = {
    "optimizer_idx": "set automatic_optimization = False and step each of self.optimizers() in training_step",
    "dataloader_iter": "take (batch, batch_idx): the loop reads the loader, so that a resume knows its place",
    "hiddens": "keep them on the module, with automatic_optimization = False",
}


def refuse_uncalled(owner: TrainModule | Callback) -> None:
    """Raises for a method of Lightning's that acclight would never call, or an argument that it would never give.

    Raises:
        TypeError: Naming the method, or the argument, and the way to go.
    """
    if not isinstance(owner, Callback):
        for argument in inspect.signature(owner.training_step).parameters.keys() & _REFUSED_ARGUMENTS.keys():
            instead = _REFUSED_ARGUMENTS[argument]
            raise TypeError(
                f"{type(owner).__name__}.training_step takes {argument!r}, which acclight does not give: {instead}"
            )
    for name, instead in REFUSED.items():
        # A callback may well have a method "backward" of its own.
        looks_called = name.startswith("on_") or not isinstance(owner, Callback)
        if looks_called and callable(getattr(owner, name, None)):
            raise TypeError(f"{type(owner).__name__} defines {name}, which acclight does not call: {instead}")


def in_order(callbacks: Iterable[Callback]) -> list[Callback]:
    """The callbacks in the order in which they run.

    Raises:
        ValueError: Two of them would keep their states under one key.
    """
    callbacks = sorted(callbacks, key=lambda callback: callback.runs_last)
    keys = [callback.state_key for callback in callbacks if callback.state_dict()]
    double = next((key for key in keys if keys.count(key) > 1), None)
    if double is not None:
        raise ValueError(f"two callbacks share the state_key {double!r}: give one of them a state_key of its own")
    return callbacks


def with_module_callbacks(callbacks: list[Callback], module: TrainModule) -> list[Callback]:
    """The Trainer's callbacks together with the module's own, which replace those of the same class or a class above.

    Args:
        callbacks: What the Trainer was given.
        module: Whose `configure_callbacks` is asked.
    """
    returned = module.configure_callbacks()
    own = [returned] if isinstance(returned, Callback) else list(returned)
    if not own:
        return callbacks
    for callback in own:
        if not isinstance(callback, Callback):
            raise TypeError(
                f"{type(module).__name__}.configure_callbacks returned a {type(callback).__name__}; return acclight.Callback "
                "objects"
            )
    kept = [c for c in callbacks if type(c) is Callback or not any(isinstance(mine, type(c)) for mine in own)]
    return in_order([*kept, *own])


class Hooks:
    """Per hook name the bound methods that somebody has really written, found once per run.

    A hook that nobody overrides is an empty tuple: it costs the loop one attribute and a truth test per step.
    """

    def __init__(self, trainer: Trainer, module: TrainModule, callbacks: Iterable[Callback]) -> None:
        callbacks = list(callbacks)
        refuse_uncalled(module)
        for callback in callbacks:
            refuse_uncalled(callback)
        for name in HOOKS:
            written = [c for c in callbacks if _overrides(c, name)]
            calls = [_of_callback(getattr(c, name), trainer, module) for c in written if not c.runs_last]
            if name not in _OTHER_SIGNATURE and overrides(module, name):
                calls.append(getattr(module, name))
            last = [_of_callback(getattr(c, name), trainer, module) for c in written if c.runs_last]
            # `self.log` means something else in each hook.
            within = trainer.metrics.within
            # Between the two come the values that are shown then, which the hook can add to and a save must hold.
            apart = name in ("on_step", "on_train_epoch_end")
            if apart:
                setattr(self, f"{name}_last", tuple(within(name, call, too_late=True) for call in last))
            setattr(self, name, tuple(within(name, call) for call in (calls if apart else [*calls, *last])))
        for name in MODULE_HOOKS:
            setattr(self, name, (getattr(module, name),) if overrides(module, name) else ())

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Sequence[Callable[..., Any]]: ...


def _overrides(callback: Callback, name: str) -> bool:
    return getattr(type(callback), name, None) is not getattr(Callback, name) or name in vars(callback)


def overrides(module: TrainModule, name: str) -> bool:
    """Whether somebody has written this method of the module, in its class or on the object."""
    from acclight.module import TrainModule

    written = getattr(module, name, None)
    return written is not None and getattr(written, "__func__", written) is not getattr(TrainModule, name, None)


def _of_callback(method: Callable[..., Any], trainer: Trainer, module: TrainModule) -> Callable[..., Any]:
    def call(*args: Any) -> None:
        method(trainer, module, *args)

    return call
