"""ModuleHooks: every hook of Callback as a module has it, without the trainer and the module among its arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from pathlib import Path

    from torch.optim import Optimizer

    from acclight.callback import Callback


class ModuleHooks(nn.Module):
    """The hooks of a TrainModule; all do nothing unless overridden. `acclight.Callback` shows the order in which they run."""

    def configure_callbacks(self) -> Callback | list[Callback]:
        """Callbacks that belong to this module; they replace the Trainer's of the same class. Called once per module."""
        return []

    def prepare_data(self) -> None:
        """Downloads and the like, in one process per machine, before `setup`. Other ranks do not see what it puts on `self`."""

    def setup(self, stage: str) -> None:
        """At the beginning of fit ("fit"), validate, test and predict, on every rank."""

    def teardown(self, stage: str) -> None:
        """At the end of fit, validate, test and predict, also after an exception."""

    def on_fit_start(self) -> None:
        """The model is wrapped, the optimizers exist, the checkpoint is loaded."""

    def on_fit_end(self) -> None:
        """The last hook of a fit that ended well, before teardown."""

    def on_sanity_check_start(self) -> None:
        """Before the validation batches that are tried before training."""

    def on_sanity_check_end(self) -> None:
        """After them."""

    def on_train_start(self) -> None:
        """Training begins."""

    def on_train_end(self) -> None:
        """Training has ended."""

    def on_train_epoch_start(self) -> None:
        """An epoch begins, or goes on after a resume."""

    def on_train_epoch_end(self) -> None:
        """An epoch has ended; the values that were logged with on_epoch are reduced afterwards."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """Before a training_step. Return -1, on any rank, to leave out the rest of this epoch on all ranks.

        A module that writes this hook makes several ranks ask each other before every batch.
        """
        return None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After a batch; `outputs` is a dict of what training_step returned, with the loss detached; empty for None."""

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        """Before an optimizer's gradients of the last window are cleared."""

    def on_before_backward(self, loss: Tensor) -> None:
        """Before a backward, with the loss as training_step returned it."""

    def on_after_backward(self) -> None:
        """After a backward."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Before the gradients, free of any loss scale, are clipped and the optimizer steps."""

    def on_step(self) -> None:
        """Once per optimizer step, after it, with `global_step` already counted, under every strategy."""

    def on_checkpoint(self, checkpoint: Path) -> None:
        """On every rank, once a checkpoint is committed and readable."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """May add plain values and tensors to a checkpoint."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Sees them again on a resume, and in `load_from_checkpoint`."""

    def on_exception(self, exception: BaseException) -> None:
        """Something raised; the exception goes on to the caller afterwards."""

    def on_validation_model_zero_grad(self) -> None:
        """Before a validation within fit. Gradients are left as they are unless this is overridden."""
        self.zero_grad()

    def on_validation_model_eval(self) -> None:
        """Puts the model into evaluation mode for a validation."""
        self.eval()

    def on_validation_model_train(self) -> None:
        """After every submodule has its former mode again: change modes here if others are wanted."""
        self.train()

    def on_validation_start(self) -> None:
        """A validation begins."""

    def on_validation_end(self) -> None:
        """A validation has ended."""

    def on_validation_epoch_start(self) -> None:
        """After on_validation_start."""

    def on_validation_epoch_end(self) -> None:
        """After the last batch."""

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Before a validation_step."""

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """After a validation_step, with what it returned."""

    def on_test_model_eval(self) -> None:
        """Puts the model into evaluation mode for a test run."""
        self.eval()

    def on_test_model_train(self) -> None:
        """After every submodule has its former mode again: change modes here if others are wanted."""
        self.train()

    def on_test_start(self) -> None:
        """A test run begins."""

    def on_test_end(self) -> None:
        """A test run has ended."""

    def on_test_epoch_start(self) -> None:
        """After on_test_start."""

    def on_test_epoch_end(self) -> None:
        """After the last batch."""

    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Before a test_step."""

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """After a test_step, with what it returned."""

    def on_predict_model_eval(self) -> None:
        """Puts the model into evaluation mode for a prediction run."""
        self.eval()

    def on_predict_model_train(self) -> None:
        """After every submodule has its former mode again: change modes here if others are wanted."""
        self.train()

    def on_predict_start(self) -> None:
        """A prediction run begins."""

    def on_predict_end(self) -> None:
        """A prediction run has ended."""

    def on_predict_epoch_start(self) -> None:
        """After on_predict_start."""

    def on_predict_epoch_end(self) -> None:
        """After the last batch."""

    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Before a predict_step."""

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """After a predict_step, with what it returned."""
