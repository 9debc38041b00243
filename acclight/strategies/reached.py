"""ReachedParameters: averages over the ranks the gradients that a backward has reached, without DDP's reducer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# As large as DistributedDataParallel's buckets: one collective for many small gradients, and little memory beside them.
_BUCKET_BYTES = 25 * 2**20


class ReachedParameters:
    """Remembers which parameters got a gradient since the last average.

    Args:
        module: Whose parameters are watched, frozen ones too.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parameters = list(module.parameters())
        self._reached: set[int] = set()
        for index, parameter in enumerate(self._parameters):
            needs = parameter.requires_grad
            watched: Any = parameter.requires_grad_(True)
            watched.register_post_accumulate_grad_hook(self._note(index))
            parameter.requires_grad_(needs)

    def _note(self, index: int) -> Callable[[Tensor], None]:
        def note(parameter: Tensor) -> None:
            self._reached.add(index)

        return note

    def average(self, *, any_rank: bool) -> None:
        """Leaves the ranks' mean in every gradient that was reached. A collective.

        Args:
            any_rank: The ranks may have reached different parameters: a gradient that is missing here counts as zero.
        """
        world = dist.get_world_size()
        if any_rank and world > 1:
            reached = torch.zeros(len(self._parameters), dtype=torch.uint8)
            reached[list(self._reached)] = 1
            dist.all_reduce(reached, op=dist.ReduceOp.MAX)
            self._reached = set(reached.nonzero().flatten().tolist())
        if world > 1:
            for bucket in self._buckets():
                flat = torch.cat([gradient.flatten() for gradient in bucket])
                dist.all_reduce(flat)
                flat /= world
                parts = torch.split(flat, [gradient.numel() for gradient in bucket])
                for gradient, part in zip(bucket, parts, strict=True):
                    gradient.copy_(part.view_as(gradient))
        self._reached.clear()

    def _buckets(self) -> Iterator[list[Tensor]]:
        """The gradients, in the same order on every rank, in buckets of one type."""
        bucket: list[Tensor] = []
        for index in sorted(self._reached):
            parameter = self._parameters[index]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            full = sum(g.numel() * g.element_size() for g in bucket) >= _BUCKET_BYTES
            if bucket and (full or bucket[0].dtype != parameter.grad.dtype):
                yield bucket
                bucket = []
            bucket.append(parameter.grad)
        if bucket:
            yield bucket
