"""The search for a batch size before a fit: trials on copies of the module, of which nothing is left."""

from __future__ import annotations

import copy
import itertools
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from acclight.checkpoint.snapshot import random_state, set_random_state
from acclight.data.loader import size_of
from acclight.datamodule import DataModule
from acclight.loggers import SilentLogger
from acclight.messages import info, quiet
from acclight.strategies.out_of_memory import free_memory, memory_ran_out

if TYPE_CHECKING:
    from acclight.callbacks import BatchSizeFinder
    from acclight.checkpoint.reader import Source
    from acclight.module import TrainModule
    from acclight.strategies.process_group import SharedNotes
    from acclight.trainer import Trainer

#: How long a rank that ran out of memory waits for the others to say the same: they train on the same batches.
_PATIENCE_SECONDS = 20.0
#: Arguments of a Trainer that do not belong to a trial; what stands here is used instead.
_OF_A_TRIAL: dict[str, Any] = {
    "callbacks": None, "enable_progress_bar": False, "enable_checkpointing": False,
    "enable_model_summary": False, "max_epochs": -1, "max_time": None, "min_epochs": None, "min_steps": None,
    "num_sanity_val_steps": 0, "limit_val_batches": 0, "limit_train_batches": 1.0, "val_check_interval": 1.0,
    "overfit_batches": 0, "reload_dataloaders_every_n_epochs": 0, "fast_dev_run": False,
}  # fmt: skip


def settle_batch_size(trainer: Trainer, finder: BatchSizeFinder, given: Any, reader: Source | None) -> None:
    """Puts a batch size where the loader hooks find it: the checkpoint's, that of an earlier fit, or one that is searched for.

    Collective.

    Args:
        trainer: In the session of a fit, before its loaders are asked for.
        finder: The callback that asks for it.
        given: The training loader that fit was given; None where a hook makes it.
        reader: The checkpoint that the fit resumes from.

    Raises:
        ValueError: The strategy cannot, the loader was given, or nothing holds a batch size.
        RuntimeError: No size fits, or a rank alone ran out of memory.
    """
    holders = _holders(trainer, finder)
    saved = None if reader is None else reader.trainer.get("callbacks", {}).get(finder.state_key)
    if saved is not None:
        finder.load_state_dict(saved)
    resumes = reader is not None and not reader.trainer.get("weights_only")
    if finder.optimal_batch_size is None and not resumes:
        if trainer.strategy.name == "deepspeed_stage_3":
            raise ValueError(
                "BatchSizeFinder cannot be used with 'deepspeed_stage_3', which cannot free the partitions of a trial that ran "
                "out of memory: use 'deepspeed_stage_1', 'deepspeed_stage_2' or 'fsdp2', or set the batch size yourself"
            )
        if given is not None:
            raise ValueError(
                "BatchSizeFinder cannot change the batch size of a loader that was given to fit: make the loader in "
                f"train_dataloader, from {finder.batch_arg_name!r}"
            )
        finder.optimal_batch_size = _search(trainer, finder)
        trainer.core.begin_run()  # the trials' runs have ended, and this one goes on
        info(f"BatchSizeFinder: {finder.batch_arg_name}={finder.optimal_batch_size}")
    if finder.optimal_batch_size is not None:
        for holder in holders:
            _set(holder, finder.batch_arg_name, finder.optimal_batch_size)


def _search(trainer: Trainer, finder: BatchSizeFinder) -> int:
    """The size that the finder chooses; the random state and the holders are afterwards as before."""
    name, shares = finder.batch_arg_name, trainer.core.data_world_size
    unit = shares if trainer.core.config.split_batches else 1
    own = _holding(trainer.datamodule, name)
    before, state = [_get(holder, name) for holder in own], random_state()

    def fits(size: int) -> bool:
        free_memory()
        module = copy.deepcopy(trainer.module)
        for holder in (*_holding(module, name), *own):
            _set(holder, name, size // unit)
        return _try(trainer, finder, module, size, size // unit)

    try:
        samples = size_of(_loader(trainer, trainer.module, finder).dataset)
        # A batch of this rank cannot hold more than its share of the data.
        most = None if samples is None else -(-samples // shares) * unit
        return finder.search(fits, multiple_of=unit, most=most)
    finally:
        for holder, value in zip(own, before, strict=True):
            _set(holder, name, value)
        set_random_state(state)
        free_memory()


def _try(trainer: Trainer, finder: BatchSizeFinder, module: TrainModule, size: int, samples: int) -> bool:
    """Fits a copy of the module for some steps; whether the memory sufficed on every rank. Collective.

    Args:
        trainer: The one whose batch size is searched for.
        finder: Says how many steps.
        module: A copy, which is of no use afterwards.
        size: What is tried.
        samples: What a batch of one rank holds then.
    """
    loader = _loader(trainer, module, finder, samples)
    core = trainer.core
    # The same batches on every rank, so that the ranks run out of memory together or not at all.
    wanted = finder.steps_per_trial * trainer.accumulate_grad_batches
    batches = core.broadcast_object(list(itertools.islice(loader, wanted)) if core.is_global_zero else None)
    strategy = trainer.given_arguments.get("strategy", "auto")
    arguments = {
        **trainer.given_arguments,
        **_OF_A_TRIAL,
        "max_steps": finder.steps_per_trial,
        "logger": SilentLogger() if trainer.loggers else False,
        "strategy": strategy if isinstance(strategy, str) else type(strategy)(**strategy.given_fields),
        "accelerator_config": replace(core.config, split_batches=False, dispatch_batches=None),
    }
    # They have run, and may have opened what the copy shares with the module.
    vars(module).update(dict.fromkeys(("prepare_data", "setup", "teardown"), _nothing))
    notes, ran_out = core.shared_notes(), None
    with quiet(), core.isolation.suspended():
        try:
            type(trainer)(**arguments).fit(module, datamodule=_TrialData(batches, trainer.datamodule))
        except Exception as error:
            if not memory_ran_out(error):
                raise
            free_memory(error)
            ran_out = f"{type(error).__name__}: {error}"
    others = _count_outcomes(notes, ran_out, core.world_size)
    if others is None:
        raise RuntimeError(
            f"BatchSizeFinder: with {finder.batch_arg_name}={size} rank {core.global_rank} "
            + (f"ran out of memory ({ran_out})" if ran_out else "was through")
            + ", while another still waits in an exchange: make the memory that is free the same on every rank, or set "
            "the batch size yourself"
        )
    info(f"BatchSizeFinder: {finder.batch_arg_name}={size} {'runs out of memory' if others else 'fits'}")
    return not others


def _count_outcomes(notes: SharedNotes, ran_out: str | None, ranks: int) -> int | None:
    """How many ranks ran out of memory; None when not every rank says in time how it went."""
    notes.add("fits" if ran_out is None else "ran out")
    deadline = time.monotonic() + _PATIENCE_SECONDS
    if ranks == 1:
        return int(ran_out is not None)
    while (failed := notes.count("ran out")) + notes.count("fits") < ranks:
        if time.monotonic() > deadline:
            return None
        time.sleep(0.005)
    return failed


class _TrialData(DataModule):
    """Batches that were read already, moved to the device as the user's data module does it."""

    def __init__(self, batches: list[Any], datamodule: DataModule | None) -> None:
        self.batches = batches
        for name in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"):
            if hasattr(datamodule, name):
                setattr(self, name, getattr(datamodule, name))

    def train_dataloader(self) -> list[Any]:
        return self.batches


def _nothing(*_: Any) -> None:
    """In the place of a method that must not run."""


def _loader(trainer: Trainer, module: TrainModule, finder: BatchSizeFinder, size: int | None = None) -> DataLoader[Any]:
    """What the user's hook makes.

    Args:
        trainer: Whose data module is asked, if it has one.
        module: Asked otherwise.
        finder: For the errors.
        size: The batch size that it has to have. Default: any.
    """
    former = module._trainer
    module.attach(trainer)
    try:
        owner: Any = module if trainer.datamodule is None else trainer.datamodule
        loader = owner.train_dataloader()
    finally:
        module.attach(former)
    name = finder.batch_arg_name
    if not isinstance(loader, DataLoader) or loader.batch_size is None:
        raise ValueError(
            f"BatchSizeFinder needs a DataLoader with a batch_size; train_dataloader gave a {type(loader).__name__}"
            + (" without one" if isinstance(loader, DataLoader) else "")
        )
    if size not in (None, loader.batch_size):
        raise ValueError(
            f"BatchSizeFinder set {name}={size}, but train_dataloader gave a DataLoader with batch_size={loader.batch_size}: "
            f"make it with batch_size=self.{name}"
        )
    return loader


def _holders(trainer: Trainer, finder: BatchSizeFinder) -> list[Any]:
    """What holds a batch size: the module, the data module, or their hyper-parameters."""
    name = finder.batch_arg_name
    if found := _holding(trainer.module, name) + _holding(trainer.datamodule, name):
        return found
    places = [type(one).__name__ for one in (trainer.module, trainer.datamodule) if one is not None]
    raise ValueError(
        f"BatchSizeFinder: neither {' nor '.join(places)} has an attribute or a hyper-parameter {name!r}: add it, and make "
        "the training loader from it, or give batch_arg_name"
    )


def _holding(owner: Any, name: str) -> list[Any]:
    parts = [] if owner is None else [owner, owner.hparams]
    return [one for one in parts if (name in one if isinstance(one, dict) else hasattr(one, name))]


def _get(holder: Any, name: str) -> Any:
    return holder[name] if isinstance(holder, dict) else getattr(holder, name)


def _set(holder: Any, name: str, value: Any) -> None:
    if isinstance(holder, dict):
        holder[name] = value
    else:
        setattr(holder, name, value)
