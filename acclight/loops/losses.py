"""What training_step returned: the loss, what it weighs in its window, and what a missing one means."""

from __future__ import annotations

import math
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from acclight.callback import overrides
from acclight.core import Nothing, UnreadWeight
from acclight.module import LossSum, TrainModule

if TYPE_CHECKING:
    from acclight.core import AcceleratorCore

# How long a rank without a loss waits for the others to say the same, under strategies where all have to.
_SECONDS_FOR_AGREEMENT = 20.0


class WindowLosses:
    """The losses of one window after the other.

    The gradient of a window is that of its losses' mean over all micro-batches of all ranks; with `count_items`, or with losses
    that are a `LossSum`, over all items. A micro-batch without a loss adds nothing; a plain mean counts it as a loss of zero.

    Args:
        core: For what the ranks have to tell each other.
        module: Whose `training_step` returns the losses.
    """

    def __init__(self, core: AcceleratorCore, module: TrainModule) -> None:
        self.core = core
        self.module = module
        self._where = f"{type(module).__name__}.training_step"
        self._returned = f"{type(module).__name__}.count_items returned"
        self._counts_items = overrides(module, "count_items")
        self._notes = core.shared_notes()
        self._window = 0
        self._weights: list[float | Tensor | UnreadWeight] = []
        #: Losses of this window on this rank, and the counts of those that are sums.
        self._seen = 0
        self._counts: list[float | Tensor] = []
        self._sums_announced = False
        #: The window's last micro-batch had no loss, and so no backward that exchanges its gradients.
        self._open_ended = False

    def begin(self, window: list[Any]) -> None:
        """Weighs the micro-batches of a window: equal parts, or each one's share of the items of all ranks."""
        self._window += 1
        self._seen, self._counts, self._open_ended = 0, [], False
        if not self._counts_items:
            self._weights = [1.0 / len(window)] * len(window)
            return
        counts = [self._count(self.module.count_items(batch), self._returned) for batch in window]
        # One copy of all that are numbers, which waits for nothing; tensors of the device are there already.
        numbers = torch.tensor([0.0 if isinstance(n, Tensor) else n for n in counts], dtype=torch.float32)
        stacked = numbers.to(self.core.device, non_blocking=True)
        for index, count in enumerate(counts):
            if isinstance(count, Tensor):
                stacked[index] = count
        total = self.core.sum(stacked.sum()).clamp(min=1e-30)
        shares = (stacked * (self.core.world_size / total)).unbind()
        self._weights = [_weight(share, count) for share, count in zip(shares, counts, strict=True)]

    def read(self, outputs: Any, index: int) -> tuple[Tensor | None, float | Tensor | UnreadWeight]:
        """The loss in what training_step returned for micro-batch `index` of the window, and its weight.

        Raises:
            RuntimeError: The loss has no graph; or there is none, on this rank alone, where all ranks have to agree.
            TypeError: For a loss that is no scalar tensor, or a count that is no number.
            ValueError: For a dict without a loss, or a negative count.
        """
        if outputs is None or isinstance(outputs, Nothing):
            self._leave_out(outputs, index)
            return None, 0.0
        weight = self._weights[index]
        loss: Any = outputs
        if isinstance(outputs, dict):
            if "loss" not in outputs:
                raise ValueError(
                    f"{self._where} returned a dict without 'loss'; it has the keys {sorted(map(str, outputs))}"
                )
            loss = outputs["loss"]
        if isinstance(loss, LossSum):
            count = self._count(loss.count, f"{self._where} returned a LossSum whose count is")
            weight = _weight(float(self.core.world_size), count)
            self._counts.append(count)
            if not self._sums_announced:
                self._sums_announced = True
                self._notes.add("sums")
            loss = loss.total
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise TypeError(
                f"{self._where} returned {what} as the loss; return a scalar tensor, a dict with 'loss', LossSum or None"
            )
        if not loss.requires_grad:
            raise RuntimeError(
                f"{self._where} returned a loss without a graph; compute it from the module's parameters, undetached"
            )
        self._seen += 1
        return loss, weight

    def _leave_out(self, outputs: Nothing | None, index: int) -> None:
        """This rank has no loss in a micro-batch."""
        last = index == len(self._weights) - 1
        if not self.core.joins_with_nothing:
            self._open_ended = last
            if not self._notes.agree(f"{self._window}.{index}", _SECONDS_FOR_AGREEMENT):
                raise RuntimeError(
                    f"{self._where} returned None on rank {self.core.global_rank}, but not on every rank: under "
                    f"{self.core.strategy.name!r} all ranks have to run the same backward. Return a loss on every rank (where "
                    "there is nothing to learn, one whose gradient is zero), or None on every rank, or use the strategy 'ddp'"
                )
        elif isinstance(outputs, Nothing):
            # The other ranks' last backward exchanges gradients: this rank joins them with zeros.
            if last and not self._seen:
                self._notes.add(str(self._window))
            self.core.backward(outputs.zero, 1.0)

    def end(self) -> bool:
        """Finishes the window's gradients; False when no rank has a loss in it, so that there is nothing to step for."""
        sums = bool(self._counts)
        if not self._seen:
            if not self.core.joins_with_nothing:
                return False
            # Gradients are exchanged: so every rank without a loss has said so by now.
            self.core.wait_for_device()
            if self._notes.count(str(self._window)) == self.core.world_size:
                return False
            sums = self._notes.count("sums") > 0
        if self._open_ended:
            self.core.finish_window()
        if sums:
            known = float(sum(count for count in self._counts if not isinstance(count, Tensor)))
            total = torch.full((), known, device=self.core.device)
            for count in self._counts:
                if isinstance(count, Tensor):
                    total += count
            self.core.scale_gradients(1.0 / self.core.sum(total).clamp(min=1e-30))
        return True

    def _count(self, count: Any, what: str) -> float | Tensor:
        """A number of items, checked; as a scalar tensor where it is on an accelerator, which is not waited for."""
        if isinstance(count, Tensor) and (count.numel() != 1 or count.is_complex()):
            raise TypeError(f"{what} a tensor of shape {tuple(count.shape)}; give one number of items")
        if not isinstance(count, (Real, Tensor)):
            raise TypeError(f"{what} {count!r}; give a number of items, or a scalar tensor of one")
        known = _known_count(count)
        if known is None:
            return torch.as_tensor(count).detach().reshape(()).to(self.core.device, torch.float32)
        if not (math.isfinite(known) and known >= 0.0):
            raise ValueError(f"{what} {known:g}; give a number of items, 0 or more")
        return known


def _known_count(count: Any) -> float | None:
    """A count that can be read without waiting for a device."""
    return float(count) if not isinstance(count, Tensor) or count.is_cpu else None


def _weight(weight: float | Tensor, count: float | Tensor) -> float | Tensor | UnreadWeight:
    """A micro-batch without items weighs exactly 0.0, so that nothing is made of its loss, which may be 0/0."""
    if isinstance(count, Tensor):
        return UnreadWeight(weight, count > 0.0)
    return weight if count > 0.0 else 0.0


def detached(outputs: Any) -> Any:
    """What training_step returned, as hooks see it: a dict, its loss cut from the graph so that no activations stay alive."""
    if outputs is None or isinstance(outputs, Nothing):
        return {}
    if isinstance(outputs, Tensor):
        return {"loss": outputs.detach()}
    if isinstance(outputs, LossSum):
        return {"loss": outputs.total.detach(), "count": outputs.count}
    if isinstance(outputs, dict) and isinstance(outputs.get("loss"), LossSum):
        return {"count": outputs["loss"].count, **outputs, "loss": outputs["loss"].total.detach()}
    if isinstance(outputs, dict) and isinstance(outputs.get("loss"), Tensor):
        return {**outputs, "loss": outputs["loss"].detach()}
    return outputs
