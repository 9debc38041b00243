"""Which modules FSDP2 gathers and frees by themselves; the rest belongs to the root, which is whole during a step."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from accelerate.utils import fsdp_utils
from torch import nn

from acclight.messages import warn

POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")


def choose_units(module: nn.Module, policy: str, names: Sequence[str] | None, min_num_params: int) -> list[nn.Module]:
    """The modules inside the user's module that become units.

    Args:
        module: The user's module; it is never a unit, because its step methods are called and not its forward.
        policy: One of `POLICIES`.
        names: Class names for "TRANSFORMER_BASED_WRAP". Default: `_no_split_modules` of the transformers models inside.
        min_num_params: For "SIZE_BASED_WRAP": a unit has at least so many parameters that are in no unit below it.

    Raises:
        ValueError: For a name that is no class of any module inside; it lists those there are.
    """
    inside = list(module.modules())[1:]
    if policy == "NO_WRAP":
        return []
    if policy == "SIZE_BASED_WRAP":
        units = _large_enough(module, min_num_params)
        if not units:
            warn(
                f"FSDP2: no module has min_num_params={min_num_params} parameters: the model is one unit, gathered whole"
            )
        return units
    present = sorted({type(m).__name__ for m in inside})
    for name in names or ():
        if name not in present:
            near = difflib.get_close_matches(name, present, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"transformer_cls_names_to_wrap: no module of the model is a {name!r}{hint} There are: {', '.join(present)}"
            )
    wanted = set(names or ()) or {n for m in module.modules() for n in (getattr(m, "_no_split_modules", None) or ())}
    units = [m for m in inside if type(m).__name__ in wanted]
    _refuse_torn_ties(module, units)
    if not units:
        warn(
            "FSDP2: no layer class to wrap is known for this model, so that it is one unit, gathered whole in each step: name "
            "classes in transformer_cls_names_to_wrap, or use auto_wrap_policy='SIZE_BASED_WRAP'; 'NO_WRAP' says it is meant so"
        )
    return units


def _refuse_torn_ties(module: nn.Module, units: Sequence[nn.Module]) -> None:
    """Raises ValueError for a tied parameter whose owners are not gathered together."""
    chosen = set(units)
    homes: dict[int, tuple[str, nn.Module]] = {}

    def visit(part: nn.Module, prefix: str, unit: nn.Module) -> None:
        unit = part if part in chosen else unit
        for name, parameter in part.named_parameters(recurse=False):
            first, home = homes.setdefault(id(parameter), (f"{prefix}{name}", unit))
            if home is not unit:
                raise ValueError(
                    f"FSDP2: {first!r} and {prefix + name!r} are one parameter, but are wrapped in different units: name a "
                    "class in transformer_cls_names_to_wrap that holds both, leave out those that part them, or use "
                    "auto_wrap_policy='SIZE_BASED_WRAP'"
                )
        for name, child in part.named_children():
            visit(child, f"{prefix}{name}.", unit)

    visit(module, "", module)


def _large_enough(module: nn.Module, least: int) -> list[nn.Module]:
    """Children before parents, like torch's own size policy; no containers without a forward, and no part of a tie."""
    owners: dict[int, list[nn.Module]] = {}
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(part)
    units: list[nn.Module] = []
    taken: set[int] = set()

    def visit(part: nn.Module) -> None:
        for child in part.children():
            visit(child)
        if part is module or isinstance(part, (nn.ModuleList, nn.ModuleDict)) or part in units:
            return
        within = set(part.modules())
        own = [p for p in part.parameters() if id(p) not in taken]
        shared = any(owner not in within for p in own for owner in owners[id(p)])
        if not shared and sum(p.numel() for p in own) >= least:
            units.append(part)
            taken.update(id(p) for p in own)

    visit(module)
    return units


@contextmanager
def only_units(units: Sequence[nn.Module]) -> Iterator[None]:
    """Makes Accelerate wrap exactly these modules, while the context lasts.

    Accelerate 1.15's own size policy also takes ModuleLists, which torch refuses, and modules whose forward never runs.
    `tests/test_strategies.py` checks that it still does.
    """
    chosen = {id(unit) for unit in units}

    def policy(plugin: Any, model: nn.Module) -> Callable[[nn.Module], bool]:
        return lambda m: id(getattr(m, "_checkpoint_wrapped_module", m)) in chosen

    original = fsdp_utils.fsdp2_prepare_auto_wrap_policy
    fsdp_utils.fsdp2_prepare_auto_wrap_policy = policy
    try:
        yield
    finally:
        fsdp_utils.fsdp2_prepare_auto_wrap_policy = original
