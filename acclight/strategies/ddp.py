"""DDPStrategy: every process holds the whole model; gradients are averaged once per window."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
        if bucket_cap_mb is not None:
            self._arguments["bucket_cap_mb"] = bucket_cap_mb
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
        return self._forward

    def _forward(self, *args: Any) -> Any:
        try:
            return self.wrapped(*args)
        except RuntimeError as error:
            if "Expected to have finished reduction in the prior iteration" not in str(error):
                raise
            named = self.step_module.get_submodule("module").named_parameters()
            unused = [canonical_name(name) for name, p in named if p.requires_grad and p.grad is None]
            few = ", ".join(unused[:8]) + (f" and {len(unused) - 8} more" if len(unused) > 8 else "")
            raise RuntimeError(
                f"the last training_step has left without a gradient, which DDP waits for: {few or 'some parameters'}; use them, "
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


def _hook(argument: str, name: str, known: tuple[str, ...]) -> DDPCommunicationHookType:
    if name not in known:
        raise ValueError(f"{argument}={name!r}: use one of {', '.join(known)}")
    return DDPCommunicationHookType(name)
