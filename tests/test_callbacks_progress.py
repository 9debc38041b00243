"""Progress displays: lines in a pipe, the live display in a terminal, and what a step costs where nothing is shown."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import DataLoader

from acclight import Callback, Trainer, TrainModule
from acclight.callbacks import PlainProgress, Progress, RichProgressBar, default_progress
from acclight.callbacks.pace import Pace, clock
from acclight.callbacks.progress import Status
from tests.distributed import run_ranks

ROOT = Path(__file__).resolve().parent.parent

SCRIPT = """
    import sys
    import torch
    from acclight import Trainer, TrainModule

    class Scalar(TrainModule):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(()))

        def training_step(self, batch, batch_idx):
            return ((self.w - batch) ** 2 / 2).mean()

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", ((self.w - batch) ** 2 / 2).mean(), prog_bar=True)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def loader(batches):
        return torch.utils.data.DataLoader(torch.ones(batches).unbind(), batch_size=1)

    trainer = Trainer(max_epochs=2, logger=False, enable_checkpointing=False, enable_model_summary=False)
    trainer.fit(Scalar(), loader(int(sys.argv[1])), loader(4))
"""


class Scalar(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = ((self.w - batch) ** 2 / 2).mean()
        self.log("double", 2 * loss, prog_bar=True)
        return {"loss": loss, "big": torch.zeros(4)}

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", ((self.w - batch) ** 2 / 2).mean(), prog_bar=True)

    def test_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("test_loss", ((self.w - batch) ** 2 / 2).mean(), prog_bar=True)

    def predict_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return batch

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def loader(batches: int = 4) -> DataLoader[Any]:
    return DataLoader(torch.ones(batches).unbind(), batch_size=1)  # type: ignore[arg-type]


def trainer_with(progress: Progress, root: Path, *more: Callback, **arguments: Any) -> Trainer:
    settings: dict[str, Any] = {
        "max_epochs": 2, "logger": False, "default_root_dir": root, "enable_model_summary": False,
        "enable_checkpointing": False, "log_every_n_steps": 1,
    }  # fmt: skip
    return Trainer(callbacks=[progress, *more], **(settings | arguments))


def screen(text: str) -> str:
    """Without the sequences that move the cursor and set colours."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


# --- lines ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def assert_lines_are_good(output: str, total: int, validations: int) -> None:
    assert "\r" not in output
    assert "\x1b" not in output
    lines = output.splitlines()
    # The first step, two epochs, the validations; and one per ten seconds, should the machine be that slow.
    assert 2 + validations <= len(lines) <= 3 + validations + 6
    for line in lines:
        assert re.search(rf"\bstep \d+/{total}\b", line), line
        assert re.search(r"\bloss \d", line), line
        assert re.search(r"[\d.e+]+ (steps|batches)/s|s/step|s/batch", line), line
    assert f"step {total}/{total}" in lines[-1]


@pytest.mark.parametrize("term", [None, "dumb", "xterm"])
def test_output_to_a_pipe_is_a_few_plain_lines(script: Path, term: str | None) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TERM"}
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    if term is not None:
        environment["TERM"] = term
    done = subprocess.run(
        [sys.executable, str(script), "500"], env=environment, capture_output=True, text=True, timeout=240, check=True
    )
    assert_lines_are_good(done.stdout, 1000, validations=2)


def test_only_rank_0_of_two_prints(script: Path) -> None:
    first, second = run_ranks(script, [20], timeout=120)
    # Each rank reads 10 of the 20 batches.
    assert_lines_are_good("\n".join(line for line in first.splitlines() if " | " in line), 20, validations=2)
    assert " | " not in second


def test_lines_of_a_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = trainer_with(PlainProgress(seconds=0), tmp_path, accumulate_grad_batches=2, num_sanity_val_steps=1)
    trainer.fit(Scalar(), loader(4), loader(3))
    lines = [
        re.sub(r"[\d.e+-]+ (step|batche)s/s|[\d.e+-]+ s/(step|batch)", "FAST", line)
        for line in capsys.readouterr().out.splitlines()
    ]
    lines = [re.sub(r" \| \d+:\d\d:\d\d left", "", line) for line in lines]
    train = [line for line in lines if line.startswith("train")]
    # w = 0, 0.5, 0.75, 0.875: the loss of step n is (1 - w)^2 / 2 before it.
    losses = [0.5, 0.125, 0.03125, 0.0078125]
    for step, loss in enumerate(losses, 1):
        expected = f"train | epoch {(step + 1) // 2}/2 | step {step}/4 | loss {loss:.4g}"
        assert any(line.startswith(expected) for line in train), (expected, train)
    validated = [line for line in lines if line.startswith("validate | epoch 2/2 | step 4/4 | batch 3/3 | loss")]
    assert "val_loss" in validated[-1]
    assert all(line.startswith(("train", "validate", "sanity check")) for line in lines)


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        ({}, "loss 0.5"),
        ({"val_loss": 2.0}, "loss 0.5  val_loss 2"),
        ({"train_loss": 1.0, "acc": 0.25}, "train_loss 1  acc 0.25"),
        ({"loss": 1.0}, "loss 1"),
    ],
)
def test_a_training_that_shows_its_loss_has_it_once(shown: dict[str, float], text: str, tmp_path: Path) -> None:
    progress = PlainProgress()
    trainer = SimpleNamespace(progress_bar_metrics=shown)
    progress._loss = torch.tensor(1.0)
    progress._count = 2
    values = progress._values(trainer)  # type: ignore[arg-type]
    assert Status("train", "1", 0, None, "step", "", values, 0.0, None).metrics == text


def test_lines_of_validate_test_and_predict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = trainer_with(PlainProgress(), tmp_path)
    trainer.validate(Scalar(), loader(3))
    trainer.test(Scalar(), loader(3))
    trainer.predict(Scalar(), loader(3))
    tasks = [line.split(" | ")[:2] for line in capsys.readouterr().out.splitlines()]
    assert [task for task, _ in tasks] == ["validate", "test", "predict"]
    assert all(count.startswith("batch 3") for _, count in tasks)


def test_display_goes_on_where_a_resumed_run_begins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class SaveAt5(Callback):
        def on_step(self, trainer: Trainer, module: TrainModule) -> None:
            if trainer.global_step == 5:
                trainer.save_checkpoint(tmp_path / "five")

    trainer_with(PlainProgress(), tmp_path, SaveAt5()).fit(Scalar(), loader())
    capsys.readouterr()
    trainer_with(PlainProgress(), tmp_path).fit(Scalar(), loader(), ckpt_path=tmp_path / "five")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("train | epoch 2/2 | step 6/8 | loss")
    assert lines[-1].startswith("train | epoch 2/2 | step 8/8 | loss")


def test_time_between_lines_is_kept(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("acclight.callbacks.progress.time.perf_counter", lambda: now[0])
    progress, trainer, module = PlainProgress(seconds=10), fake_trainer(), Scalar()
    progress.on_train_start(trainer, module)
    for step in range(1, 101):
        now[0] += 0.5
        trainer.global_step = step
        progress.on_train_batch_end(trainer, module, {"loss": torch.tensor(1.0)}, None, step)
    steps = [int(line.split("step ")[1].split("/")[0]) for line in capsys.readouterr().out.splitlines()]
    assert steps == [1, 21, 41, 61, 81]


# --- cost -------------------------------------------------------------------------------------------------------------


class Untouchable:
    """Fails the test when anybody reads it."""

    def __float__(self) -> float:
        raise AssertionError("a metric was read on a step where nothing is shown")


class FakeTrainer(SimpleNamespace):
    """What a display asks of a trainer."""

    reads = 0

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        self.reads += 1
        return {}


def fake_trainer(rank: int = 0) -> Any:
    return FakeTrainer(
        is_global_zero=rank == 0, global_step=0, current_epoch=0, max_epochs=1, estimated_stepping_batches=1000,
        num_val_batches=[3], sanity_checking=False, state="fit",
    )  # fmt: skip


@pytest.mark.parametrize(
    "make",
    [lambda: RichProgressBar(seconds=60, console=Console(file=io.StringIO())), lambda: PlainProgress(seconds=60)],
)
def test_nothing_is_read_on_steps_that_are_not_shown(make: Any) -> None:
    progress, trainer, module = make(), fake_trainer(), Scalar()
    progress.on_train_start(trainer, module)
    trainer.global_step = 1
    progress.on_train_batch_end(trainer, module, {"loss": torch.tensor(1.0)}, None, 0)
    assert trainer.reads == 1
    for step in range(2, 100):
        trainer.global_step = step
        progress.on_train_batch_end(trainer, module, {"loss": Untouchable()}, None, step)
    assert trainer.reads == 1
    progress.teardown(trainer, module, "fit")


@pytest.mark.parametrize("rank", [0, 1])
def test_step_that_is_not_shown_costs_about_a_microsecond(rank: int) -> None:
    progress, trainer, module = PlainProgress(seconds=60), fake_trainer(rank), Scalar()
    progress.on_train_start(trainer, module)
    outputs = {"loss": torch.tensor(1.0)}
    progress.on_train_batch_end(trainer, module, outputs, None, 0)
    best = 1.0
    for _ in range(5):
        began = time.perf_counter()
        for step in range(2000):
            progress.on_train_batch_end(trainer, module, outputs, None, step)
        best = min(best, (time.perf_counter() - began) / 2000)
    # About 0.3 microseconds on an idle machine.
    assert best < 3e-6


def test_other_ranks_show_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    trainer, module = fake_trainer(rank=1), Scalar()
    for progress in (PlainProgress(seconds=0), RichProgressBar(seconds=0)):
        progress.on_train_start(trainer, module)
        progress.on_train_batch_end(trainer, module, {"loss": torch.tensor(1.0)}, None, 0)
        progress.on_validation_start(trainer, module)
        progress.on_validation_batch_end(trainer, module, None, None, 0)
        progress.on_validation_end(trainer, module)
        progress.on_train_epoch_end(trainer, module)
        progress.on_train_end(trainer, module)
        progress.teardown(trainer, module, "fit")
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""


def test_what_a_step_returns_is_not_kept_alive() -> None:
    import weakref

    progress, trainer, module = PlainProgress(seconds=60), fake_trainer(), Scalar()
    progress.on_train_start(trainer, module)
    big = torch.zeros(1000)
    alive = weakref.ref(big)
    progress.on_train_batch_end(trainer, module, {"loss": torch.tensor(1.0), "big": big}, None, 0)
    del big
    assert alive() is None


# --- the live display -------------------------------------------------------------------------------------------------


def rich_run(root: Path, *more: Callback, width: int = 80, **arguments: Any) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=width, legacy_windows=False, _environ={"TERM": "xterm"})
    trainer = trainer_with(RichProgressBar(seconds=0, console=console), root, *more, **arguments)
    trainer.fit(Scalar(), loader(), loader(3))
    return file.getvalue()


@pytest.mark.parametrize("width", [60, 80, 200])
def test_rich_display_of_a_whole_run(tmp_path: Path, width: int) -> None:
    output = rich_run(tmp_path, width=width)
    plain = screen(output)
    assert "train epoch 1/2" in plain
    assert re.search(r"train epoch 2/2 +\S+ +8/8  [\d.]+ s?(teps)?/s", plain)
    assert "sanity check" in plain
    assert re.search(r"validate +\S+ +2/3", plain)
    assert "loss 0.5  double 1" in plain
    assert all(len(line) <= width for chunk in plain.split("\r") for line in chunk.split("\n"))
    assert output.rstrip().endswith("\x1b[?25h"), "the cursor is shown again"
    last = plain.rstrip().split("\n")[-2:]
    assert "8/8" in last[0], last
    assert "val_loss" in last[1]
    assert "validate" not in last[0] + last[1]


def test_rich_display_lets_prints_appear_above(tmp_path: Path) -> None:
    class Talks(Callback):
        def on_step(self, trainer: Trainer, module: TrainModule) -> None:
            print(f"said at {trainer.global_step}")

    plain = screen(rich_run(tmp_path, Talks()))
    assert [int(step) for step in re.findall(r"said at (\d)", plain)] == list(range(1, 9))


def test_rich_display_gives_the_terminal_back_after_an_exception(tmp_path: Path) -> None:
    class Boom(Callback):
        def on_step(self, trainer: Trainer, module: TrainModule) -> None:
            raise RuntimeError("boom")

    before = sys.stdout, sys.stderr
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80, _environ={"TERM": "xterm"})
    trainer = trainer_with(RichProgressBar(seconds=0, console=console), tmp_path, Boom())
    with pytest.raises(RuntimeError, match="boom"):
        trainer.fit(Scalar(), loader())
    assert (sys.stdout, sys.stderr) == before
    assert file.getvalue().rstrip().endswith("\x1b[?25h")


def test_rich_display_of_validate_test_and_predict(tmp_path: Path) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80, _environ={"TERM": "xterm"})
    trainer = trainer_with(RichProgressBar(seconds=0, console=console), tmp_path)
    trainer.validate(Scalar(), loader(3))
    trainer.test(Scalar(), loader(3))
    trainer.predict(Scalar(), loader(3))
    plain = screen(file.getvalue())
    for task in ("validate", "test", "predict"):
        assert re.search(rf"{task} +\S+ +3", plain), task
    assert "test_loss 0.5" in plain


def test_run_in_a_terminal_has_the_live_display(script: Path) -> None:
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, str(script), "200"], env=environment, stdout=theirs, stderr=theirs, stdin=subprocess.DEVNULL
    )
    os.close(theirs)
    chunks = []
    try:
        while chunk := os.read(ours, 65536):
            chunks.append(chunk)
    except OSError:
        # How Linux says that the other side has closed.
        pass
    finally:
        os.close(ours)
    assert process.wait(60) == 0
    output = b"".join(chunks).decode()
    assert "\x1b[?25l" in output
    assert output.rstrip().endswith("\x1b[?25h")
    assert "400/400" in screen(output)
    # At most ten redraws in a second: far fewer than steps.
    assert output.count("train epoch") < 200


# --- parts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("terminal", "term", "kind"),
    [
        (True, "xterm-256color", RichProgressBar),
        (True, None, PlainProgress),
        (True, "", PlainProgress),
        (True, "dumb", PlainProgress),
        (True, "unknown", PlainProgress),
        (False, "xterm", PlainProgress),
    ],
)
def test_display_is_chosen_by_what_standard_output_is(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, term: str | None, kind: type[Progress]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    monkeypatch.delenv("TERM", raising=False)
    if term is not None:
        monkeypatch.setenv("TERM", term)
    assert type(default_progress()) is kind


@pytest.mark.parametrize(
    ("shell", "widgets", "kind"),
    [
        ("ZMQInteractiveShell", True, RichProgressBar),
        ("ZMQInteractiveShell", False, PlainProgress),
        ("TerminalInteractiveShell", True, PlainProgress),
    ],
)
def test_display_in_a_notebook(
    monkeypatch: pytest.MonkeyPatch, shell: str, widgets: bool, kind: type[Progress]
) -> None:
    ipython = SimpleNamespace(get_ipython=type(shell, (), {}))
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setattr(
        "acclight.callbacks.progress.find_spec", lambda name: object() if widgets and name == "ipywidgets" else None
    )
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    assert type(default_progress()) is kind


def test_importing_progress_does_not_import_rich() -> None:
    script = "import sys, acclight.callbacks as c; c.RichProgressBar(); c.PlainProgress(); print('rich' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "False"


def test_pace_by_hand() -> None:
    pace = Pace(100, now=0.0, span=10.0)
    assert pace.per_second() == 0.0
    assert pace.seconds_left(200) is None
    pace.mark(110, 5.0)
    assert pace.per_second() == 2.0
    assert pace.seconds_left(200) == 45.0
    pace.pause(5.0)
    pace.resume(105.0)
    pace.mark(120, 110.0)
    assert pace.per_second() == 2.0, "the 100 seconds of the pause do not count"
    pace.mark(180, 120.0)
    # The marks at 100 (now moved to 100.0) and 105.0 are more than 10 seconds old; 110.0 is the oldest that counts.
    assert pace.per_second() == 6.0
    assert pace.seconds_left(150) == 0.0


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00:00"), (59.6, "0:01:00"), (3723, "1:02:03"), (360000, "100:00:00")]
)
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


@pytest.mark.parametrize(
    ("speed", "unit", "text"),
    [
        (0.0, "step", ""), (0.25, "step", "4 s/step"), (2.5, "batch", "2.5 batches/s"),
        (85.14, "step", "85.1 steps/s"), (123456.7, "step", "123457 steps/s"),
    ],
)  # fmt: skip
def test_speed_in_words(speed: float, unit: str, text: str) -> None:
    status = Status("train", "1", 0, None, unit, "", {}, speed, None)
    assert status.speed == text
    assert status.count == "0"
    assert status.left == ""


def test_negative_time_is_refused() -> None:
    with pytest.raises(ValueError, match="seconds=-1"):
        PlainProgress(seconds=-1)
