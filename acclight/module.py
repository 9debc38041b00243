"""TrainModule: the model, its steps and its optimizers, written once for every strategy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from acclight.hyperparameters import Hyperparameters, choose, init_arguments, saved_arguments, storable
from acclight.logging.torchmetric import entries
from acclight.messages import warn
from acclight.module_hooks import ModuleHooks

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from acclight.loggers import Logger
    from acclight.loops.manual import ModuleOptimizer
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


class TrainModule(ModuleHooks):
    """Subclass this: `training_step` and `configure_optimizers` are enough to fit.

    The Trainer moves, wraps and compiles the module; the steps hold no device code. The loaders may be given to the Trainer, or
    come from a DataModule, or from `train_dataloader`, `val_dataloader`, `test_dataloader`, `predict_dataloader` of this class.

    Attributes:
        automatic_optimization: The loop runs backward and steps the optimizers (True). With False, training_step does, by
            `optimizers()`, `manual_backward` and `step()`.
    """

    automatic_optimization: bool = True
    _trainer: Trainer | None = None
    #: The argument of `__init__` that holds all hyper-parameters, if they came in one.
    _hparams_holder: str | None = None
    _log_hparams: bool = True
    #: What `log` was given inside compiled code, as MetricStore.log takes it.
    _traced_logs: list[tuple[Any, ...]] | None = None

    def attach(self, trainer: Trainer | None) -> None:
        """Lets this module, and every TrainModule inside, know the Trainer that runs it; None when none does any more."""
        for part in self.modules():
            if isinstance(part, TrainModule):
                part._trainer = trainer

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the module is not attached to the Trainer, which cannot be copied.
        return {**self.__dict__, "_trainer": None, "_held": None}

    # -- what the user writes ---------------------------------------------------------------------------------------------

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """One micro-batch of training.

        Returns:
            The mean loss (a scalar tensor, or a dict with "loss"), a `LossSum`, or None to contribute nothing: like a loss of
            zero in a plain mean. Under FSDP2 and DeepSpeed, whose ranks must all run the same backward, every rank returns None
            for a micro-batch, or none does.
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
        if type(self).forward is nn.Module.forward and "forward" not in vars(self):
            raise NotImplementedError(f"{type(self).__name__} needs a predict_step, or a forward, for Trainer.predict")
        return self(batch)

    def configure_model(self) -> None:
        """Creates the parts of the model that should be born sharded; runs once the strategy is there."""

    def configure_optimizers(self) -> Any:
        """Returns the optimizer(s) and schedulers: any of Lightning's forms, or None for no optimizer."""
        raise NotImplementedError(f"{type(self).__name__} needs configure_optimizers to be fitted")

    def count_items(self, batch: Any) -> int | float | Tensor:
        """How many items `batch` holds (say, labels that are not -100); weights its mean loss in the window. Optional.

        A batch without items (0) adds nothing, also where its mean is 0/0.
        """
        raise NotImplementedError

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Moves a batch to the device: tensors in dicts, lists, tuples, dataclasses, and whatever has `.to(device)`."""
        from lightning_utilities.core.apply_func import apply_to_collection

        if self._trainer is None or not self._trainer.core.config.non_blocking:
            return apply_to_collection(batch, _Movable, lambda part: part.to(device))

        def move(part: Any) -> Any:
            return part.to(device, non_blocking=True) if isinstance(part, Tensor) else part.to(device)

        return apply_to_collection(batch, _Movable, move)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """May change a batch before it is moved to the device."""
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """May change a batch after it was moved to the device."""
        return batch

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clips one optimizer's gradients, after on_before_optimizer_step. Override it to clip in another way.

        Args:
            optimizer: The torch optimizer that is about to step.
            gradient_clip_val: The Trainer's.
            gradient_clip_algorithm: The Trainer's.
        """
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Steps a scheduler that is due. Override it for schedulers whose `step` wants other arguments.

        Args:
            scheduler: As configure_optimizers gave it.
            metric: The value that it watches, or None.
        """
        if metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)

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
    def local_rank(self) -> int:
        """This process's rank on its machine."""
        return self.trainer.core.local_rank

    @property
    def loggers(self) -> list[Logger]:
        """All loggers."""
        return self.trainer.loggers

    @property
    def logger(self) -> Logger | None:
        """The first logger, or None."""
        loggers = self.trainer.loggers
        return loggers[0] if loggers else None

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool = True,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[..., Any] = "mean",
        *,
        batch_size: int | None = None,
        sync_dist: bool = True,
        add_dataloader_idx: bool = True,
        rank_zero_only: bool = False,
    ) -> None:
        """Logs a value; it is reduced over micro-batches and ranks only when it is shown. Never a collective by itself.

        Possible in training_step, validation_step, test_step and the hooks of their batches and epochs. A key keeps its
        arguments for the whole run, and belongs to one hook.

        Args:
            name: Key; with both on_step and on_epoch it becomes `name_step` and `name_epoch`.
            value: A number, a tensor of one element (no graph is kept), or a torchmetrics object, which computes its own value.
            prog_bar: Show it in the progress display too.
            logger: Hand it to the loggers.
            on_step: Show the value of an optimizer step (mean over its micro-batches and the ranks); in an evaluation, give the
                loggers the value of every batch, over the number of batches evaluated so far. Default: True in the hooks of
                training batches.
            on_epoch: Show the value of the epoch or evaluation. Default: True everywhere else.
            reduce_fx: "mean" (weighted by samples), "sum", "min" or "max", or torch's function of that name.
            batch_size: Samples that the value stands for. Default: as many as the loader has put into the batch.
            sync_dist: Accepted as in Lightning; values are always those of all ranks that have logged them.
            add_dataloader_idx: With several evaluation loaders, put the loader's name into the key.
            rank_zero_only: Heed rank 0's value alone.

        Raises:
            RuntimeError: In a hook where nothing can be logged.
            ValueError: The arguments contradict each other, or earlier ones of this key.
            TypeError: `value` is no number.
        """
        if self._trainer is None:
            # As in Lightning: a step that a test calls by hand still works.
            warn(f"self.log({name!r}) outside of a Trainer does nothing")
            return
        if rank_zero_only and not self._trainer.is_global_zero:
            return
        arguments = (name, value, prog_bar, logger, on_step, on_epoch, reduce_fx, batch_size, add_dataloader_idx)
        if torch.compiler.is_compiling() and self._traced_logs is not None:
            # All that compiled code can do without ending its graph; it is logged when the step is through.
            self._traced_logs.append(arguments)
        else:
            self._trainer.metrics.log(*arguments)

    def log_dict(self, dictionary: Mapping[str, Any], **kwargs: Any) -> None:
        """Logs every entry, of a dict or a torchmetrics.MetricCollection, as `log` does."""
        for name, value in entries(dictionary):
            self.log(name, value, **kwargs)

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """The optimizer, or the list of them when configure_optimizers returned several.

        Args:
            use_pl_optimizer: Lightning's name for: as `ModuleOptimizer`, whose `step` does what belongs to a step (True), or
                the torch optimizers themselves.
        """
        trainer = self.trainer
        optimizers: Sequence[Any] = trainer.manual.optimizers if use_pl_optimizer else trainer.optimizers
        return optimizers[0] if len(optimizers) == 1 else list(optimizers)

    def manual_backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Backward in manual optimization: with loss scaling, hooks, and gradients averaged over the ranks.

        Args:
            loss: A scalar with a graph.
            retain_graph: Keep the graph for another backward. Default False.

        Raises:
            RuntimeError: With automatic optimization.
        """
        self.trainer.manual.backward(loss, retain_graph=retain_graph)

    def clip_gradients(
        self,
        optimizer: Optimizer | ModuleOptimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clips the gradients of one optimizer's parameters: in manual optimization, or in configure_gradient_clipping.

        Args:
            optimizer: Of `self.optimizers()`.
            gradient_clip_val: Largest norm, or largest element. Default: the Trainer's; 0 clips nothing.
            gradient_clip_algorithm: "norm" or "value". Default: the Trainer's.

        Raises:
            ValueError: A value contradicts the Trainer's, or cannot be used.
        """
        self.trainer.manual.clip(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def toggle_optimizer(self, optimizer: Optimizer | ModuleOptimizer) -> None:
        """Until `untoggle_optimizer`, only the parameters of this one of several optimizers get gradients."""
        self.trainer.manual.toggle(optimizer)

    def untoggle_optimizer(self, optimizer: Optimizer | ModuleOptimizer) -> None:
        """Ends `toggle_optimizer`."""
        self.trainer.manual.untoggle()

    @contextmanager
    def toggled_optimizer(self, optimizer: Optimizer | ModuleOptimizer) -> Iterator[None]:
        """`toggle_optimizer` for as long as the context lasts."""
        self.toggle_optimizer(optimizer)
        try:
            yield
        finally:
            self.untoggle_optimizer(optimizer)

    def lr_schedulers(self) -> Any:
        """The scheduler, the list of them when there are several, or None."""
        schedulers = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        return schedulers[0] if len(schedulers) == 1 else (schedulers or None)

    def all_gather(self, data: Any, sync_grads: bool = False) -> Any:
        """The tensors of all ranks: each tensor in `data` with a new first dimension of the number of ranks. Collective.

        Args:
            data: A tensor, or dicts, lists, tuples of them; every rank's of the same shape.
            sync_grads: Let gradients flow back to the ranks.

        Returns:
            `data` itself in a single process, as in Lightning.
        """
        return self.trainer.core.all_gather(data, sync_grads=sync_grads)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints on rank 0."""
        if self._trainer is None or self._trainer.is_global_zero:
            print(*args, **kwargs)

    def freeze(self) -> None:
        """Stops the gradients of all parameters, and goes to evaluation mode."""
        self.requires_grad_(False).eval()

    def unfreeze(self) -> None:
        """Lets all parameters be trained, and goes to training mode."""
        self.requires_grad_(True).train()

    # -- hyper-parameters ---------------------------------------------------------------------------------------------------

    @property
    def hparams(self) -> Hyperparameters:
        """What `save_hyperparameters` kept, by key or by attribute; changes of it reach later checkpoints."""
        own: Hyperparameters = self.__dict__.setdefault("_hparams", Hyperparameters())
        return own

    @property
    def hparams_initial(self) -> Hyperparameters:
        """A copy of what `save_hyperparameters` kept, without later changes."""
        initial: Hyperparameters = self.__dict__.get("_hparams_initial", Hyperparameters())
        return deepcopy(initial)

    def save_hyperparameters(self, *args: Any, ignore: str | Sequence[str] = (), logger: bool = True) -> None:
        """Keeps the arguments of `__init__` in `hparams`, loggers and checkpoints.

        Called in the `__init__` of a base class, it keeps the arguments of the whole family; called again, it adds to them.

        Args:
            args: Names of arguments, or one mapping or Namespace that holds the hyper-parameters. Default: all arguments.
            ignore: Names that are left out, also where an earlier call has kept them.
            logger: Show them to the loggers. Default True.

        Raises:
            RuntimeError: Outside of `__init__`.
            ValueError: For a name that is no argument.
        """
        ignored = (ignore,) if isinstance(ignore, str) else tuple(ignore)
        frame = inspect.currentframe()
        given = init_arguments(self, frame.f_back if frame is not None else None)
        kept, holder = choose(given, args, ignored)
        self.hparams.update(kept)
        for name in ignored:
            self.hparams.pop(name, None)
        self._hparams_holder = holder
        self._log_hparams = logger
        odd = sorted(self.hparams.keys() - self.storable_hparams.keys())
        if odd:
            warn(
                f"save_hyperparameters: {odd[0]!r} is a {type(self.hparams[odd[0]]).__name__}, which a checkpoint cannot hold: "
                f"it is left out there and in loggers; say so with save_hyperparameters(ignore={odd})"
            )
        self.__dict__["_hparams_initial"] = Hyperparameters(
            {name: value if name in odd else deepcopy(value) for name, value in self.hparams.items()}
        )

    @property
    def storable_hparams(self) -> dict[str, Any]:
        """The hyper-parameters that checkpoints and loggers can hold: plain values, paths, and lists and mappings of them."""
        return storable(self.hparams)

    @classmethod
    def load_from_checkpoint(
        cls, checkpoint_path: str | Path, map_location: Any = None, *, strict: bool = True, **overrides: Any
    ) -> Any:
        """A module with the hyper-parameters and weights of a checkpoint.

        Args:
            checkpoint_path: A checkpoint folder.
            map_location: The device to put it on. Default: the CPU.
            strict: Names of the checkpoint and of the module must be the same. Default True.
            overrides: Arguments of `__init__` that replace or complete the saved ones.

        Raises:
            TypeError: An argument without a default is neither saved nor given.
            RuntimeError: The checkpoint is another model's; names what is missing or too much.
        """
        from acclight import checkpoint

        document = checkpoint.read_trainer(checkpoint_path)
        arguments = saved_arguments(cls, document.get("hparams", {}), document.get("hparams_holder"), overrides)
        module = cls(**arguments)
        module.configure_model()
        module.on_load_checkpoint(document.get("extra", {}))
        weights = checkpoint.load_weights(checkpoint_path)
        try:
            module.load_state_dict(weights, strict=strict)
        except RuntimeError as error:
            own = module.state_dict().keys()
            names = {
                "not in it": [n for n in own if n not in weights],
                "only in it": [n for n in weights if n not in own],
            }
            odd = "; ".join(f"{where}: {', '.join(some)}" for where, some in names.items() if some)
            if not odd:
                raise
            raise RuntimeError(f"the checkpoint {checkpoint_path} does not fit {cls.__name__}; {odd}") from error
        return module if map_location is None else module.to(map_location)


class _MovableMeta(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return callable(getattr(instance, "to", None))


class _Movable(metaclass=_MovableMeta):
    """Everything that has `.to(device)`."""
