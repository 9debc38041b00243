"""LearningRateMonitor, ThroughputMonitor and ModelSummary: what they log and print, by hand."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from acclight import Callback, Trainer, TrainModule
from acclight.callbacks import LearningRateMonitor, ModelSummary, ThroughputMonitor
from acclight.callbacks.model_summary import summarize, summary_table
from acclight.loggers import Logger


class Notes(Logger):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.rows.append((step, dict(metrics)))

    def of(self, name: str) -> list[tuple[int, Any]]:
        return [(step, row[name]) for step, row in self.rows if name in row]

    @property
    def names(self) -> set[str]:
        return {name for _, row in self.rows for name in row} - {"epoch"}


class Net(TrainModule):
    def __init__(self, optimizers: Any = None) -> None:
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.second = nn.Linear(3, 1)
        self.make_optimizers = optimizers

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        output: Tensor = self.second(self.first(batch))
        return output.square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        time.sleep(0.05)

    def configure_optimizers(self) -> Any:
        if self.make_optimizers is None:
            return torch.optim.SGD(self.parameters(), lr=0.1)
        return self.make_optimizers(self)


def loader(batches: int = 4, size: int = 2) -> DataLoader[Any]:
    return DataLoader(torch.ones(batches * size, 2).unbind(), batch_size=size)  # type: ignore[arg-type]


def fit(root: Path, callback: Callback, module: TrainModule, **arguments: Any) -> Notes:
    notes = Notes()
    settings: dict[str, Any] = {
        "max_epochs": 2, "logger": notes, "default_root_dir": root, "enable_model_summary": False,
        "enable_checkpointing": False, "enable_progress_bar": False, "log_every_n_steps": 1, "num_sanity_val_steps": 0,
    }  # fmt: skip
    val = arguments.pop("val", None)
    train = arguments.pop("train", None) or loader()
    Trainer(callbacks=[callback], **(settings | arguments)).fit(module, train, val)
    return notes


# --- learning rate ----------------------------------------------------------------------------------------------------


def test_rate_is_the_one_that_the_step_was_made_with(tmp_path: Path) -> None:
    def optimizers(module: Net) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        scheduler = StepLR(optimizer, step_size=2, gamma=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    notes = fit(tmp_path, LearningRateMonitor(), Net(optimizers))
    expected = [1.0, 1.0, 0.1, 0.1, 0.01, 0.01, 0.001, 0.001]
    assert notes.of("lr-SGD") == [(step, pytest.approx(rate)) for step, rate in enumerate(expected, 1)]
    assert [epoch for _, epoch in notes.of("epoch")] == [0] * 4 + [1] * 4


@pytest.mark.parametrize(("every", "accumulate", "steps"), [(3, 1, [3, 6]), (2, 2, [2, 4]), (50, 1, [])])
def test_rate_is_logged_where_the_trainer_logs(tmp_path: Path, every: int, accumulate: int, steps: list[int]) -> None:
    notes = fit(tmp_path, LearningRateMonitor(), Net(), log_every_n_steps=every, accumulate_grad_batches=accumulate)
    assert [step for step, _ in notes.of("lr-SGD")] == steps


def test_rate_per_epoch(tmp_path: Path) -> None:
    def optimizers(module: Net) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        return [optimizer], [StepLR(optimizer, step_size=1, gamma=0.5)]

    notes = fit(tmp_path, LearningRateMonitor("epoch"), Net(optimizers), max_epochs=3)
    assert notes.of("lr-SGD") == [(0, 1.0), (4, 0.5), (8, 0.25)]


def test_names_of_groups_and_schedulers(tmp_path: Path) -> None:
    def groups(module: Net) -> Any:
        first: dict[str, Any] = {"params": module.first.parameters(), "lr": 0.1}
        return torch.optim.Adam([first, {"params": module.second.parameters(), "name": "head"}], lr=0.2)

    notes = fit(tmp_path, LearningRateMonitor(), Net(groups), max_steps=1)
    assert notes.of("lr-Adam/pg1") == [(1, 0.1)]
    assert notes.of("lr-Adam/head") == [(1, 0.2)]
    assert notes.names == {"lr-Adam/pg1", "lr-Adam/head"}

    def named(module: Net) -> Any:
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 1), "name": "warm"}}

    assert fit(tmp_path, LearningRateMonitor(), Net(named), max_steps=1).of("warm") == [(1, 0.3)]


def test_momentum_and_weight_decay(tmp_path: Path) -> None:
    def sgd(module: Net) -> Any:
        return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)

    def adam(module: Net) -> Any:
        return torch.optim.Adam(module.parameters(), lr=0.1, betas=(0.8, 0.99))

    monitor = LearningRateMonitor(log_momentum=True, log_weight_decay=True)
    notes = fit(tmp_path, monitor, Net(sgd), max_steps=1)
    assert notes.of("lr-SGD-momentum") == [(1, 0.9)]
    assert notes.of("lr-SGD-weight_decay") == [(1, 0.01)]
    assert fit(tmp_path, monitor, Net(adam), max_steps=1).of("lr-Adam-momentum") == [(1, 0.8)]


def test_several_optimizers_are_numbered(tmp_path: Path) -> None:
    class Manual(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
            self.second(self.first(batch)).square().mean().backward()
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()

        def configure_optimizers(self) -> Any:
            return [
                torch.optim.SGD(self.first.parameters(), lr=0.1),
                torch.optim.Adam(self.second.parameters(), lr=0.2),
                torch.optim.SGD(self.second.parameters(), lr=0.3),
            ]

    notes = fit(tmp_path, LearningRateMonitor(), Manual(), max_steps=1)
    assert notes.rows[0] == (1, {"lr-SGD": 0.1, "lr-Adam": 0.2, "lr-SGD-1": 0.3, "epoch": 0})


def test_rate_without_a_logger_is_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="LearningRateMonitor has nothing to write to"):
        fit(tmp_path, LearningRateMonitor(), Net(), logger=False)


def test_unknown_interval() -> None:
    with pytest.raises(ValueError, match="logging_interval='batch'"):
        LearningRateMonitor("batch")


# --- throughput -------------------------------------------------------------------------------------------------------


class FakeTrainer:
    """One process that does steps at times that the test decides."""

    is_global_zero = True
    current_epoch = 0

    def __init__(self, log_every_n_steps: int) -> None:
        self.log_every_n_steps = log_every_n_steps
        self.global_step = 0
        self.loggers = [Notes()]


class Clock:
    """Stands in for the module `time`."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("acclight.callbacks.throughput_monitor.time", clock)
    return clock


def run_steps(
    monitor: ThroughputMonitor, trainer: Any, clock: Clock, steps: int, *, wait: float, work: float, micro: int = 1
) -> None:
    module = Net()
    for _ in range(steps):
        for index in range(micro):
            clock.now += wait
            monitor.on_train_batch_start(trainer, module, torch.ones(4, 8), index)
            clock.now += work
            if index == micro - 1:
                trainer.global_step += 1
            monitor.on_train_batch_end(trainer, module, None, torch.ones(4, 8), index)


def test_throughput_by_hand(ticking: Clock) -> None:
    monitor = ThroughputMonitor(lambda batch: batch.shape[0], lambda batch: batch.numel())
    trainer: Any = FakeTrainer(log_every_n_steps=2)
    notes, module = trainer.loggers[0], Net()
    monitor.on_train_start(trainer, module)
    monitor.on_train_epoch_start(trainer, module)
    # 4 steps of 2 micro-batches of 4 samples and 32 items, each after 0.1 s of waiting and 0.4 s of work.
    run_steps(monitor, trainer, ticking, 4, wait=0.1, work=0.4, micro=2)
    assert notes.of("throughput/steps_per_sec") == [(2, pytest.approx(1.0)), (4, pytest.approx(1.0))]
    assert notes.of("throughput/samples_per_sec") == [(2, pytest.approx(8.0)), (4, pytest.approx(8.0))]
    assert notes.of("throughput/items_per_sec") == [(2, pytest.approx(64.0)), (4, pytest.approx(64.0))]
    # The wait right after a logged step is not told from the reading of metrics: 7 of the 8 waits of 0.1 s in 4 s.
    assert notes.of("throughput/data_wait") == [(2, pytest.approx(0.2)), (4, pytest.approx(0.7 / 4))]
    assert all(value > 1.0 for _, value in notes.of("throughput/peak_memory_mib"))


def test_throughput_window_forgets_what_is_old(ticking: Clock) -> None:
    monitor = ThroughputMonitor(lambda batch: batch.shape[0], window_size=4)
    trainer: Any = FakeTrainer(log_every_n_steps=2)
    monitor.on_train_start(trainer, Net())
    run_steps(monitor, trainer, ticking, 4, wait=0.0, work=1.0)
    run_steps(monitor, trainer, ticking, 4, wait=0.0, work=0.25)
    # Over steps 1-2, 1-4, 3-6 and 5-8.
    rates = [rate for _, rate in trainer.loggers[0].of("throughput/steps_per_sec")]
    assert rates == pytest.approx([1.0, 1.0, 4 / 2.5, 4.0])
    assert "throughput/items_per_sec" not in trainer.loggers[0].names


def test_throughput_leaves_out_validations_and_checkpoints(ticking: Clock) -> None:
    monitor = ThroughputMonitor(lambda batch: batch.shape[0])
    trainer: Any = FakeTrainer(log_every_n_steps=4)
    module = Net()
    monitor.on_train_start(trainer, module)
    monitor.on_train_epoch_start(trainer, module)
    run_steps(monitor, trainer, ticking, 2, wait=0.0, work=0.5)
    monitor.on_validation_start(trainer, module)
    ticking.now += 100.0
    monitor.on_save_checkpoint(trainer, module, {})
    ticking.now += 50.0
    monitor.on_checkpoint(trainer, module, Path("somewhere"))
    monitor.on_validation_end(trainer, module)
    monitor.on_save_checkpoint(trainer, module, {})
    ticking.now += 50.0
    monitor.on_checkpoint(trainer, module, Path("somewhere"))
    run_steps(monitor, trainer, ticking, 2, wait=0.0, work=0.5)
    assert trainer.loggers[0].of("throughput/steps_per_sec") == [(4, pytest.approx(2.0))]
    assert trainer.loggers[0].of("throughput/data_wait") == [(4, pytest.approx(0.0))]


def test_counts_on_the_device_are_read_only_where_something_is_logged(ticking: Clock) -> None:
    class Counted(Tensor):
        """Counts how often its value is read."""

        reads = 0

        def __float__(self) -> float:
            Counted.reads += 1
            return float(self.as_subclass(Tensor))

    monitor = ThroughputMonitor(lambda batch: 4, lambda batch: batch.sum().as_subclass(Counted))
    trainer: Any = FakeTrainer(log_every_n_steps=5)
    monitor.on_train_start(trainer, Net())
    run_steps(monitor, trainer, ticking, 10, wait=0.0, work=1.0)
    assert Counted.reads == 2
    assert [value for _, value in trainer.loggers[0].of("throughput/items_per_sec")] == pytest.approx([32.0, 32.0])


def test_throughput_in_a_run(tmp_path: Path) -> None:
    monitor = ThroughputMonitor(lambda batch: batch.shape[0], lambda batch: batch.numel())
    began = time.perf_counter()
    notes = fit(tmp_path, monitor, Net(), log_every_n_steps=4, val=loader(2), val_check_interval=1)
    seconds = time.perf_counter() - began
    assert [step for step, _ in notes.of("throughput/samples_per_sec")] == [4, 8]
    # The validations take 0.8 of the seconds, and do not count.
    assert notes.of("throughput/samples_per_sec")[-1][1] > 16 / max(seconds - 0.8, 1e-3)
    for _, row in notes.rows:
        if "throughput/items_per_sec" in row:
            assert row["throughput/items_per_sec"] == pytest.approx(2 * row["throughput/samples_per_sec"])
            assert 0.0 <= row["throughput/data_wait"] <= 1.0


def test_window_below_one() -> None:
    with pytest.raises(ValueError, match="window_size=0"):
        ThroughputMonitor(len, window_size=0)


# --- summary ----------------------------------------------------------------------------------------------------------


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2, bias=False))
        self.head = nn.Linear(2, 2)
        self.head.weight.requires_grad_(False)


def test_summary_by_hand() -> None:
    parts = {part.name: (part.type, part.parameters, part.trainable) for part in summarize(Deep(), max_depth=1)}
    assert parts == {"body": ("Sequential", 56, 56), "head": ("Linear", 6, 2), "": ("Deep", 62, 58)}
    deep = summarize(Deep(), max_depth=-1)
    assert [part.name for part in deep] == ["body", "body.0", "body.1", "body.2", "head", ""]
    assert [part.parameters for part in deep] == [56, 40, 0, 16, 6, 62]
    assert deep[-1].bytes == 4 * 62
    assert [part.name for part in summarize(Deep(), max_depth=0)] == [""]


def test_summary_table() -> None:
    assert summary_table(Deep(), max_depth=1).splitlines() == [
        "name  type        parameters  trainable",
        "---------------------------------------",
        "body  Sequential          56      100 %",
        "head  Linear               6     33.3 %",
        "Deep: 62 parameters, 58 trainable (93.5 %), 0.0 MiB",
    ]


def test_tied_weights_count_once_in_the_whole() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(6, 4)
            self.out = nn.Linear(4, 6, bias=False)
            self.out.weight = self.embedding.weight

    assert [part.parameters for part in summarize(Tied())] == [24, 24, 24]


def test_dtypes_and_lazy_parameters() -> None:
    module = nn.ModuleDict({"small": nn.Linear(2, 2, dtype=torch.bfloat16), "lazy": nn.LazyLinear(3)})
    small, lazy, whole = summarize(module)
    assert (small.parameters, small.bytes) == (6, 12)
    assert lazy.lazy
    assert (whole.parameters, whole.lazy) == (6, True)
    assert "6 + lazy parameters" in summary_table(module)


def test_wrappers_of_checkpointing_and_compile_are_not_shown() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    module = Deep()
    module.body[0] = checkpoint_wrapper(module.body[0])
    module.head = torch.compile(module.head)  # type: ignore[assignment]
    parts = [(part.name, part.type, part.parameters) for part in summarize(module, max_depth=2)]
    assert parts == [
        ("body", "Sequential", 56), ("body.0", "Linear", 40), ("body.1", "ReLU", 0), ("body.2", "Linear", 16),
        ("head", "Linear", 6), ("", "Deep", 62),
    ]  # fmt: skip


def test_summary_is_said_once_when_a_fit_begins(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, ModelSummary(max_depth=1), Net())
    (lines,) = (one.getMessage().splitlines() for one in caplog.records if "trainable" in one.getMessage())
    assert [line.split() for line in lines] == [
        ["name", "type", "parameters", "trainable"],
        ["-" * len("second  Linear           4      100 %")],
        ["first", "Linear", "9", "100", "%"],
        ["second", "Linear", "4", "100", "%"],
        ["Net:", "13", "parameters,", "13", "trainable", "(100", "%),", "0.0", "MiB"],
    ]


def test_depth_below_minus_one() -> None:
    with pytest.raises(ValueError, match="max_depth=-2"):
        ModelSummary(max_depth=-2)
