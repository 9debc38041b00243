"""Manual optimization: training_step runs backward and steps the optimizers itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from acclight.trainer import Trainer


class ModuleOptimizer:
    """An optimizer as the user's module sees it: its `step` does what belongs to a step under every strategy.

    Everything else (`param_groups`, `state`, `state_dict`, `add_param_group`, ...) is the torch optimizer's own.

    Attributes:
        optimizer: The torch optimizer.
    """

    def __init__(self, optimizer: Optimizer, index: int, manual: ManualOptimization) -> None:
        self.optimizer = optimizer
        self._index = index
        self._manual = manual

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step, after on_before_optimizer_step; skipped where fp16 gradients have overflown.

        Args:
            closure: Runs `zero_grad`, the loss and `manual_backward` first; LBFGS may run it several times.

        Returns:
            What the closure returned.

        Raises:
            RuntimeError: With automatic optimization.
        """
        return self._manual.step(self._index, closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of this optimizer's parameters, after on_before_zero_grad.

        Args:
            set_to_none: Accepted as in torch; gradients become None.
        """
        self._manual.zero_grad(self._index)

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Only this optimizer's parameters get gradients while the context lasts.

        Args:
            sync_grad: Average gradients over the ranks in each manual_backward (True), or keep them local until a later one.
        """
        self._manual.toggle(self)
        self._manual.sync = sync_grad
        try:
            yield
        finally:
            self._manual.sync = True
            self._manual.untoggle()

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)  # a copy that is being made
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return repr(self.optimizer)


class ManualOptimization:
    """What the module's `optimizers`, `manual_backward`, `clip_gradients` and `toggle_optimizer` do.

    Args:
        trainer: With the model and its optimizers prepared.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.core = trainer.core
        self.optimizers = [ModuleOptimizer(one, index, self) for index, one in enumerate(trainer.optimizers)]
        #: Backward averages the gradients over the ranks.
        self.sync = True
        #: Of the batch that runs: no step of it was skipped, and one has begun.
        self.stepped, self.begun = True, False
        # Names, because a strategy may put other objects in place of the parameters while a step runs.
        names = {id(parameter): name for name, parameter in trainer.module.named_parameters()}
        self._owned: list[dict[str, nn.Parameter]] = [
            {names[id(p)]: p for p in _parameters(one) if id(p) in names} for one in trainer.optimizers
        ]
        self._before_toggle: dict[str, bool] = {}

    def train(self, *arguments: Any) -> Any:
        """One batch; returns what training_step returned."""
        self.stepped, self.begun = True, False
        return self.core.manual_forward("training_step", *arguments)

    def backward(self, loss: Tensor, *, retain_graph: bool) -> None:
        """See TrainModule.manual_backward."""
        self._require("manual_backward")
        hooks = self.trainer.hooks
        for call in hooks.on_before_backward:
            call(loss)
        self.core.manual_backward(loss, sync=self.sync, retain_graph=retain_graph)
        for call in hooks.on_after_backward:
            call()

    def step(self, index: int, closure: Callable[[], Any] | None) -> Any:
        """See ModuleOptimizer.step."""
        self._require("optimizer.step")
        optimizer = self.trainer.optimizers[index]

        def evaluate() -> Any:
            result = closure() if closure is not None else None
            self.core.unscale(index)
            for call in self.trainer.hooks.on_before_optimizer_step:
                call(optimizer)
            self.begun = True
            return result

        if isinstance(optimizer, torch.optim.LBFGS) and self.core.precision != "16-mixed":
            evaluated: Any = optimizer.step
            result = evaluated(evaluate)
        else:
            result = evaluate()
            self.stepped = self.core.optimizer_step(index) and self.stepped
        self.core.after_manual_step()
        return result

    def zero_grad(self, index: int) -> None:
        """See ModuleOptimizer.zero_grad."""
        self._require("optimizer.zero_grad")
        for call in self.trainer.hooks.on_before_zero_grad:
            call(self.trainer.optimizers[index])
        self.core.manual_zero_grad(index)

    def clip(self, optimizer: Optimizer | ModuleOptimizer, value: float | None, algorithm: str | None) -> None:
        """See TrainModule.clip_gradients."""
        index = self._index(optimizer)
        own_value, own_algorithm = self.core.clip_val or None, self.core.clip_algorithm
        if value is not None and own_value is not None and value != own_value:
            raise ValueError(
                f"clip_gradients(gradient_clip_val={value}) contradicts Trainer(gradient_clip_val={own_value}): use one of them"
            )
        if algorithm is not None and own_value is not None and algorithm != own_algorithm:
            raise ValueError(
                f"clip_gradients(gradient_clip_algorithm={algorithm!r}) contradicts "
                f"Trainer(gradient_clip_algorithm={own_algorithm!r}): use one of them"
            )
        value = own_value if value is None else value
        algorithm = own_algorithm if algorithm is None else algorithm
        if algorithm not in ("norm", "value"):
            raise ValueError(f"clip_gradients(gradient_clip_algorithm={algorithm!r}): use 'norm' or 'value'")
        if value:
            self.core.unscale(index)
            self.core.clip_gradients(_parameters(self.trainer.optimizers[index]), float(value), algorithm)

    def toggle(self, optimizer: Optimizer | ModuleOptimizer) -> None:
        """See TrainModule.toggle_optimizer."""
        index = self._index(optimizer)
        self.untoggle()
        self._before_toggle = {name: p.requires_grad for owned in self._owned for name, p in owned.items()}
        mine = self._owned[index]
        self._require_grad({name: needs and name in mine for name, needs in self._before_toggle.items()})

    def untoggle(self) -> None:
        """See TrainModule.untoggle_optimizer."""
        self._require_grad(self._before_toggle)
        self._before_toggle = {}

    def _require_grad(self, wanted: dict[str, bool]) -> None:
        if not wanted:
            return
        for owned in self._owned:
            for name, parameter in owned.items():
                parameter.requires_grad_(wanted[name])
        # FSDP2 has whole parameters in the module while a step runs, and shards in the optimizer.
        for name, parameter in self.trainer.module.named_parameters():
            if name in wanted and parameter.requires_grad is not wanted[name]:
                parameter.requires_grad_(wanted[name])

    def _index(self, optimizer: Optimizer | ModuleOptimizer) -> int:
        raw = optimizer.optimizer if isinstance(optimizer, ModuleOptimizer) else optimizer
        for index, one in enumerate(self.trainer.optimizers):
            if one is raw:
                return index
        raise ValueError(f"{type(raw).__name__} is none of the optimizers that configure_optimizers returned")

    def _require(self, what: str) -> None:
        if self.trainer.module.automatic_optimization:
            raise RuntimeError(
                f"{what}() is the loop's own work in automatic optimization: set self.automatic_optimization = False in "
                f"{type(self.trainer.module).__name__}.__init__ to do it in training_step"
            )


def check_manual(trainer: Trainer) -> None:
    """Raises ValueError for arguments of the Trainer that manual optimization leaves to training_step."""
    name = f"{type(trainer.module).__name__}.automatic_optimization=False"
    if trainer.accumulate_grad_batches != 1:
        raise ValueError(
            f"accumulate_grad_batches={trainer.accumulate_grad_batches} cannot be used with {name}: accumulate in "
            "training_step, or use automatic optimization"
        )
    if trainer.core.clip_val:
        raise ValueError(
            f"gradient_clip_val={trainer.core.clip_val} cannot be used with {name}: call self.clip_gradients(optimizer, ...) in "
            "training_step, or use automatic optimization"
        )


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
