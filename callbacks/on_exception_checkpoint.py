"""OnExceptionCheckpoint: a checkpoint of the last whole step when an exception ends the training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from acclight import Callback
from acclight.messages import info, warn

if TYPE_CHECKING:
    from acclight import Trainer, TrainModule


class OnExceptionCheckpoint(Callback):
    """Saves when an exception, Ctrl-C among them, ends a fit in one process; `ckpt_path="auto"` goes on from there.

    The checkpoint holds the last whole step: the window that failed is trained anew. Random numbers that it has drawn are not
    drawn again. Nothing is saved before the first step, for a step that is saved already, or where the exception came while
    parameters were changed.

    With several processes nothing is saved, which is said when fit begins: a checkpoint is written by all ranks together, and
    those that have not failed wait elsewhere. There `ModelCheckpoint(every_n_train_steps=...)` bounds what is lost.

    Args:
        dirpath: The folder of the checkpoint. Default: ModelCheckpoint's, else `<default_root_dir>/checkpoints`.
        filename: The checkpoint's name is this and the step: "on_exception-step-00000120" by default.
    """

    runs_last = True

    def __init__(self, dirpath: str | Path | None = None, filename: str = "on_exception") -> None:
        if Path(filename).name != filename or filename in ("", ".."):
            raise ValueError(f"OnExceptionCheckpoint: filename={filename!r}: give a plain name, without folders")
        self.dirpath = None if dirpath is None else Path(dirpath).expanduser().absolute()
        self.filename = filename

    def search_folders(self) -> list[Path]:
        """Where checkpoints to resume from lie, beside ModelCheckpoint's."""
        return [] if self.dirpath is None else [self.dirpath]

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Says what it cannot do."""
        if trainer.world_size > 1:
            warn(
                f"OnExceptionCheckpoint saves nothing with {trainer.world_size} processes, which would have to fail together: "
                "use ModelCheckpoint(every_n_train_steps=...)"
            )

    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        """Saves, where that can be done."""
        if trainer.state != "fit" or trainer.world_size > 1 or trainer.global_step == 0:
            return
        if trainer.in_optimizer_step:
            warn("OnExceptionCheckpoint saves nothing: the exception came while parameters were changed")
            return
        callback = trainer.checkpoint_callback
        known = callback.dirpath if callback is not None else None
        folder = self.dirpath or Path(known or trainer.default_root_dir / "checkpoints")
        path = folder / f"{self.filename}-step-{trainer.global_step:08d}"
        if path.exists():
            return
        trainer.save_checkpoint(path)
        info(f"OnExceptionCheckpoint: saved {path}")
