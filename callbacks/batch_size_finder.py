"""BatchSizeFinder: the largest batch size for which the memory suffices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from acclight import Callback

_MODES = ("power", "binsearch")


class BatchSizeFinder(Callback):
    """Before a fit that starts from the beginning, tries growing batch sizes, and trains with the largest that fits.

    A trial is a short fit of a copy of the module by another Trainer with the same strategy, precision, accumulation and
    compilation, and the same batches on every rank; the copy is dropped. So weights, random state, metrics, callbacks and
    loggers are as if there had been no search: the training is that of a run that had the found size from the start. Trials run
    no callbacks and no validations, so leave room for what those hold.

    The module or the data module holds the batch size under the name `batch_arg_name`, as an attribute or a hyper-parameter, and
    its `train_dataloader` makes a DataLoader of that size (per rank, unless accelerator_config has split_batches). The found
    size is put there. A checkpoint keeps it: a resumed run takes it over and does not search.

    Ranks run out of memory together, as they get the same batches. Should one fail while the others wait for it in an exchange,
    the job ends with an error that says so.

    Args:
        mode: "power" (default) doubles the size until it does not fit; "binsearch" then halves the gap to find the largest.
        steps_per_trial: Optimizer steps of a trial. Default 3.
        init_val: The first size. Default 2. Where it does not fit, smaller ones are tried.
        max_trials: At most so many trials. Default 25.
        batch_arg_name: The attribute's name. Default "batch_size".

    Attributes:
        optimal_batch_size: What was found; None before the search.

    Raises:
        ValueError: For an unknown mode, or a number below 1. When fit begins: under ZeRO-3, for a loader that was given to fit,
            or where nothing has the attribute.
    """

    def __init__(
        self,
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
    ) -> None:
        if mode not in _MODES:
            raise ValueError(f"mode={mode!r}: use {' or '.join(map(repr, _MODES))}")
        for name, value in (("steps_per_trial", steps_per_trial), ("init_val", init_val), ("max_trials", max_trials)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"BatchSizeFinder: {name}={value!r}: give a whole number, 1 or more")
        self.mode = mode
        self.steps_per_trial = steps_per_trial
        self.init_val = init_val
        self.max_trials = max_trials
        self.batch_arg_name = batch_arg_name
        self.optimal_batch_size: int | None = None

    def search(self, fits: Callable[[int], bool], *, multiple_of: int = 1, most: int | None = None) -> int:
        """The largest size that fits, as far as the mode looks.

        Args:
            fits: Tries a size.
            multiple_of: All sizes are multiples of it. Default 1.
            most: No larger one makes sense: the data has no more. Default: no limit.

        Raises:
            RuntimeError: None fits.
        """
        units = max(1, self.init_val // multiple_of)
        limit = None if most is None else max(1, most // multiple_of)
        units = units if limit is None else min(units, limit)
        good, bad = 0, None
        for _ in range(self.max_trials):
            if fits(units * multiple_of):
                good = units
            else:
                bad = units
            if bad is None:
                units = good * 2 if limit is None else min(good * 2, limit)
            elif good == 0:
                units = bad // 2
            elif self.mode == "power":
                break
            else:
                units = (good + bad) // 2
            if units in (0, good):
                break
        if good == 0:
            raise RuntimeError(
                f"BatchSizeFinder: the smallest batch size that was tried, {(bad or 1) * multiple_of}, runs out of memory: use a "
                "smaller model, activation checkpointing, a lower precision, or shard it with the strategy 'fsdp2'"
            )
        return good * multiple_of

    def state_dict(self) -> dict[str, Any]:
        """The found size."""
        return {"optimal_batch_size": self.optimal_batch_size}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the found size back."""
        self.optimal_batch_size = state_dict["optimal_batch_size"]
