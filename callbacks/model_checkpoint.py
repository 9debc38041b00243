"""ModelCheckpoint: saves while training runs, and keeps the best or the newest."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from acclight import Callback, checkpoint
from acclight.callbacks.monitor import Monitor, is_logged, missing_metric
from acclight.messages import info, warn

if TYPE_CHECKING:
    from acclight import Trainer, TrainModule


@dataclass(frozen=True)
class Saved:
    """One checkpoint that this callback has written."""

    path: str
    step: int
    #: The monitored value of these weights; None where there was none at that step.
    score: float | None


class ModelCheckpoint(Callback):
    """Saves checkpoints at intervals and keeps the best ones by a metric, or the newest.

    Every interval counts optimizer steps or epochs; without one a checkpoint is written at the end of every epoch,
    after the validation there. A step is saved once, also where several intervals meet. The last step of a training is
    saved too, except with `every_n_train_steps`, which saves at its multiples only (`save_last` adds the last step).

    A score is the metric of the very weights that are saved. A save at a step without a validation has no score where
    validation logs the metric: it is kept as the newest until the next one, and is never the best. A score that is NaN
    counts as none. An older checkpoint is deleted only once the newer one is committed.

    A run that is resumed into another folder saves there as if it were the first, and deletes nothing in the old one;
    the best of the old folder stays `best_model_path` until a better one is saved.

    Args:
        dirpath: The folder of the checkpoints. Default: `checkpoints` in the run's folder (`trainer.log_dir`, such as
            `acclight_logs/version_0`), or in `trainer.default_root_dir` where no logger has a folder.
        filename: The name of a checkpoint, with metrics, `epoch` and `step` in braces: "{epoch}-{val/loss:.3f}" gives
            "epoch=3-val_loss=0.123". A metric without a value at that step is "nan". Where the name is taken, "-v1" and
            so on is added. Default: `step-00000120`.
        monitor: The metric that decides which checkpoints are the best. None: the newest are kept.
        verbose: Say which checkpoint was written, and its score.
        save_last: Keep the newest checkpoint in any case, and write one at the end of training (see `last_model_path`).
        save_top_k: How many checkpoints to keep; -1 for all, 0 for none.
        save_weights_only: Leave out optimizer, schedulers and positions; such a checkpoint cannot be resumed.
        mode: "min" where a smaller metric is better, "max" where a bigger one is.
        auto_insert_metric_name: Put `name=` before each value in `filename`.
        every_n_train_steps: Save when the number of optimizer steps is a multiple of this.
        train_time_interval: Save when this much time has passed since the last save. With several processes, rank 0's
            clock decides, at the steps where the trainer logs.
        every_n_epochs: Save at the end of every n-th epoch. 0: not at epochs.
        save_on_train_epoch_end: For epochs: True saves at the end of the training epoch, False after each validation.
            Default: after each validation where validation logs the metric, else at the end of the training epoch.
        asynchronous: Write while training goes on, from a copy on the CPU; the paths and scores below then know of a checkpoint
            once it is committed. The next save, and the end of training, wait for it. Default True.

    Attributes:
        best_model_path: The checkpoint with the best score, or the newest without `monitor`; empty when there is none.
        best_model_score: Its score, or None.
        best_k_models: Score by path.
        last_model_path: The newest checkpoint; empty when there is none.

    Raises:
        ValueError: For arguments that contradict each other, and for a `monitor` or a metric in `filename` that is not
            there after the first validation.
    """

    runs_last = True

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        *,
        verbose: bool = False,
        save_last: bool | None = None,
        save_top_k: int = 1,
        save_weights_only: bool = False,
        mode: str = "min",
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        asynchronous: bool = True,
    ) -> None:
        given: dict[str, Any] = {
            "every_n_train_steps": every_n_train_steps,
            "train_time_interval": train_time_interval,
            "every_n_epochs": every_n_epochs,
        }
        asked = [name for name, value in given.items() if value]
        if len(asked) > 1:
            raise ValueError(f"give one of {', '.join(asked)}: each is an interval of its own")
        for name in ("every_n_train_steps", "every_n_epochs"):
            if given[name] is not None and (not isinstance(given[name], int) or given[name] < 0):
                raise ValueError(f"{name}={given[name]!r} must be a whole number, 0 (off) or more")
        if train_time_interval is not None and not isinstance(train_time_interval, timedelta):
            raise TypeError(f"train_time_interval={train_time_interval!r} must be a datetime.timedelta")
        if save_top_k < -1:
            raise ValueError(f"save_top_k={save_top_k} must be -1 (keep all), 0 (keep none) or more")
        if save_last not in (None, True, False):
            raise ValueError(
                f"save_last={save_last!r} must be True or False; ckpt_path='last' finds the newest checkpoint"
            )
        if filename is not None and any("/" in literal for literal, *_ in Formatter().parse(filename)):
            raise ValueError(f"filename={filename!r} names a folder; give the folder as dirpath")
        self.dirpath = None if dirpath is None else str(dirpath)
        self.filename = filename
        self.monitor = monitor
        self.mode = mode
        self.verbose = verbose
        self.save_last = bool(save_last)
        self.save_top_k = save_top_k
        self.save_weights_only = save_weights_only
        self.auto_insert_metric_name = auto_insert_metric_name
        self.save_on_train_epoch_end = save_on_train_epoch_end
        self.asynchronous = asynchronous
        self._every_n_train_steps = every_n_train_steps or 0
        self._train_time_interval = train_time_interval
        none_given = all(value is None for value in given.values())
        self._every_n_epochs = 1 if none_given else every_n_epochs or 0
        self._save_at_end = self._every_n_epochs > 0 or train_time_interval is not None or self.save_last
        self._default_dirpath = dirpath is None
        self._watch = Monitor(monitor or "", mode)
        self._saved: list[Saved] = []
        # The best of another folder, from which the run was resumed; one entry at most.
        self._elsewhere: list[Saved] = []
        self._written: Saved | None = None
        self._decided_step = 0
        self._waits_for_validation = False
        self._saved_at = time.monotonic()
        self._names_checked = self._validated = False

    @property
    def state_key(self) -> str:
        """One for each metric and interval, so that several of these callbacks can be told apart in a checkpoint."""
        return (
            f"{type(self).__qualname__}(monitor={self.monitor}, mode={self.mode}, steps={self._every_n_train_steps}, "
            f"epochs={self._every_n_epochs}, time={self._train_time_interval})"
        )

    # -- what there is ------------------------------------------------------------------------------------------------

    @property
    def best_k_models(self) -> dict[str, float]:
        """Score by path, of the checkpoints that are kept for their score."""
        ranked = self._ranked(self._saved)
        best = ranked if self.save_top_k == -1 else ranked[: self.save_top_k]
        return {saved.path: saved.score for saved in best if saved.score is not None}

    @property
    def best_model_path(self) -> str:
        """The checkpoint with the best score, or the newest without `monitor`; empty when there is none."""
        if self.monitor is None:
            return self.last_model_path
        best = self._ranked([*self._elsewhere, *self._saved])
        return best[0].path if best else ""

    @property
    def best_model_score(self) -> float | None:
        """The score of `best_model_path`; None when there is none."""
        best = self._ranked([*self._elsewhere, *self._saved])
        return best[0].score if best else None

    @property
    def last_model_path(self) -> str:
        """The newest checkpoint; empty when there is none."""
        return self._saved[-1].path if self._saved else ""

    def search_folders(self) -> list[Path]:
        """Where checkpoints to resume from lie: `dirpath`, and by default also that folder of the other runs of its name."""
        if self.dirpath is None:
            return []
        folder = Path(self.dirpath)
        return [folder, *sorted(folder.parent.parent.glob(f"*/{folder.name}"))] if self._default_dirpath else [folder]

    def save(self, trainer: Trainer) -> None:
        """Saves now, whatever the score, unless this step is saved already. Every rank has to call it."""
        newest = self._written or (self._saved[-1] if self._saved else None)
        if newest is None or newest.step != trainer.global_step:
            score = self._score(trainer)
            # Without a score it is kept as the newest, also where the score is not among the best.
            self._save(trainer, score if score is None or self._is_among_best(score) else None)

    # -- hooks --------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """Decides the folder, the same on all ranks."""
        if stage == "fit":
            self._decide_folder(trainer)

    def _decide_folder(self, trainer: Trainer) -> None:
        if self._default_dirpath:
            self.dirpath = str(Path(trainer.log_dir or trainer.default_root_dir) / "checkpoints")
        self.dirpath = _of_rank_zero(os.path.abspath(os.path.expanduser(self.dirpath or "")))

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        """A run that begins at step 0 knows of no earlier one; one that goes on knows what is in its folder."""
        # Once more: a logger may have gone back to the run that is resumed.
        self._decide_folder(trainer)
        everything = [*self._elsewhere, *self._saved] if trainer.global_step > 0 else []
        self._saved = [saved for saved in everything if os.path.dirname(saved.path) == self.dirpath]
        self._elsewhere = self._ranked([saved for saved in everything if saved not in self._saved])[:1]
        self._decided_step = self._decided_step if trainer.global_step > 0 else 0
        self._written = None
        self._waits_for_validation = self._names_checked = self._validated = False
        self._saved_at = time.monotonic()

    def on_step(self, trainer: Trainer, module: TrainModule) -> None:
        """Saves where an interval of steps or time is over; where a validation follows, after it, with its score."""
        if self._every_n_train_steps:
            due = self._step_is_due(trainer)
        else:
            due = self._train_time_interval is not None and self._time_is_over(trainer)
        if due and self.monitor is not None and trainer.validation_due:
            self._waits_for_validation = True
        elif due:
            self._save_if_good(trainer)

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Saves where the validation's metric decides."""
        if not trainer.fitting:
            return
        self._validated = True
        self._check_names(trainer, may_come=trainer.logs_at_epoch_end)
        if self.monitor is not None:
            self._watch.observe(trainer)
            self._add_score(trainer)
        # After a resume it may be the validation of a step before, which this one has not seen.
        of_step = self._waits_for_validation or (self.monitor is not None and self._step_is_due(trainer))
        due = of_step or (self._epoch_is_due(trainer) and self._saves_after_validation(trainer))
        self._waits_for_validation = False
        if due:
            self._save_if_good(trainer)

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Saves where epochs are counted."""
        if self._validated or not trainer.num_val_batches:
            self._check_names(trainer)
        if self.monitor is not None:
            self._watch.observe(trainer)
        if self._epoch_is_due(trainer) and (
            self.save_on_train_epoch_end
            or (self.save_on_train_epoch_end is None and (self.monitor is None or self._watch.is_fresh(trainer)))
        ):
            self._save_if_good(trainer)

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Saves the last step where no interval has come to it."""
        if self._save_at_end and self._saves_any and trainer.global_step not in (0, self._decided_step):
            self.save(trainer)

    def on_fit_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Deletes what a run that died after its last commit could not, where the resumed run has saved nothing."""
        self._prune(trainer)

    def on_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: Path) -> None:
        """Deletes what is no longer kept, now that the newer checkpoint is committed."""
        if self._written is None or Path(self._written.path) != checkpoint:
            return
        # A damaged checkpoint may have been replaced under its own name.
        self._saved = [saved for saved in self._saved if saved.path != self._written.path] + [self._written]
        self._written = None
        self._prune(trainer)

    def state_dict(self) -> dict[str, Any]:
        """The checkpoints that are there, with their scores, and the one that is being written."""
        # With those that are deleted after the commit: should it not come to that, the resumed run deletes them.
        saved = [*self._elsewhere, *self._saved, *([] if self._written is None else [self._written])]
        return {"saved": [asdict(entry) for entry in saved], "decided_step": self._decided_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on with the checkpoints of the run that is resumed."""
        self._saved, self._elsewhere = [Saved(**saved) for saved in state_dict["saved"]], []
        self._decided_step = state_dict["decided_step"]

    # -- when ---------------------------------------------------------------------------------------------------------

    @property
    def _saves_any(self) -> bool:
        return self.save_top_k != 0 or self.save_last

    def _step_is_due(self, trainer: Trainer) -> bool:
        return self._every_n_train_steps > 0 and trainer.global_step % self._every_n_train_steps == 0

    def _epoch_is_due(self, trainer: Trainer) -> bool:
        return self._every_n_epochs > 0 and (trainer.current_epoch + 1) % self._every_n_epochs == 0

    def _saves_after_validation(self, trainer: Trainer) -> bool:
        """Whether an epoch's checkpoint is written after this validation, not at the end of the training epoch."""
        if self.save_on_train_epoch_end is not None:
            return not self.save_on_train_epoch_end
        ends_epoch = isinstance(trainer.val_check_interval, float) and trainer.val_check_interval == 1.0
        return self.monitor is not None and self._watch.is_fresh(trainer) and not ends_epoch

    def _time_is_over(self, trainer: Trainer) -> bool:
        assert self._train_time_interval is not None
        several = trainer.world_size > 1
        if several and trainer.global_step % max(trainer.log_every_n_steps, 1):
            return False
        over = time.monotonic() - self._saved_at >= self._train_time_interval.total_seconds()
        return bool(_of_rank_zero(over)) if several else over

    def _check_names(self, trainer: Trainer, *, may_come: bool = False) -> None:
        """Raises for a monitor or a metric in `filename` that neither training nor validation has logged.

        Args:
            trainer: The Trainer.
            may_come: What is missing may be logged at the end of the epoch.
        """
        # Right after a resume, nobody knows yet what training logs.
        if self._names_checked or not trainer.steps_of_fit:
            return
        named = [] if self.monitor is None else [(f"monitor={self.monitor!r}", self.monitor)]
        in_filename = [
            name for _, name, _, _ in Formatter().parse(self.filename or "") if name not in (None, "epoch", "step")
        ]
        named += [(f"filename={self.filename!r}", str(name)) for name in in_filename]
        missing = [(argument, name) for argument, name in named if not is_logged(trainer, name)]
        if missing and may_come:
            return
        self._names_checked = True
        if missing:
            argument, name = missing[0]
            raise ValueError(missing_metric(trainer, f"ModelCheckpoint({argument})", name))

    # -- what ---------------------------------------------------------------------------------------------------------

    def _score(self, trainer: Trainer) -> float | None:
        value = None if self.monitor is None else self._watch.value(trainer)
        return None if value is None or math.isnan(value) else value

    def _add_score(self, trainer: Trainer) -> None:
        """Gives the checkpoint of this step its score where nobody could know that a validation would follow."""
        written = self._written
        if written is not None and written.step == trainer.global_step and written.score is None:
            self._written = replace(written, score=self._score(trainer))
        elif self._saved and self._saved[-1].step == trainer.global_step and self._saved[-1].score is None:
            self._saved = [*self._saved[:-1], replace(self._saved[-1], score=self._score(trainer))]
            self._prune(trainer)

    def _ranked(self, saved: list[Saved]) -> list[Saved]:
        """Those with a score, the best first; of equal ones the older first."""
        scored = [entry for entry in saved if entry.score is not None]
        return sorted(scored, key=lambda entry: entry.score or 0.0, reverse=self.mode == "max")

    def _kept(self, saved: list[Saved]) -> list[Saved]:
        """Those that stay, in the order in which they were saved."""
        if self.save_top_k == -1 or not saved:
            return saved
        if self.monitor is None:
            kept = saved[-self.save_top_k :] if self.save_top_k else []
        else:
            kept = self._ranked(saved)[: self.save_top_k]
        newest = saved[-1]
        # The newest without a score may be all that a resume could go on from.
        return [
            entry for entry in saved if entry in kept or (entry is newest and (self.save_last or newest.score is None))
        ]

    def _prune(self, trainer: Trainer) -> None:
        """Deletes what is no longer kept; only called when the newest is committed."""
        outdated = [saved for saved in self._saved if saved not in self._kept(self._saved)]
        self._saved = [saved for saved in self._saved if saved not in outdated]
        if trainer.is_global_zero:
            for saved in outdated:
                _delete(saved.path)

    def _is_among_best(self, score: float) -> bool:
        ranked = self._ranked(self._saved)
        if self.save_top_k == -1 or len(ranked) < self.save_top_k:
            return True
        worst = ranked[self.save_top_k - 1].score if self.save_top_k else None
        return worst is not None and self._watch.better(score, worst)

    def _save_if_good(self, trainer: Trainer) -> None:
        if not self._saves_any or self._decided_step == trainer.global_step:
            return
        # The one before may still be written: whether this one is among the best depends on it.
        trainer.finish_saving()
        score = self._score(trainer)
        if score is None or self.save_last or self._is_among_best(score):
            self._save(trainer, score)
        self._decided_step = trainer.global_step

    def _save(self, trainer: Trainer, score: float | None) -> None:
        path = self._path(trainer)
        # Inside a window it is written at the window's end; on_checkpoint says when it is committed.
        self._written = Saved(path, trainer.global_step, score)
        self._decided_step = trainer.global_step
        self._saved_at = time.monotonic()
        trainer.save_checkpoint(path, weights_only=self.save_weights_only, asynchronous=self.asynchronous)
        if self.verbose:
            info(f"saving {path}" + ("" if score is None else f" with {self.monitor} = {score:g}"))

    def _path(self, trainer: Trainer) -> str:
        """Where the next checkpoint goes: a name that no good checkpoint has. The same on all ranks."""
        if self.filename is None:
            name = f"step-{trainer.global_step:08d}"
        else:
            values = {name: value.item() for name, value in trainer.callback_metrics.items()}
            if self.monitor in values and not self._watch.is_fresh(trainer):
                values[self.monitor] = math.nan
            values |= {"epoch": trainer.current_epoch, "step": trainer.global_step}
            name = checkpoint_name(self.filename, values, insert_names=self.auto_insert_metric_name)
        path, version = Path(self.dirpath or "", name), 0
        while trainer.is_global_zero and path.exists() and not checkpoint.verify(path):
            version += 1
            path = path.with_name(f"{name}-v{version}")
        return str(_of_rank_zero(str(path)))


def checkpoint_name(template: str, values: Mapping[str, float], *, insert_names: bool = True) -> str:
    """Fills the names in braces of a template: "{epoch}-{val/loss:.3f}" becomes "epoch=3-val_loss=0.123".

    Args:
        template: The text; names may have a format after a colon.
        values: By name; one that is not there is "nan".
        insert_names: Put `name=` before each value, with "_" for "/".

    Raises:
        ValueError: For a format that does not fit its value.
    """
    parts = []
    for literal, name, spec, _ in Formatter().parse(template):
        parts.append(literal)
        if name is None:
            continue
        if insert_names:
            parts.append(f"{name.replace('/', '_')}=")
        value = values.get(name, math.nan)
        try:
            parts.append("nan" if math.isnan(value) else format(value, spec or ""))
        except ValueError as error:
            raise ValueError(
                f"filename={template!r}: the value {value!r} of {name!r} has no format {spec!r}"
            ) from error
    return "".join(parts)


def _of_rank_zero(value: Any) -> Any:
    """Rank 0's value on every rank; every rank has to ask."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _delete(path: str) -> None:
    """Deletes a checkpoint. A disk that refuses is no reason to lose the training."""
    try:
        checkpoint.remove(path)
    except (OSError, checkpoint.CheckpointError) as error:
        warn(f"the outdated checkpoint {path} could not be deleted: {error}")
