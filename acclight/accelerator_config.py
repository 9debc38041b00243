"""AcceleratorConfig: how loaders are shared out and gradients accumulated, by the names that Accelerate's users know."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: The fields of Accelerate's GradientAccumulationPlugin.
_ACCUMULATION = ("num_steps", "adjust_scheduler", "sync_with_dataloader", "sync_each_batch")


@dataclass(frozen=True)
class AcceleratorConfig:
    """What `Trainer(accelerator_config=...)` takes, also as a dict or the path of a JSON file.

    Attributes:
        split_batches: A loader's batch size is that of all processes together. Default False: of each process.
        dispatch_batches: Rank 0 alone reads, and sends each rank its batches (pickled), for streams that are slow to open.
            Default None: each rank reads, an iterable dataset too, and takes its share; so one that picks its own part by its
            rank loses nothing. The batches are the same.
        even_batches: The end of a training epoch is filled up, from its start, to a multiple of the number of processes.
            Evaluations never repeat a sample.
        use_seedable_sampler: The order of the samples follows `data_seed`, else the seed of torch. False: the order is drawn from
            torch's global generator when a fit begins, so that a second fit has another one. A resume is exact in both.
        data_seed: Seed of the order. Default None: torch's.
        non_blocking: The device need not have a batch before the next line runs; wants loaders with pin_memory=True.
        use_configured_state: Work in the process state, and with the precision, of the `PartialState` or `Accelerator` that is
            there already. Default False: in a state of the Trainer's own.
        gradient_accumulation_kwargs: "num_steps" (instead of accumulate_grad_batches), "sync_each_batch" (average gradients over
            the ranks after every batch, which saves memory under FSDP2); "adjust_scheduler" and "sync_with_dataloader" as they
            always are here, True.

    Raises:
        ValueError: For a value that cannot be.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = True
    data_seed: int | None = None
    non_blocking: bool = False
    use_configured_state: bool = False
    gradient_accumulation_kwargs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if str(field.type).startswith("bool") and not (isinstance(value, bool) or value is field.default):
                raise ValueError(f"accelerator_config: {field.name}={value!r} must be True or False")
        seed = self.data_seed
        if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool) or seed < 0):
            raise ValueError(f"accelerator_config: data_seed={seed!r} must be a whole number, 0 or more")
        if seed is not None and not self.use_seedable_sampler:
            raise ValueError(
                f"accelerator_config: data_seed={seed} needs use_seedable_sampler=True; without it the order has no seed"
            )
        given = self.gradient_accumulation_kwargs or {}
        if not isinstance(given, Mapping):
            raise ValueError(f"gradient_accumulation_kwargs={given!r}: give a dict, with {' and '.join(_ACCUMULATION)}")
        if not isinstance(sync := given.get("sync_each_batch", False), bool):
            raise ValueError(f"gradient_accumulation_kwargs: sync_each_batch={sync!r}: give True or False")
        for name in given:
            if name not in _ACCUMULATION:
                raise ValueError(_unknown("gradient_accumulation_kwargs", name, _ACCUMULATION))
        for name in ("adjust_scheduler", "sync_with_dataloader"):
            if given.get(name, True) is not True:
                raise ValueError(
                    f"gradient_accumulation_kwargs: {name}={given[name]!r} cannot be: a scheduler steps once per optimizer step, "
                    "and a window ends with its epoch; leave it out"
                )
        steps = given.get("num_steps", 1)
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            raise ValueError(f"gradient_accumulation_kwargs: num_steps={steps!r} must be a whole number, 1 or more")

    @classmethod
    def read(cls, given: Any) -> AcceleratorConfig:
        """The configuration in what the Trainer was given: None, a dict, the path of a JSON file, or an instance.

        An instance may be transformers' AcceleratorConfig, too.

        Raises:
            TypeError: For anything else, a class instead of an instance for one.
            ValueError: For an unknown key; it names the nearest. For a file that is not there or holds no mapping.
        """
        if given is None:
            return cls()
        if isinstance(given, cls):
            return given
        if isinstance(given, type):
            raise TypeError(
                f"accelerator_config={given.__name__} is a class: give an instance, {given.__name__}(...), a dict or a path"
            )
        if isinstance(given, (str, Path)):
            given = _load(Path(given))
        elif dataclasses.is_dataclass(given):
            given = vars(given)
        if not isinstance(given, Mapping):
            raise TypeError(
                f"accelerator_config is a {type(given).__name__}: give None, a dict, the path of a JSON file, or an "
                "AcceleratorConfig"
            )
        known = [field.name for field in dataclasses.fields(cls)]
        for name in given:
            if name not in known:
                raise ValueError(_unknown("accelerator_config", name, known))
        return cls(**given)

    def accumulation(self, accumulate_grad_batches: int) -> int:
        """Batches per optimizer step: the Trainer's, or `num_steps` where the Trainer says 1.

        Raises:
            ValueError: Both are given.
        """
        steps = (self.gradient_accumulation_kwargs or {}).get("num_steps")
        if steps is None:
            return accumulate_grad_batches
        if accumulate_grad_batches > 1:
            raise ValueError(
                f"accumulation is given twice: accumulate_grad_batches={accumulate_grad_batches}, and num_steps={steps} in "
                "accelerator_config's gradient_accumulation_kwargs; keep one of them"
            )
        return int(steps)

    @property
    def sync_each_batch(self) -> bool:
        """Whether the ranks average their gradients after every batch of a window."""
        return bool((self.gradient_accumulation_kwargs or {}).get("sync_each_batch", False))


def _load(path: Path) -> Any:
    if not path.is_file():
        raise ValueError(f"accelerator_config={str(path)!r}: there is no such file; give a dict, or a JSON file")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"accelerator_config={str(path)!r} is no JSON file: {error}") from error


def _unknown(owner: str, name: str, known: Any) -> str:
    near = difflib.get_close_matches(str(name), known, n=1)
    return f"{owner} has no key {name!r}" + (
        f"; did you mean {near[0]!r}?" if near else f"; it takes {', '.join(known)}"
    )
