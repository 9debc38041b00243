"""Runs test code in several real processes, under a wall-clock limit, and brings every rank's values or traceback back.

Three ways in:

- `RankChecks`: many checks, of all modules, share one group of processes; each check is a pytest test of its own.
- `run_ranks`: one function, or one script, once on every rank of a fresh group.
- `run_command`: any command line (`accelerate launch`, `torchrun`), ended with all its children at the limit.

No port is picked in advance: the test process itself hosts the rendezvous store, on a port that the system gave it, as
torchrun's agent does. Arguments and values travel as JSON and safetensors.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import inspect
import json
import os
import reprlib
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, cast

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parent.parent

_POLL_SECONDS = 0.01
_LINES_SHOWN = 120
_LAUNCH_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
_LAUNCH_PREFIXES = ("ACCELERATE_", "FSDP_", "TORCHELASTIC_", "PYTEST_")

# A rank that hangs is ended by SIGABRT, which prints where it hangs; it need not write its memory to disk as well.
resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


# --- values in files -------------------------------------------------------------------------------------------------


def write_values(path: Path, value: Any) -> None:
    """Writes a value as `path` (JSON), its tensors beside it as safetensors; the JSON file appears whole or not at all.

    Args:
        path: The JSON file.
        value: None, bool, int, float, str, Path, tensor, and lists, tuples (they come back as lists), dicts of these.

    Raises:
        TypeError: For anything else, with the place in the value.
    """
    tensors: dict[str, torch.Tensor] = {}
    tree = _pack(value, tensors, "value")
    if tensors:
        save_file(tensors, path.with_suffix(".safetensors"))
    part = path.with_suffix(".part")
    part.write_text(json.dumps(tree))
    part.replace(path)


def read_values(path: Path) -> Any:
    """Reads what `write_values` wrote; tensors come back on the CPU."""
    beside = path.with_suffix(".safetensors")
    return _unpack(json.loads(path.read_text()), load_file(beside) if beside.exists() else {})


def _pack(value: Any, tensors: dict[str, torch.Tensor], where: str) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Path):
        return {"$path": str(value)}
    if isinstance(value, torch.nn.Parameter) or type(value) is torch.Tensor:
        name = str(len(tensors))
        # A clone: safetensors refuses tensors that share memory.
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {"$tensor": name}
    if isinstance(value, list | tuple):
        return [_pack(item, tensors, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if type(key) is not str or key.startswith("$"):
                raise TypeError(f"{where} has the key {key!r}; only strings that do not start with '$' can be sent")
        return {key: _pack(item, tensors, f"{where}[{key!r}]") for key, item in value.items()}
    raise TypeError(f"{where} is a {type(value).__name__}; only plain values, paths and plain tensors can be sent")


def _unpack(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(tree, list):
        return [_unpack(item, tensors) for item in tree]
    if isinstance(tree, dict):
        if tree.keys() == {"$path"}:
            return Path(tree["$path"])
        if tree.keys() == {"$tensor"}:
            return tensors[tree["$tensor"]]
        return {key: _unpack(item, tensors) for key, item in tree.items()}
    return tree


# --- processes -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankReport:
    """What is known of one rank after a failure.

    Attributes:
        rank: Its number.
        returncode: As for `subprocess.Popen`: negative for a signal.
        killed: True when the harness ended it (at the limit, or because another rank had failed).
        error: The traceback of what the function raised, if it raised.
        output: Standard output and error together.
    """

    rank: int
    returncode: int
    killed: bool
    error: str | None
    output: str


class RanksFailed(AssertionError):
    """At least one rank failed, died or ran past the limit.

    Attributes:
        reports: One report per rank, in order.
    """

    def __init__(self, message: str, reports: Sequence[RankReport]) -> None:
        self.reports = list(reports)
        parts = [message]
        for report in self.reports:
            state = "was ended by the harness" if report.killed else f"ended with code {report.returncode}"
            parts.append(f"--- rank {report.rank} {'raised' if report.error else state} ---")
            if report.error is not None:
                parts.append(report.error.rstrip())
            lines = report.output.rstrip().splitlines()
            if len(lines) > _LINES_SHOWN:
                parts.append(f"[{len(lines) - _LINES_SHOWN} lines before]")
            parts.extend(lines[-_LINES_SHOWN:])
        super().__init__("\n".join(parts))


def clean_environment() -> dict[str, str]:
    """This process's environment for a child: without a launcher's variables, one thread per process, CPU only."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCH_NAMES and not name.startswith(_LAUNCH_PREFIXES)
    }
    environment.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", PYTHONFAULTHANDLER="1", PYTHONUNBUFFERED="1")
    if sys.platform == "linux":
        # Gloo looks the host's own name up otherwise, and not every machine knows its name.
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    return environment


def _with(environment: dict[str, str], changes: Mapping[str, str | None] | None) -> dict[str, str]:
    for name, value in (changes or {}).items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    return environment


def _end(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """Ends processes with all that they started. Each must lead a process group of its own."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.send_signal(signal.SIGABRT)
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline and any(process.poll() is None for process in running):
        time.sleep(_POLL_SECONDS)
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class RankGroup:
    """Processes of one group, started together and ended together.

    Args:
        argv: The command of every rank.
        folder: An existing folder for the ranks' output and working directory.
        world_size: How many ranks.
        env: Environment variables to set, or to take away (None), on every rank.
    """

    def __init__(
        self, argv: Sequence[str], folder: Path, *, world_size: int, env: Mapping[str, str | None] | None = None
    ) -> None:
        self.folder = folder
        self.world_size = world_size
        self.processes: list[subprocess.Popen[bytes]] = []
        self._killed: set[int] = set()
        self._calls = 0
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )
        for rank in range(world_size):
            environment = clean_environment()
            environment.update(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(world_size),
                LOCAL_WORLD_SIZE=str(world_size),
                GROUP_RANK="0",
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(self._store.port),
                TORCHELASTIC_USE_AGENT_STORE="True",
            )
            with open(self._output(rank), "wb") as output:
                self.processes.append(
                    subprocess.Popen(
                        list(argv),
                        stdin=subprocess.PIPE,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        cwd=folder,
                        env=_with(environment, env),
                        start_new_session=True,
                    )
                )

    def _output(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.txt"

    def output(self, rank: int) -> str:
        """What a rank has printed so far."""
        return self._output(rank).read_text(errors="replace")

    def call(
        self, function: str, args: Mapping[str, Any] | Sequence[Any], *, timeout: float, grace: float
    ) -> list[Any]:
        """Runs one function on every rank and returns their values in rank order.

        Args:
            function: "module:function", importable on every rank.
            args: Its positional or its keyword arguments.
            timeout: Seconds until the ranks are ended.
            grace: Seconds the other ranks may go on once one has failed.

        Raises:
            RanksFailed: After which the group is ended.
            pytest.skip.Exception: Where every rank skipped.
        """
        number, self._calls = self._calls, self._calls + 1
        write_values(self.folder / f"call-{number}.json", {"function": function, "args": args, "limit": timeout + 5.0})
        for process in self.processes:
            assert process.stdin is not None
            # A rank that is gone already is found below.
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(b"%d\n" % number)
                process.stdin.flush()
        results = [self.folder / f"result-{number}-{rank}.json" for rank in range(self.world_size)]
        in_time = self._wait(
            done=lambda rank: results[rank].exists(),
            failed=lambda rank: self.processes[rank].poll() is not None,
            timeout=timeout,
            grace=grace,
        )
        outcomes: list[dict[str, Any]] = [read_values(result) if result.exists() else {} for result in results]
        if all("value" in outcome for outcome in outcomes):
            return [outcome["value"] for outcome in outcomes]
        if all("skip" in outcome for outcome in outcomes):
            pytest.skip(outcomes[0]["skip"])
        self.end()
        raised = [rank for rank, outcome in enumerate(outcomes) if outcome.keys() & {"error", "skip"}]
        if raised:
            first = min(raised, key=lambda rank: results[rank].stat().st_mtime_ns)
            message = f"{function} failed on rank {first}"
            message += f" first, then on {sorted(set(raised) - {first})}" if len(raised) > 1 else ""
        elif in_time:
            message = f"{function}: a rank died"
        else:
            message = f"{function} ran past its limit of {timeout:g} s"
        raise RanksFailed(message, self._reports(outcomes))

    def _wait(self, done: Callable[[int], bool], failed: Callable[[int], bool], timeout: float, grace: float) -> bool:
        """Waits until every rank is done or has failed; False when the limit came before any failure."""
        deadline = time.monotonic() + timeout
        any_failed = False
        while time.monotonic() < deadline:
            bad = [failed(rank) for rank in range(self.world_size)]
            if all(bad[rank] or done(rank) for rank in range(self.world_size)):
                return True
            if any(bad) and not any_failed:
                any_failed = True
                deadline = min(deadline, time.monotonic() + grace)
            time.sleep(_POLL_SECONDS)
        return any_failed

    def wait(self, *, timeout: float, grace: float) -> list[str]:
        """Waits for the ranks to end by themselves and returns their outputs; RanksFailed unless all end with 0."""
        for process in self.processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        in_time = self._wait(
            done=lambda rank: self.processes[rank].poll() == 0,
            failed=lambda rank: self.processes[rank].poll() not in (None, 0),
            timeout=timeout,
            grace=grace,
        )
        self.end()
        if any(process.returncode != 0 for process in self.processes):
            message = "a rank did not end well" if in_time else f"the ranks ran past their limit of {timeout:g} s"
            raise RanksFailed(message, self._reports([{}] * self.world_size))
        return [self.output(rank) for rank in range(self.world_size)]

    def end(self) -> None:
        """Ends all ranks and what they started. Does nothing to those that have ended."""
        self._killed |= {rank for rank, process in enumerate(self.processes) if process.poll() is None}
        _end(self.processes)

    def _reports(self, outcomes: Sequence[Mapping[str, Any]]) -> list[RankReport]:
        return [
            RankReport(
                rank=rank,
                returncode=process.returncode,
                killed=rank in self._killed and "error" not in outcome,
                error=outcome.get("error"),
                output=self.output(rank),
            )
            for rank, (process, outcome) in enumerate(zip(self.processes, outcomes, strict=True))
        ]

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


def _function_group(
    folder: Path, *, world_size: int, backend: str | None, env: Mapping[str, str | None] | None
) -> RankGroup:
    argv = [sys.executable, "-m", "tests.distributed", str(folder), backend or ""]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return RankGroup(argv, folder, world_size=world_size, env={"PYTHONPATH": paths, **(env or {})})


def _address(function: Callable[..., Any]) -> str:
    if "<" in function.__qualname__:
        raise ValueError(
            f"{function.__qualname__} is out of reach for other processes; define it at the top of its module"
        )
    return f"{function.__module__}:{function.__qualname__}"


def run_ranks(
    target: Callable[..., Any] | str | Path,
    args: Sequence[Any] = (),
    *,
    world_size: int = 2,
    timeout: float = 120.0,
    grace: float = 10.0,
    backend: str | None = None,
    env: Mapping[str, str | None] | None = None,
) -> list[Any]:
    """Runs a function or a script once on every rank of a fresh group.

    Each rank is a process with torchrun's environment, one thread and no GPU; it works in an empty folder.

    Args:
        target: A module-level function, "module:function", or the Path of a script.
        args: Positional arguments (plain values, paths, tensors), or a script's command line.
        world_size: How many ranks.
        timeout: Seconds for all, start included; then the ranks are ended with all that they started.
        grace: Seconds the other ranks may go on once one has failed.
        backend: The process group to be in when the function is called; None leaves joining to the function.
        env: Environment variables to set, or to take away (None).

    Returns:
        Per rank what the function returned (tuples as lists), or what the script printed.

    Raises:
        RanksFailed: When a rank raises, dies, or runs past the limit.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        if isinstance(target, Path):
            argv = [sys.executable, str(target.resolve()), *map(str, args)]
            with RankGroup(argv, folder, world_size=world_size, env=env) as group:
                return list(group.wait(timeout=timeout, grace=grace))
        address = target if isinstance(target, str) else _address(target)
        with _function_group(folder, world_size=world_size, backend=backend, env=env) as group:
            values = group.call(address, args, timeout=timeout, grace=grace)
            group.wait(timeout=timeout, grace=grace)
            return values


class RankChecks:
    """Makes pytest tests of functions that run on every rank of one shared group.

    The group starts with the first test that needs it, serves the tests of every module that asks for such a group, and
    ends with the session: starting ranks costs more than most tests. A test that fails or hangs ends the group; the next
    one gets a fresh one, so that no test inherits another's half-done collectives.

        on_two_ranks = RankChecks(world_size=2, backend="gloo")

        @on_two_ranks
        def test_sum(tmp_path: Path) -> None:  # runs on both ranks, with the same arguments
            ...

    Arguments come from pytest (fixtures, parametrize) and must be plain values, paths or tensors. `tmp_path` is one
    folder that all ranks share.

    Args:
        world_size: How many ranks.
        backend: The process group to be in when a check runs; None leaves joining to the checks.
        timeout: Seconds for one check; the first also pays for the start.
        grace: Seconds the other ranks may go on once one has failed.
    """

    # The groups that run, by world size and backend.
    _groups: ClassVar[dict[tuple[int, str | None], RankGroup]] = {}

    def __init__(
        self, *, world_size: int = 2, backend: str | None = None, timeout: float = 60.0, grace: float = 5.0
    ) -> None:
        self._key = (world_size, backend)
        self._timeout = timeout
        self._grace = grace

    def __call__(self, function: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(function)
        def test(request: pytest.FixtureRequest, **arguments: Any) -> None:
            self.call(function, arguments, request.session)

        parameters = list(inspect.signature(function).parameters.values())
        own = inspect.Parameter("request", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        cast(Any, test).__signature__ = inspect.Signature([own, *parameters])
        cast(Any, test).on_each_rank = function
        return test

    def call(self, function: Callable[..., Any], arguments: Mapping[str, Any], session: pytest.Session) -> list[Any]:
        """Runs a function of a test module on every rank, for a fixture say, and returns their values in rank order."""
        if self._key not in self._groups:
            world_size, backend = self._key
            folder = tempfile.TemporaryDirectory(prefix="ranks-")
            self._groups[self._key] = _function_group(
                Path(folder.name), world_size=world_size, backend=backend, env=None
            )
            session.addfinalizer(folder.cleanup)
            session.addfinalizer(self.close)
        try:
            return self._groups[self._key].call(_address(function), arguments, timeout=self._timeout, grace=self._grace)
        except pytest.skip.Exception:
            raise
        except BaseException as error:
            self._groups.pop(self._key).end()
            if isinstance(error, RanksFailed):
                # The ranks' tracebacks are the ones of interest.
                pytest.fail(str(error), pytrace=False)
            raise

    def close(self) -> None:
        """Lets the ranks end by themselves; raises RanksFailed when they do not end well."""
        group = self._groups.pop(self._key, None)
        if group is not None:
            group.wait(timeout=self._timeout, grace=self._grace)


def run_command(
    argv: Sequence[str | Path],
    *,
    timeout: float = 120.0,
    cwd: Path | None = None,
    env: Mapping[str, str | None] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs a command line without a terminal; at the limit it is ended with all that it started.

    `accelerate launch --main_process_port 0` and `torchrun --rdzv-backend c10d --rdzv-endpoint localhost:0` take a free
    port themselves.

    Args:
        argv: The program and its arguments.
        timeout: Seconds.
        cwd: Its working directory.
        env: Environment variables to set, or to take away (None).

    Returns:
        The exit code, and standard output and error together as `stdout`.

    Raises:
        RanksFailed: When it runs past the limit.
    """
    with tempfile.NamedTemporaryFile(prefix="command-") as output:
        process = subprocess.Popen(
            [str(part) for part in argv],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env=_with(clean_environment(), env),
            start_new_session=True,
        )
        try:
            process.wait(timeout)
            late = False
        except subprocess.TimeoutExpired:
            late = True
        finally:
            _end([process])
        text = Path(output.name).read_text(errors="replace")
    if late:
        report = RankReport(0, process.returncode, killed=True, error=None, output=text)
        raise RanksFailed(f"{argv[0]} ran past its limit of {timeout:g} s", [report])
    return subprocess.CompletedProcess(argv, process.returncode, text)


# --- inside a rank ---------------------------------------------------------------------------------------------------


def _serve(folder: Path, backend: str) -> None:
    """Runs calls by number, as they come in on standard input, until it closes."""
    calls = os.fdopen(os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    torch.set_num_threads(1)
    for line in calls:
        call = read_values(folder / f"call-{int(line)}.json")
        result = folder / f"result-{int(line)}-{os.environ['RANK']}.json"
        # The harness ends a rank at its limit. Should the harness itself be gone, the rank still ends.
        faulthandler.dump_traceback_later(call["limit"], exit=True)
        try:
            if backend and not dist.is_initialized():
                dist.init_process_group(backend)
            if dist.is_initialized():
                dist.barrier()
            write_values(result, {"value": _invoke(call["function"], call["args"])})
        except pytest.skip.Exception as skip:
            write_values(result, {"skip": str(skip)})
        except BaseException as error:
            write_values(result, {"error": _describe(error)})
            sys.stdout.flush()
            sys.stderr.flush()
            # Not sys.exit: exit handlers would wait for the other ranks, which may wait for this one.
            os._exit(1)
        faulthandler.cancel_dump_traceback_later()
    if dist.is_initialized():
        # A gloo process that ends without this aborts now and then.
        dist.barrier()
        dist.destroy_process_group()


def _describe(error: BaseException) -> str:
    """The traceback, and for a bare `assert` the local values, shortened, that pytest would show in its own process."""
    lines = traceback.format_exception(error)
    trace = error.__traceback__
    if isinstance(error, AssertionError) and not error.args and trace is not None:
        while trace.tb_next is not None:
            trace = trace.tb_next
        short = reprlib.Repr()
        short.maxother = short.maxstring = 300
        lines += [f"    {name} = {short.repr(value)}\n" for name, value in trace.tb_frame.f_locals.items()]
    return "".join(lines)


def _invoke(address: str, args: Sequence[Any] | Mapping[str, Any]) -> Any:
    module, _, name = address.partition(":")
    function = getattr(importlib.import_module(module), name)
    function = getattr(function, "on_each_rank", function)
    return function(**args) if isinstance(args, Mapping) else function(*args)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), sys.argv[2])
