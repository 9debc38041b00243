"""torch.compile for a TrainModule: its whole steps, or region by region."""

from __future__ import annotations

import difflib
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from acclight.messages import info

_OPTIONS = ("backend", "mode", "fullgraph", "dynamic", "options", "disable")
#: What steps call of a torchmetrics object; calling the object itself is its `forward`.
_METRIC_CALLS = ("forward", "update", "compute", "reset")
_LAUNCHER_PREFIX = "ACCELERATE_DYNAMO_"
#: What a Trainer that has read them hides from Accelerate, which would compile a second time.
LAUNCHER_VARIABLES = tuple(
    f"{_LAUNCHER_PREFIX}{name}"
    for name in ("BACKEND", "MODE", "USE_FULLGRAPH", "USE_DYNAMIC", "USE_REGIONAL_COMPILATION")
)


@dataclass(frozen=True)
class Compilation:
    """How a module is compiled.

    The steps are compiled as methods, and regions in place, so that no wrapper module gets into the names of the parameters.

    Attributes:
        regional: Compile the blocks that a model repeats, each by itself and once for all of a kind, instead of whole steps.
        options: Keyword arguments of `torch.compile`.
    """

    regional: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def step(self, method: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
        """A step method, compiled unless only regions are; the torchmetrics objects of its module run as they are.

        With `fullgraph` they are part of the one graph, because nothing may run beside it.
        """
        if self.regional:
            return method
        compiled = torch.compile(method, **self.options)
        return compiled if self.options.get("fullgraph") else _beside_metrics(compiled, module)

    def regions(self, module: nn.Module) -> None:
        """Compiles the repeated blocks inside `module`, in place.

        Raises:
            ValueError: When there are none.
        """
        if not self.regional:
            return
        blocks = list(_repeated_blocks(module))
        if not blocks:
            raise ValueError(
                f"compile='regional': {type(module).__name__} has no ModuleList or Sequential of two or more modules of one "
                "class; use compile=True"
            )
        for block in blocks:
            block.compile(**self.options)


def _beside_metrics(step: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    """A compiled step, during which the module's torchmetrics objects run as they are when they are called.

    What they do is bookkeeping, in code that was not written to be traced: the compiler fails in some of it.
    """
    library = sys.modules.get("torchmetrics")
    kinds = () if library is None else (library.Metric, library.MetricCollection)
    metrics = [part for part in module.modules() if isinstance(part, kinds)]
    if not metrics:
        return step
    # Made once: a step is compiled anew when what it calls is another object.
    untraced: Any = torch.compiler.disable
    plain = [{name: untraced(getattr(metric, name)) for name in _METRIC_CALLS} for metric in metrics]

    @functools.wraps(step)
    def beside(*args: Any) -> Any:
        # Only meanwhile, so that metrics can be copied and pickled.
        before = [{name: vars(metric)[name] for name in _METRIC_CALLS if name in vars(metric)} for metric in metrics]
        try:
            for metric, calls in zip(metrics, plain, strict=True):
                vars(metric).update(calls)
            return step(*args)
        finally:
            for metric, calls in zip(metrics, before, strict=True):
                for name in _METRIC_CALLS:
                    vars(metric).pop(name, None)
                vars(metric).update(calls)

    return beside


@contextmanager
def counters_may_change(compilation: Compilation | None) -> Iterator[None]:
    """Lets compiled code, the user's own as well, read counters such as `self.global_step` without compiling for every value."""
    if compilation is None and "torch._dynamo" not in sys.modules:
        yield
        return
    import torch._dynamo

    with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
        yield


def unwrapped(module: Any) -> Any:
    """The module inside what `torch.compile(module)` returned, whose call is compiled from now on; any other as it is."""
    inner = getattr(module, "__dict__", {}).get("_modules", {}).get("_orig_mod")
    if inner is None:
        return module
    inner._compiled_call_impl = module.dynamo_ctx(inner._call_impl)
    return inner


def _repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules of which a ModuleList or Sequential holds two or more of one class."""
    for child in module.children():
        kinds = {type(block) for block in child.children()}
        if isinstance(child, (nn.ModuleList, nn.Sequential)) and len(child) > 1 and len(kinds) == 1:
            yield from child.children()
        else:
            yield from _repeated_blocks(child)


def resolve_compilation(given: bool | str | Mapping[str, Any] | None) -> Compilation | None:
    """What `Trainer(compile=...)` asks for; where it says nothing, what the launcher does; None for no compilation.

    Args:
        given: True, "regional", or a dict of torch.compile's arguments and, for regions, `"regional": True`; False for none.

    Raises:
        ValueError: For another text, or an unknown key; it names the nearest.
    """
    launched = _launched()
    if given is None:
        return launched
    if given is False:
        chosen = None
    elif given is True:
        chosen = Compilation()
    elif given == "regional":
        chosen = Compilation(regional=True)
    elif isinstance(given, Mapping):
        chosen = _from_mapping(given)
    else:
        raise ValueError(f"compile={given!r}: give True, False, 'regional', or a dict of torch.compile's arguments")
    if launched is not None and launched != chosen:
        info(f"compile={given!r} of the script wins over the launcher's dynamo settings")
    return chosen


def _from_mapping(given: Mapping[str, Any]) -> Compilation:
    # Accelerate's own name for it is accepted as well.
    options = {"regional" if key == "use_regional_compilation" else key: value for key, value in given.items()}
    regional = bool(options.pop("regional", False))
    for key in options:
        if key not in _OPTIONS:
            near = difflib.get_close_matches(key, [*_OPTIONS, "regional"], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"compile has no key {key!r}{hint} It takes {', '.join([*_OPTIONS, 'regional'])}")
    return Compilation(regional, options)


def _launched() -> Compilation | None:
    if os.environ.get(f"{_LAUNCHER_PREFIX}BACKEND", "no").lower() == "no":
        return None
    from accelerate.utils import TorchDynamoPlugin

    plugin = TorchDynamoPlugin()
    options = {key: value for key, value in plugin.to_kwargs().items() if value is not None}
    return Compilation(bool(plugin.use_regional_compilation), options | {"backend": plugin.backend.value.lower()})
