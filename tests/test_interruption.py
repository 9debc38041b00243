"""Exceptions on one rank, signals and uneven ranks: every process ends, and says why."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from acclight import Callback, Trainer, TrainModule
from acclight.callbacks import EarlyStopping, ModelCheckpoint
from acclight.checkpoint import CheckpointError, ranks
from acclight.loggers import CSVLogger
from acclight.loops.interruption import Agreement
from acclight.strategies import process_group
from tests.distributed import ROOT, RankChecks, run_command, run_ranks
from tests.scenarios import DISTRIBUTED, Scalar, quiet_trainer, repeated

on_two_ranks = RankChecks(world_size=2, timeout=60.0)

SCRIPT = """
import atexit, os, signal, sys, time, torch
# What a shell starts in the background ignores Ctrl-C, and so does what that starts: these tests among it.
signal.signal(signal.SIGINT, signal.default_int_handler)
from pathlib import Path
from torch.utils.data import DataLoader, IterableDataset
from acclight import Callback, Trainer
from acclight.callbacks import ModelCheckpoint
from tests.scenarios import Scalar, quiet_trainer, repeated

what, folder, strategy = sys.argv[1], Path(sys.argv[2]), sys.argv[3] if sys.argv[3:] else "auto"
rank = int(os.environ.get("RANK", "0"))
world = int(os.environ.get("WORLD_SIZE", "1"))
# A traceback is printed before this; a process that a signal kills does not come to it.
atexit.register((folder / f"exited-{rank}").touch)


def note(name):
    with open(folder / f"rank-{rank}.txt", "a") as file:
        file.write(name + "\\n")


class Notes(Callback):
    def on_exception(self, trainer, module, exception):
        (folder / f"failed-{rank}").touch()
        note(f"on_exception {type(exception).__name__} " + " ".join(getattr(exception, "__notes__", ())))

    def teardown(self, trainer, module, stage):
        note("teardown")

    def on_train_end(self, trainer, module):
        note(f"on_train_end {trainer.global_step}")

    def on_step(self, trainer, module):
        note(f"step {trainer.global_step}")


class Failing(Scalar):
    def training_step(self, batch, batch_idx):
        if rank == world - 1 and batch_idx == 2 and what == "training":
            raise ValueError("boom")
        if what == "slow":
            time.sleep(0.1)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        if rank == world - 1 and what == "validation":
            raise ValueError("boom")
        return super().validation_step(batch, batch_idx)


class Bad(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index == 2 * world + world - 1 and what == "worker":
            raise ValueError("boom")
        return torch.tensor(float(index))


if what == "slow":
    loader, checkpoints = repeated([float(i % 7) for i in range(20)], world), [ModelCheckpoint(folder / "checkpoints")]
else:
    loader, checkpoints = DataLoader(Bad(), batch_size=1, num_workers=2 if what == "worker" else 0), []
val = repeated([1.0], world) if what == "validation" else None
trainer = quiet_trainer(
    strategy=strategy, max_epochs=1, callbacks=[Notes(), *checkpoints], num_sanity_val_steps=0, log_every_n_steps=1
)
module = Failing(lr=0.1)
trainer.fit(module, loader, val, ckpt_path="auto" if what == "slow" else None)
note(f"done {trainer.global_step} {module.w.item()!r}")
"""


def notes(folder: Path, rank: int) -> list[str]:
    path = folder / f"rank-{rank}.txt"
    return path.read_text().splitlines() if path.exists() else []


def left_of(folder: Path) -> list[str]:
    """The command lines of the processes that still run with this folder among their arguments."""
    found = []
    for one in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (one / "cmdline").read_bytes().decode().split("\0")
            found += [" ".join(words)] if str(folder) in words else []
    return found


def torchrun(script: Path, *arguments: str) -> list[str]:
    rendezvous = ["--nproc_per_node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    return [sys.executable, "-m", "torch.distributed.run", *rendezvous, str(script), *arguments]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize(
    ("strategy", "where"),
    [
        ("ddp", "training"),
        ("ddp", "validation"),
        ("ddp", "worker"),
        ("fsdp2", "worker"),
        ("deepspeed_stage_1", "validation"),
        ("deepspeed_stage_3", "training"),
        pytest.param("fsdp2", "validation", marks=pytest.mark.slow),
        pytest.param("fsdp2", "training", marks=pytest.mark.slow),
        pytest.param("deepspeed_stage_3", "validation", marks=pytest.mark.slow),
        pytest.param("deepspeed_stage_3", "worker", marks=pytest.mark.slow),
    ],
)
def test_an_error_on_one_rank_ends_all_with_one_traceback(
    script: Path, tmp_path: Path, strategy: str, where: str
) -> None:
    command = torchrun(script, where, str(tmp_path), strategy)
    done = run_command(command, cwd=ROOT, timeout=120.0, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode != 0
    assert left_of(tmp_path) == [], "torchrun's ranks are sessions of their own, which run_command leaves alone"
    assert time.time() - (tmp_path / "failed-1").stat().st_mtime < 30.0, done.stdout
    assert "ValueError: boom" in done.stdout
    assert done.stdout.count('raise ValueError("boom")') == 1, done.stdout
    assert "rank      : 1 (local_rank: 1)" in done.stdout.rsplit("Root Cause", 1)[1], done.stdout
    assert any(line.startswith("on_exception ValueError") for line in notes(tmp_path, 1))
    assert notes(tmp_path, 1).count("teardown") == 1
    # Torchrun kills the ranks that are left a tenth of a second after the first one's exit: anywhere in what follows.
    ended_by_itself = (tmp_path / "exited-0").exists()
    heard = [line for line in notes(tmp_path, 0) if line.startswith("on_exception")]
    assert heard or not ended_by_itself
    assert all("rank 1 failed first with " in line for line in heard), heard
    if ended_by_itself:
        assert notes(tmp_path, 0)[-1] == "teardown"
        # Last come rank 0's traceback, which ends with the reason, and what torchrun says.
        reason = done.stdout.rindex("rank 1 failed first with ")
        assert reason > done.stdout.index('raise ValueError("boom")'), done.stdout


def uninterrupted() -> float:
    """Plain SGD with lr 0.1 on (w - x)^2 / 2 for x = 0, 1, ..., 6, 0, ..., twenty steps."""
    w = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.1)
    for i in range(20):
        optimizer.zero_grad()
        ((w - float(i % 7)) ** 2 / 2).mean().backward()
        optimizer.step()
    return float(w.detach())


@pytest.mark.parametrize("signum", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)])
def test_a_signal_to_one_rank_stops_all_at_one_step_and_the_run_goes_on(
    signum: signal.Signals, script: Path, tmp_path: Path
) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "SLURM_JOB_ID": "1"}
    process = subprocess.Popen(
        torchrun(script, "slow", str(tmp_path)), cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True,
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60.0
        while "step 5" not in notes(tmp_path, 0):
            assert time.monotonic() < deadline, "the run did not come to step 5"
            time.sleep(0.01)
        children = subprocess.run(
            ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True
        ).stdout.split()
        first = next(p for p in children if b"RANK=0\0" in Path(f"/proc/{p}/environ").read_bytes())
        os.kill(int(first), signum)
        output, _ = process.communicate(timeout=60.0)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode != 0, output
    assert f"Signal {signum.value} ({signum.name}) received by PID" in output
    for rank in (0, 1):
        steps = [line for line in notes(tmp_path, rank) if line.startswith("step")]
        assert steps[-1] in ("step 5", "step 6", "step 7"), (rank, notes(tmp_path, rank), output)
        assert notes(tmp_path, rank)[-1] == "teardown"
    saved = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    stopped_at = [line for line in notes(tmp_path, 0) if line.startswith("step")][-1].split()[1]
    assert saved == [f"step-{int(stopped_at):08d}"]

    done = run_command(torchrun(script, "slow", str(tmp_path)), cwd=ROOT, timeout=90.0, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout
    for rank in (0, 1):
        assert notes(tmp_path, rank)[-1] == f"done 20 {uninterrupted()!r}"


@pytest.mark.parametrize(
    ("signum", "job", "saves"),
    [
        (signal.SIGTERM, {}, True),
        (signal.SIGINT, {}, False),
        (signal.SIGUSR1, {"SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "train"}, True),
        (signal.SIGUSR1, {"SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "bash"}, None),
        (signal.SIGUSR1, {}, None),
    ],
)
def test_a_signal_to_a_plain_process_ends_it_as_that_signal(
    script: Path, tmp_path: Path, signum: signal.Signals, job: dict[str, str], saves: bool | None
) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **job}
    process = subprocess.Popen(
        [sys.executable, str(script), "slow", str(tmp_path)], cwd=ROOT, env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60.0
        while "step 3" not in notes(tmp_path, 0):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signum)
        output, _ = process.communicate(timeout=30.0)
    finally:
        process.kill()
    # A shell shows 143, 130 and 138 for these.
    assert process.returncode == -signum, output
    assert not any(line.startswith("done") for line in notes(tmp_path, 0))
    if saves is None:
        # Not watched: it ends the process at once.
        assert "teardown" not in notes(tmp_path, 0)
        assert not (tmp_path / "checkpoints").exists()
        return
    assert notes(tmp_path, 0).count("teardown") == 1
    if saves:
        assert next((tmp_path / "checkpoints").iterdir()).name.startswith("step-")
    else:
        assert any(line.startswith("on_exception KeyboardInterrupt") for line in notes(tmp_path, 0))


@pytest.fixture
def terminations() -> Iterator[list[int]]:
    """How often a handler of the program's own, which was there before fit, is called for SIGTERM."""
    seen: list[int] = []
    former = signal.signal(signal.SIGTERM, lambda signum, frame: seen.append(signum))
    yield seen
    signal.signal(signal.SIGTERM, former)


class Terminated(Callback):
    """SIGTERM comes when training is through already."""

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_that_comes_too_late_to_stop_anything_is_delivered_all_the_same(terminations: list[int]) -> None:
    trainer = quiet_trainer(strategy="single", max_steps=2, callbacks=Terminated())
    trainer.fit(Scalar(), repeated([1.0] * 4, 1))
    assert trainer.global_step == 2
    assert terminations == [signal.SIGTERM]


def test_an_exception_is_not_hidden_by_a_signal_that_came_before_it(terminations: list[int]) -> None:
    class Failing(Scalar):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"), pytest.warns(UserWarning, match="SIGTERM came"):
        quiet_trainer(strategy="single", max_steps=2).fit(Failing(), repeated([1.0], 1))
    # The handler is back in its place for the next one.
    os.kill(os.getpid(), signal.SIGTERM)
    assert terminations == [signal.SIGTERM]


LEAVING = """
import os, sys
import torch.distributed as dist
from acclight import Callback
from tests.scenarios import Scalar, quiet_trainer, repeated

what = sys.argv[1]
rank = int(os.environ["RANK"])


class Leaving(Callback):
    def setup(self, trainer, module, stage):
        if rank == 1 and what == "exit in a hook":
            sys.exit(3)

    def on_train_start(self, trainer, module):
        if rank == 1 and what == "handled":
            raise ValueError("boom")

    def teardown(self, trainer, module, stage):
        if rank == 1 and what == "teardown":
            raise ValueError("boom")


trainer = quiet_trainer(max_steps=2, callbacks=Leaving())
try:
    trainer.fit(Scalar(), repeated([1.0] * 4, 2))
except Exception as error:
    print(f"rank {rank} handled {type(error).__name__}")
    sys.exit(1)
if rank == 1 and what == "exit after fit":
    sys.exit(4)
if rank == 0 and what == "teardown":
    dist.barrier()
print(f"rank {rank} is done")
"""


@pytest.fixture
def leaving(tmp_path: Path) -> Path:
    path = tmp_path / "leaving.py"
    path.write_text(LEAVING)
    return path


@pytest.mark.parametrize(
    "where",
    [
        "exit in a hook",
        "teardown",
        pytest.param("handled", marks=pytest.mark.slow),
        pytest.param("exit after fit", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_leaves_by_itself_takes_the_job_down(leaving: Path, where: str) -> None:
    started = time.monotonic()
    done = run_command(torchrun(leaving, where), cwd=ROOT, timeout=90.0, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode != 0, done.stdout
    assert time.monotonic() - started < 60.0, done.stdout
    assert ("rank 1 handled ValueError" in done.stdout) == (where in ("handled", "teardown"))


@pytest.mark.parametrize("times", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_ranks_that_end_well_leave_without_a_word(leaving: Path, times: int) -> None:
    for _ in range(times):
        done = run_command(torchrun(leaving, "nothing"), cwd=ROOT, timeout=60.0, env={"PYTHONPATH": str(ROOT)})
        assert done.returncode == 0, done.stdout
        assert "leaves without" not in done.stdout
        assert "terminate called" not in done.stdout


def test_a_rank_waits_for_late_ones_only_so_long() -> None:
    run_ranks(leave_alone, timeout=60.0)


def leave_alone() -> None:
    process_group.join("gloo", timedelta(seconds=60))
    process_group._FAREWELL_SECONDS = 1.0
    started = time.monotonic()
    if dist.get_rank() == 1:
        with pytest.warns(UserWarning, match="rank 1 leaves without the other ranks: they did not come within 1 s"):
            process_group._leave()
        assert time.monotonic() - started < 10.0
        assert not dist.is_initialized()
    else:
        time.sleep(3.0)
        process_group._leave()


SAVING = """
import os, sys
from pathlib import Path
from acclight import Callback
from acclight.callbacks import ModelCheckpoint
from acclight.checkpoint import ranks
from tests.scenarios import Tokens, quiet_trainer, ragged_tokens
from torch.utils.data import DataLoader

what, strategy, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
rank = int(os.environ["RANK"])
if what == "alone":
    ranks.MEET_SECONDS = 2.0


def note(name):
    with open(folder / f"rank-{rank}.txt", "a") as file:
        file.write(name + "\\n")


class Saving(Callback):
    def on_save_checkpoint(self, trainer, module, checkpoint):
        if rank == 1 and what == "hook":
            raise ValueError("boom")

    def on_step(self, trainer, module):
        if what == "before" and rank == 1 and trainer.global_step == 3:
            raise ValueError("boom")
        if what in ("alone", "before") and rank == 0 and trainer.global_step == 3:
            trainer.save_checkpoint(folder / "saved")

    def on_exception(self, trainer, module, exception):
        (folder / f"failed-{rank}").touch()
        note(f"on_exception {exception}")

    def teardown(self, trainer, module, stage):
        note("teardown")


checkpoints = [ModelCheckpoint(folder / "checkpoints", every_n_train_steps=3)] if what == "hook" else []
trainer = quiet_trainer(strategy=strategy, max_steps=6, callbacks=[Saving(), *checkpoints])
trainer.fit(Tokens(), DataLoader(ragged_tokens(32), batch_size=2))
"""


def run_saving(folder: Path, what: str, strategy: str) -> str:
    path = folder / "saving.py"
    path.write_text(SAVING)
    done = run_command(
        torchrun(path, what, strategy, str(folder)), cwd=ROOT, timeout=120.0, env={"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode != 0, done.stdout
    assert time.time() - min(path.stat().st_mtime for path in folder.glob("failed-*")) < 30.0, done.stdout
    assert notes(folder, 0)[-1] == "teardown", (notes(folder, 0), done.stdout)
    return done.stdout


def test_an_error_of_one_rank_inside_a_save_ends_all(tmp_path: Path) -> None:
    output = run_saving(tmp_path, "hook", "ddp")
    assert output.count('raise ValueError("boom")') == 1
    saying = notes(tmp_path, 0)[0]
    assert saying.startswith("on_exception saving ")
    assert "failed on rank 1: ValueError: boom" in saying
    assert list((tmp_path / "checkpoints").glob("*")) == []


def test_a_rank_that_waits_to_save_hears_of_anothers_error(tmp_path: Path) -> None:
    run_saving(tmp_path, "before", "ddp")
    assert "rank 1 failed first with ValueError: boom" in notes(tmp_path, 0)[0]


@pytest.mark.parametrize(
    "strategy",
    [
        "ddp",
        "deepspeed_stage_2",
        pytest.param("fsdp2", marks=pytest.mark.slow),
        pytest.param("deepspeed_stage_3", marks=pytest.mark.slow),
    ],
)
def test_a_save_that_only_rank_0_asks_for_ends_with_the_reason(tmp_path: Path, strategy: str) -> None:
    run_saving(tmp_path, "alone", strategy)
    assert "only 1 of 2 ranks called within 2 s. Every rank has to call save_checkpoint" in notes(tmp_path, 0)[0]


def test_the_wait_for_a_save_is_shorter_than_any_backends() -> None:
    """The tests above shorten it; with a minute the reason would come too late for many a launcher."""
    assert ranks.HURRIED_MEET_SECONDS < ranks.MEET_SECONDS < 60.0


def test_a_signal_shortens_the_wait_for_a_save() -> None:
    run_ranks(save_hurried, timeout=60.0)


def save_hurried() -> None:
    process_group.join("gloo", timedelta(seconds=60))
    if dist.get_rank() == 0:
        ranks.HURRIED_MEET_SECONDS = 0.5
        with pytest.raises(CheckpointError, match="only 1 of 2 ranks"):
            ranks.meet("saving", "key", hurried=lambda: True)
    dist.barrier()


class RaisingTeardown(Callback):
    def __init__(self, error: BaseException | None) -> None:
        self.error = error
        self.torn_down = False

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self.torn_down = True
        if self.error is not None:
            raise self.error


class Finalized(CSVLogger):
    status = ""

    def finalize(self, status: str) -> None:
        self.status = status
        super().finalize(status)


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
def test_every_part_is_torn_down_whatever_one_raises(tmp_path: Path, kind: type[BaseException]) -> None:
    first, second, third = RaisingTeardown(kind("one")), RaisingTeardown(ValueError("two")), RaisingTeardown(None)
    logger = Finalized(tmp_path)
    trainer = quiet_trainer(strategy="single", max_steps=1, callbacks=[first, second, third], logger=logger)
    with pytest.raises(kind, match="one"), pytest.warns(UserWarning, match="teardown itself raised ValueError: two"):
        trainer.fit(Scalar(), repeated([1.0], 1))
    assert second.torn_down
    assert third.torn_down
    assert logger.status == "success"
    trainer.callbacks.remove(first)
    trainer.callbacks.remove(second)
    trainer.validate(Scalar(), repeated([1.0], 1))


def test_an_interrupt_in_a_teardown_is_not_hidden_by_an_error(tmp_path: Path) -> None:
    class Failing(Scalar):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            raise ValueError("boom")

    interrupted, last = RaisingTeardown(KeyboardInterrupt()), RaisingTeardown(None)
    logger = Finalized(tmp_path)
    trainer = quiet_trainer(strategy="single", max_steps=1, callbacks=[interrupted, last], logger=logger)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(Failing(), repeated([1.0], 1))
    assert last.torn_down
    assert logger.status == "failed"


def test_a_signal_in_the_sanity_check_is_noted(terminations: list[int]) -> None:
    class Terminated(Scalar):
        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            assert terminations == []

    torn_down = RaisingTeardown(None)
    trainer = quiet_trainer(strategy="single", max_steps=2, callbacks=[torn_down])
    trainer.fit(Terminated(), repeated([1.0] * 4, 1), repeated([1.0], 1))
    assert (trainer.global_step, trainer.interrupted, torn_down.torn_down) == (0, True, True)
    assert terminations == [signal.SIGTERM]


def test_steps_that_become_slow_bring_the_next_question_forward() -> None:
    run_ranks(slow_down, timeout=90.0)


def slow_down() -> None:
    process_group.join("gloo", timedelta(seconds=60))
    agreement = Agreement(process_group.SharedNotes(2))
    for _ in range(2000):
        assert agreement.ask(False) == (False,)
    asked = 0
    while not agreement.ask(dist.get_rank() == 1)[0]:
        asked += 1
    assert asked <= 16
    dist.barrier()


class StopsAt(Callback):
    """Sets should_stop in one hook at one step, on every rank or on one."""

    def __init__(self, step: int, hook: str, rank: int | None = None) -> None:
        self.step, self.hook, self.rank = step, hook, rank

    def note(self, hook: str, trainer: Trainer) -> None:
        if (hook, trainer.global_step) == (self.hook, self.step) and self.rank in (None, trainer.global_rank):
            trainer.should_stop = True

    def on_step(self, trainer: Trainer, module: TrainModule) -> None:
        self.note("step", trainer)

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.note("validation", trainer)


STOPS = [
    # Steps are far shorter than the time between two questions of the ranks.
    pytest.param("step", 7, {}, 7, id="step"),
    pytest.param("validation", 20, {"val_check_interval": 10}, 20, id="validation"),
    pytest.param("step", 5, {"min_steps": 23}, 23, id="min_steps"),
]


@on_two_ranks
@pytest.mark.parametrize(("hook", "step", "limits", "end"), STOPS)
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_what_every_rank_wishes_comes_true_at_that_step(
    strategy: str, hook: str, step: int, limits: dict[str, Any], end: int
) -> None:
    trainer = quiet_trainer(strategy=strategy, max_epochs=1, callbacks=StopsAt(step, hook), **limits)
    trainer.fit(Scalar(), repeated([1.0] * 60, 2), repeated([0.0], 1))
    assert trainer.global_step == end


@on_two_ranks
def test_early_stopping_ends_at_the_validation_that_decides() -> None:
    class Constant(Scalar):
        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.log("val_loss", 1.0)

    for _ in range(3):
        early = EarlyStopping("val_loss", patience=1)
        trainer = quiet_trainer(strategy="ddp", max_epochs=1, val_check_interval=10, callbacks=early)
        trainer.fit(Constant(), repeated([1.0] * 60, 2), repeated([0.0], 1))
        assert trainer.global_step == 20


@on_two_ranks
@pytest.mark.parametrize("hook", ["step", "validation"])
def test_what_one_rank_wishes_comes_true_on_all(hook: str) -> None:
    trainer = quiet_trainer(strategy="ddp", max_epochs=1, val_check_interval=10, callbacks=StopsAt(20, hook, rank=1))
    trainer.fit(Scalar(), repeated([1.0] * 60, 2), repeated([0.0], 1))
    # After a validation the ranks ask each other in any case.
    assert trainer.global_step == 20


@on_two_ranks
def test_a_wish_of_one_rank_waits_for_few_steps() -> None:
    trainer = quiet_trainer(strategy="ddp", max_epochs=1, callbacks=StopsAt(20, "step", rank=1))
    trainer.fit(Scalar(), repeated([1.0] * 60, 2))
    assert 20 <= trainer.global_step <= 36
    assert trainer.core.gather_objects(trainer.global_step) == [trainer.global_step] * 2


class Died(BaseException):
    """Stands for the end of the process: nothing of acclight catches it, and nothing is saved after it."""


class DiesAtCheckpoint(Callback):
    """Ends the run right after the checkpoint of one step is committed, and notes which hooks were reached."""

    def __init__(self, step: int | None = None) -> None:
        self.step = step
        self.lines: list[str] = []

    def on_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: Path) -> None:
        if trainer.global_step == self.step:
            raise Died

    def note(self, hook: str, trainer: Trainer) -> None:
        self.lines.append(f"{hook} {trainer.global_step}")

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.note("validated", trainer)

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.note("epoch end", trainer)

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.note("train end", trainer)


class Watched(Scalar):
    """Scalar with one scheduler that watches a metric, and one that counts epochs."""

    def __init__(self, monitor: str = "val_loss") -> None:
        super().__init__()
        self.monitor = monitor

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        epochs = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return [optimizer], [{"scheduler": plateau, "monitor": self.monitor}, epochs]


VALUES = [1.0, 2.0, 3.0, 4.0]


def plain_watched() -> tuple[float, float, float]:
    """Weight, rate and last validation loss of Watched on three epochs of VALUES, validated on 0 after each."""
    w = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.5)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    epochs = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(3):
        for value in VALUES:
            optimizer.zero_grad()
            ((w - value) ** 2 / 2).mean().backward()
            optimizer.step()
        loss = (w.detach() ** 2 / 2).item()
        plateau.step(loss)
        epochs.step()
    return w.item(), optimizer.param_groups[0]["lr"], loss


def watched_fit(
    folder: Path,
    step: int | None = None,
    module: Watched | None = None,
    more: Sequence[Callback] = (),
    **arguments: Any,
) -> tuple[list[str], Trainer]:
    """One fit, which ends itself at a step's checkpoint; where it came and its Trainer."""
    notes = DiesAtCheckpoint(step)
    # In place: it dies between the commit and what belongs after the step.
    checkpoints = ModelCheckpoint(folder, every_n_train_steps=4, save_top_k=-1, asynchronous=False)
    limits = {"max_steps": 12, "val_check_interval": 4, "num_sanity_val_steps": 0, **arguments}
    trainer = quiet_trainer(strategy="single", callbacks=[notes, *more, checkpoints], **limits)
    with contextlib.suppress(Died):
        trainer.fit(module or Watched(), repeated(VALUES, 1), repeated([0.0], 1), ckpt_path="auto")
    return notes.lines, trainer


@pytest.mark.parametrize("interval", [4, 1.0])
@pytest.mark.parametrize("step", [4, 12])
def test_what_belongs_after_a_checkpointed_step_comes_first_after_a_resume(
    tmp_path: Path, interval: int | float, step: int
) -> None:
    steps = [4, 8, 12]
    expected = [f"{what} {step}" for step in steps for what in ("validated", "epoch end")] + ["train end 12"]
    before, _ = watched_fit(tmp_path, step, val_check_interval=interval)
    assert before == expected[: 2 * steps.index(step)]
    module = Watched()
    after, trainer = watched_fit(tmp_path, module=module, val_check_interval=interval)
    assert before + after == expected
    weight, rate, loss = plain_watched()
    assert module.w.item() == pytest.approx(weight, rel=1e-6)
    assert trainer.optimizers[0].param_groups[0]["lr"] == rate
    assert trainer.callback_metrics["val_loss"].item() == pytest.approx(loss, rel=1e-6)


def test_an_epoch_that_was_trained_before_the_resume_has_no_training_metrics_and_that_is_no_error(
    tmp_path: Path,
) -> None:
    more = [EarlyStopping("loss", patience=9), ModelCheckpoint(tmp_path / "best", monitor="loss", asynchronous=False)]
    watched_fit(tmp_path / "all", 4, Watched("loss"), more)
    lines, trainer = watched_fit(tmp_path / "all", None, Watched("loss"), more)
    assert lines == [
        "validated 4",
        "epoch end 4",
        "validated 8",
        "epoch end 8",
        "validated 12",
        "epoch end 12",
        "train end 12",
    ]
    assert trainer.callback_metrics["loss"].item() > 0


def test_a_validation_in_the_middle_of_an_epoch_is_owed_too(tmp_path: Path) -> None:
    # Validation after steps 2, 4, ... of each epoch; died at step 4 with a fraction, where the epoch goes on.
    arguments: dict[str, Any] = {"max_steps": -1, "max_epochs": 1, "val_check_interval": 0.5}
    loader = repeated([*VALUES, *VALUES], 1)
    for step, expected in ((4, []), (None, ["validated 4", "validated 8", "epoch end 8", "train end 8"])):
        notes = DiesAtCheckpoint(step)
        callbacks = [notes, ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1, asynchronous=False)]
        trainer = quiet_trainer(strategy="single", callbacks=callbacks, num_sanity_val_steps=0, **arguments)
        with contextlib.suppress(Died):
            trainer.fit(Scalar(), loader, repeated([0.0], 1), ckpt_path="auto")
        assert notes.lines == expected


def test_a_checkpoint_of_a_validations_last_hook_does_not_validate_again(tmp_path: Path) -> None:
    class Saving(Callback):
        def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
            if not trainer.sanity_checking and trainer.global_step == 4:
                trainer.save_checkpoint(tmp_path / "inside")
                raise Died

    arguments: dict[str, Any] = {"strategy": "single", "max_steps": 6, "val_check_interval": 4}
    with pytest.raises(Died):
        quiet_trainer(callbacks=Saving(), **arguments).fit(Watched(), repeated(VALUES, 1), repeated([0.0], 1))
    notes = DiesAtCheckpoint()
    trainer = quiet_trainer(callbacks=notes, **arguments)
    trainer.fit(Watched(), repeated(VALUES, 1), repeated([0.0], 1), ckpt_path=tmp_path / "inside")
    assert notes.lines == ["epoch end 4", "epoch end 6", "train end 6"]


def test_a_run_that_is_through_owes_nothing(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"strategy": "single", "max_steps": 6, "val_check_interval": 4}
    trainer = quiet_trainer(**arguments)
    trainer.fit(Watched(), repeated(VALUES, 1), repeated([0.0], 1))
    trainer.save_checkpoint(tmp_path / "end")
    notes = DiesAtCheckpoint()
    quiet_trainer(callbacks=notes, **arguments).fit(
        Watched(), repeated(VALUES, 1), repeated([0.0], 1), ckpt_path=tmp_path / "end"
    )
    trainer.fit(trainer.module, repeated(VALUES, 1), repeated([0.0], 1))
    assert notes.lines == []
