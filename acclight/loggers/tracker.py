"""TrackerLogger: metrics and hyper-parameters to one of Accelerate's trackers (Weights & Biases, MLflow and others)."""

from __future__ import annotations

import difflib
import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from accelerate.state import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers
from accelerate.utils import DistributedType

from acclight.loggers.logger import IgnoreCalls, Logger, as_number, flat, plain, writes_here


@dataclass(frozen=True)
class _Service:
    """What Accelerate's tracker leaves to its user.

    Attributes:
        install: What pip installs for it.
        run_of: A started run -> what names it.
        continuing: That name -> the arguments with which the tracker goes on with the run.
        project_variable: Names the project where the script does not, and where the tracker does not read it itself.
        root: A folder -> the arguments with which local files go there.
    """

    install: str
    run_of: Callable[[Any], str] | None = None
    continuing: Callable[[str], dict[str, Any]] = lambda run: {}
    project_variable: str = ""
    root: Callable[[Path], dict[str, Any]] = lambda folder: {}


_SERVICES = {
    "aim": _Service("aim", lambda run: run.hash, lambda run: {"run_hash": run}),
    # An offset of 0: ClearML would otherwise add the steps that the run has behind it to the x axis.
    "clearml": _Service(
        "clearml", lambda task: task.id, lambda run: {"reuse_last_task_id": run, "continue_last_task": 0}
    ),
    "comet_ml": _Service(
        "comet_ml", lambda experiment: experiment.get_key(), lambda run: {"experiment_key": run}, "COMET_PROJECT_NAME"
    ),
    # A folder that is not resumed is emptied.
    "dvclive": _Service(
        "dvclive", lambda live: live.dir, lambda run: {"dir": run, "resume": True},
        root=lambda folder: {"dir": str(folder / "dvclive")},
    ),
    "mlflow": _Service("mlflow", lambda run: run.info.run_id, lambda run: {"run_id": run}),
    "swanlab": _Service("swanlab", lambda run: run.id, lambda run: {"id": run, "resume": "allow"}),
    "tensorboard": _Service("tensorboard", lambda writer: str(writer.log_dir)),
    "trackio": _Service("trackio", lambda run: run.name, lambda run: {"name": run, "resume": "allow"}),
    "wandb": _Service(
        "wandb", lambda run: run.id, lambda run: {"id": run, "resume": "allow"}, "WANDB_PROJECT",
        root=lambda folder: {"dir": str(folder)},
    ),
}  # fmt: skip


class TrackerLogger(Logger):
    """Writes to a tracker of Accelerate's, over the optimizer steps.

    The run is opened when something is written for the first time. A later fit goes on with it, and so does one that resumes
    from a checkpoint, where the tracker can: all of Accelerate's can, and TensorBoard by its folder.

    Args:
        name: "aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio" or "wandb", a name given to
            `accelerate.tracking.register_tracker_class`, or a `GeneralTracker`.
        project: The project, or experiment, that holds the run. Default: what the tracker's own environment variable says, else
            "acclight_logs".
        **arguments: Of the tracker: `wandb.init`'s, `mlflow.start_run`'s and so on, and `logging_dir`.

    Raises:
        ValueError: For an unknown name; it gives the nearest one.
        ImportError: When the tracker's package is not installed.
    """

    def __init__(self, name: str | GeneralTracker, *, project: str | None = None, **arguments: Any) -> None:
        self._given = None if isinstance(name, str) else name
        self.name = name if isinstance(name, str) else name.name
        if self._given is None:
            _check_name(self.name)
        elif arguments:
            raise ValueError(f"TrackerLogger({self.name!r}): give {', '.join(arguments)} to the tracker object itself")
        self._service = _SERVICES.get(self.name, _Service(self.name)) if self._given is None else _Service(self.name)
        self.project = project or os.environ.get(self._service.project_variable) or "acclight_logs"
        #: Where local files go when the arguments do not say; the Trainer gives its default_root_dir.
        self.root: Path | None = None
        self._arguments = arguments
        self._tracker: Any = None
        self._broken: Exception | None = None
        self._run: str | None = None
        #: Hyper-parameters and configuration: what there is, and what the run has.
        self._values: dict[str, bool | int | float | str] = {}
        self._sent: dict[str, bool | int | float | str] = {}

    @property
    def state_key(self) -> str:
        return f"{type(self).__name__}/{self.name}/{self.project}"

    @property
    def experiment(self) -> Any:
        """The tracker's own run: `wandb`'s Run, `mlflow`'s ActiveRun and so on."""
        return self._open().tracker if writes_here() else IgnoreCalls()

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Writes one value per metric; see `Logger.log_metrics`.

        Raises:
            TypeError: For a value that is no single number.
        """
        if not writes_here():
            return
        values = {name: as_number(name, value) for name, value in metrics.items()}
        self._send_values()
        with _rank_zero():
            if self.name == "wandb":
                # Its own step only grows: what a resumed run does again would be dropped.
                self._open().log({**values, "global_step": step})
            else:
                self._open().log(values, step=step)

    def log_hyperparams(self, params: Mapping[str, Any] | Namespace) -> None:
        """Takes hyper-parameters, nested ones as "a/b"; they are sent once, before the first metrics or by `save`."""
        self._values |= dict(flat(plain(params)))

    def log_configuration(self, configuration: Mapping[str, Any]) -> None:
        """Takes what is in force, among the hyper-parameters as "trainer/...". Sent with them."""
        self._values |= dict(flat(plain(configuration), "trainer/"))

    def save(self) -> None:
        """Sends the hyper-parameters."""
        if writes_here():
            self._send_values()

    def finalize(self, status: str) -> None:
        """Closes the run; Weights & Biases and MLflow are told when it did not go well."""
        tracker, self._tracker = self._tracker, None
        self._broken = None
        if tracker is None:
            return
        with _rank_zero():
            if status != "success" and self._given is None and self.name == "wandb":
                tracker.tracker.finish(exit_code=1)
            elif status != "success" and self._given is None and self.name == "mlflow":
                import_module("mlflow").end_run("KILLED" if status == "interrupted" else "FAILED")
            else:
                tracker.finish()

    def state_dict(self) -> dict[str, Any]:
        return {"run": self._run, "sent": dict(self._sent)} if self._run else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._tracker is None:
            self._run, self._sent = state["run"], dict(state["sent"])

    def _open(self) -> Any:
        if self._broken is not None:
            # One attempt a run: each may wait for a network that is not there.
            raise self._broken
        if self._tracker is None:
            try:
                with _rank_zero():
                    self._tracker = self._start()
            except Exception as error:
                self._broken = error
                raise
        return self._tracker

    def _start(self) -> Any:
        tracker = self._make() if self._given is None else self._given
        # Accelerate would ask its process state at every call; only rank 0 comes here.
        tracker.main_process_only = False
        tracker.start()
        if self._service.run_of is not None:
            run = self._service.run_of(tracker.tracker)
            if run != self._run or self.name == "trackio":
                # trackio replaces the hyper-parameters of a run that it goes on with by those it is opened with.
                self._run, self._sent = run, {}
        if self.name == "wandb" and self._given is None:
            tracker.tracker.define_metric("global_step")
            tracker.tracker.define_metric("*", step_metric="global_step")
        return tracker

    def _make(self) -> Any:
        made = LOGGER_TYPE_TO_CLASS[self.name]
        arguments: dict[str, Any] = {}
        # In the working directory the tracker's own way, environment variables included, is right.
        if self.root is not None and self.root != Path.cwd():
            arguments |= self._service.root(self.root)
        if self._run is not None:
            arguments |= self._service.continuing(self._run)
        arguments |= self._arguments
        if not made.requires_logging_directory:
            return made(self.project, **arguments)
        folder = arguments.pop("logging_dir", self.root or ".")
        return made(self.project, str(folder), **arguments)

    def _send_values(self) -> None:
        if not self._values:
            return
        tracker = self._open()
        if all(self._sent.get(name) == value for name, value in self._values.items()):
            return
        values = dict(self._values)
        if self.name == "mlflow":
            # A parameter of MLflow's cannot change; a run that is continued keeps the one it began with.
            values = {name: value for name, value in values.items() if name not in self._sent}
        with _rank_zero():
            # Noted first: a tracker that refuses them is not asked again with every row.
            self._sent = dict(self._values)
            tracker.store_init_configuration(values)


def _check_name(name: str) -> None:
    known = sorted({*_SERVICES, *LOGGER_TYPE_TO_CLASS})
    if name not in LOGGER_TYPE_TO_CLASS:
        near = difflib.get_close_matches(name.lower(), known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"logger={name!r} is unknown{hint} Known are: {', '.join([*known, 'csv'])}")
    if name in _SERVICES and name not in [str(one) for one in get_available_trackers()]:
        raise ImportError(
            f"logger={name!r} needs the package {name}, which is not installed: `pip install {_SERVICES[name].install}`"
        )


@contextmanager
def _rank_zero() -> Iterator[None]:
    """Lets Accelerate's trackers speak, whose logging refuses to without a process state; a Trainer that runs has one."""
    before = PartialState._shared_state
    if before:
        yield
        return
    state = type(before)()
    state.update(process_index=0, local_process_index=0, num_processes=1, distributed_type=DistributedType.NO)
    PartialState._shared_state = state
    try:
        yield
    finally:
        PartialState._shared_state = before
