"""CSVLogger: metrics as one CSV file that grows in both directions, hyper-parameters as JSON."""

from __future__ import annotations

import csv
import io
import json
import os
import warnings
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from acclight.loggers.logger import IgnoreCalls, RunFolderLogger, as_number, plain, writes_here


class CSVLogger(RunFolderLogger):
    """Writes `metrics.csv` (a row per call, a column per metric), `hparams.json` and `configuration.json` into the run's folder.

    Every row is handed to the operating system at once, so a run that is killed keeps it. Numbers are written with
    `repr`, so reading them gives the same floats; a metric that a row does not have is an empty cell. The first column
    is `step`.

    Args:
        save_dir: The folder of all experiments.
        name: Of the experiment. An empty name leaves this level of folders out.
        version: A number n stands for the folder `version_n`, a string for the folder of that name. A run that is there
            already is continued: rows are appended. None: that of the run which a fit resumes, where it lies in the same
            folder, else the first number after those that are taken.
    """

    def __init__(
        self, save_dir: str | os.PathLike[str], name: str = "acclight_logs", version: int | str | None = None
    ) -> None:
        super().__init__(save_dir, name, version)
        self._table: MetricsTable | None = None
        self._hparams: dict[str, Any] = {}

    @property
    def experiment(self) -> Any:
        """The `MetricsTable` of this run."""
        if not writes_here():
            return IgnoreCalls()
        if self._table is None:
            self._table = MetricsTable(self.log_dir / "metrics.csv")
        return self._table

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Appends one row; see `Logger.log_metrics`.

        Raises:
            ValueError: For a metric named "step", the name of the x axis.
            TypeError: For a value that is no single number.
            OSError: When the file cannot be written; names it.
        """
        if metrics:
            self.experiment.append({name: as_number(name, value) for name, value in metrics.items()}, step)

    def log_hyperparams(self, params: Mapping[str, Any] | Namespace) -> None:
        """Writes `hparams.json`; what earlier calls gave stays unless it is given again."""
        if not writes_here():
            return
        self._hparams |= plain(params)
        self._write("hparams.json", self._hparams)

    def log_configuration(self, configuration: Mapping[str, Any]) -> None:
        """Writes `configuration.json`."""
        if writes_here():
            self._write("configuration.json", plain(configuration))

    def _write(self, name: str, values: dict[str, Any]) -> None:
        path = self.log_dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{name}.tmp")
        temporary.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, path)

    def save(self) -> None:
        """Waits until the rows are on disk."""
        if self._table is not None:
            self._table.sync()

    def finalize(self, status: str) -> None:
        """Closes the file."""
        if self._table is not None:
            self._table.close()
            self._table = None


class MetricsTable:
    """A CSV file that takes rows with other columns than it has so far.

    Args:
        path: The file; one that is there is continued.

    Raises:
        ValueError: When the file there has no `step` as its first column, so that it is not one of these.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns: list[str] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size:
            _drop_torn_row(path)
        if path.exists() and path.stat().st_size:
            with path.open(newline="", encoding="utf-8") as existing:
                self.columns = next(csv.reader(existing), [])
            if self.columns[:1] != ["step"]:
                raise ValueError(
                    f"{path} was not written by CSVLogger: its first column is not 'step'; use another version or name"
                )
        self._file: TextIO = path.open("a", newline="", encoding="utf-8")

    def append(self, values: Mapping[str, int | float], step: int) -> None:
        """Adds a row, and first the columns that are new."""
        if "step" in values:
            raise ValueError("a metric named 'step' would hide CSVLogger's x axis; log it under another name")
        try:
            new = [name for name in values if name not in self.columns]
            if new or not self.columns:
                # The epoch goes next to the step.
                new.sort(key=lambda name: name != "epoch")
                self._widen(new)
            row = {name: repr(value) for name, value in values.items()} | {"step": repr(step)}
            self._file.write(_line([row.get(name, "") for name in self.columns]))
            self._file.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def sync(self) -> None:
        """Waits until the rows are on disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file; no more rows after this."""
        self._file.close()

    def _widen(self, new: list[str]) -> None:
        """Writes the file anew with more columns; the old one is complete until the new one takes its place."""
        columns = [*(self.columns or ["step"]), *new]
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        with temporary.open("w", newline="", encoding="utf-8") as wider:
            wider.write(_line(columns))
            if self.columns:
                self._file.flush()
                with self.path.open(newline="", encoding="utf-8") as existing:
                    rows = csv.reader(existing)
                    next(rows)
                    wider.writelines(_line(row + [""] * (len(columns) - len(row))) for row in rows)
            wider.flush()
            os.fsync(wider.fileno())
        os.replace(temporary, self.path)
        self._file.close()
        self._file = self.path.open("a", newline="", encoding="utf-8")
        self.columns = columns


def _line(cells: list[str]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(cells)
    return buffer.getvalue()


def _drop_torn_row(path: Path) -> None:
    """Takes away a last row without its line end: a write that a full disk or a power cut stopped midway."""
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        if file.read() == b"\n":
            return
    os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
    warnings.warn(f"{path}: the last row was cut off when the run ended and has been dropped", stacklevel=2)
