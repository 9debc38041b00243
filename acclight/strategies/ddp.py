"""DDPStrategy: every process holds the whole model; gradients are averaged once per window."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from acclight.strategies import process_group
from acclight.strategies.fields import Config, reads_config
from acclight.strategies.reached import ReachedParameters
from acclight.strategies.strategy import Strategy, canonical_name


class DDPStrategy(Strategy):
    """Wraps the model in `torch.nn.parallel.DistributedDataParallel`.

    Args:
        config: The fields below as a dict, or the path of a JSON or YAML file with them; arguments win. A leading "ddp_" is
            accepted.
        backend: "nccl", "gloo", "mpi", "xccl", "hccl", "cncl" or "mccl". Default: the device's own.
        find_unused_parameters: Look for parameters that a step does not use, at the cost of walking the graph. Default False.
        bucket_cap_mb: Size of a gradient bucket in MiB. Default torch's, 25.
        broadcast_buffers: Copy rank 0's buffers to all before each training forward. Default True.
        static_graph: The graph never changes. Default False.
        gradient_as_bucket_view: Gradients are views into the buckets, which saves their memory. Default False.
        comm_hook: How gradients travel: "no" (default), "fp16", "bf16", "power_sgd" or "batched_power_sgd".
        comm_wrapper: "fp16" or "bf16" around a PowerSGD hook. Default "no".
        comm_state_option: Arguments of torch's PowerSGDState.
        timeout: Seconds that a collective may wait. Default 1800.

    Raises:
        ValueError: For an unknown field or hook, or a backend that is not there; it names what there is.
    """

    kind = "ddp"
    joins_with_nothing = True

    @reads_config(prefix="ddp_", section="ddp_config")
    def __init__(
        self,
        config: Config | None = None,
        *,
        backend: str | None = None,
        find_unused_parameters: bool = False,
        bucket_cap_mb: int | None = None,
        broadcast_buffers: bool = True,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = False,
        comm_hook: str = "no",
        comm_wrapper: str = "no",
        comm_state_option: Mapping[str, Any] | None = None,
        timeout: float = 1800.0,
    ) -> None:
        super().__init__(timeout=timeout)
        if backend is not None:
            process_group.check_backend(backend)
        self.backend = backend
        self._arguments: dict[str, Any] = {
            "find_unused_parameters": find_unused_parameters,
            "broadcast_buffers": broadcast_buffers,
            "static_graph": static_graph,
            "gradient_as_bucket_view": gradient_as_bucket_view,
        }
        self._reached: ReachedParameters | None = None
        #: How often another set of parameters was trained from then on.
        self._rewraps = 0
        if bucket_cap_mb is not None:
            if isinstance(bucket_cap_mb, bool) or not isinstance(bucket_cap_mb, (int, float)) or bucket_cap_mb <= 0:
                raise ValueError(f"bucket_cap_mb={bucket_cap_mb!r}: give a number of MiB, more than 0")
            self._arguments["bucket_cap_mb"] = bucket_cap_mb
        if "power_sgd" not in str(comm_hook).lower() and (str(comm_wrapper).lower() != "no" or comm_state_option):
            named = (
                f"comm_state_option={comm_state_option!r}" if comm_state_option else f"comm_wrapper={comm_wrapper!r}"
            )
            raise ValueError(
                f"{named} belongs to a PowerSGD hook, and comm_hook={comm_hook!r}: give comm_hook='power_sgd' too"
            )
        self._communication = {
            "comm_hook": _hook("comm_hook", comm_hook, ("no", "fp16", "bf16", "power_sgd", "batched_power_sgd")),
            "comm_wrapper": _hook("comm_wrapper", comm_wrapper, ("no", "fp16", "bf16")),
            "comm_state_option": dict(comm_state_option or {}),
        }

    def check_window(self, *, accumulate: int, batch_size: int | None, world_size: int) -> None:
        if accumulate > 1 and self._arguments["static_graph"]:
            raise ValueError(
                f"static_graph=True cannot be used with accumulate_grad_batches={accumulate}: torch's static graph exchanges "
                "gradients in every backward; leave one of them out"
            )

    def accelerator_arguments(self, *, clip: float, micro_batch_size: int) -> dict[str, Any]:
        return {"kwargs_handlers": [DistributedDataParallelKwargs(**self._arguments, **self._communication)]}

    def prepare(self, accelerator: Any, step_module: nn.Module, optimizers: Sequence[Optimizer]) -> Callable[..., Any]:
        self._reached = None
        super().prepare(accelerator, step_module, optimizers)
        self._accelerator = accelerator
        self._notes = process_group.SharedNotes(dist.get_world_size())
        self._note_trained()
        return self._forward

    def _note_trained(self) -> None:
        """Keeps what the reducer knows: it averages the parameters that were trained when it was made."""
        named = list(self.step_module.get_submodule("module").named_parameters())
        self._averaged = {canonical_name(name): p for name, p in named if p.requires_grad}
        self._frozen = {canonical_name(name): p for name, p in named if not p.requires_grad}

    def _forward(self, *args: Any) -> Any:
        if isinstance(self.wrapped, DistributedDataParallel) and self.wrapped.require_backward_grad_sync:
            unfrozen, frozen = self._unfrozen(), [n for n, p in self._averaged.items() if not p.requires_grad]
            if unfrozen or frozen:
                self._agree(unfrozen, frozen)
                self._wrap_again()
        return self.wrapped(*args)

    def _unfrozen(self) -> list[str]:
        return [name for name, parameter in self._frozen.items() if parameter.requires_grad]

    def _agree(self, unfrozen: Sequence[str], frozen: Sequence[str]) -> None:
        """Raises RuntimeError unless every rank has frozen and unfrozen the same: what follows is a collective."""
        # A rank that has not goes on to its backward, and waits there as long as the process group allows.
        seconds = self.timeout.total_seconds() / 2
        if not self._notes.agree(f"{self._rewraps}:{','.join(unfrozen)}:{','.join(frozen)}", seconds):
            changes = [f"{what} {_few(names)}" for what, names in (("unfrozen", unfrozen), ("frozen", frozen)) if names]
            raise RuntimeError(
                f"rank {dist.get_rank()} has {' and '.join(changes)} during the training, and the other ranks have not within "
                f"{seconds:g} s: freeze and unfreeze the same parameters on every rank"
            )
        self._rewraps += 1

    def _wrap_again(self) -> None:
        """Makes a new reducer, for the parameters that are trained now. A collective."""
        former: Any = self.wrapped
        if not any(p.requires_grad for p in self.step_module.parameters()):
            raise RuntimeError("all parameters are frozen now, so that there is nothing to train: leave some unfrozen")
        former._remove_autograd_hooks()
        # As Accelerate does, without what it does to the model itself, which is done.
        handler = self._accelerator.ddp_handler
        wrapped = DistributedDataParallel(
            former.module, device_ids=former.device_ids, output_device=former.output_device, **handler.to_kwargs()
        )
        handler.register_comm_hook(wrapped)
        self.wrapped = wrapped
        self._note_trained()

    def forget_window(self) -> None:
        # The reducer may be in the middle of a backward.
        if isinstance(self.wrapped, DistributedDataParallel):
            self._wrap_again()

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        super().backward(loss, retain_graph=retain_graph)
        wrapped = self.wrapped
        if not isinstance(wrapped, DistributedDataParallel) or not wrapped.require_backward_grad_sync:
            return
        self._check_averaged(wrapped)
        if unfrozen := self._unfrozen():
            # Within training_step, where the reducer had been made already; the next forward makes a new one.
            self._agree(unfrozen, [])
            for name in unfrozen:
                parameter = self._frozen[name]
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()

    def _check_averaged(self, wrapped: Any) -> None:
        """Raises RuntimeError where the reducer still waits for a gradient, so that none is averaged."""
        try:
            wrapped._check_reducer_finalized()
        except RuntimeError as error:
            # torch gives their numbers alone.
            numbers = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
            if numbers is None:
                raise
            names = list(self._averaged)
            unused = [names[int(number)] for number in numbers[1].split()]
            frozen = [name for name in unused if not self._averaged[name].requires_grad]
            if frozen:
                raise RuntimeError(
                    f"training_step has frozen {_few(frozen)}, for whose gradients DDP waits in this step: freeze them in a "
                    "hook before it, such as on_train_batch_start or on_train_epoch_start"
                ) from error
            raise RuntimeError(
                f"the last training_step has left without a gradient, which DDP waits for: {_few(unused)}; use them, "
                "freeze them, or give DDPStrategy(find_unused_parameters=True)"
            ) from error

    def check_wrapped(self) -> None:
        trains = bool(self._optimizers) and any(p.requires_grad for p in self.step_module.parameters())
        if trains and not isinstance(self.wrapped, DistributedDataParallel):
            raise RuntimeError(
                f"strategy 'ddp' was asked for, but Accelerate left the model as {type(self.wrapped).__name__}: "
                "start the script with `accelerate launch` or `torchrun`"
            )

    def manual_forward(self, *args: Any) -> Any:
        # The reducer exchanges gradients once per forward, and expects all parameters to be used; buffers still follow rank 0.
        self.wrapped.require_backward_grad_sync = False  # type: ignore[assignment]
        self.wrapped.require_forward_param_sync = True  # type: ignore[assignment]
        return self.wrapped(*args)

    def manual_backward(self, loss: Tensor, *, sync: bool, retain_graph: bool) -> None:
        if self._reached is None:
            self._reached = ReachedParameters(self.step_module)
        super().manual_backward(loss, sync=sync, retain_graph=retain_graph)
        if sync:
            self._reached.average(any_rank=bool(self._arguments["find_unused_parameters"]))

    def set_gradient_sync(self, sync: bool) -> None:
        # What DistributedDataParallel.no_sync() sets; without it the gradients travel once per micro-batch.
        self.wrapped.require_backward_grad_sync = sync  # type: ignore[assignment]


def _few(names: Sequence[str]) -> str:
    """The first names of many."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _hook(argument: str, name: str, known: tuple[str, ...]) -> DDPCommunicationHookType:
    if name not in known:
        raise ValueError(f"{argument}={name!r}: use one of {', '.join(known)}")
    return DDPCommunicationHookType(name)
