"""AcceleratorCore: the one owner of `accelerate.Accelerator`: prepare, backward, the accumulation window, clipping, reduction."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.optim import Optimizer

from acclight.messages import info
from acclight.strategies import process_group
from acclight.strategies.isolation import Isolation
from acclight.strategies.strategy import Strategy

# Trainer's names of a precision -> Accelerate's.
_PRECISIONS: dict[str, str] = {
    "32": "no", "32-true": "no", "no": "no",
    "bf16": "bf16", "bf16-mixed": "bf16",
    "16": "fp16", "16-mixed": "fp16", "fp16": "fp16",
}  # fmt: skip


class StepModule(nn.Module):
    """The thin module that is wrapped in place of the user's: its forward is a step method of the user's module.

    So the wrapper's hooks (gradient averaging, gathering of shards) surround the whole step, whatever the step calls: `self(x)`,
    a sub-module or a helper method.
    """

    def __init__(self, module: nn.Module, autocast: torch.autocast | None) -> None:
        super().__init__()
        self.module = module
        self._autocast = autocast

    def forward(self, step: str, *args: Any) -> Any:
        if self._autocast is None:
            outputs = getattr(self.module, step)(*args)
        else:
            with self._autocast:
                outputs = getattr(self.module, step)(*args)
        # Wrappers look for the loss in plain containers only, and FSDP2 would leave out the backward of another silently.
        return dict(outputs) if isinstance(outputs, dict) and type(outputs) is not dict else outputs


class AcceleratorCore:
    """Everything of a Trainer that touches Accelerate.

    Args:
        strategy: How the model is spread over processes.
        precision: "32", "bf16-mixed", "16-mixed" or None: what the launcher says, else "32".
        clip_val: Largest gradient norm or element; 0 or None for no clipping.
        clip_algorithm: "norm" or "value".
    """

    def __init__(
        self, strategy: Strategy, *, precision: str | int | None, clip_val: float | None, clip_algorithm: str
    ) -> None:
        vars(rank_zero_only)["rank"] = int(os.environ.get("RANK", "0"))
        self.strategy = strategy
        self.precision = _resolve_precision(precision)
        self.clip_val = float(clip_val or 0.0)
        self.clip_algorithm = clip_algorithm
        self.isolation = Isolation(self._environment(strategy))
        use_cpu = os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("1", "true", "yes", "on")
        device_type = "cuda" if torch.cuda.is_available() and not use_cpu else "cpu"
        with self.isolation.active():
            if strategy.distributed:
                process_group.join(process_group.default_backend(device_type), strategy.timeout)
            strategy.claim_process_state(device_type)
            arguments = strategy.accelerator_arguments(
                # Batches are the loop's own affair; the engine uses the number for its throughput timer only.
                precision=self.precision, clip=self._engine_clip(), micro_batch_size=1,
            )  # fmt: skip
            self.accelerator = Accelerator(
                mixed_precision=self.precision,
                cpu=strategy.kind in ("single", "ddp") and device_type == "cpu",
                step_scheduler_with_optimizer=False,
                **arguments,
            )
        self.device: torch.device = self.accelerator.device
        self.world_size: int = self.accelerator.num_processes
        self.global_rank: int = self.accelerator.process_index
        self.local_rank: int = max(self.accelerator.local_process_index, 0)
        vars(rank_zero_only)["rank"] = self.global_rank
        self._trainable: list[nn.Parameter] = []
        self._norm: Tensor | None = None
        self._synced = True
        self.step_module: StepModule
        self.forward: Callable[..., Any]
        self.prepared = False

    def _environment(self, strategy: Strategy) -> dict[str, str | None]:
        variables = strategy.environment()
        if strategy.distributed and not process_group.launched():
            # A group of one: Accelerate takes a process for a distributed one when it finds these.
            variables |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        # The Trainer counts the window, the clipping and the precision itself.
        return variables | {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": None, "ACCELERATE_MIXED_PRECISION": None}

    def _engine_clip(self) -> float:
        return self.clip_val if self.clip_algorithm == "norm" else 0.0

    @property
    def num_machines(self) -> int:
        """How many machines take part, by the launcher's count of processes per machine."""
        return max(1, self.world_size // int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size)))

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    def active(self) -> AbstractContextManager[None]:
        """Puts this Trainer's Accelerate state in place for as long as the context lasts."""
        return self.isolation.active()

    # -- prepare --------------------------------------------------------------------------------------------------------

    def prepare(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Wraps the user's module and binds the optimizers to it."""
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.precision)
        autocast = (
            torch.autocast(self.device.type, dtype=dtype) if dtype and self.strategy.kind != "deepspeed" else None
        )
        self.step_module = StepModule(module, autocast)
        self.forward = self.strategy.prepare(self.accelerator, self.step_module, optimizers)
        # Accelerate wraps forward in its own autocast and turns every output into float32; the thin module's autocast
        # surrounds the step already, and outputs keep the type that the user gave them.
        self.step_module.__dict__.pop("forward", None)
        self._trainable = [p for p in module.parameters() if p.requires_grad]
        self.prepared = True

    def evaluate(self, step: str, *args: Any) -> Any:
        """Runs an evaluation step; through the wrapper only where every rank has to join its forward."""
        if self.strategy.collective_forward:
            return self.forward(step, *args)
        return self.step_module(step, *args)

    # -- one window ---------------------------------------------------------------------------------------------------

    def begin_micro_batch(self, last: bool) -> None:
        """Announces the next forward and backward; `last` ends the window, and gradients are averaged over the ranks."""
        if last is not self._synced:
            self.strategy.set_gradient_sync(last)
            self._synced = last

    def backward(self, loss: Tensor, weight: float | Tensor) -> None:
        """Adds the gradient of `weight * loss`. Over a window the weights of all ranks add up to the number of ranks."""
        self.strategy.backward(loss if isinstance(weight, float) and weight == 1.0 else loss * weight)

    def clip(self, optimizer_index: int) -> None:
        """Clips the window's gradients as the Trainer was asked to, and remembers their norm before clipping."""
        self.strategy.unscale(optimizer_index)
        self._norm = None
        if self.clip_val <= 0.0:
            return
        if self.clip_algorithm == "norm":
            self._norm = self.strategy.clip_norm(self._trainable, self.clip_val)
        else:
            self.strategy.clip_value(self._trainable, self.clip_val)

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiplies the window's gradients; for losses whose count is known only after the forward.

        Raises:
            RuntimeError: Under DeepSpeed, whose engine has taken the gradients away by then.
        """
        if self.strategy.kind == "deepspeed":
            raise RuntimeError(
                "training_step returned a LossSum under DeepSpeed, which needs the count before the backward: "
                "return the mean loss and define count_items(batch)"
            )
        for parameter in self._trainable:
            if parameter.grad is not None:
                self.strategy.local(parameter.grad).mul_(factor)

    def optimizer_step(self, index: int) -> bool:
        """Steps one optimizer; False when fp16 loss scaling skipped it."""
        return self.strategy.optimizer_step(index)

    def zero_grad(self, index: int) -> None:
        """Clears the gradients of one optimizer's parameters."""
        self.strategy.zero_grad(index)

    def grad_norm(self) -> float:
        """The norm of the last window's gradients before clipping, as a plain float; reading it waits for the device.

        Without clipping by norm it is computed now, from the gradients that are still there, and every rank has to ask.
        """
        norm = self.strategy.last_norm()
        if norm is not None:
            return norm
        if self._norm is None:
            gradients = [p.grad for p in self._trainable if p.grad is not None]
            self._norm = self.strategy.total_norm(gradients) if gradients else torch.zeros(())
        return float(self._norm)

    # -- across ranks -------------------------------------------------------------------------------------------------

    def failed_elsewhere(self, error: BaseException) -> str | None:
        """Reports this rank's exception to the others; returns what an earlier one of another rank was, if there is one."""
        return process_group.report_failure(error)

    def barrier(self) -> None:
        """Waits until every rank is here."""
        if self.world_size > 1:
            dist.barrier()

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

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

    @contextmanager
    def local_first(self) -> Iterator[None]:
        """Lets each machine's first process go first, for work that leaves files behind."""
        if self.local_rank == 0:
            yield
        self.barrier()
        if self.local_rank != 0:
            yield


def _resolve_precision(precision: str | int | None) -> str:
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION")
    if precision is None:
        return launched or "no"
    try:
        chosen = _PRECISIONS[str(precision)]
    except KeyError:
        raise ValueError(f"precision={precision!r} is unknown; use '32', 'bf16-mixed' or '16-mixed'") from None
    if launched and launched != chosen:
        info(f"precision={precision!r} of the script wins over {launched!r} of the launcher")
    return chosen
