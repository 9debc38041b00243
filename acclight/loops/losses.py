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
    With `count_items` a window may hold both kinds: a mean stands for its items, a `LossSum` for those that it counts.

    What sums count is added up over the ranks at a window's end. Whether there is anything to add up, the ranks tell each other
    in the first window, and again only when that changes: plain means cost no collective.

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
        #: With count_items: the items of each micro-batch on this rank, those of all ranks, and by what the latter divide.
        self._items: list[float | Tensor] = []
        self._all_items = self._divisor = torch.ones(())
        #: The losses of this window on this rank that are means, and those that are sums.
        self._means = self._sums = 0
        #: What has to be added to the items that this rank has counted so far: those of its sums.
        self._more_items: list[float | Tensor] = []
        #: All losses of all ranks are means, as far as the ranks have told each other; None before the first window with a loss.
        self._all_means: bool | None = None
        self._sums_announced = False
        #: The window's last micro-batch had no loss, and so no backward that exchanges its gradients.
        self._open_ended = False

    def begin(self, window: list[Any]) -> None:
        """Weighs the micro-batches of a window: equal parts, or each one's share of the items of all ranks."""
        self._window += 1
        self._means, self._sums, self._more_items = 0, 0, []
        self._sums_announced = self._open_ended = False
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
        self._items, self._all_items = counts, self.core.sum(stacked.sum())
        # Sums may have items where nothing else has.
        self._divisor = torch.where(self._all_items > 0.0, self._all_items, 1.0)
        shares = (stacked * (self.core.world_size / self._divisor)).unbind()
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
        is_sum = False
        if isinstance(outputs, dict):
            if "loss" not in outputs:
                raise ValueError(
                    f"{self._where} returned a dict without 'loss'; it has the keys {sorted(map(str, outputs))}"
                )
            loss = outputs["loss"]
        if isinstance(loss, LossSum):
            count = self._count(loss.count, f"{self._where} returned a LossSum whose count is")
            weight = self._weigh_sum(count, index)
            loss, is_sum = loss.total, True
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise TypeError(
                f"{self._where} returned {what} as the loss; return a scalar tensor, a dict with 'loss', LossSum or None"
            )
        if not loss.requires_grad:
            raise RuntimeError(
                f"{self._where} returned a loss without a graph; compute it from the module's parameters, undetached"
            )
        self._sums += is_sum
        self._means += not is_sum
        return loss, weight

    def _weigh_sum(self, count: float | Tensor, index: int) -> float | Tensor | UnreadWeight:
        """The weight of a LossSum over so many items; notes what `end` has to know of it."""
        weight: float | Tensor = float(self.core.world_size)
        expected: float | Tensor | None = None
        self._more_items.append(count)
        if self._counts_items:
            weight, expected = weight / self._divisor, self._items[index]
            self._more_items.append(-expected)
        # Told before the backward that exchanges gradients: after it a rank without a loss looks for what others have told.
        # A sum over just the items that were counted changes nothing.
        if self._all_means and not self._sums_announced and (expected is None or float(count) != float(expected)):
            self._sums_announced = True
            self._notes.add(f"{self._window}.sums")
        return _weight(weight, count)

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
            if last and not (self._means or self._sums):
                self._notes.add(str(self._window))
            self.core.backward(outputs.zero, 1.0)

    def end(self) -> bool:
        """Finishes the window's gradients; False when no rank has a loss in it, so that there is nothing to step for.

        Raises:
            ValueError: Some losses of the window are sums, others means, and nobody knows how many items a mean stands for.
        """
        if not (self._means or self._sums):
            if not self.core.joins_with_nothing:
                return False
            # Gradients are exchanged: so every rank without a loss has said so by now.
            self.core.wait_for_device()
            if self._notes.count(str(self._window)) == self.core.world_size:
                return False
        if self._open_ended:
            self.core.finish_window()
        if self._all_means and not self._sums_begin():
            return True
        known = float(sum(count for count in self._more_items if not isinstance(count, Tensor)))
        told = torch.tensor([known, self._sums, self._means]).to(self.core.device)
        for count in self._more_items:
            if isinstance(count, Tensor):
                told[0] += count
        more_items = self.core.sum(told)[0]
        # Reading waits for an accelerator: there a rank that goes on with sums alone learns of another's means by its end.
        only_sums = self._sums > 0 and not self._means
        goes_on = self._all_means is False and (self._counts_items or (only_sums and self.core.device.type != "cpu"))
        if not goes_on:
            sums, means = told[1:].tolist()
            if sums and means and not self._counts_items:
                raise self._mixed()
            self._all_means = not sums
        if self._counts_items and not self._all_means:
            self.core.scale_gradients(self._divisor / (self._all_items + more_items).clamp(min=1e-30))
        elif not self._all_means:
            self.core.scale_gradients(1.0 / more_items.clamp(min=1e-30))
        return True

    def _sums_begin(self) -> bool:
        """All losses were means so far: whether sums begin with this window, on every rank that has a loss in it.

        Ranks with means alone say nothing and wait for nothing; one that has found a sum waits for the others to say the same.
        """
        if not self._sums_announced and (self._means or self._sums or not self._notes.count(f"{self._window}.sums")):
            return False
        mixed = self._means and not self._counts_items
        if mixed or not self._notes.agree(f"{self._window}.all sums", _SECONDS_FOR_AGREEMENT):
            raise self._mixed()
        return True

    def _mixed(self) -> ValueError:
        if self._counts_items:
            return ValueError(
                f"{self._where} returned a LossSum over other items than count_items counts, on this rank but not on every rank, "
                "after steps with means alone: count the same items in both, or return a LossSum on every rank"
            )
        return ValueError(
            f"{self._where} returned a LossSum for one part of a step and a mean loss for another, on this rank or another, so "
            "that nobody knows how many items the mean stands for: return a LossSum each time, or define count_items(batch)"
        )

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
