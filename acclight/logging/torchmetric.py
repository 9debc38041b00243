"""torchmetrics objects: found without importing the library, reduced exactly over uneven ranks, put back as they were.

torchmetrics 1.9 reduces a state over ranks by one collective per tensor. Ranks whose lists differ in length, or where one has
seen no data (its empty list is sent as float32, whatever the others hold), then wait for each other or mix up types. Here
each rank's states travel whole, and those of a rank that has seen nothing are left out.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Gather = Callable[[Any], list[Any]]

# What a Metric remembers of its updates, beside the states that it declares.
_MEMORY = ("_update_count", "_computed", "_forward_cache", "_is_synced", "_cache")


def is_metric(value: Any) -> bool:
    """Whether it is a torchmetrics object; it can only be one when the library has been imported."""
    library = sys.modules.get("torchmetrics")
    return library is not None and isinstance(value, library.Metric)


def entries(dictionary: Any) -> Iterable[tuple[str, Any]]:
    """The names and values of a dict, or of a torchmetrics.MetricCollection, whose metrics may share their states."""
    # Plain ones first: in a compiled step, looking into sys.modules fails while the compiler itself imports something.
    library = None if type(dictionary) is dict else sys.modules.get("torchmetrics")
    if library is not None and isinstance(dictionary, library.MetricCollection):
        # Copies of the states, which it would make by default, grow with every batch.
        return dictionary.items(copy_state=False)  # type: ignore[no-any-return]
    return dictionary.items()  # type: ignore[no-any-return]


def metrics_in(module: nn.Module) -> list[Any]:
    """All torchmetrics objects that a module holds."""
    return [part for part in module.modules() if is_metric(part)] if "torchmetrics" in sys.modules else []


def path_of(metric: Any, module: nn.Module) -> str | None:
    """Where a module holds a metric, as a dotted path; None where it does not."""
    return next((name for name, part in module.named_modules() if part is metric), None)


def compute(name: str, metric: Any) -> float:
    """The metric's value over all ranks. A collective, which every rank has to join.

    Raises:
        ValueError: The metric's value is not one number.
    """
    with warnings.catch_warnings():
        # A rank without data computes too.
        warnings.filterwarnings("ignore", message=r".*was called before the ``update`` method", category=UserWarning)
        value = metric.compute()
    if isinstance(value, dict):
        raise ValueError(
            f"self.log({name!r}) got a {type(metric).__name__}, whose value is a dict with {sorted(map(str, value))}: "
            "log the entries of its compute() with self.log_dict"
        )
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(
            f"self.log({name!r}) got a {type(metric).__name__}, whose value has the shape {tuple(value.shape)}: log single "
            "numbers of its compute()"
        )
    return float(value)


class MetricStates:
    """The states of some metrics at one moment, to put them back.

    Args:
        metrics: torchmetrics objects.
    """

    def __init__(self, metrics: list[Any]) -> None:
        self._saved = [
            (metric, self._states(metric), {name: vars(metric)[name] for name in _MEMORY}) for metric in metrics
        ]

    @staticmethod
    def _states(metric: Any) -> dict[str, Any]:
        # Tensors may be changed in place; what a list holds may not, but the list itself grows.
        states = {name: getattr(metric, name) for name in metric._defaults}
        return {name: list(s) if isinstance(s, list) else s.detach().clone() for name, s in states.items()}

    def restore(self) -> None:
        """Puts them back."""
        for metric, states, memory in self._saved:
            for name, state in states.items():
                current = getattr(metric, name)
                if isinstance(current, list) and isinstance(state, list):
                    # The same list: the metrics of a group share it.
                    current[:] = state
                else:
                    setattr(metric, name, state)
            vars(metric).update(memory)


def leave_inference_mode(metrics: list[Any]) -> None:
    """Makes states that were created under `torch.inference_mode` usable in training; called outside of that mode."""
    for metric in metrics:
        for name in metric._defaults:
            state = getattr(metric, name)
            if isinstance(state, Tensor) and state.is_inference():
                setattr(metric, name, state.clone())


@contextmanager
def exact_over_ranks(metrics: list[Any], gather: Gather) -> Iterator[None]:
    """While it lasts, `metric.compute()` reduces states as this module says, where the metric does not do so itself.

    Args:
        metrics: torchmetrics objects; those with a process group or a gather function of their own are left alone.
        gather: Gives the plain objects of all ranks for this rank's (a collective).
    """
    changed = [metric for metric in metrics if _reduces_plainly(metric)]
    for metric in changed:
        vars(metric)["_sync_dist"] = _Sync(metric, gather)
    try:
        yield
    finally:
        for metric in changed:
            vars(metric).pop("_sync_dist", None)


def _reduces_plainly(metric: Any) -> bool:
    inherited = type(metric)._sync_dist is sys.modules["torchmetrics"].Metric._sync_dist
    changed = "_sync_dist" in vars(metric)
    return bool(inherited and not changed and metric.process_group is None and metric.dist_sync_fn is None)


class _Sync:
    """Stands in for `Metric._sync_dist` of one metric."""

    def __init__(self, metric: Any, gather: Gather) -> None:
        self._metric, self._gather = metric, gather

    def __call__(self, dist_sync_fn: Any = None, process_group: Any = None) -> None:
        metric = self._metric
        own = {name: _on_cpu(getattr(metric, name)) for name in metric._reductions} if metric.update_called else None
        ranks = [states for states in self._gather(own) if states is not None]
        if not ranks:
            return
        for name, reduction in metric._reductions.items():
            states = [states[name] for states in ranks]
            if isinstance(states[0], list):
                # Updates in the order of the dataset: batches go to the ranks in turn.
                longest = max(map(len, states))
                merged = [state[i].to(metric.device) for i in range(longest) for state in states if i < len(state)]
                is_cat = reduction is None or getattr(reduction, "__name__", "") == "dim_zero_cat"
                setattr(metric, name, merged if is_cat or not merged else reduction(merged))
            else:
                stacked = torch.stack([state.to(metric.device) for state in states])
                setattr(metric, name, stacked if reduction is None else reduction(stacked))


def _on_cpu(state: Any) -> Any:
    return [part.detach().cpu() for part in state] if isinstance(state, list) else state.detach().cpu()
