"""DDPStrategy: every process holds the whole model; gradients are averaged once per window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from acclight.strategies.reached import ReachedParameters
from acclight.strategies.strategy import Strategy


class DDPStrategy(Strategy):
    """Wraps the model in `torch.nn.parallel.DistributedDataParallel`.

    Args:
        find_unused_parameters: Look for parameters that a step does not use, at the cost of walking the graph. Default False.
        bucket_cap_mb: Size of a gradient bucket in MiB. Default torch's, 25.
        broadcast_buffers: Copy rank 0's buffers to all before each training forward. Default True.
        static_graph: The graph never changes. Default False.
        gradient_as_bucket_view: Gradients are views into the buckets, which saves their memory. Default False.
        timeout: Seconds that a collective may wait. Default 1800.
    """

    kind = "ddp"
    joins_with_nothing = True

    def __init__(
        self,
        *,
        find_unused_parameters: bool = False,
        bucket_cap_mb: int | None = None,
        broadcast_buffers: bool = True,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = False,
        timeout: float = 1800.0,
    ) -> None:
        super().__init__(timeout=timeout)
        self._arguments: dict[str, Any] = {
            "find_unused_parameters": find_unused_parameters,
            "broadcast_buffers": broadcast_buffers,
            "static_graph": static_graph,
            "gradient_as_bucket_view": gradient_as_bucket_view,
        }
        self._reached: ReachedParameters | None = None
        if bucket_cap_mb is not None:
            self._arguments["bucket_cap_mb"] = bucket_cap_mb

    def accelerator_arguments(self, *, clip: float, micro_batch_size: int) -> dict[str, Any]:
        return {"kwargs_handlers": [DistributedDataParallelKwargs(**self._arguments)]}

    def prepare(self, accelerator: Any, step_module: nn.Module, optimizers: Sequence[Optimizer]) -> nn.Module:
        self._reached = None
        return super().prepare(accelerator, step_module, optimizers)

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
