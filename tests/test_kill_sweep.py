"""SIGKILL at any point of training and of saving: a restart with "auto" ends in what an unbroken run ends in, bit for bit.

The points are functions of acclight and hooks of the training that the script wraps, each at one step, so that a case dies at
the same place every time. The one thing that is left to chance is how far training is while a thread writes a checkpoint.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, NamedTuple

import pytest
import torch

from acclight.checkpoint import latest, read_trainer, verify
from acclight.checkpoint.stored import read_tensors
from tests.distributed import ROOT, run_command
from tests.test_interruption import torchrun

#: Checkpoints are written at the multiples of this, up to the last step.
EVERY, STEPS = 4, 24
#: How long a rank may live on once its launcher or another rank is gone: torchrun itself kills after 30 s.
LINGER_SECONDS = 40.0

SCRIPT = '''
"""Trains to the end, or to the point where it kills somebody.

python script.py FOLDER ATTEMPT STRATEGY sync|async [EVENT STEP RANK VICTIM]
"""
import functools, os, re, shutil, signal, sys, threading, time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import acclight.checkpoint
from acclight import Callback, TrainModule, seed_everything
from acclight.callbacks import ModelCheckpoint
from acclight.checkpoint import files, writer
from acclight.checkpoint import format as layout
from tests.scenarios import quiet_trainer

folder, attempt, strategy, way = Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
point = (sys.argv[5], int(sys.argv[6])) if sys.argv[5:] else None
rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
here = point is not None and rank == int(sys.argv[7])
lock = threading.Lock()


def event(name, step):
    """The point is reached, on the rank that looks for it: the victims die, and whoever is none of them goes on."""
    global here
    with lock:
        if not here or point != (name, step):
            return
        here = False
    victim = sys.argv[8]
    (folder / f"{attempt}-killed").touch()
    if victim == "launcher":
        os.kill(os.getppid(), signal.SIGKILL)
        return
    victims = range(world) if victim == "all" else [int(victim.removeprefix("rank "))]
    for one in sorted(victims, key=lambda one: one == rank):
        os.kill(int((folder / f"{attempt}-pid-{one}").read_text()), signal.SIGKILL)


def step_of(path):
    """The step in a path of a checkpoint, or of its temporary folder; -1 where there is none."""
    found = re.findall(r"step-(\\d{8})", str(path))
    return int(found[-1]) if found else -1


def around(owner, name, before=None, after=None, path_of=lambda *args: args[0]):
    """Events before and after a function."""
    real = getattr(owner, name)

    @functools.wraps(real)
    def call(*args, **kwargs):
        step = step_of(path_of(*args))
        if before:
            event(before, step)
        result = real(*args, **kwargs)
        if after:
            event(after, step)
        return result

    setattr(owner, name, call)


around(writer, "_make_temporary", "before the temporary folder", "after the temporary folder")
around(writer.Writing, "copy", after="copied", path_of=lambda writing: writing.path)
around(writer.files, "write_file", "before a document")
around(layout, "write_manifest", "before the manifest", "after the manifest")
around(writer.os, "rename", "before the rename", "after the rename", path_of=lambda source, target: target)
around(writer.Writing, "finish", after="committed", path_of=lambda writing, *_: writing.path)
around(acclight.checkpoint, "remove", "before a removal", "after a removal")

write = files.NewFile.write


def write_half(file, content):
    content = memoryview(content)
    write(file, content[: len(content) // 2])
    if file.path.suffix == ".safetensors":
        event("inside a tensor file", step_of(file.path))
    elif file.path.name == layout.MANIFEST:
        event("inside the manifest", step_of(file.path))
    write(file, content[len(content) // 2 :])


files.NewFile.write = write_half
rmtree = shutil.rmtree


def rmtree_in_parts(path, *args, **kwargs):
    if Path(path).name.startswith("step-"):
        event("without its manifest", step_of(path))
        rmtree(path / layout.MODEL_FOLDER, ignore_errors=True)  # it may be half removed already
        event("half removed", step_of(path))
    elif Path(path).name.startswith(".saving-"):
        event("what is left of a save is removed", step_of(path))
    rmtree(path, *args, **kwargs)


shutil.rmtree = rmtree_in_parts


class Points(Callback):
    """Comes before ModelCheckpoint."""

    def on_train_start(self, trainer, module):
        (folder / f"{attempt}-begun-{rank}").write_text(str(trainer.global_step))

    def on_after_backward(self, trainer, module):
        event("backward", trainer.global_step + 1)

    def on_before_optimizer_step(self, trainer, module, optimizer):
        event("before the optimizer's step", trainer.global_step + 1)

    def on_step(self, trainer, module):
        event("step", trainer.global_step)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        event("batch end", trainer.global_step)

    def on_checkpoint(self, trainer, module, checkpoint):
        event("heard of the commit", step_of(checkpoint))

    def on_train_epoch_end(self, trainer, module):
        event("epoch end", trainer.global_step)


class Rows(Dataset):
    """Rows that tell which they are."""

    def __init__(self):
        self.rows = torch.randn(48, 6, generator=torch.Generator().manual_seed(2))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return index, self.rows[index]


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 33), nn.BatchNorm1d(33), nn.Tanh(), nn.Dropout(0.3), nn.Linear(33, 1))
        self.seen = open(folder / f"{attempt}-seen-{rank}", "a", buffering=1)

    def training_step(self, batch, batch_idx):
        ids, rows = batch
        step = self.trainer.global_step + 1
        self.seen.write(f"{step} {ids.tolist()}\\n")
        event("forward", step)
        # Those of the middle are the best, so that a newest one is sometimes kept for its score and sometimes not.
        self.log("score", float(abs(step - 12)))
        return (self.net(rows)[:, 0] - rows.sum(1)).square().mean()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


if __name__ == "__main__":
    (folder / f"{attempt}-pid-{rank}").write_text(str(os.getpid()))
    seed_everything(1)
    checkpoints = ModelCheckpoint(
        folder / "checkpoints", every_n_train_steps=EVERY, monitor="score", save_top_k=2, save_last=True,
        asynchronous=way == "async",
    )
    trainer = quiet_trainer(
        strategy=strategy, max_steps=STEPS, callbacks=[Points(), checkpoints], log_every_n_steps=EVERY, logger=False
    )
    workers = 0 if "deepspeed" in strategy else 2
    loader = DataLoader(Rows(), batch_size=4 // world, shuffle=True, num_workers=workers)
    trainer.fit(Net(), loader, ckpt_path="auto")
    trainer.save_checkpoint(folder / "final")
'''.replace("EVERY", str(EVERY)).replace("STEPS", str(STEPS))

#: What rank 0 alone comes to.
OF_RANK_0 = (
    "before the temporary folder", "after the temporary folder", "before the manifest", "inside the manifest",
    "after the manifest", "before the rename", "after the rename", "before a removal", "without its manifest",
    "half removed", "after a removal", "what is left of a save is removed",
)  # fmt: skip


class Kill(NamedTuple):
    """Who dies where.

    Attributes:
        way: Of saving: "sync", or "async".
        event: Where, in the script's words.
        step: Of the training, or of the checkpoint that is written or removed.
        victim: "rank 0", "rank 1", "all" or "launcher". A rank that dies alone dies at a point of its own, where it has one;
            else rank 0 ends it, and goes on.
    """

    way: str
    event: str
    step: int
    victim: str

    @property
    def rank(self) -> int:
        """Which rank looks for the point."""
        return 1 if self.victim == "rank 1" and self.event not in OF_RANK_0 else 0


# Each row is one training that dies again and again: every restart but the last is killed at the next point. A run resumes at
# most two checkpoints before the kill, so that each point is still to come. Of the checkpoints 4, 8, ..., 24 the best two are
# 12 and 8: 4 is removed once 12 is committed, 16 after 20, and 20 after 24; or by the next save, where a kill came between.
QUICK = {
    "single": [Kill("async", "before the rename", 8, "all"), Kill("sync", "half removed", 16, "all")],
    "ddp": [Kill("async", "inside a tensor file", 8, "all"), Kill("sync", "before the manifest", 12, "launcher")],
}
SLOW = {
    "single": [
        Kill("async", "batch end", 7, "all"),
        Kill("sync", "inside a tensor file", 12, "all"),
        Kill("async", "what is left of a save is removed", 12, "all"),
        Kill("sync", "before a removal", 16, "all"),
        Kill("async", "heard of the commit", 24, "all"),
    ],
    "ddp": [
        Kill("async", "forward", 2, "rank 1"),
        Kill("async", "inside a tensor file", 8, "rank 0"),
        Kill("async", "committed", 16, "rank 1"),
        Kill("sync", "half removed", 16, "all"),
        Kill("async", "step", 22, "launcher"),
    ],
    "fsdp2": [
        Kill("sync", "before the temporary folder", 4, "all"),
        Kill("async", "inside a tensor file", 12, "rank 1"),
        Kill("async", "without its manifest", 4, "rank 0"),
        Kill("sync", "after the rename", 16, "rank 0"),
        Kill("async", "backward", 19, "launcher"),
        Kill("sync", "before the rename", 24, "rank 1"),
    ],
    "deepspeed_stage_1": [
        Kill("sync", "after the temporary folder", 8, "rank 1"),
        Kill("async", "inside the manifest", 12, "rank 0"),
        Kill("async", "before the optimizer's step", 15, "all"),
        Kill("sync", "heard of the commit", 20, "launcher"),
        Kill("sync", "before a removal", 20, "rank 0"),
    ],
    "deepspeed_stage_2": [
        Kill("sync", "backward", 3, "rank 0"),
        Kill("async", "before a document", 8, "launcher"),
        Kill("async", "before the rename", 12, "rank 1"),
        Kill("sync", "committed", 20, "all"),
        Kill("sync", "half removed", 16, "rank 0"),
    ],
    "deepspeed_stage_3": [
        Kill("async", "copied", 8, "rank 0"),
        Kill("sync", "epoch end", 12, "rank 1"),
        Kill("async", "inside a tensor file", 16, "all"),
        Kill("async", "after a removal", 16, "launcher"),
        Kill("sync", "after the manifest", 24, "rank 0"),
    ],
}


def launch(folder: Path, attempt: str, strategy: str, way: str, kill: Kill | None = None) -> CompletedProcess[str]:
    """Runs the script, to the end or to the kill."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    arguments = [str(folder), attempt, strategy, way]
    if kill is not None:
        arguments += [kill.event, str(kill.step), str(kill.rank), kill.victim]
    alone = [sys.executable, str(script), *arguments]
    command = alone if strategy == "single" else torchrun(script, *arguments)
    return run_command(command, cwd=ROOT, timeout=100.0, env={"PYTHONPATH": str(ROOT)})


def seen(folder: Path, attempt: str) -> list[dict[int, str]]:
    """For each rank which samples each step was trained on."""
    files = sorted(folder.glob(f"{attempt}-seen-*"))
    lines = [[line.partition(" ") for line in file.read_text().splitlines()] for file in files]
    return [{int(step): ids for step, _, ids in of_rank} for of_rank in lines]


def assert_seen(folder: Path, attempt: str, begun: int, expected: list[dict[int, str]]) -> int:
    """Nothing is left out or trained on twice after the resume; gives the last step that any rank has begun."""
    now = seen(folder, attempt)
    assert len(now) == len(expected)
    for own, whole in zip(now, expected, strict=True):
        last = max(own, default=begun)
        assert own == {step: ids for step, ids in whole.items() if begun < step <= last}
    return max((step for own in now for step in own), default=begun)


def content(path: Path) -> dict[str, Any]:
    """All that a checkpoint holds, each tensor as a hash of its bytes; paths in it without the run's folder.

    Not the files: after a resume the tensors are in another order in them, and under other ranks.
    """
    assert verify(path) == []
    found: dict[str, Any] = {}
    for folder in ("model", "optimizer", "tensors"):
        for name, tensor in read_tensors(path / folder).items():
            digest = hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
            found[f"{folder}/{name}"] = [str(tensor.dtype), list(tensor.shape), digest]
    for file in sorted(path.glob("*.json")):
        if file.name != "manifest.json":
            found[file.name] = json.loads(file.read_text().replace(str(path.parent), ""))
    for file in sorted((path / "rng").iterdir()):
        found[f"rng/{file.name}"] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def listing(folder: Path) -> list[str]:
    """What is in the folder of the checkpoints."""
    checkpoints = folder / "checkpoints"
    return sorted(os.listdir(checkpoints)) if checkpoints.exists() else []


def end_of_ranks(folder: Path, attempt: str) -> list[int]:
    """Waits for the ranks of a run whose launcher is gone; those that would not end are killed, and returned."""
    pids = [int(file.read_text()) for file in folder.glob(f"{attempt}-pid-*")]
    deadline = time.monotonic() + LINGER_SECONDS
    while (left := [pid for pid in pids if is_of(pid, folder)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left


def is_of(pid: int, folder: Path) -> bool:
    """Whether a process runs, and with this folder among its arguments."""
    try:
        return str(folder).encode() in (Path("/proc") / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def resumable(folder: Path) -> int:
    """The step of the newest good checkpoint; whatever else looks like one has lost its manifest to a removal."""
    for name in listing(folder):
        path = folder / "checkpoints" / name
        assert name.startswith(".") or verify(path) == [] or not (path / "manifest.json").exists(), verify(path)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Skipped a damaged checkpoint: .* holds no manifest")
        newest = latest(folder / "checkpoints")
    return 0 if newest is None else int(read_trainer(newest)["global_step"])


class Unbroken(NamedTuple):
    """What a run without a kill ends in."""

    content: dict[str, Any]
    listing: list[str]
    seen: list[dict[int, str]]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Unbroken]:
    """The run without a kill under a strategy, made once."""

    @cache
    def run(strategy: str) -> Unbroken:
        folder = tmp_path_factory.mktemp("unbroken")
        done = launch(folder, "whole", strategy, "async")
        assert done.returncode == 0, done.stdout
        ids = seen(folder, "whole")
        assert all(list(of_rank) == list(range(1, STEPS + 1)) for of_rank in ids)
        return Unbroken(content(folder / "final"), listing(folder), ids)

    return run


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("strategy", "kills"),
    [
        *(pytest.param(strategy, kills, id=f"{strategy}, quick") for strategy, kills in QUICK.items()),
        *(pytest.param(strategy, kills, marks=pytest.mark.slow, id=strategy) for strategy, kills in SLOW.items()),
    ],
)
def test_a_killed_run_ends_as_the_unbroken_one(
    strategy: str, kills: list[Kill], tmp_path: Path, unbroken: Callable[[str], Unbroken]
) -> None:
    expected = unbroken(strategy)
    begun = 0
    for number, kill in enumerate(kills):
        attempt = f"{number}"
        done = launch(tmp_path, attempt, strategy, kill.way, kill)
        assert (tmp_path / f"{attempt}-killed").exists(), f"{kill} was never reached:\n{done.stdout}"
        assert done.returncode != 0
        assert end_of_ranks(tmp_path, attempt) == [], f"{kill}: the ranks lived on for {LINGER_SECONDS} s"
        last = assert_seen(tmp_path, attempt, begun, expected.seen)
        begun = resumable(tmp_path)
        # One checkpoint may be under way while training has come to the next.
        assert last - begun <= 2 * EVERY, f"{kill}: of {last} steps {begun} are left"
        # The next save deletes what the one before it has left.
        assert sum(name.startswith(".") for name in listing(tmp_path)) <= 1, listing(tmp_path)
    done = launch(tmp_path, "last", strategy, "async")
    assert done.returncode == 0, done.stdout
    assert {file.read_text() for file in tmp_path.glob("last-begun-*")} == {str(begun)}, done.stdout
    assert assert_seen(tmp_path, "last", begun, expected.seen) == STEPS
    assert content(tmp_path / "final") == expected.content
    assert listing(tmp_path) == expected.listing
    assert end_of_ranks(tmp_path, "last") == []
