"""Session: what surrounds fit, validate, test and predict."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from acclight.loggers import guarded
from acclight.messages import warn

if TYPE_CHECKING:
    from acclight.datamodule import DataModule
    from acclight.module import TrainModule
    from acclight.trainer import Trainer

# How long a checkpoint that is being written may take once the training has failed: a launcher kills 30 s later.
_LAST_SAVE_SECONDS = 15.0


@contextmanager
def session(trainer: Trainer, state: str, module: TrainModule, datamodule: DataModule | None) -> Iterator[None]:
    """Sets everything up, lets the hooks see an exception, and puts everything back afterwards.

    Args:
        trainer: Idle.
        state: "fit", "validate", "test" or "predict".
        module: The one that runs.
        datamodule: Gives the loaders, where there is one.

    Raises:
        RuntimeError: The Trainer is not idle.
    """
    if trainer.state is not None:
        raise RuntimeError(f"{state} was called while {trainer.state} runs: wait for it to end")
    with trainer.core.active(), _numerics(trainer):
        trainer.begin_session(state, module, datamodule)
        failed = True
        try:
            with trainer.core.local_first():
                for owner in (datamodule, module) if trainer.local_rank == 0 else ():
                    if owner is not None:
                        owner.prepare_data()
            if datamodule is not None:
                datamodule.setup(state)
            for callback in trainer.callbacks:
                callback.setup(trainer, module, state)
            module.setup(state)
            yield
            failed = False
        except BaseException as error:
            trainer.failing = True
            trainer.interrupted = isinstance(error, KeyboardInterrupt)
            elsewhere = trainer.core.failed_elsewhere(error)
            if elsewhere is not None:
                # A lost connection, say, is the other rank's exit, seen from here.
                error.add_note(elsewhere)
            _attempt([functools.partial(call, error) for call in trainer.hooks.on_exception], underway=True)
            raise
        finally:
            _teardown(trainer, state, module, datamodule, failed=failed)
        trainer.core.end_run()


def _teardown(
    trainer: Trainer, state: str, module: TrainModule, datamodule: DataModule | None, *, failed: bool
) -> None:
    """Every part is torn down, whatever another one raises."""
    if trainer.saving is not None:
        # The other ranks may be gone, so that it would never be complete.
        if problem := trainer.saving.give_up(_LAST_SAVE_SECONDS):
            warn(f"the checkpoint {trainer.saving.path} was being written when {state} ended, and is lost: {problem}")
        trainer.saving = None
    status = "interrupted" if trainer.interrupted else "failed" if failed else "success"
    try:
        _attempt(
            [
                *([functools.partial(datamodule.teardown, state)] if datamodule is not None else []),
                *(functools.partial(callback.teardown, trainer, module, state) for callback in trainer.callbacks),
                functools.partial(module.teardown, state),
                *([functools.partial(guarded.finish, trainer.loggers, status)] if trainer.is_global_zero else []),
                *(data.close for data in ([] if trainer.data is None else [trainer.data])),
                *(data.close for data in trainer.eval_data.values()),
            ],
            underway=failed,
        )
    finally:
        trainer.end_session()


def _attempt(calls: Sequence[Callable[[], Any]], *, underway: bool) -> None:
    """Makes all of some calls, whatever one raises; then the first exception leaves, unless one is on its way already.

    An interrupt (Ctrl-C, `sys.exit`) leaves in any case: a request to end is never hidden.
    """
    raised: list[tuple[str, BaseException]] = []
    for call in calls:
        try:
            call()
        except BaseException as error:
            raised.append((getattr(getattr(call, "func", call), "__qualname__", repr(call)), error))
    interrupts = [one for _, one in raised if not isinstance(one, Exception)]
    leaving = next(iter(interrupts or [one for _, one in raised if not underway]), None)
    for name, one in raised:
        if one is not leaving:
            warnings.warn(f"{name} itself raised {type(one).__name__}: {one}", stacklevel=3)
    if leaving is not None:
        raise leaving


@contextmanager
def _numerics(trainer: Trainer) -> Iterator[None]:
    """What `deterministic` and `detect_anomaly` ask torch for."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if trainer.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=trainer.deterministic == "warn")
    try:
        with torch.autograd.set_detect_anomaly(trainer.detect_anomaly):
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
