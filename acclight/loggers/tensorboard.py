"""TensorBoardLogger: scalars and hyper-parameters as TensorBoard event files."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from acclight.loggers.logger import IgnoreCalls, RunFolderLogger, as_number, flat, plain, writes_here

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardLogger(RunFolderLogger):
    """Writes event files into the run's folder: scalars at the optimizer step, hyper-parameters for TensorBoard's tabs.

    Args:
        save_dir: The folder of all experiments; what `tensorboard --logdir` takes.
        name: Of the experiment. An empty name leaves this level of folders out.
        version: A number n stands for the folder `version_n`, a string for the folder of that name. A run that is there
            already is continued: TensorBoard shows its event files as one. None: that of the run which a fit resumes,
            where it lies in the same folder, else the first number after those that are taken.
        **writer_arguments: Handed to `torch.utils.tensorboard.SummaryWriter`, for instance `flush_secs`.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str = "acclight_logs",
        version: int | str | None = None,
        **writer_arguments: Any,
    ) -> None:
        super().__init__(save_dir, name, version)
        self._writer: SummaryWriter | None = None
        self._writer_arguments = writer_arguments
        self._hparams: dict[str, Any] = {}
        self._session_end: Any = None

    @property
    def experiment(self) -> Any:
        """The `torch.utils.tensorboard.SummaryWriter` of this run, for images, histograms and the like."""
        if not writes_here():
            return IgnoreCalls()
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(log_dir=str(self.log_dir), **self._writer_arguments)
        return self._writer

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Writes one scalar per metric; see `Logger.log_metrics`.

        Raises:
            TypeError: For a value that is no single number.
        """
        writer = self.experiment
        for name, value in metrics.items():
            writer.add_scalar(name, as_number(name, value), step)

    def log_hyperparams(self, params: Mapping[str, Any] | Namespace) -> None:
        """Writes a table for the text tab (tag `hparams`) and the run's entry in the hparams tab."""
        if not writes_here():
            return
        from torch.utils.tensorboard.summary import hparams

        self._hparams |= plain(params)
        values = dict(flat(self._hparams))
        self._write_table("hparams", values)
        # SummaryWriter.add_hparams would open a second event file in a folder of its own, and end the session at once.
        experiment, session_start, self._session_end = hparams(values, {})  # type: ignore[no-untyped-call]
        self.experiment.file_writer.add_summary(experiment)
        self.experiment.file_writer.add_summary(session_start)

    def log_configuration(self, configuration: Mapping[str, Any]) -> None:
        """Writes a table for the text tab (tag `configuration`)."""
        if writes_here():
            self._write_table("configuration", dict(flat(plain(configuration))))

    def _write_table(self, tag: str, values: Mapping[str, Any]) -> None:
        rows = "".join(f"| {_cell(name)} | {_cell(str(value))} |\n" for name, value in values.items())
        self.experiment.add_text(tag, f"| name | value |\n| --- | --- |\n{rows}")

    def save(self) -> None:
        """Flushes the event file."""
        if self._writer is not None:
            self._writer.flush()

    def finalize(self, status: str) -> None:
        """Closes the event file; in the hparams tab a run that went well counts as done, another one as still open."""
        if self._writer is None:
            return
        if self._session_end is not None and status == "success":
            self.experiment.file_writer.add_summary(self._session_end)
            self._session_end = None
        self._writer.close()
        self._writer = None


def _cell(text: str) -> str:
    """Text for one cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")
