"""Averages of the weights over training: running means, and exponential moving averages (EMA)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from acclight import Callback

if TYPE_CHECKING:
    from acclight import Trainer, TrainModule


class WeightAveraging(Callback):
    """Keeps an average of the weights beside those that are trained, and validates and ends with it.

    Without a function of your own it is the mean of the weights at all updates, as in stochastic weight averaging (SWA);
    override `should_update` to say when an update is due.

    - The first update copies the weights, as in `torch.optim.swa_utils.AveragedModel`. Before it, validations use the weights
      that are trained ("raw").
    - Each rank averages what it holds of the weights: its shard under FSDP2, its float32 part of them under ZeRO. No update
      communicates.
    - The average is in float32 at least, also of a 16-bit model; validations use it rounded to the model's type.
    - Frozen parameters are left out; one that is trained later joins with its weights after its first step.
    - Validations of a fit run with the average, from `on_validation_start` up to this callback's `on_validation_end`; then, and
      after an exception, the raw weights are back. Meanwhile they are kept aside: once more the memory of the weights.
    - When fit ends well, the average takes the place of the weights, so that `test`, `predict` and the module itself use it.
      A second `fit` of the same Trainer goes on with the raw weights, which are kept aside until then (unless the module has
      got others since).
    - Every checkpoint, also one that is saved inside a validation or after fit, holds the raw weights in `model/` and the
      average in `averaged/`. A resume goes on with both, under any strategy. `checkpoint.load_weights(path, averaged=True)` and
      `checkpoint.export(path, out, averaged=True)` give the average; `validate`, `test` and `predict` with `ckpt_path` use it
      where the Trainer has this callback, and `fit` never does.

    Args:
        device: Where the average is kept. Default: where the weights are.
        use_buffers: Average the buffers of floats too (those in `state_dict`); False leaves the model's own in its place.
        avg_fn: `avg_fn(averaged, current, updates)` returns the new value of one tensor; `updates` counts from 0.
        multi_avg_fn: `multi_avg_fn(averaged, current, updates)` changes a list of tensors in place.

    Raises:
        ValueError: For both functions; for two callbacks that average the weights of one Trainer.
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        *,
        avg_fn: Callable[[Tensor, Tensor, int], Tensor] | None = None,
        multi_avg_fn: Callable[[list[Tensor], list[Tensor], int], None] | None = None,
    ) -> None:
        if avg_fn is not None and multi_avg_fn is not None:
            raise ValueError("avg_fn and multi_avg_fn are both given: leave one out")
        self.device = None if device is None else torch.device(device)
        self.use_buffers = use_buffers
        self.avg_fn = avg_fn
        self.multi_avg_fn = multi_avg_fn
        #: How often the average was updated.
        self.updates = 0
        #: This rank's part of the average by name, as `Strategy.weight_shards` gives the weights.
        self._average: dict[str, Tensor] = {}
        #: Copies of the raw shards, and of what else this rank computes with, while the average is in their place.
        self._raw: tuple[dict[str, Tensor], list[Tensor]] | None = None
        #: The module whose weights are averaged.
        self._module: weakref.ref[TrainModule] | None = None
        #: While training runs, what it changes.
        self._live: dict[str, Tensor] = {}
        self._frozen: list[torch.nn.Parameter] = []
        self._fit_runs = False

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Whether to update the average now; by default after every step.

        Args:
            step_idx: After an optimizer step: which one it was, counted from 0.
            epoch_idx: At the end of an epoch: which one it was, counted from 0.
        """
        return step_idx is not None

    # -- hooks --------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """Refuses a second average; an average of another module is forgotten."""
        averaging = [type(c).__name__ for c in trainer.callbacks if isinstance(c, WeightAveraging)]
        if len(averaging) > 1:
            raise ValueError(
                f"callbacks: {' and '.join(averaging)} would both average the weights: leave all but one out"
            )
        if self._module is not None and self._module() is not module:
            self.forget()
        self._module = weakref.ref(module)

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Puts back the raw weights that an earlier fit has ended with."""
        if trainer.global_step == 0:
            self.forget()
        elif self._raw is not None and self._in_place(trainer):
            self._take_out(trainer)
        self._raw = None
        self._fit_runs = True

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Finds the weights to average."""
        self._find(trainer)

    def on_step(self, trainer: Trainer, module: TrainModule) -> None:
        """Updates the average where that is due."""
        if self.should_update(step_idx=trainer.global_step - 1):
            self._update(trainer)

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Updates the average where that is due."""
        if self.should_update(epoch_idx=trainer.current_epoch):
            self._update(trainer)

    def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
        """The average takes the place of the weights, once there is one."""
        if self._fit_runs and self.updates:
            self._put_in(trainer)

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        """The raw weights come back."""
        if self._fit_runs:
            self._take_out(trainer)

    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        """The raw weights come back, without waiting for a rank that may be gone."""
        if self._fit_runs:
            self._take_out(trainer)

    def on_fit_end(self, trainer: Trainer, module: TrainModule) -> None:
        """The average takes the place of the weights."""
        if self.updates:
            self._put_in(trainer)

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """Lets go of the weights."""
        self._live, self._frozen, self._fit_runs = {}, [], False

    # -- what a checkpoint holds --------------------------------------------------------------------------------------

    def averaged_state(self, trainer: Trainer) -> dict[str, Tensor]:
        """The average by name, whole or as DTensors; what is not there is as in the model. Every rank has to ask."""
        if not self._average or self._module is None or self._module() is not trainer.module:
            return {}
        return trainer.strategy.whole_weights(trainer.module, self._average)

    def raw_state(self, trainer: Trainer) -> dict[str, Tensor]:
        """Likewise the weights that training goes on with, while the average is in their place; else empty."""
        if self._raw is None or self._module is None or self._module() is not trainer.module:
            return {}
        if not self._fit_runs and not self._in_place(trainer):
            return {}
        return trainer.strategy.whole_weights(trainer.module, self._raw[0])

    def load_averaged_state(
        self, trainer: Trainer, updates: int, read: Callable[[dict[str, Tensor]], set[str]]
    ) -> None:
        """Takes the average of a checkpoint back.

        Args:
            trainer: In fit, with the model prepared.
            updates: How often it was updated.
            read: `read(into)` fills those of a mapping of tensors that were saved, and says which.
        """
        with _plain_tensors():
            strategy, module = trainer.strategy, trainer.module
            shards = strategy.weight_shards(module, buffers=self.use_buffers, trained_only=False)
            places = {name: self._copy(shard) for name, shard in shards.items()}
            filled = strategy.load_weight_shards(module, places, read)
            self._average = {name: place for name, place in places.items() if name in filled}
        self.updates = updates

    def forget(self) -> None:
        """Drops the average, and the raw weights that were kept aside."""
        self.updates, self._average, self._raw = 0, {}, None

    # -- the average --------------------------------------------------------------------------------------------------

    def _find(self, trainer: Trainer) -> None:
        """Looks up what training changes; a parameter that is trained only now joins the average."""
        with _plain_tensors():
            strategy, module = trainer.strategy, trainer.module
            trained = strategy.weight_shards(module, buffers=self.use_buffers)
            every = strategy.weight_shards(module, buffers=self.use_buffers, trained_only=False)
            self._live = {name: every[name] for name in every if name in trained or name in self._average}
            self._frozen = [parameter for parameter in module.parameters() if not parameter.requires_grad]
            if self._average:
                self._begin()

    def _begin(self) -> None:
        """Copies what is not averaged yet."""
        for name, shard in self._live.items():
            if name not in self._average:
                self._average[name] = self._copy(shard)

    def _copy(self, shard: Tensor) -> Tensor:
        dtype = torch.promote_types(shard.dtype, torch.float32)
        return torch.empty_like(shard, dtype=dtype, device=self.device or shard.device).copy_(shard)

    def _update(self, trainer: Trainer) -> None:
        if any(parameter.requires_grad for parameter in self._frozen):
            self._find(trainer)
        with _plain_tensors():
            if not self._average:
                self._begin()
            else:
                averaged = list(self._average.values())
                current = [self._live[name].to(one.device, one.dtype) for name, one in self._average.items()]
                self._move(averaged, current)
        self.updates += 1

    def _move(self, averaged: list[Tensor], current: list[Tensor]) -> None:
        """One update of the tensors `averaged`, in place."""
        if self.multi_avg_fn is not None:
            self.multi_avg_fn(averaged, current, self.updates)
        elif self.avg_fn is not None:
            for one, new in zip(averaged, current, strict=True):
                one.copy_(self.avg_fn(one, new, self.updates))
        else:
            torch._foreach_lerp_(averaged, current, 1 / (self.updates + 1))

    # -- the average in the place of the weights ----------------------------------------------------------------------

    def _put_in(self, trainer: Trainer) -> None:
        with _plain_tensors():
            strategy, module = trainer.strategy, trainer.module
            shards = strategy.weight_shards(module, buffers=self.use_buffers, trained_only=False)
            aside = {name: shards[name].to(one.device, copy=True) for name, one in self._average.items()}
            # Before anything is written: whatever comes in between, the raw weights can come back.
            self._raw = aside, [self._aside(tensor) for tensor in strategy.gathered_weights(module)]
            strategy.write_weight_shards(module, self._average)

    def _aside(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device or tensor.device, copy=True)

    def _take_out(self, trainer: Trainer) -> None:
        if self._raw is None:
            return
        with _plain_tensors():
            shards, gathered = self._raw
            trainer.strategy.write_weight_shards(trainer.module, shards, gathered)
        self._raw = None

    def _in_place(self, trainer: Trainer) -> bool:
        """The weights are still the average, on all ranks; else somebody has given the module others. Collective."""
        with _plain_tensors():
            shards = trainer.strategy.weight_shards(trainer.module, buffers=self.use_buffers, trained_only=False)
            same = all(
                name in shards and torch.equal(shards[name], one.to(shards[name].device, shards[name].dtype))
                for name, one in self._average.items()
            )
        if dist.is_initialized() and trainer.world_size > 1:
            answer = torch.tensor(int(same), device=trainer.device)
            dist.all_reduce(answer, dist.ReduceOp.MIN)
            same = bool(answer)
        return same


class EMAWeightAveraging(WeightAveraging):
    """Keeps an exponential moving average of the weights: each update makes it decay * average + (1 - decay) * weights.

    It starts at the initial weights, not at those of the first update: with decay=0.5 and the weights 0 (initial), -1, -2 after
    two steps it is 0, -0.5, -1.25. With a delayed start it starts at the weights that it finds then. What else holds is said
    at `WeightAveraging`.

    Args:
        device: Where the average is kept. Default: where the weights are.
        use_buffers: Average the buffers of floats too (those in `state_dict`); False leaves the model's own in its place.
        decay: How much of the average an update keeps, from 0 to 1. Default 0.999.
        update_every_n_steps: Update after every step whose `global_step` is a multiple of this. Default 1.
        update_starting_at_step: Start when so many steps are done. Default: at once.
        update_starting_at_epoch: Start with this epoch, counted from 0. Default: at once.

    Raises:
        ValueError: For arguments out of range.
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        decay: float = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
    ) -> None:
        if not 0.0 <= decay <= 1.0:
            raise ValueError(f"decay={decay} must be from 0 to 1")
        if update_every_n_steps < 1:
            raise ValueError(f"update_every_n_steps={update_every_n_steps} must be 1 or more")
        for name, start in (
            ("update_starting_at_step", update_starting_at_step),
            ("update_starting_at_epoch", update_starting_at_epoch),
        ):
            if start is not None and start < 0:
                raise ValueError(f"{name}={start} must be 0 or more")
        super().__init__(device, use_buffers)
        self.decay = decay
        self.update_every_n_steps = update_every_n_steps
        self.update_starting_at_step = update_starting_at_step
        self.update_starting_at_epoch = update_starting_at_epoch

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """After every n-th step, once the average has started."""
        return step_idx is not None and bool(self._average) and (step_idx + 1) % self.update_every_n_steps == 0

    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Starts the average where that is due."""
        self._start_if_due(trainer)

    def on_step(self, trainer: Trainer, module: TrainModule) -> None:
        """Updates the average, or starts it, where that is due."""
        super().on_step(trainer, module)
        self._start_if_due(trainer)

    def _start_if_due(self, trainer: Trainer) -> None:
        if self._average or trainer.global_step < (self.update_starting_at_step or 0):
            return
        if trainer.current_epoch >= (self.update_starting_at_epoch or 0):
            with _plain_tensors():
                self._begin()

    def _move(self, averaged: list[Tensor], current: list[Tensor]) -> None:
        torch._foreach_lerp_(averaged, current, 1.0 - self.decay)


@contextmanager
def _plain_tensors() -> Iterator[None]:
    """Without gradients, and no tensor of inference mode, which a later step could not use: validations may run under it."""
    with torch.inference_mode(False), torch.no_grad():
        yield
