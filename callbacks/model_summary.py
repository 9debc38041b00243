"""ModelSummary: the parts of the model and their parameters, in one table at the start of a fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.parameter import is_lazy

from acclight import Callback
from acclight.messages import info

if TYPE_CHECKING:
    from acclight import Trainer, TrainModule

_HEADER = ("name", "type", "parameters", "trainable")
# Activation checkpointing and torch.compile put a module of their own around the user's.
_WRAPPED = ("_checkpoint_wrapped_module", "_orig_mod")


@dataclass(frozen=True)
class Part:
    """One line of the summary."""

    name: str
    type: str
    #: Numbers of parameters; shared ones count in every part that uses them, and once in the whole.
    parameters: int
    trainable: int
    #: Bytes of the parameters, over all ranks that share them.
    bytes: int
    #: Some parameters get their shape with the first batch and are not counted.
    lazy: bool = False


class ModelSummary(Callback):
    """Says what the model's parts are, on rank 0 when a fit begins. Sharded parameters count in full.

    Args:
        max_depth: How many levels of submodules to show; 0 for the totals only, -1 for all.

    Raises:
        ValueError: For a depth below -1.
    """

    def __init__(self, max_depth: int = 1) -> None:
        if max_depth < -1:
            raise ValueError(f"max_depth={max_depth} must be -1 (all levels) or more")
        self.max_depth = max_depth

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Prints the table."""
        if trainer.is_global_zero:
            info(summary_table(module, self.max_depth))


def summarize(module: nn.Module, max_depth: int = 1) -> list[Part]:
    """The module's parts down to a depth, in the order in which they are defined; the last entry is the whole.

    Args:
        module: Plain, or wrapped and sharded.
        max_depth: As in `ModelSummary`.
    """
    parts = []
    for path, child in module.named_modules():
        names = [name for name in path.split(".") if name not in _WRAPPED]
        is_wrapper = any(hasattr(child, name) for name in _WRAPPED)
        if path and not is_wrapper and (max_depth == -1 or len(names) <= max_depth):
            parts.append(_count(".".join(names), child))
    return [*parts, _count("", module)]


def summary_table(module: nn.Module, max_depth: int = 1) -> str:
    """The summary as plain text, one line per part and one for the whole."""
    *parts, whole = summarize(module, max_depth)
    rows = [_HEADER, *(_row(part) for part in parts)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(w) if column < 2 else cell.rjust(w)
            for column, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * max(len(line) for line in lines))
    total = f"{whole.type}: {_shown(whole)} parameters, {whole.trainable:,} trainable ({_share(whole)}), "
    return "\n".join([*(lines if parts else []), total + f"{whole.bytes / 2**20:,.1f} MiB"])


def _count(name: str, module: nn.Module) -> Part:
    total = trainable = size = 0
    lazy = False
    for parameter in module.parameters():
        if is_lazy(parameter):
            lazy = True
            continue
        # A DTensor counts all its shards itself; DeepSpeed's ZeRO-3 leaves an empty tensor and keeps the number here.
        number = int(getattr(parameter, "ds_numel", parameter.numel()))
        total += number
        trainable += number if parameter.requires_grad else 0
        size += number * parameter.element_size()
    return Part(name, type(module).__name__, total, trainable, size, lazy)


def _row(part: Part) -> tuple[str, str, str, str]:
    return part.name, part.type, _shown(part), _share(part)


def _shown(part: Part) -> str:
    return f"{part.parameters:,}" + (" + lazy" if part.lazy else "")


def _share(part: Part) -> str:
    return f"{100 * part.trainable / part.parameters:.3g} %" if part.parameters else "-"
