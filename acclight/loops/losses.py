"""What training_step returned: the loss, what it weighs in its window, and what a missing one means."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from acclight.callback import overrides
from acclight.core import Nothing
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
        self._counts_items = overrides(module, "count_items")
        self._notes = core.shared_notes()
        self._window = 0
        self._weights: list[float] | list[Tensor] = []
        #: Losses of this window on this rank, and the counts of those that are sums.
        self._seen = 0
        self._counts: list[Tensor] = []
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
        counts = torch.stack([self._number(self.module.count_items(batch)) for batch in window])
        total = self.core.sum(counts.sum()).clamp(min=1.0)
        self._weights = list((counts * (self.core.world_size / total)).unbind())

    def read(self, outputs: Any, index: int) -> tuple[Tensor | None, float | Tensor]:
        """The loss in what training_step returned for micro-batch `index` of the window, and its weight.

        Raises:
            RuntimeError: The loss has no graph; or there is none, on this rank alone, where all ranks have to agree.
            TypeError: For a loss that is no scalar tensor.
            ValueError: For a dict without a loss.
        """
        if outputs is None or isinstance(outputs, Nothing):
            self._leave_out(outputs, index)
            return None, 0.0
        weight = self._weights[index]
        if isinstance(outputs, LossSum):
            loss: Any = outputs.total
            weight = float(self.core.world_size)
            self._counts.append(self._number(outputs.count))
            if not self._sums_announced:
                self._sums_announced = True
                self._notes.add("sums")
        elif isinstance(outputs, dict):
            if "loss" not in outputs:
                raise ValueError(
                    f"{self._where} returned a dict without 'loss'; it has the keys {sorted(map(str, outputs))}"
                )
            loss = outputs["loss"]
        else:
            loss = outputs
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
            total = torch.stack([torch.zeros((), device=self.core.device), *self._counts]).sum()
            self.core.scale_gradients(1.0 / self.core.sum(total).clamp(min=1e-30))
        return True

    def _number(self, count: int | float | Tensor) -> Tensor:
        return torch.as_tensor(count, dtype=torch.float32).to(self.core.device)


def detached(outputs: Any) -> Any:
    """What training_step returned, as hooks see it: a dict, its loss cut from the graph so that no activations stay alive."""
    if outputs is None or isinstance(outputs, Nothing):
        return {}
    if isinstance(outputs, Tensor):
        return {"loss": outputs.detach()}
    if isinstance(outputs, LossSum):
        return {"loss": outputs.total.detach(), "count": outputs.count}
    if isinstance(outputs, dict) and isinstance(outputs.get("loss"), Tensor):
        return {**outputs, "loss": outputs["loss"].detach()}
    return outputs
