"""AcceleratorCore: the one owner of `accelerate.Accelerator`: prepare, backward, the accumulation window, clipping, reduction."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from accelerate import Accelerator, ParallelismConfig
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.optim import Optimizer

from acclight.accelerator_config import AcceleratorConfig
from acclight.messages import info
from acclight.strategies import process_group
from acclight.strategies.compiling import LAUNCHER_VARIABLES, Compilation, counters_may_change, resolve_compilation
from acclight.strategies.isolation import Isolation, configured_precision
from acclight.strategies.parallelism import resolve_parallelism
from acclight.strategies.precision import Precision, precision_source, resolve_precision
from acclight.strategies.resolve import launched_accumulation, launched_kind
from acclight.strategies.strategy import Strategy


class Nothing(NamedTuple):
    """What comes out of a training_step without a loss where the other ranks may have one, and are joined with zeros.

    Attributes:
        zero: A scalar zero whose backward gives every trained parameter a gradient of zeros.
    """

    zero: Tensor


class UnreadWeight(NamedTuple):
    """The weight of a micro-batch whose number of items is on an accelerator, which nobody waits for.

    Attributes:
        weight: The weight.
        nonzero: Whether it has items at all, a scalar tensor; else its loss may be 0/0.
    """

    weight: float | Tensor
    nonzero: Tensor


class StepModule(nn.Module):
    """The thin module that is wrapped in place of the user's: its forward is a step method of the user's module.

    So the wrapper's hooks (gradient averaging, gathering of shards) surround the whole step, whatever the step calls: `self(x)`,
    a sub-module or a helper method.
    """

    def __init__(
        self, module: nn.Module, precision: Precision, device: torch.device, compilation: Compilation | None
    ) -> None:
        super().__init__()
        self.module = module
        self._precision = precision
        self._autocast = torch.autocast(device.type, dtype=precision.autocast) if precision.autocast else None
        self._compilation = compilation
        self._compiled: dict[str, Callable[..., Any]] = {}
        #: What self.log is given inside compiled code, the user's own as well.
        self._traced_logs: list[tuple[Any, ...]] = []
        for part in module.modules():
            if hasattr(part, "_traced_logs"):
                part._traced_logs = self._traced_logs  # type: ignore[assignment]
        #: A training_step that returns None gives `Nothing`: within the wrapped forward, so that wrappers see it.
        self.stands_in = False

    def forward(self, step: str, *args: Any) -> Any:
        method = getattr(self.module, step) if self._compilation is None else self._compiled_step(step)
        if self._autocast is not None:
            with self._autocast:
                outputs = method(*args)
        elif self._precision.parameters is not None:
            with self._precision.default_dtype():
                outputs = method(*self._precision.cast_inputs(args))
        else:
            outputs = method(*args)
        if self._traced_logs:
            owner: Any = self.module
            for arguments in self._traced_logs:
                owner.trainer.metrics.log(*arguments)
            self._traced_logs.clear()
        if outputs is None and self.stands_in and step == "training_step":
            zeros: Any = _Zeros.apply
            return Nothing(zeros(*(p for p in self.parameters() if p.requires_grad)))
        # Wrappers look for the loss in plain containers only, and FSDP2 would leave out the backward of another silently.
        return dict(outputs) if isinstance(outputs, dict) and type(outputs) is not dict else outputs

    def _compiled_step(self, step: str) -> Callable[..., Any]:
        assert self._compilation is not None
        if step not in self._compiled:
            self._compiled[step] = self._compilation.step(getattr(self.module, step), self.module)
        return self._compiled[step]


class _Zeros(torch.autograd.Function):
    """Zero, with a gradient of zeros for everything; 0 * x would pass on what is not finite."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return tuple(torch.zeros_like(p) for p in ctx.saved_tensors)


class Held(NamedTuple):
    """Whose hands a module is in whose parameters a strategy has changed.

    Attributes:
        core: The core that has prepared it; not kept alive by the module.
        make_whole: Gives it plain, whole parameters again. A collective.
    """

    core: weakref.ref[AcceleratorCore]
    make_whole: Callable[[], None]


class AcceleratorCore:
    """Everything of a Trainer that touches Accelerate.

    Args:
        strategy: How the model is spread over processes.
        precision: As the Trainer was given it; see `Strategy` for what each one means.
        clip_val: Largest gradient norm or element; 0 or None for no clipping.
        clip_algorithm: "norm" or "value".
        compilation: As the Trainer's `compile` was given.
        config: How data is shared out and gradients accumulated. Default: AcceleratorConfig().
        parallelism: As the Trainer was given it.
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        precision: str | int | None,
        clip_val: float | None,
        clip_algorithm: str,
        compilation: bool | str | Mapping[str, Any] | None = None,
        config: AcceleratorConfig | None = None,
        parallelism: ParallelismConfig | Mapping[str, Any] | None = None,
    ) -> None:
        vars(rank_zero_only)["rank"] = int(os.environ.get("RANK", "0"))
        self.strategy = strategy
        self.config = config = AcceleratorConfig() if config is None else config
        if config.sync_each_batch and strategy.kind == "deepspeed":
            raise ValueError(
                f"gradient_accumulation_kwargs: sync_each_batch=True cannot be used with {strategy.name!r}, whose engine "
                "averages once per window; leave it out, or use the strategy 'fsdp2' or 'ddp'"
            )
        configured = strategy.configured_precision()
        if config.use_configured_state:
            configured = configured or configured_precision(strategy.kind, precision)
        self._precision = strategy.precision = resolve_precision(precision, configured)
        self.compilation = resolve_compilation(compilation)
        # Read now: while the Trainer works, Accelerate must not see it.
        self._launched_accumulation = launched_accumulation()
        self.clip_val = float(clip_val or 0.0)
        self.clip_algorithm = clip_algorithm
        self.isolation = Isolation(self._environment(strategy))
        if config.use_configured_state:
            self.isolation.take_over()
        use_cpu = os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("1", "true", "yes", "on")
        device_type = "cuda" if torch.cuda.is_available() and not use_cpu else "cpu"
        launched = "launcher" if process_group.launched() else "default"
        #: Where what is in force came from where the Trainer's arguments do not say it.
        self.sources = {
            "strategy": "launcher" if launched_kind() else launched,
            "processes": launched,
            "device": "launcher" if use_cpu else "default",
            "precision": precision_source(precision, configured),
        }
        if strategy.distributed:
            process_group.join(strategy.backend or process_group.default_backend(device_type), strategy.timeout)
        resolved = resolve_parallelism(
            parallelism, strategy=strategy.name, world_size=dist.get_world_size() if strategy.distributed else 1
        )
        with self.isolation.active():
            strategy.claim_process_state(device_type)
            arguments = strategy.accelerator_arguments(
                # Batches are the loop's own affair; the engine uses the number for its throughput timer only.
                clip=self._engine_clip(), micro_batch_size=1,
            )  # fmt: skip
            self.accelerator = Accelerator(
                mixed_precision=self._precision.accelerate,
                cpu=strategy.kind in ("single", "ddp") and device_type == "cpu",
                step_scheduler_with_optimizer=False,
                # For loaders that a script prepares itself; the Trainer's are shared out by acclight.data.
                dataloader_config=DataLoaderConfiguration(
                    split_batches=config.split_batches, dispatch_batches=config.dispatch_batches,
                    even_batches=config.even_batches, use_seedable_sampler=config.use_seedable_sampler,
                    data_seed=config.data_seed, non_blocking=config.non_blocking,
                ),
                # One, whatever the window: the loop weights its micro-batches itself, and nothing is divided twice.
                gradient_accumulation_plugin=GradientAccumulationPlugin(
                    num_steps=1, sync_each_batch=config.sync_each_batch
                ),
                parallelism_config=resolved,
                **arguments,
            )  # fmt: skip
        strategy.check_accelerator(self.accelerator)
        # Accelerate calls a CPU "cpu:0" in some groups, which torch.compile takes for another device than a tensor's "cpu".
        self.device = torch.device("cpu") if device_type == "cpu" else self.accelerator.device
        self.world_size: int = self.accelerator.num_processes
        self.global_rank: int = self.accelerator.process_index
        self.local_rank: int = max(self.accelerator.local_process_index, 0)
        # In Accelerate's mesh the ranks that compute one batch together (tensor and context parallelism) lie side by side.
        self._ranks_per_batch: int = resolved.non_data_parallel_size if resolved is not None else 1
        #: Which share of the data this rank reads, and of how many.
        self.data_rank = self.global_rank // self._ranks_per_batch
        self.data_world_size = self.world_size // self._ranks_per_batch
        vars(rank_zero_only)["rank"] = self.global_rank
        #: Frozen ones too: which of them are trained may change at any time, and those that are have gradients.
        self._parameters: list[nn.Parameter] = []
        self._norm: Tensor | None = None
        #: What the strategy was told last; None when that is no longer sure.
        self._synced: bool | None = True
        #: A fit has ended within a window.
        self.left_in_window = False
        self.step_module: StepModule
        self.forward: Callable[..., Any]
        self.prepared = False

    def _environment(self, strategy: Strategy) -> dict[str, str | None]:
        variables = strategy.environment()
        if strategy.distributed and not process_group.launched():
            # A group of one: Accelerate takes a process for a distributed one when it finds these.
            variables |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        # The Trainer sees to the window, the precision and the compilation itself.
        own = (
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_PARALLELISM_CONFIG",
            *LAUNCHER_VARIABLES,
        )  # fmt: skip
        return variables | dict.fromkeys(own)

    def check_window(self, accumulate: int, batch_size: int | None) -> None:
        """Holds what makes up an optimizer step against what the launcher and the strategy's configuration say.

        Raises:
            ValueError: When the strategy's configuration says something else.
        """
        launched = self._launched_accumulation
        if launched not in (1, accumulate):
            info(
                f"accumulate_grad_batches={accumulate} of the script wins over gradient_accumulation_steps="
                f"{launched} of the launcher"
            )
        self.strategy.check_window(accumulate=accumulate, batch_size=batch_size, world_size=self.world_size)

    def _engine_clip(self) -> float:
        return self.clip_val if self.clip_algorithm == "norm" else 0.0

    @property
    def num_machines(self) -> int:
        """How many machines take part, by the launcher's count of processes per machine."""
        return max(1, self.world_size // int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size)))

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    @property
    def precision(self) -> str:
        """The Trainer's name of the precision in force."""
        return self._precision.name

    @contextmanager
    def active(self) -> Iterator[None]:
        """Puts this Trainer's process-wide state in place for as long as the context lasts."""
        with self.isolation.active(), counters_may_change(self.compilation):
            yield

    @contextmanager
    def init_context(self) -> Iterator[None]:
        """The context in which `configure_model` creates parameters."""
        with self.strategy.init_context(), self._precision.default_dtype():
            yield

    # -- prepare --------------------------------------------------------------------------------------------------------

    def take(self, module: nn.Module) -> bool:
        """Makes a module whole that another Trainer, or this one before another module, has sharded; True where that was so.

        Every rank has to call it, before optimizers are made: the module's parameters are new, plain ones then.
        """
        held: Held | None = vars(module).get("_held")
        if held is None or (held.core() is self and self.step_module.module is module):
            return False
        held.make_whole()
        vars(module)["_held"] = None
        former = held.core()
        if former is not None and former.step_module.module is module:
            former.prepared = False
        return True

    def check_own(self, module: nn.Module) -> None:
        """Raises RuntimeError when another Trainer has taken the module, so that this one's state is not the module's."""
        held: Held | None = vars(module).get("_held")
        given_up = "step_module" in vars(self) and not self.prepared
        if given_up or (held is not None and held.core() is not self):
            raise RuntimeError(
                "another Trainer has prepared this module since, so that this Trainer's optimizers are no longer those of its "
                "parameters: save with the other Trainer"
            )

    def check_trained(self, module: nn.Module) -> None:
        """Raises ValueError for a fit of a module without trained parameters where the strategy exchanges their gradients."""
        if not self.strategy.distributed or any(p.requires_grad for p in module.parameters()):
            return
        frozen = any(True for _ in module.parameters())
        raise ValueError(
            f"{type(module).__name__} has {'frozen parameters only' if frozen else 'no parameters'}, so that fit under "
            f"{self.strategy.name!r} has nothing to train: "
            + ("leave some unfrozen before fit" if frozen else "make them in __init__ or configure_model")
            + ", or use validate, test or predict"
        )

    def prepare(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Wraps the user's module, anew where an evaluation has wrapped it before, and binds the optimizers to it."""
        if not self.prepared or self.step_module.module is not module:
            self._precision.cast_module(module)
            if self.compilation is not None:
                self.compilation.regions(module)
        self.step_module = StepModule(module, self._precision, self.device, self.compilation)
        self.strategy.manual = not getattr(module, "automatic_optimization", True)
        self.forward = self.strategy.prepare(self.accelerator, self.step_module, optimizers)
        self.step_module = self.strategy.step_module  # type: ignore[assignment]
        self._synced, self.step_module.stands_in = True, self.joins_with_nothing
        if self._precision.name != "fp8":
            # Accelerate wraps forward in its own autocast and turns every output into float32; the thin module's autocast
            # surrounds the step already, and outputs keep the type that the user gave them. (fp8's recipes live in there.)
            self.step_module.__dict__.pop("forward", None)
        self._parameters = list(module.parameters())
        self.prepared = True
        make_whole = self.strategy.way_back(module)
        if make_whole is not None:
            vars(module)["_held"] = Held(weakref.ref(self), make_whole)

    def evaluate(self, step: str, *args: Any) -> Any:
        """Runs an evaluation step; through the wrapper only where every rank has to join its forward."""
        if self.strategy.collective_forward:
            return self.forward(step, *args)
        return self.step_module(step, *args)

    # -- one window ---------------------------------------------------------------------------------------------------

    def begin_fit(self) -> None:
        """Forgets what is left of a window that an exception has ended in an earlier fit; every rank calls it."""
        if self.any_rank(self.left_in_window):
            self.strategy.forget_window()
            self._synced = None
        self.left_in_window = False

    def begin_micro_batch(self, last: bool) -> None:
        """Announces the next forward and backward; `last` ends the window, and gradients are averaged over the ranks."""
        last = last or self.config.sync_each_batch
        if last is not self._synced:
            self.strategy.set_gradient_sync(last)
            self._synced = last
            self.step_module.stands_in = last and self.joins_with_nothing

    def backward(self, loss: Tensor, weight: float | Tensor | UnreadWeight) -> None:
        """Adds the gradient of `weight * loss`. Over a window the weights of all ranks add up to the number of ranks.

        A weight of exactly 0.0 gives gradients of zeros, whatever the loss is: 0 x (0/0) would make them NaN.
        """
        keep: bool | Tensor = True
        if isinstance(weight, UnreadWeight):
            weight, keep = weight
        elif isinstance(weight, float) and weight == 0.0:
            keep = False
        loss = loss if isinstance(weight, float) and weight == 1.0 else loss * weight
        # Where nothing is kept the whole backward runs too: wrappers exchange gradients and free shards in it.
        try:
            with nullcontext() if keep is True else self.strategy.gradients_where(keep):
                self.strategy.backward(loss)
        except RuntimeError as error:
            if "backward through the graph a second time" in str(error):
                error.add_note(
                    "The loop runs backward itself on the loss that training_step returns. If training_step has called "
                    "loss.backward(), leave that out and return the loss, or set self.automatic_optimization = False and call "
                    "self.manual_backward(loss). If the loss hangs on an earlier batch, detach what was kept of it."
                )
            raise

    def unscale(self, optimizer_index: int) -> None:
        """Takes the fp16 loss scale out of one optimizer's gradients, so that hooks and clipping see the true ones."""
        self.strategy.unscale(optimizer_index)

    def clip(self, *, skip: bool) -> None:
        """Clips the window's gradients as the Trainer was asked to, and remembers their norm before clipping.

        Args:
            skip: Clip nothing: the module does it.
        """
        self._norm = None
        self.strategy.reset_clipping()
        if self.clip_val > 0.0 and not skip:
            self.clip_gradients(self._parameters, self.clip_val, self.clip_algorithm)

    def clip_gradients(self, parameters: Sequence[nn.Parameter], value: float, algorithm: str) -> None:
        """Clips the gradients of some parameters by their common norm, or by element."""
        if algorithm == "norm":
            self._norm = self.strategy.clip_norm(parameters, value)
        else:
            self.strategy.clip_value(parameters, value)

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiplies the window's gradients; for losses whose count is known only after the forward."""
        self.strategy.scale_gradients(self._parameters, factor)

    def finish_window(self) -> None:
        """Averages the gradients of a window over the ranks after all, when its last micro-batch had no backward."""
        self.strategy.finish_window()

    def drop_gradients(self) -> None:
        """Forgets what the window has gathered so far; every rank does."""
        self.strategy.drop_gradients()
        self._synced = None

    @property
    def joins_with_nothing(self) -> bool:
        """A rank without a loss joins the others' exchange of gradients with zeros; else all ranks need one, or none."""
        return self.strategy.joins_with_nothing and not self.strategy.manual

    def optimizer_step(self, index: int) -> bool:
        """Steps one optimizer; False when fp16 loss scaling skipped it."""
        return self.strategy.optimizer_step(index)

    def zero_grad(self, index: int) -> None:
        """Clears the gradients of one optimizer's parameters."""
        self.strategy.zero_grad(index)

    # -- a training step that runs backward itself ----------------------------------------------------------------------

    def manual_forward(self, step: str, *args: Any) -> Any:
        """Runs a step that calls `manual_backward`, and steps optimizers, as often as it likes."""
        return self.strategy.manual_forward(step, *args)

    def manual_backward(self, loss: Tensor, *, sync: bool, retain_graph: bool) -> None:
        """Adds the gradient of `loss`; with `sync` the gradients are averaged over the ranks."""
        self._norm = None
        self.strategy.manual_backward(loss, sync=sync, retain_graph=retain_graph)

    def after_manual_step(self) -> None:
        """Lets the rest of the step see the parameters that an optimizer has changed."""
        self.strategy.after_manual_step()

    def manual_zero_grad(self, index: int) -> None:
        """Clears the gradients of one optimizer's parameters, also those that the strategy has taken away already."""
        self.strategy.manual_zero_grad(index)

    def grad_norm(self) -> float:
        """The norm of the last window's gradients before clipping, as a plain float; reading it waits for the device.

        Without clipping by norm it is computed now, from the gradients that are still there, and every rank has to ask.
        """
        norm = self.strategy.last_norm()
        if norm is not None:
            return norm
        if self._norm is None:
            gradients = [p.grad for p in self._parameters if p.grad is not None]
            self._norm = self.strategy.total_norm(gradients) if gradients else torch.zeros(())
        return float(self._norm)

    # -- across ranks -------------------------------------------------------------------------------------------------

    def begin_run(self) -> None:
        """A fit, validation, test or prediction begins, on every rank."""
        self._run = process_group.begin_run()

    def end_run(self) -> None:
        """It has ended on this rank without an exception."""
        process_group.end_run()

    def failed_elsewhere(self, error: BaseException) -> str | None:
        """Reports this rank's exception to the others; returns what an earlier one of another rank was, if there is one."""
        return process_group.report_failure(self._run, error)

    def shared_notes(self) -> process_group.SharedNotes:
        """New notes for what one rank may have to tell the others without a collective; every rank has to ask for them."""
        return process_group.SharedNotes(self.world_size)

    def wait_for_device(self) -> None:
        """Waits until the device has done all that it was given."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def any_rank(self, wish: bool) -> bool:
        """Whether any rank wishes it. A collective."""
        if self.world_size == 1:
            return wish
        votes = torch.tensor(int(wish))
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        return bool(votes)

    def all_gather(self, data: Any, *, sync_grads: bool) -> Any:
        """See TrainModule.all_gather."""
        from lightning_utilities.core.apply_func import apply_to_collection

        return data if self.world_size == 1 else apply_to_collection(data, Tensor, self._gather_one, sync_grads)

    def _gather_one(self, tensor: Tensor, sync_grads: bool) -> Tensor:
        tensor = tensor.to(self.device).contiguous()
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        if sync_grads and tensor.requires_grad:
            from torch.distributed.nn import functional

            with_gradient: Any = functional.all_gather
            return torch.stack(with_gradient(tensor))
        dist.all_gather(gathered, tensor.detach())
        return torch.stack(gathered)

    def barrier(self) -> None:
        """Waits until every rank is here."""
        if self.world_size > 1:
            dist.barrier()

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def gather_values(self, values: Sequence[float]) -> list[list[float]]:
        """The numbers of every rank, in the order of the ranks; every rank gives equally many. One collective."""
        if self.world_size == 1:
            return [list(values)]
        own = torch.tensor(values, dtype=torch.float64, device=self.device)
        gathered = own.new_empty(self.world_size, len(own))
        dist.all_gather(list(gathered), own)
        ranks: list[list[float]] = gathered.tolist()
        return ranks

    def gather_objects(self, value: Any) -> list[Any]:
        """The value of every rank, in the order of the ranks; for small plain objects."""
        if self.world_size == 1:
            return [value]
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value)
        return gathered

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's value on every rank."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def scatter_objects(self, values: Sequence[Any] | None) -> Any:
        """This rank's entry of the list that rank 0 gives, one for each share of the data; the other ranks give None."""
        if self.world_size == 1:
            assert values is not None
            return values[0]
        box: list[Any] = [None]
        every = None if values is None else [values[rank // self._ranks_per_batch] for rank in range(self.world_size)]
        dist.scatter_object_list(box, every, src=0)
        return box[0]

    @contextmanager
    def local_first(self) -> Iterator[None]:
        """Lets each machine's first process go first, for work that leaves files behind."""
        if self.local_rank == 0:
            yield
        self.barrier()
        if self.local_rank != 0:
            yield
