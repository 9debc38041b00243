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

    @contextmanager
    def active(self) -> Iterator[None]:
        """Puts this Trainer's state in place; entering again while it is in place changes nothing."""
        self._depth += 1
        if self._depth > 1:
            try:
                yield
            finally:
                self._depth -= 1
            return
        variables = {name: value for name, value in os.environ.items() if _managed(name)}
        states = [cls._shared_state for cls in _SINGLETONS]
        former = {key: getattr(sys.modules.get(key[0]), key[1], unset) for key, unset in _MODULE_VARIABLES.items()}
        try:
            for name, value in self._environment.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            for cls, state in zip(_SINGLETONS, self._states, strict=True):
                cls._shared_state = state
            _set(self._module_variables)
            yield
        finally:
            self._depth = 0
            # What Accelerate has set meanwhile belongs to this Trainer and comes back with it the next time.
            now = {name: value for name, value in os.environ.items() if _managed(name)}
            for name in now.keys() | variables.keys():
                if now.get(name) != variables.get(name):
                    self._environment[name] = now.get(name)
                    if name in variables:
                        os.environ[name] = variables[name]
                    else:
                        del os.environ[name]
            for key, before in former.items():
                value = getattr(sys.modules.get(key[0]), key[1], before)
                if value is not before:
                    self._module_variables[key] = value
            _set({key: before for key, before in former.items() if key in self._module_variables})
            for cls, state in zip(_SINGLETONS, states, strict=True):
                cls._shared_state = state


def _set(values: Mapping[tuple[str, str], Any]) -> None:
    for (module, name), value in values.items():
        if module in sys.modules:
            setattr(sys.modules[module], name, value)
