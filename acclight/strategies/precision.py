"""What `Trainer(precision=...)` means, the same under every strategy."""

from __future__ import annotations

import difflib
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from acclight.messages import info

_BY_ALIAS = {
    "32": "32-true", "no": "32-true", "fp32": "32-true",
    "bf16": "bf16-mixed", "16": "16-mixed", "fp16": "16-mixed", "64": "64-true",
}  # fmt: skip
_FP8_PACKAGES = {"torchao": "torchao", "transformer_engine": "transformer-engine", "msamp": "ms-amp"}


@dataclass(frozen=True)
class Precision:
    """One precision.

    Attributes:
        name: The Trainer's name for it.
        accelerate: Accelerate's `mixed_precision`.
        autocast: What matrix products inside a step are computed in; None for the type of their operands.
        parameters: What floating parameters, buffers and inputs are turned into; None leaves them as they are.
    """

    name: str
    accelerate: str = "no"
    autocast: torch.dtype | None = None
    parameters: torch.dtype | None = None

    def cast_module(self, module: nn.Module) -> None:
        """Gives the parameters the type that this precision trains them in.

        Under "-mixed" those that are trained become float32 (a model that was loaded in 16 bits would otherwise lose small
        updates, and each strategy in another way); under "-true" all parameters and buffers get the one type, but for those of
        torchmetrics objects, whose sums would stand still.
        """
        if self.parameters is not None:
            _cast(module, self.parameters)
        elif self.autocast is not None:
            small = [p for p in module.parameters() if p.requires_grad and p.dtype in (torch.bfloat16, torch.float16)]
            for parameter in small:
                parameter.data = parameter.data.float()
            if small:
                info(
                    f"precision {self.name}: {len(small)} trained 16-bit parameters became float32, of which steps compute"
                )

    def cast_inputs(self, args: tuple[Any, ...]) -> Any:
        """The arguments of a step with their floating tensors in the type of the parameters."""
        from lightning_utilities.core.apply_func import apply_to_collection

        return apply_to_collection(args, Tensor, lambda t: t.to(self.parameters) if t.is_floating_point() else t)

    @contextmanager
    def default_dtype(self) -> Iterator[None]:
        """Makes tensors that the user's code creates have the type of the parameters, while the context lasts."""
        if self.parameters is None:
            yield
            return
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.parameters)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


_PRECISIONS = {
    one.name: one
    for one in (
        Precision("32-true"),
        Precision("bf16-mixed", accelerate="bf16", autocast=torch.bfloat16),
        Precision("16-mixed", accelerate="fp16", autocast=torch.float16),
        Precision("bf16-true", parameters=torch.bfloat16),
        Precision("16-true", parameters=torch.float16),
        Precision("64-true", parameters=torch.float64),
        Precision("fp8", accelerate="fp8", autocast=torch.bfloat16),
    )
}


def _cast(module: nn.Module, dtype: torch.dtype) -> None:
    # A metric can only be one when the library has been imported.
    metric = getattr(sys.modules.get("torchmetrics"), "Metric", ())
    if isinstance(module, metric):
        return
    for child in module.children():
        _cast(child, dtype)
    apply: Any = module._apply
    apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, recurse=False)


def resolve_precision(given: str | int | None, configured: str | None) -> Precision:
    """The precision of the script; where it says nothing, the strategy's configuration; else the launcher's; else float32.

    Args:
        given: What the Trainer was given.
        configured: What a ds_config asks for, as the Trainer would name it.

    Raises:
        ValueError: For an unknown name.
        ImportError: For "fp8" without a package that has it.
    """
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION")
    if given is None:
        chosen = _named(configured or launched or "32-true", "ACCELERATE_MIXED_PRECISION")
    else:
        chosen = _named(given, "precision")
        if configured is None and launched and _named(launched, "ACCELERATE_MIXED_PRECISION") != chosen:
            info(f"precision={given!r} of the script wins over {launched!r} of the launcher")
    if chosen.name == "fp8" and not any(importlib.util.find_spec(package) for package in _FP8_PACKAGES):
        raise ImportError(
            f"precision='fp8' needs one of {', '.join(_FP8_PACKAGES.values())}, and none is installed: "
            "`pip install torchao`, or use precision='bf16-mixed'"
        )
    return chosen


def precision_source(given: str | int | None, configured: str | None) -> str:
    """Where `resolve_precision` takes its answer from: "argument", "ds_config", "launcher" or "default"."""
    if given is not None:
        return "argument"
    return "ds_config" if configured else "launcher" if "ACCELERATE_MIXED_PRECISION" in os.environ else "default"


def _named(value: str | int, source: str) -> Precision:
    name = str(value).lower()
    name = _BY_ALIAS.get(name, name)
    if name not in _PRECISIONS:
        near = difflib.get_close_matches(name, [*_PRECISIONS, *_BY_ALIAS], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{source}={value!r} is unknown{hint} Known are: {', '.join(_PRECISIONS)}")
    return _PRECISIONS[name]
