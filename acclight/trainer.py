"""Trainer: reads the arguments, wires the parts, and exposes fit, validate, test and predict."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from acclight import arguments
from acclight.accelerator_config import AcceleratorConfig
from acclight.callback import Callback, Hooks, in_order, overrides, with_module_callbacks
from acclight.checkpoint import snapshot
from acclight.checkpoint.background import BackgroundSave
from acclight.core import AcceleratorCore
from acclight.loggers import SilentLogger, guarded
from acclight.loggers.choose import make_loggers
from acclight.logging import MetricStore, Shown
from acclight.loops.batch_size import settle_batch_size
from acclight.loops.evaluate import evaluate
from acclight.loops.fit import FitLoop
from acclight.loops.fit_loaders import FitLoaders
from acclight.loops.manual import ManualOptimization, check_manual
from acclight.loops.optimizers import SchedulerConfig, read_optimizers
from acclight.loops.pause import paused_training
from acclight.loops.predict import predict
from acclight.loops.progress import Progress as Counts
from acclight.loops.reading import evaluation_data, evaluation_loaders
from acclight.loops.session import session
from acclight.messages import info, warn
from acclight.misspelt import warn_of_misspelt
from acclight.startup import announce
from acclight.strategies.compiling import unwrapped
from acclight.strategies.resolve import launched_accumulation, resolve_strategy

if TYPE_CHECKING:
    from accelerate import Accelerator, ParallelismConfig
    from accelerate.tracking import GeneralTracker

    from acclight.checkpoint.reader import Source
    from acclight.data import EvalData, TrainData
    from acclight.datamodule import DataModule
    from acclight.loggers import Logger
    from acclight.loops.validation import FitValidation
    from acclight.module import TrainModule
    from acclight.strategies import Strategy


class Trainer:
    """Trains a TrainModule under any strategy; the arguments are Lightning's where the idea is the same.

    Args:
        strategy: "auto" (what the launcher says, else one device), a name ("single", "ddp", "fsdp2", "deepspeed_stage_1",
            "deepspeed_stage_2", "deepspeed_stage_3") or a Strategy object.
        precision: "32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true" (or "32", "bf16", "16", "64") or "fp8";
            `Strategy` says what each one means. Default: what the launcher says, else "32-true".
        max_epochs: Epochs in all, over resumes; -1 for no limit. Default: 1000 where no limit is given.
        max_steps: Optimizer steps in all; -1 for no limit. Default -1.
        max_time: Longest time, as a timedelta or a dict of its arguments; a validation or save that runs is finished.
        min_epochs: `should_stop` is heeded only after so many epochs.
        min_steps: `should_stop` is heeded only after so many optimizer steps.
        accumulate_grad_batches: Batches per rank in one optimizer step. Default: the launcher's, else 1.
        gradient_clip_val: Largest gradient norm (or element). Default: what a DeepSpeed launch says, else no clipping.
        gradient_clip_algorithm: "norm" (default) or "value".
        callbacks: Callbacks, in the order in which they run.
        logger: True for TensorBoard and CSV files, False for none, a logger, the name of one, or a list of these. Names are
            "tensorboard", "csv", and those of `TrackerLogger`, such as "wandb". One that fails while training runs is told
            once, and training goes on.
        log_every_n_steps: Optimizer steps between logged values. Default 50.
        val_check_interval: An int: optimizer steps between validations; a float: the fraction of an epoch. Default 1.0.
        check_val_every_n_epoch: Epochs between those with validations, at their end or at fractions of them. Default 1. None, as
            in Lightning, needs a val_check_interval in steps, which does not heed epochs anyway.
        num_sanity_val_steps: Validation batches that are tried before training. Default 2; -1 for all.
        limit_train_batches: Batches per rank and epoch (int), or a fraction (float). Default 1.0.
        limit_val_batches: Likewise for each validation loader.
        limit_test_batches: Likewise for each test loader.
        limit_predict_batches: Likewise for each prediction loader.
        overfit_batches: Train every epoch on the same first batches per rank, so many (int) or such a fraction (float), to see
            whether the model can learn them by heart; 0 (the default) is off. As in Lightning, it stands for limit_train_batches
            and limit_val_batches, and fit turns off shuffling: the samplers of the training and validation loaders are replaced
            by sequential ones (a batch sampler of your own and a stream stay as they are). Validation reads the first batches
            of the validation loader: give the training loader as that too to validate on what is trained.
        reload_dataloaders_every_n_epochs: Call the loader hooks of the module or the data module again at the start of every
            n-th epoch (epochs 0, n, 2n, ...), on all ranks, once the old loaders' workers are closed. A resume calls them with
            `current_epoch` at the last of these. Loaders that were given to fit stay. 0 (the default) is off.
        fast_dev_run: Run so many batches (True: 1) of everything once, without checkpoints, and with a logger that takes
            every call and does nothing.
        deterministic: Use deterministic algorithms only (True), or warn where there is none ("warn").
        detect_anomaly: Find the operation that makes a NaN in the backward; slow.
        inference_mode: Evaluate under torch.inference_mode where the strategy can. Default True.
        compile: True compiles the step methods with torch.compile, "regional" the blocks that the model repeats, a dict gives
            torch.compile's arguments (and "regional": True). Default: what the launcher says, else no compilation.
        accelerator_config: How loaders are shared out and gradients accumulated: an `AcceleratorConfig`, a dict of its fields or
            the path of a JSON file.
        parallelism: Accelerate's ParallelismConfig, or a dict of its fields (dp_replicate_size, dp_shard_size, tp_size, cp_size):
            the mesh over which strategy "fsdp2" shards. Default: what the launcher says, else all processes in one row.
        default_root_dir: Where loggers and checkpoints go. Default: the working directory.
        enable_progress_bar: Show progress. Default True.
        enable_checkpointing: Save checkpoints where no ModelCheckpoint is given. Default True.
        enable_model_summary: Show the model's parts at the start. Default True.

    Raises:
        TypeError: For an unknown argument; it names the nearest one.
        ValueError: For a value that cannot be used.
        ImportError: For a logger whose package is not installed.
    """

    #: The arguments that the script gave, by name.
    given_arguments: Mapping[str, Any]

    @arguments.checked
    def __init__(
        self,
        *,
        strategy: str | Strategy = "auto",
        precision: str | int | None = None,
        max_epochs: int | None = None,
        max_steps: int = -1,
        max_time: timedelta | dict[str, int] | str | None = None,
        min_epochs: int | None = None,
        min_steps: int | None = None,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str = "norm",
        callbacks: Callback | Sequence[Callback] | None = None,
        logger: bool | str | Logger | GeneralTracker | Sequence[str | Logger | GeneralTracker] | None = True,
        log_every_n_steps: int = 50,
        val_check_interval: int | float = 1.0,
        check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int = 2,
        limit_train_batches: int | float = 1.0,
        limit_val_batches: int | float = 1.0,
        limit_test_batches: int | float = 1.0,
        limit_predict_batches: int | float = 1.0,
        overfit_batches: int | float = 0.0,
        reload_dataloaders_every_n_epochs: int = 0,
        fast_dev_run: bool | int = False,
        deterministic: bool | str = False,
        detect_anomaly: bool = False,
        inference_mode: bool = True,
        compile: bool | str | dict[str, Any] | None = None,  # noqa: A002  # torch's and Lightning's name
        accelerator_config: AcceleratorConfig | Mapping[str, Any] | str | Path | None = None,
        parallelism: ParallelismConfig | Mapping[str, Any] | None = None,
        default_root_dir: str | Path | None = None,
        enable_progress_bar: bool = True,
        enable_checkpointing: bool = True,
        enable_model_summary: bool = True,
    ) -> None:
        if min_epochs is not None and max_epochs is not None and 0 <= max_epochs < min_epochs:
            raise ValueError(f"min_epochs={min_epochs} contradicts max_epochs={max_epochs}; change one of them")
        if check_val_every_n_epoch is None and not isinstance(val_check_interval, int):
            raise ValueError(
                "check_val_every_n_epoch=None counts no epochs, of which "
                f"val_check_interval={val_check_interval} is a fraction: give it as a number of optimizer steps (an int)"
            )
        if overfit_batches:
            limit_train_batches = limit_val_batches = overfit_batches
        if fast_dev_run:
            batches = int(fast_dev_run)
            limit_train_batches = limit_val_batches = limit_test_batches = limit_predict_batches = batches
            max_epochs, max_steps, num_sanity_val_steps, val_check_interval = 1, -1, 0, 1.0
            enable_checkpointing, log_every_n_steps = False, 1
            logger = SilentLogger() if logger else False
        if max_epochs is None:
            max_epochs = -1 if max_steps >= 0 or max_time is not None else 1000
        self.max_epochs: int | None = max_epochs
        self.max_steps = max_steps
        self.max_time = arguments.as_timedelta(max_time)
        self.min_epochs = min_epochs
        self.min_steps = min_steps
        config = AcceleratorConfig.read(accelerator_config)
        said = "accumulate_grad_batches" in self.given_arguments or "num_steps" in (
            config.gradient_accumulation_kwargs or {}
        )
        self.accumulate_grad_batches = config.accumulation(accumulate_grad_batches) if said else launched_accumulation()
        self.log_every_n_steps = log_every_n_steps
        self.val_check_interval = val_check_interval
        self.check_val_every_n_epoch = 1 if check_val_every_n_epoch is None else check_val_every_n_epoch
        self.num_sanity_val_steps = num_sanity_val_steps
        self.limits: dict[str, int | float] = {
            "train": limit_train_batches, "validation": limit_val_batches,
            "test": limit_test_batches, "predict": limit_predict_batches,
        }  # fmt: skip
        self.overfit_batches = overfit_batches
        self.reload_dataloaders_every_n_epochs = reload_dataloaders_every_n_epochs
        self.deterministic = deterministic
        self.detect_anomaly = detect_anomaly
        self.inference_mode = inference_mode
        self.default_root_dir = Path.cwd() if default_root_dir is None else Path(default_root_dir).expanduser()
        #: Set it to end the fit: after this very step where every rank sets it at the same one; where only some do, all ranks end
        #: together at the next step at which they ask each other: at most 16 steps, or about a tenth of a second, later.
        self.should_stop = False
        self.interrupted = False
        #: An exception is ending the run; `on_exception` runs, or what comes after it.
        self.failing = False
        self.state: str | None = None
        self.validating = False
        self.sanity_checking = False
        self.progress = Counts()
        self.callback_metrics: dict[str, torch.Tensor] = {}
        self.logged_metrics: dict[str, float] = {}
        self._shown_in_progress: dict[str, float] = {}
        #: Those of `callback_metrics` that the newest validation of this fit has logged.
        self._validated: dict[str, torch.Tensor] = {}
        self.optimizers: list[torch.optim.Optimizer] = []
        self.lr_scheduler_configs: list[SchedulerConfig] = []
        self.data: TrainData | None = None
        #: What the running evaluation reads, or in fit its validations.
        self.eval_data: dict[str, EvalData] = {}
        self.validation: FitValidation | None = None
        #: Those of the fit that runs.
        self.loaders: FitLoaders | None = None
        self.datamodule: DataModule | None = None
        self.hooks: Hooks
        self.manual: ManualOptimization
        self._transfers: list[Callable[..., Any]]
        #: Dataset indices of the evaluation or prediction batch that runs, in its order; None where the data has none.
        self.batch_indices: list[Any] | None = None
        #: While an evaluation runs, the random state that training goes on with.
        self.paused_random_state: dict[str, Any] | None = None
        self._module: TrainModule | None = None
        #: Another Trainer, in whose run this one evaluates the same module.
        self._former: Trainer | None = None
        #: The module that is wrapped, and whether with its optimizers.
        self._prepared: tuple[TrainModule, bool] | None = None
        self._pending_saves: list[tuple[Path, bool, bool]] = []
        #: The checkpoint that is being written while training goes on.
        self.saving: BackgroundSave | None = None
        self._loop: FitLoop | None = None

        loggers = make_loggers(logger, self.default_root_dir)
        resolved = resolve_strategy(strategy)
        self.core = AcceleratorCore(
            resolved,
            precision=precision,
            clip_val=resolved.configured_clip if gradient_clip_val is None else gradient_clip_val,
            clip_algorithm=gradient_clip_algorithm,
            compilation=compile,
            config=config,
            parallelism=parallelism,
        )
        self.metrics = MetricStore(self.core, self.core.device)
        self.loggers = loggers
        for one in loggers:
            if one.version is None:
                # Decided once, on rank 0: the ranks would otherwise find each other's folders.
                one.version = self.core.broadcast_object(one.next_version() if self.is_global_zero else None)
        self.callbacks = self._make_callbacks(
            callbacks, enable_progress_bar, enable_checkpointing, enable_model_summary and not fast_dev_run
        )
        #: Without those of a module, and the module whose callbacks have been added.
        self._own_callbacks = self.callbacks
        self._callbacks_of: TrainModule | None = None

    def __deepcopy__(self, memo: Any) -> Trainer:
        raise TypeError("a Trainer cannot be copied: make a new one with the same arguments")

    def _make_callbacks(
        self, given: Callback | Sequence[Callback] | None, progress: bool, checkpoints: bool, summary: bool
    ) -> list[Callback]:
        callbacks: list[Callback] = [] if given is None else [given] if isinstance(given, Callback) else list(given)
        if progress:
            from acclight.callbacks import Progress, default_progress

            callbacks += [] if any(isinstance(c, Progress) for c in callbacks) else [default_progress()]
        if summary:
            from acclight.callbacks import ModelSummary

            callbacks += [] if any(isinstance(c, ModelSummary) for c in callbacks) else [ModelSummary()]
        if checkpoints:
            from acclight.callbacks import ModelCheckpoint

            callbacks += [] if any(isinstance(c, ModelCheckpoint) for c in callbacks) else [ModelCheckpoint()]
        return in_order(callbacks)

    # -- what users call ------------------------------------------------------------------------------------------------

    def fit(
        self,
        module: TrainModule,
        train_dataloaders: Iterable[Any] | None = None,
        val_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
    ) -> None:
        """Trains to the first limit; limits are absolute, so that a second call, or a resume, goes on to them.

        Args:
            module: The model.
            train_dataloaders: The training loader; or give a datamodule, or define `train_dataloader` on the module.
            val_dataloaders: One validation loader, a list or a dict of them.
            datamodule: Gives both loaders.
            ckpt_path: A checkpoint folder, "last" (the newest), "best", or "auto" (the newest good one, or a fresh start). What
                belongs after the step of the checkpoint and had not happened, such as its validation, comes first. Also a folder
                of `accelerate.Accelerator.save_state`, whose training goes on but for random states and the place in the data,
                or a file with weights (Lightning's .ckpt, a state_dict of torch's, .safetensors), from which training begins.
        """
        train_dataloaders, datamodule = arguments.loaders_and_datamodule(
            "fit", "train_dataloaders", train_dataloaders, datamodule
        )
        arguments.check_loaders("fit", "val_dataloaders", val_dataloaders)
        arguments.check_ckpt_path(ckpt_path)
        module = self._module_for("fit", module)
        with session(self, "fit", module, datamodule):
            if self.manual_optimization:
                check_manual(self)
            begun = self._begun_epoch(module)
            reader = snapshot.find(self, ckpt_path)
            if self.batch_size_finder is not None:
                settle_batch_size(self, self.batch_size_finder, train_dataloaders, reader)
            self.loaders = FitLoaders(self, train_dataloaders, val_dataloaders)
            self.loaders.load(self._first_counts(module, reader))
            assert self.data is not None
            if begun is not None and begun[0]["dataset"] == self.data.state_dict()["dataset"]:
                self.data.load_state_dict(begun[0])
                self.data.load_own_state(begun[1])
            self._prepare(training=True, resumed=reader)
            self.core.begin_fit()
            if reader is not None:
                snapshot.restore(self, reader)
                self.metrics.forget_training()
                info(f"resumed from {reader.path} at step {self.global_step}")
            assert self.validation is not None
            self._loop = FitLoop(self, self.core, module, self.data, self.validation)
            announce(self, resumed=reader is not None and bool(reader.data) and not reader.trainer["weights_only"])
            self._warn_of_what_cannot_be()
            for call in self.hooks.on_fit_start:
                call()
            self._loop.run()
            self.interrupted = self._loop.preempted is not None
            self.finish_saving()
            if not self.interrupted:
                for call in self.hooks.on_fit_end:
                    call()
            owed = self._loop.signal_owed
        if owed is not None:
            # Everything is saved and closed: now the signal does what it would have done at once.
            os.kill(os.getpid(), owed)

    def validate(
        self,
        module: TrainModule | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
    ) -> list[dict[str, float]]:
        """Runs the validation loop once; returns the metrics, one dict per loader, and says them unless `verbose=False`."""
        return self._evaluate("validate", "validation", module, dataloaders, datamodule, ckpt_path, verbose)

    def test(
        self,
        module: TrainModule | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
    ) -> list[dict[str, float]]:
        """Runs the test loop once; returns the metrics, one dict per loader, and says them unless `verbose=False`."""
        return self._evaluate("test", "test", module, dataloaders, datamodule, ckpt_path, verbose)

    def predict(
        self,
        module: TrainModule | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        return_predictions: bool = True,
        ckpt_path: str | Path | None = None,
    ) -> list[Any] | None:
        """Runs predict_step over all batches.

        Returns:
            What predict_step returned per batch, in the dataset's order, on every rank (a list per loader where there are
            several); None with `return_predictions=False`.
        """
        dataloaders, datamodule = arguments.loaders_and_datamodule("predict", "dataloaders", dataloaders, datamodule)
        arguments.check_ckpt_path(ckpt_path)
        with session(self, "predict", self._module_for("predict", module), datamodule):
            self.eval_data = evaluation_data(self, "predict", evaluation_loaders(self, "predict", dataloaders))
            self._prepare(training=False)
            self._load_weights(ckpt_path)
            with paused_training(self, "predict"):
                results = predict(self, self.eval_data, return_predictions)
                for call in self.hooks.on_predict_end:
                    call()
        if not return_predictions:
            return None
        return results[0] if len(results) == 1 else results

    def save_checkpoint(self, path: str | Path, weights_only: bool = False, asynchronous: bool = False) -> None:
        """Writes a checkpoint; every rank has to call it. Asked for inside a window, it is written at the window's end.

        Args:
            path: The folder to make.
            weights_only: Only the model's weights and hyper-parameters.
            asynchronous: In fit, copy the state and write it while training goes on: `on_checkpoint` comes once it is committed,
                at a later step, and before the next save begins or training ends. Each rank copies what it writes to the CPU.
        """
        if self._loop is not None and self._loop.in_window and not self.failing:
            self._pending_saves.append((Path(path), weights_only, asynchronous))
            return
        with self.core.active():
            self._save(Path(path), weights_only, asynchronous)

    def finish_saving(self) -> None:
        """Waits for the checkpoint that is being written, if there is one; every rank has to call it.

        Raises:
            CheckpointError: It could not be written.
        """
        if self.saving is None:
            return
        saved = self.saving.path
        try:
            self.saving.wait()
        except Exception:
            self.saving = None  # a Ctrl-C leaves it, with a bound, to the teardown
            raise
        self.saving = None
        for call in self.hooks.on_checkpoint:
            call(saved)

    # -- what can be read -----------------------------------------------------------------------------------------------

    @property
    def module(self) -> TrainModule:
        """The module that runs, or ran last."""
        if self._module is None:
            raise RuntimeError("the Trainer has no module yet: call fit, validate, test or predict")
        return self._module

    @property
    def global_step(self) -> int:
        """Optimizer steps done (windows, also those whose fp16 step was skipped)."""
        return self.progress.global_step

    @property
    def steps_of_fit(self) -> int:
        """Optimizer steps of the fit that runs; 0 right after a resume, when no metric of training is known yet."""
        return 0 if self._loop is None else self.global_step - self._loop.first_step

    @property
    def skipped_steps(self) -> int:
        """Steps that fp16 loss scaling skipped."""
        return self.progress.skipped_steps

    @property
    def current_epoch(self) -> int:
        """The epoch that runs, from 0."""
        return self.progress.epoch

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.core.device

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self.core.world_size

    @property
    def global_rank(self) -> int:
        """This process's rank."""
        return self.core.global_rank

    @property
    def local_rank(self) -> int:
        """This process's number on its machine."""
        return self.core.local_rank

    @property
    def num_nodes(self) -> int:
        """The number of machines."""
        return self.core.num_machines

    @property
    def precision(self) -> str:
        """The precision in force, by its name."""
        return str(self.core.precision)

    @property
    def is_global_zero(self) -> bool:
        """This process is rank 0."""
        return self.core.is_global_zero

    @property
    def strategy(self) -> Strategy:
        """The strategy in force."""
        return self.core.strategy

    @property
    def accelerator(self) -> Accelerator:
        """Accelerate's own object."""
        return self.core.accelerator

    @property
    def grad_norm(self) -> float:
        """The norm of the last step's gradients before clipping; reading it waits for the device.

        Without clipping by norm it is computed when asked for, and every rank has to ask.
        """
        return self.core.grad_norm()

    @property
    def gradient_clip_val(self) -> float | None:
        """The largest gradient norm or element, as given or as a DeepSpeed launch says; None for no clipping."""
        return self.core.clip_val or None

    @property
    def gradient_clip_algorithm(self) -> str:
        """How it is clipped: "norm" or "value"."""
        return self.core.clip_algorithm

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """What the progress display shows: this process's newest step values, and the reduced ones. Waits for the device."""
        return {**self._shown_in_progress, **self.metrics.live()}

    @property
    def pending_metrics(self) -> list[str]:
        """Keys that training logs on its steps, and those that it has logged for the epoch that runs: values may come later."""
        return self.metrics.pending_names()

    @property
    def logger(self) -> Logger | None:
        """The first logger, or None; Lightning's name."""
        return self.loggers[0] if self.loggers else None

    @property
    def log_dir(self) -> Path | None:
        """The folder of this run: the first logger's that has one, else default_root_dir."""
        return next((one.log_dir for one in self.loggers if one.log_dir is not None), self.default_root_dir)

    @property
    def checkpoint_callback(self) -> Any:
        """The first ModelCheckpoint, or None."""
        from acclight.callbacks import ModelCheckpoint

        return next((c for c in self.callbacks if isinstance(c, ModelCheckpoint)), None)

    @property
    def early_stopping_callback(self) -> Any:
        """The first EarlyStopping, or None."""
        from acclight.callbacks import EarlyStopping

        return next((c for c in self.callbacks if isinstance(c, EarlyStopping)), None)

    @property
    def batch_size_finder(self) -> Any:
        """The first BatchSizeFinder, or None."""
        from acclight.callbacks import BatchSizeFinder

        return next((c for c in self.callbacks if isinstance(c, BatchSizeFinder)), None)

    @property
    def training(self) -> bool:
        """Fit runs, and no validation of it."""
        return self.state == "fit" and not self.validating

    @property
    def testing(self) -> bool:
        """Test runs."""
        return self.state == "test"

    @property
    def predicting(self) -> bool:
        """Predict runs."""
        return self.state == "predict"

    @property
    def is_last_batch(self) -> bool:
        """In training: no other batch comes in this epoch; False for a loader of unknown length."""
        return self._loop is not None and self._loop.at_last_batch

    def print(self, *args: Any, **kwargs: Any) -> None:
        """`print` on rank 0."""
        if self.is_global_zero:
            print(*args, **kwargs)

    @property
    def fitting(self) -> bool:
        """Fit runs, and it is not in the sanity check."""
        return self.state == "fit" and not self.sanity_checking

    @property
    def num_training_batches(self) -> int | float:
        """Batches per rank and epoch; infinite when the loader does not say."""
        if self.data is None or self.data.num_batches is None:
            return math.inf
        return self.data.num_batches

    @property
    def num_val_batches(self) -> list[int | float]:
        """Batches of this rank per loader of the evaluation that runs, or of fit's validations."""
        return [math.inf if data.num_batches is None else data.num_batches for data in self.eval_data.values()]

    @property
    def steps_per_epoch(self) -> int | float:
        """Optimizer steps per epoch; infinite when the loader does not say."""
        batches = self.num_training_batches
        return batches if math.isinf(batches) else math.ceil(batches / self.accumulate_grad_batches)

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Optimizer steps of the whole training: those done, and those to come before a limit, as the loader is now.

        Infinite when neither a limit nor the loader says. Known in `configure_optimizers`, also of a resume.
        """
        begun = self.progress.epoch + self.progress.epoch_done
        epochs = math.inf if self.max_epochs is None or self.max_epochs < 0 else max(self.max_epochs - begun, 0)
        # What is left of the epoch that runs, then whole ones; infinitely many of no steps are none.
        to_come = self.steps_left_in_epoch if epochs else 0
        if epochs > 1 and self.steps_per_epoch:
            to_come += (epochs - 1) * self.steps_per_epoch
        by_steps = self.max_steps if self.max_steps >= 0 else math.inf
        steps = max(min(self.global_step + to_come, by_steps), self.global_step)
        return steps if math.isinf(steps) else int(steps)

    @property
    def steps_left_in_epoch(self) -> int | float:
        """Optimizer steps to the end of the epoch that runs, or of the one that comes; infinite when nobody knows."""
        if self.data is None or self.progress.epoch_done:
            return self.steps_per_epoch
        left = self.data.batches_left
        return math.inf if left is None else math.ceil(left / self.accumulate_grad_batches)

    @property
    def max_time_seconds(self) -> float | None:
        """max_time in seconds."""
        return None if self.max_time is None else self.max_time.total_seconds()

    @property
    def in_optimizer_step(self) -> bool:
        """Parameters are being changed, or were changed by a step that is not counted yet."""
        begun = self.manual_optimization and self.manual.begun
        return self._loop is not None and (self._loop.in_step or (self._loop.in_window and begun))

    @property
    def logs_at_epoch_end(self) -> bool:
        """Somebody has written on_train_epoch_end, and may log metrics there: after the epoch's validation."""
        hooks = [type(one).on_train_epoch_end for one in self.callbacks]
        return overrides(self.module, "on_train_epoch_end") or any(
            not hook.__module__.startswith("acclight.") for hook in hooks
        )

    @property
    def validation_due(self) -> bool:
        """A validation follows the step that has just been done."""
        return self._loop is not None and self._loop.validation_follows()

    @property
    def manual_optimization(self) -> bool:
        """The module steps its optimizers itself."""
        return not self.module.automatic_optimization

    # -- what the loops call ----------------------------------------------------------------------------------------------

    def to_device(self, batch: Any, dataloader_idx: int = 0) -> Any:
        """A batch after the three transfer hooks: the module's, but for those that the datamodule has."""
        before, move, after = self._transfers
        return after(move(before(batch, dataloader_idx), self.core.device, dataloader_idx), dataloader_idx)

    def publish(self, shown: Shown) -> None:
        """Hands reduced values to callbacks and the progress display."""
        self.callback_metrics.update({name: torch.tensor(value) for name, value in shown.callback.items()})
        self._shown_in_progress.update(shown.prog_bar)

    def show(self, shown: Shown) -> None:
        """Hands reduced values to callbacks, progress display and loggers."""
        self.publish(shown)
        if self.sanity_checking:
            return
        self.logged_metrics.update(shown.logger)
        rows = [*shown.series, *([(self.global_step, shown.logger)] if shown.logger else [])]
        for step, values in rows if self.is_global_zero else ():
            guarded.write(self.loggers, {"epoch": self.current_epoch, **values}, step)

    def show_validation(self, shown: Shown) -> None:
        """Likewise what a whole validation of a fit has logged.

        What the one before it logged and this one did not (of a loader that is gone, say) no longer stands for the model.
        """
        for name, value in self._validated.items():
            # Training may have logged the name since.
            if name not in shown.callback and self.callback_metrics.get(name) is value:
                for metrics in (self.callback_metrics, self.logged_metrics, self._shown_in_progress):
                    metrics.pop(name, None)
        self.show(shown)
        self._validated = {name: self.callback_metrics[name] for name in shown.callback}

    def forget_metrics(self) -> None:
        """Drops what was shown so far."""
        self._validated.clear()
        self.callback_metrics.clear()
        self.logged_metrics.clear()
        self._shown_in_progress.clear()

    def save_pending(self) -> None:
        """Writes the checkpoints that were asked for inside the window that has just ended."""
        while self._pending_saves:
            self._save(*self._pending_saves.pop(0))

    # -- wiring ---------------------------------------------------------------------------------------------------------

    def begin_session(self, state: str, module: TrainModule, datamodule: DataModule | None) -> None:
        """Binds the module to this Trainer: its callbacks, once for each module, and its hooks."""
        former = module._trainer
        spread = [t.strategy.name for t in (former, self) if t is not None and t.strategy.kind not in ("single", "ddp")]
        if former is not None and spread:
            raise RuntimeError(
                f"{state} was called for a module whose {former.state} another Trainer runs, and {spread[0]!r} changes its "
                f"parameters: call {state} after that {former.state}, or give it a copy that was made before"
            )
        self._former = former
        self._module = module
        self.datamodule = datamodule
        module.attach(self)
        try:
            if self._callbacks_of is not module:
                self.callbacks = with_module_callbacks(self._own_callbacks, module)
                self._callbacks_of = module
            self.hooks = Hooks(self, module, self.callbacks)
            warn_of_misspelt([module, *self.callbacks, *([] if datamodule is None else [datamodule])])
            names = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
            self._transfers = [getattr(datamodule, name, None) or getattr(module, name) for name in names]
        except BaseException:
            module.attach(former)
            raise
        self.state = state
        if datamodule is not None:
            datamodule.trainer = self
        self.core.begin_run()
        self.metrics.begin_run(module)
        self.forget_metrics()
        self.should_stop = self.interrupted = self.failing = False

    def end_session(self) -> None:
        """Lets go of the module and of what belonged to the run."""
        self.state = None
        self.loaders = None
        self.core.left_in_window |= self._loop is not None and self._loop.in_window
        self._loop = None
        self._pending_saves = []
        self.metrics.end_window()
        self.module.attach(self._former)
        self._former = None
        if self.datamodule is not None:
            self.datamodule.trainer = None

    def _prepare(self, *, training: bool, resumed: Source | None = None) -> None:
        """Creates the model's last parts and the optimizers, and wraps them; a module that is wrapped already stays so.

        Args:
            training: With optimizers.
            resumed: The checkpoint that is restored afterwards; configure_optimizers sees its step and position already.
        """
        module = self.module
        known = self._prepared is not None and self._prepared[0] is module
        # Another Trainer may have sharded it since, or this one's shards may have been made whole for another.
        fresh = self.core.take(module) or not known or not self.core.prepared
        if not fresh and self._prepared is not None and (self._prepared[1] or not training):
            return
        if fresh:
            with self.core.init_context():
                module.configure_model()
            module.attach(self)
            self.progress = Counts() if training and not known else self.progress
        self.optimizers, self.lr_scheduler_configs = [], []
        if resumed is not None:
            snapshot.restore_position(self, resumed)
        if training:
            self.core.check_trained(module)
            self.optimizers, self.lr_scheduler_configs = read_optimizers(module)
            if not self.optimizers and self.core.strategy.kind == "deepspeed":
                raise ValueError(
                    "configure_optimizers returned None: a DeepSpeed engine trains with exactly one optimizer"
                )
        self.core.prepare(module, self.optimizers)
        self.manual = ManualOptimization(self)
        self._prepared = module, training

    def _first_counts(self, module: TrainModule, reader: Source | None) -> Counts:
        """Where the fit that comes will begin."""
        if reader is not None and not reader.trainer.get("weights_only"):
            counts = Counts()
            counts.load_state_dict(reader.trainer["progress"])
            return counts
        return self.progress if self._prepared is not None and self._prepared[0] is module else Counts()

    def _begun_epoch(self, module: TrainModule) -> tuple[dict[str, Any], Any] | None:
        """Where an earlier fit of this module has left its data, in the middle of an epoch, and this rank's own place."""
        if self.data is None or self.progress.epoch_done or self._prepared is None or self._prepared[0] is not module:
            return None
        return self.data.state_dict(), self.data.own_state()

    def _warn_of_what_cannot_be(self) -> None:
        """Says where training will not do what the arguments ask for."""
        assert self._loop is not None
        assert self.validation is not None
        batches = self.num_training_batches
        if 0 < batches < self.accumulate_grad_batches:
            warn(
                f"accumulate_grad_batches={self.accumulate_grad_batches}, but an epoch has {batches} batches: each epoch "
                f"makes one step, over the {batches} that it holds"
            )
        end, every = self.estimated_stepping_batches, self.log_every_n_steps
        if self.loggers and self.global_step < end and end // every == self.global_step // every:
            warn(
                f"training ends at step {end}, before the next of every log_every_n_steps={every} steps: what it logs on its "
                "steps will not reach the loggers; set a lower value"
            )
        if not self._loop.limit_reached() and (reason := self.validation.never_due()):
            warn(f"no validation will run: {reason}")

    def _module_for(self, state: str, module: TrainModule | None) -> TrainModule:
        chosen = self._module if module is None and state != "fit" else unwrapped(module)
        if chosen is None:
            raise ValueError(f"Trainer.{state} needs a module" + (": none was fitted before" if state != "fit" else ""))
        arguments.check_module(state, chosen)
        return chosen

    def _evaluate(
        self,
        state: str,
        stage: str,
        module: TrainModule | None,
        dataloaders: Any,
        datamodule: DataModule | None,
        ckpt_path: str | Path | None,
        verbose: bool,
    ) -> list[dict[str, float]]:
        dataloaders, datamodule = arguments.loaders_and_datamodule(state, "dataloaders", dataloaders, datamodule)
        arguments.check_ckpt_path(ckpt_path)
        with session(self, state, self._module_for(state, module), datamodule):
            named = evaluation_loaders(self, "val" if stage == "validation" else stage, dataloaders)
            self.eval_data = evaluation_data(self, stage, named)
            self._prepare(training=False)
            self._load_weights(ckpt_path)
            self.validating = stage == "validation"
            try:
                with paused_training(self, stage):
                    shown = evaluate(self, stage, self.eval_data)
                    self.show(shown)
                    for call in getattr(self.hooks, f"on_{stage}_end"):
                        call()
            finally:
                self.validating = False
        if verbose and shown.callback:
            info(f"{state}: " + ", ".join(f"{name} {value:.4g}" for name, value in shown.callback.items()))
        return [shown.of_loader(position) for position in range(len(named))]

    def _load_weights(self, ckpt_path: str | Path | None) -> None:
        reader = snapshot.find(self, ckpt_path)
        if reader is not None:
            snapshot.restore_weights(self, reader)

    def _save(self, path: Path, weights_only: bool, asynchronous: bool) -> None:
        self.finish_saving()
        self.core.check_own(self.module)
        asynchronous = asynchronous and self._loop is not None
        writing = snapshot.take(self, path, weights_only=weights_only, copy=asynchronous)
        if asynchronous:
            self.saving = BackgroundSave(writing)
            return
        saved = writing.finish()
        for call in self.hooks.on_checkpoint:
            call(saved)
