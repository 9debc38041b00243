"""Keeps what Accelerate and DeepSpeed store per process inside one Trainer.

Accelerate 1.15 keeps its state in class attributes (`PartialState`, `AcceleratorState`, `GradientState`) and announces its
plugins to itself through `os.environ`; it tells transformers of ZeRO-3 through a variable of a module, and DeepSpeed 0.19 puts
a function of its own in the place of `torch.nn.functional.linear`. Two Trainers in one process, or a Trainer beside a hand-made
`Accelerator`, would read each other's settings. Here every Trainer owns a set of these, puts it in place while it works and
puts the former one back.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType

_SINGLETONS: tuple[Any, ...] = (PartialState, AcceleratorState, GradientState)
_PREFIXES = ("ACCELERATE_", "FSDP_")
#: Variables of modules, and what they are before anybody sets them; None for a module that is always there.
_MODULE_VARIABLES: dict[tuple[str, str], Any] = {
    ("torch.nn.functional", "linear"): None,
    ("transformers.integrations.deepspeed", "_hf_deepspeed_config_weak_ref"): None,
    ("deepspeed.runtime.torch_autocast", "TORCH_AUTOCAST_INITIALIZED"): False,
    ("deepspeed.runtime.torch_autocast", "TORCH_AUTOCAST_DTYPE"): None,
}
#: What Accelerate's look for a GPU and torch's compiler leave behind.
_LEFT = ("PYTORCH_NVML_BASED_CUDA_CHECK", "TORCHINDUCTOR_CACHE_DIR")
_LAUNCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def configured_precision(kind: str, given: str | int | None) -> str | None:
    """The precision of the `Accelerator` that exists already; None for a `PartialState` alone.

    Args:
        kind: The Trainer's kind of strategy.
        given: The Trainer's precision, if it has one.

    Raises:
        ValueError: There is no state, one of another kind, or one with another precision than the Trainer's.
    """
    if not PartialState._shared_state:
        raise ValueError(
            "accelerator_config: use_configured_state=True, but there is no state: make a PartialState() or an Accelerator() "
            "before the Trainer, or leave it out"
        )
    made = AcceleratorState._shared_state
    found = str((made or PartialState._shared_state)["distributed_type"].value)
    fitting = {"NO": ["single"], "FSDP": ["fsdp2"], "DEEPSPEED": ["deepspeed"]}.get(found)
    # A PartialState alone says only that there are several processes.
    fitting = fitting or (["ddp"] if made else ["ddp", "fsdp2"])
    if kind not in fitting:
        raise ValueError(
            f"accelerator_config: use_configured_state=True, but the state that exists is of the kind {found!r}, and the "
            f"Trainer's strategy is {kind!r}: use the strategy {' or '.join(map(repr, fitting))}, or leave it out"
        )
    if not made or kind == "deepspeed":  # whose precision is in its own configuration
        return None
    precision = str(made["_mixed_precision"])
    if given is not None and str(given).lower().removesuffix("-mixed").removesuffix("-true") not in (
        {"no": ("no", "32", "fp32"), "fp16": ("16", "fp16")}.get(precision, (precision,))
    ):
        raise ValueError(
            f"precision={given!r}, but the Accelerator that use_configured_state=True takes over has "
            f"mixed_precision={precision!r}: give no precision, or change one of them"
        )
    return precision


def _managed(name: str) -> bool:
    return name.startswith(_PREFIXES) or name in _LAUNCH or name in _LEFT


class Isolation:
    """One Trainer's own copy of Accelerate's process-wide state.

    Args:
        environment: Variables to set (a string) or to hide (None) while this Trainer works.
    """

    def __init__(self, environment: Mapping[str, str | None]) -> None:
        self._environment: dict[str, str | None] = dict(environment)
        # The same class as Accelerate's own dictionaries, so that thread-local ones stay thread-local.
        self._states = [type(cls._shared_state)() for cls in _SINGLETONS]
        self._module_variables: dict[tuple[str, str], Any] = {}
        self._depth = 0
        #: What was there before this Trainer's own was put in place.
        self._found: dict[str, str] = {}
        self._former_states: list[Any] = []
        self._former: dict[tuple[str, str], Any] = {}

    def take_over(self) -> None:
        """Begins with the process state (device, group, ranks) that exists already, instead of an empty one."""
        own = self._states[0]
        own.update(PartialState._shared_state)
        if own["distributed_type"] is DistributedType.FSDP:
            # What an Accelerator has made of it; the Trainer's own one starts from the kind of device again.
            device = own["device"].type
            own["distributed_type"] = DistributedType(
                "MULTI_GPU" if device in ("cuda", "cpu") else f"MULTI_{device.upper()}"
            )

    @contextmanager
    def active(self) -> Iterator[None]:
        """Puts this Trainer's state in place; entering again while it is in place changes nothing."""
        if self._depth == 0:
            self._put()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._put_back()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Within `active`: the process is as it was outside for a while, for a Trainer that has to see the launch itself."""
        self._put_back()
        try:
            yield
        finally:
            self._put()

    def _put(self) -> None:
        self._found = {name: value for name, value in os.environ.items() if _managed(name)}
        self._former_states = [cls._shared_state for cls in _SINGLETONS]
        self._former = {
            key: getattr(sys.modules.get(key[0]), key[1], unset) for key, unset in _MODULE_VARIABLES.items()
        }
        for name, value in self._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        for cls, state in zip(_SINGLETONS, self._states, strict=True):
            cls._shared_state = state
        _set(self._module_variables)

    def _put_back(self) -> None:
        # What Accelerate has set meanwhile belongs to this Trainer and comes back with it the next time.
        now = {name: value for name, value in os.environ.items() if _managed(name)}
        for name in now.keys() | self._found.keys():
            if now.get(name) != self._found.get(name):
                self._environment[name] = now.get(name)
                if name in self._found:
                    os.environ[name] = self._found[name]
                else:
                    del os.environ[name]
        for key, before in self._former.items():
            value = getattr(sys.modules.get(key[0]), key[1], before)
            if value is not before:
                self._module_variables[key] = value
        _set({key: before for key, before in self._former.items() if key in self._module_variables})
        for cls, state in zip(_SINGLETONS, self._former_states, strict=True):
            cls._shared_state = state


def _set(values: Mapping[tuple[str, str], Any]) -> None:
    for (module, name), value in values.items():
        if module in sys.modules:
            setattr(sys.modules[module], name, value)
