"""Creating a model without memory and filling it shard by shard, so that no process ever holds it whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from acclight.messages import warn
from acclight.strategies.first_rank import knot


class EmptyCreation:
    """Parameters that were created without memory, and which modules can make their values.

    It is PyTorch's way: create on the meta device, shard, initialize the shards. `reset_parameters` runs for one module at a
    time, in the order in which they were made, on whole parameters, of which each rank keeps its shard of rank 0's; so a seed
    gives the weights of a plain creation. A model's `_init_weights(module)` (transformers, timm) follows where the creation
    called it, for each module at once: what it draws, it draws in another order.

    Args:
        everything: Take the memory also from parameters of modules without `reset_parameters`, which cannot make it again.
    """

    def __init__(self, *, everything: bool) -> None:
        self._everything = everything
        self._made: dict[nn.Module, dict[str, nn.Parameter]] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Takes the memory of each parameter away as soon as a module registers it, while the context lasts."""
        hook = register_module_parameter_registration_hook(self._empty)  # type: ignore[arg-type]
        try:
            yield
        finally:
            hook.remove()

    def _empty(self, module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        known: nn.Parameter | None = parameter.__dict__.get("_on_meta")
        if known is not None or parameter.is_meta or type(parameter) is not nn.Parameter:
            return known
        if not self._everything and not hasattr(module, "reset_parameters"):
            return None
        empty = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        parameter.__dict__["_on_meta"] = empty  # registered once more, it is the same one
        self._made.setdefault(module, {})[name] = empty
        return empty

    def places(self, module: nn.Module) -> dict[int, tuple[nn.Module, str]]:
        """Where in `module` each parameter (by id) has its first name; to be asked before it is sharded."""
        found: dict[int, tuple[nn.Module, str]] = {}
        for part in module.modules():
            for name, parameter in part._parameters.items():
                found.setdefault(id(parameter), (part, name))
        return found

    @torch.no_grad()
    def fill(self, module: nn.Module, places: dict[int, tuple[nn.Module, str]], device: torch.device) -> None:
        """Gives the sharded parameters of `module` memory on `device`, and their values. A collective."""
        tie = knot(module)
        module._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)  # type: ignore[no-untyped-call]
        tie()
        initializers: dict[nn.Module, Callable[[nn.Module], Any]] = {}
        for part in module.modules():
            if hasattr(part, "_init_weights"):
                initializers |= dict.fromkeys(part.modules(), part._init_weights)  # type: ignore[arg-type]
        for part, made in self._made.items():
            for name, value in _initialized(part, made, initializers.get(part)).items():
                owner, attribute = places.get(id(made[name]), (None, ""))
                if owner is not None:  # else another parameter has taken its place: a tie
                    _keep_own(owner._parameters[attribute], value)


def _initialized(
    part: nn.Module, made: dict[str, nn.Parameter], initialize: Callable[[nn.Module], Any] | None
) -> dict[str, nn.Parameter]:
    """What a module, and the model around it, give to the parameters that it has made."""
    held = dict(part._parameters)
    whole = {n: nn.Parameter(torch.empty_like(p, device="cpu"), p.requires_grad) for n, p in made.items()}
    part._parameters.update(whole)
    try:
        part.reset_parameters()  # type: ignore[operator]
        # In-place changes are counted: more during the creation than now means that the model has changed them after that.
        if initialize is not None and any(whole[n]._version < p._version for n, p in made.items()):
            initialize(part)
    finally:
        part._parameters.update(held)
    for name, parameter in made.items():
        if whole[name]._version < parameter._version:
            warn(
                f"create_sharded: configure_model has changed {name!r} of a {type(part).__name__} after it was made; that is not "
                "seen again, and the value is reset_parameters': change it in a method _init_weights(module) of the model instead"
            )
    return whole


def _keep_own(parameter: Tensor | None, value: Tensor) -> None:
    """Copies this rank's part of rank 0's `value`."""
    if isinstance(parameter, DTensor):
        parameter.to_local().copy_(distribute_tensor(value, parameter.device_mesh, parameter.placements).to_local())
    elif parameter is not None:
        parameter.copy_(value)
        dist.broadcast(parameter, src=0)
