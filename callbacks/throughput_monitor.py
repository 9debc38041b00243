"""ThroughputMonitor: how fast the training is, what it waits for and how much memory it takes."""

from __future__ import annotations

import resource
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from acclight import Callback
from acclight.loggers.guarded import write

if TYPE_CHECKING:
    from acclight import Trainer, TrainModule


@dataclass(frozen=True)
class Mark:
    """What this rank had done at one moment."""

    #: Seconds of training, pauses left out.
    time: float
    steps: int
    samples: float
    items: float
    #: Seconds of that time in which the loop waited for a batch.
    waited: float


class ThroughputMonitor(Callback):
    """Logs speed and memory of all ranks together, at the steps where the trainer logs.

    - `throughput/steps_per_sec`
    - `throughput/samples_per_sec`: over all ranks
    - `throughput/items_per_sec`: over all ranks, with `length_fn`
    - `throughput/data_wait`: share of the time in which the loop waited for data, from 0 to 1, on the slowest rank
    - `throughput/peak_memory_mib`: the highest so far, on the rank with the most; of the GPU that it trains on, else of
      the process

    The time of validations and checkpoints does not count. Between logged steps nothing waits for the device.

    Args:
        batch_size_fn: The number of samples of a batch on one rank.
        length_fn: The number of items (say, tokens) of a batch on one rank; a number or a scalar tensor on any device.
        window_size: Over how many of the last optimizer steps speed is averaged; at least those since the last log.

    Raises:
        ValueError: For a window below 1.
    """

    def __init__(
        self,
        batch_size_fn: Callable[[Any], int | Tensor],
        length_fn: Callable[[Any], int | Tensor] | None = None,
        window_size: int = 100,
    ) -> None:
        if window_size < 1:
            raise ValueError(f"window_size={window_size} must be at least 1")
        self.batch_size_fn = batch_size_fn
        self.length_fn = length_fn
        self.window_size = window_size
        self._clear()

    def _clear(self) -> None:
        self._steps = 0
        self._samples: int | Tensor = 0
        self._items: int | Tensor = 0
        self._waited = 0.0
        self._paused = 0.0
        self._pauses = 0
        self._pause_began = 0.0
        self._saving = False
        # When the loop began to wait for a batch; None where something else than data comes in between.
        self._waits_since: float | None = None
        self._marks: deque[Mark] = deque()

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Counts from here."""
        self._clear()
        self._steps = trainer.global_step
        self._marks.append(self._mark())

    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        """The loop begins to wait for the first batch."""
        self._waits_since = time.perf_counter()

    def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> None:
        """The wait for this batch is over."""
        self._end_saving()
        if self._waits_since is not None:
            self._waited += time.perf_counter() - self._waits_since
            self._waits_since = None

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Counts the batch (a count on the device stays there), and logs where the trainer does."""
        self._end_saving()
        self._samples += self.batch_size_fn(batch)
        if self.length_fn is not None:
            self._items += self.length_fn(batch)
        step = trainer.global_step
        if step == self._steps:
            self._waits_since = time.perf_counter()
            return
        self._steps = step
        if step % trainer.log_every_n_steps:
            self._waits_since = time.perf_counter()
        else:
            # The trainer reads its metrics next, which may wait for the device: no wait for data begins here.
            self._log(trainer, module)

    def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Stops the clock."""
        self._pause()

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Starts it again."""
        self._resume()

    def on_save_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]) -> None:
        """Stops the clock."""
        if not self._saving:
            self._saving = True
            self._pause()

    def on_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: Path) -> None:
        """Starts it again, where the checkpoint was written in place; else training has gone on already."""
        self._end_saving()

    def _end_saving(self) -> None:
        if self._saving:
            self._saving = False
            self._resume()

    def _pause(self) -> None:
        if self._pauses == 0:
            self._pause_began = time.perf_counter()
        self._pauses += 1

    def _resume(self) -> None:
        self._pauses -= 1
        if self._pauses == 0:
            now = time.perf_counter()
            self._paused += now - self._pause_began
            if self._waits_since is not None:
                self._waits_since += now - self._pause_began

    def _mark(self) -> Mark:
        now = time.perf_counter() - self._paused
        # Here, where something is logged, a count on the device is read.
        return Mark(now, self._steps, float(self._samples), float(self._items), self._waited)

    def _log(self, trainer: Trainer, module: TrainModule) -> None:
        new = self._mark()
        self._marks.append(new)
        while len(self._marks) > 2 and self._marks[1].steps <= new.steps - self.window_size:
            self._marks.popleft()
        old = self._marks[0]
        seconds = max(new.time - old.time, 1e-9)
        own = [
            new.samples - old.samples,
            new.items - old.items,
            seconds,
            (new.waited - old.waited) / seconds,
            peak_memory(module.device) / 2**20,
        ]
        ranks = _of_all_ranks(own, module.device)
        samples, items, *_ = (sum(column) for column in zip(*ranks, strict=True))
        _, _, seconds, wait, memory = (max(column) for column in zip(*ranks, strict=True))
        if not trainer.is_global_zero:
            return
        values = {
            "throughput/steps_per_sec": (new.steps - old.steps) / seconds,
            "throughput/samples_per_sec": samples / seconds,
            "throughput/data_wait": wait,
            "throughput/peak_memory_mib": memory,
            "epoch": trainer.current_epoch,
        }
        if self.length_fn is not None:
            values["throughput/items_per_sec"] = items / seconds
        write(trainer.loggers, values, trainer.global_step)


def peak_memory(device: torch.device) -> int:
    """The most memory so far, in bytes: what PyTorch has allocated on a GPU, else what the process has had resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # macOS counts in bytes, other systems in KiB.
    return peak if sys.platform == "darwin" else peak * 1024


def _of_all_ranks(values: list[float], device: torch.device) -> list[list[float]]:
    """The values of every rank; every rank has to call it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [values]
    own = torch.tensor(values, dtype=torch.float64, device=device)
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    return [entry.tolist() for entry in gathered]
