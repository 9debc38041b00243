"""self.log: where, what, how it is reduced and when it is read; every value is worked out by hand."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from acclight import Callback, Trainer, TrainModule
from acclight.loggers import Logger
from acclight.logging.exchange import Key
from tests.distributed import RankChecks
from tests.scenarios import DISTRIBUTED, quiet_trainer

on_two_ranks = RankChecks(world_size=2, timeout=90.0)


class Rows(Logger):
    """Keeps what a logger is given, but for the epoch."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.rows.append((step, {name: value for name, value in metrics.items() if name != "epoch"}))

    def of(self, name: str) -> list[tuple[int, float]]:
        return [(step, values[name]) for step, values in self.rows if name in values]


class Logs(TrainModule):
    """Logs what a test says, wherever the test says: `logs(hook=function of (module, *the hook's arguments))`."""

    def __init__(self, **hooks: Callable[..., Any]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))
        self.seen: list[Any] = []
        self.steps = {
            name: function for name, function in hooks.items() if name.endswith("_step") and name != "on_step"
        }
        for name, function in hooks.items():
            if name not in self.steps:
                setattr(self, name, lambda *arguments, function=function: function(self, *arguments))

    def run(self, step: str, *arguments: Any) -> Any:
        return self.steps[step](self, *arguments) if step in self.steps else None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.run("training_step", batch, batch_idx)
        return self.w.sum() + 1.0

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.run("validation_step", batch, batch_idx, dataloader_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.run("test_step", batch, batch_idx, dataloader_idx)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.run("predict_step", batch, batch_idx, dataloader_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def ids(samples: int, batch_size: int) -> DataLoader[Any]:
    return DataLoader(torch.arange(float(samples)), batch_size=batch_size)


def fit(module: TrainModule, train: Any = None, val: Any = None, **arguments: Any) -> tuple[Trainer, Rows]:
    rows = Rows()
    settings = {"strategy": "single", "max_epochs": 1, "log_every_n_steps": 1, "logger": rows} | arguments
    trainer = quiet_trainer(**settings)
    trainer.fit(module, ids(4, 1) if train is None else train, val)
    return trainer, rows


def log_batch_value(values: list[float], **arguments: Any) -> Callable[..., None]:
    return lambda module, batch, batch_idx, *_: module.log("x", torch.tensor(values[batch_idx]), **arguments)


# --- means are weighted by sample ------------------------------------------------------------------------------------


def test_the_smaller_last_batch_counts_for_what_it_holds() -> None:
    # Batches of 4, 4 and 1 samples: (4 * 1 + 4 * 1 + 1 * 10) / 9.
    steps = {"validation_step": log_batch_value([1, 1, 10]), "test_step": log_batch_value([1, 1, 10])}
    module = Logs(training_step=log_batch_value([1, 1, 10], on_epoch=True, on_step=False), **steps)
    trainer, rows = fit(module, ids(9, 4))
    assert rows.of("x") == [(3, 2.0)]
    assert trainer.validate(module, ids(9, 4)) == [{"x": 2.0}]
    assert trainer.test(module, ids(9, 4)) == [{"x": 2.0}]


class Bags(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> int:
        return index


class BagStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


def bag(samples: list[int]) -> dict[str, Any]:
    """A batch whose parts have other lengths than it has samples."""
    return {"table": torch.zeros(14, 3), "x": torch.zeros(len(samples), 2), "name": [str(i) for i in samples]}


def test_the_loader_knows_how_many_samples_a_batch_has(recwarn: pytest.WarningsRecorder) -> None:
    module = Logs(
        validation_step=log_batch_value([1, 6]), training_step=log_batch_value([1, 6], on_epoch=True, on_step=False)
    )
    trainer, rows = fit(module, DataLoader(Bags(), batch_size=4, collate_fn=bag))
    assert rows.of("x") == [(2, 2.0)]
    assert trainer.validate(module, DataLoader(Bags(), batch_size=4, collate_fn=bag)) == [{"x": 2.0}]
    assert not [w for w in recwarn if "batch_size" in str(w.message)]


def test_a_stream_is_guessed_with_one_warning_and_an_explicit_number_wins(recwarn: pytest.WarningsRecorder) -> None:
    loader = DataLoader(BagStream(), batch_size=4, collate_fn=bag)

    def log(module: Logs, batch: Any, *_: Any) -> None:
        module.log("guessed", 1.0 if len(batch["x"]) == 4 else 6.0)
        module.log("given", 1.0 if len(batch["x"]) == 4 else 6.0, batch_size=len(batch["x"]))

    module = Logs(validation_step=log, training_step=lambda *a: None)
    trainer, _ = fit(module, ids(2, 1), loader, max_epochs=2)
    # The table's 14 rows twice: a plain mean.
    assert trainer.callback_metrics["guessed"] == 3.5
    assert trainer.callback_metrics["given"] == 2.0
    warnings = [str(w.message) for w in recwarn if "lengths" in str(w.message)]
    assert len(warnings) == 1
    assert "pass batch_size= to self.log" in warnings[0]


def test_a_batch_without_samples_does_not_spoil_the_mean() -> None:
    def log(module: Logs, batch: Any, *_: Any) -> None:
        empty = batch[batch > 100.0]
        module.log("x", batch.mean() if batch[0] == 0.0 else empty.mean(), batch_size=2 if batch[0] == 0.0 else 0)
        module.log("none", empty.mean(), batch_size=0)

    [metrics] = quiet_trainer(strategy="single").validate(Logs(validation_step=log), ids(4, 2))
    assert metrics["x"] == 0.5
    assert math.isnan(metrics["none"])


def test_a_wrong_batch_size_is_an_error() -> None:
    module = Logs(validation_step=lambda m, *_: m.log("x", 1.0, batch_size=-1))
    with pytest.raises(ValueError, match=r"'x', batch_size=-1"):
        quiet_trainer(strategy="single").validate(module, ids(2, 1))


def test_values_of_epoch_hooks_have_no_batch() -> None:
    def log(module: Logs) -> None:
        module.log("x", 1.0)
        module.log("x", 4.0)

    module = Logs(on_validation_epoch_end=log, on_train_epoch_end=log)
    trainer, rows = fit(module, ids(3, 2))
    assert rows.of("x") == [(2, 2.5)]
    assert trainer.validate(module, ids(3, 2)) == [{"x": 2.5}]


def test_steps_are_means_over_micro_batches_by_sample() -> None:
    module = Logs(training_step=log_batch_value([1.0, 4.0, 7.0]))
    _, rows = fit(module, ids(5, 2), accumulate_grad_batches=2)
    # Windows (2 samples: 1, 2 samples: 4) and (1 sample: 7).
    assert rows.of("x") == [(1, 2.5), (2, 7.0)]
    _, rows = fit(module, ids(3, 2), accumulate_grad_batches=2)
    assert rows.of("x") == [(1, 2.0)]


def test_only_the_window_that_is_shown_counts() -> None:
    module = Logs(training_step=lambda m, batch, i: m.log("x", batch.mean()))
    _, rows = fit(module, ids(7, 1), log_every_n_steps=3)
    assert rows.of("x") == [(3, 2.0), (6, 5.0)]


def test_a_metric_may_have_the_name_of_the_epoch() -> None:
    class Epochs(Rows):
        def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
            self.rows.append((step, dict(metrics)))

    rows = Epochs()
    module = Logs(on_train_epoch_end=lambda m: m.log("epoch" if m.current_epoch else "x", 0.5))
    fit(module, ids(1, 1), logger=rows, max_epochs=2)
    assert rows.rows == [(1, {"epoch": 0, "x": 0.5}), (2, {"epoch": 0.5})]


def test_a_key_that_is_not_logged_this_time_is_not_shown() -> None:
    def log(module: Logs, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 0:
            module.log("first", 1.0)
        if module.current_epoch == 0:
            module.log("once", 2.0, on_step=False, on_epoch=True)

    _, rows = fit(Logs(training_step=log), ids(3, 1), max_epochs=2)
    assert rows.of("first") == [(1, 1.0), (4, 1.0)]
    assert rows.of("once") == [(3, 2.0)]


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        3, 3.0, np.float32(3.0), np.float64(3.0), np.int64(3), np.array(3.0), np.array([3.0]), torch.tensor(3),
        torch.tensor(3.0), torch.tensor([3.0]), torch.tensor([[3.0]]), torch.tensor(3.0, dtype=torch.bfloat16),
        torch.tensor(3.0, dtype=torch.float64), nn.Parameter(torch.tensor(3.0)),
    ],
    ids=lambda value: f"{type(value).__name__}-{getattr(value, 'dtype', '')}-{getattr(value, 'ndim', '')}",
)  # fmt: skip
@pytest.mark.parametrize("reduce_fx", ["mean", "sum", "min", "max"])
def test_every_kind_of_number(value: Any, reduce_fx: str) -> None:
    def log(module: Logs, batch: Tensor, batch_idx: int) -> None:
        module.log("x", value if batch_idx == 0 else 5.0, on_step=True, on_epoch=True, reduce_fx=reduce_fx)

    _, rows = fit(Logs(training_step=log), ids(4, 3))
    assert rows.of("x_step") == [(1, 3.0), (2, 5.0)]
    # Three samples and one.
    assert rows.of("x_epoch") == [(2, {"mean": 3.5, "sum": 8.0, "min": 3.0, "max": 5.0}[reduce_fx])]


@pytest.mark.parametrize("value", [True, np.bool_(True), torch.tensor(True)], ids=["bool", "numpy", "tensor"])
def test_truth_values_give_a_share(value: Any) -> None:
    def log(module: Logs, batch: Tensor, batch_idx: int) -> None:
        module.log("x", value if batch_idx == 0 else not value, on_step=False, on_epoch=True)

    _, rows = fit(Logs(training_step=log), ids(4, 3))
    assert rows.of("x") == [(2, 0.75)]


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (torch.zeros(2), ValueError, r"'x'.*shape \(2,\).*mean"),
        (torch.zeros(0), ValueError, r"'x'.*shape \(0,\)"),
        (torch.tensor(1j), TypeError, r"'x'.*complex"),
        ("1.0", TypeError, "'x'.*str"),
        (None, TypeError, "'x'.*NoneType"),
        ({"a": 1.0}, TypeError, "'x'.*dict"),
        ([1.0], TypeError, "'x'.*list"),
        (np.zeros(2), TypeError, "'x'.*ndarray"),
    ],
)
def test_what_is_no_number_is_an_error(value: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        fit(Logs(training_step=lambda m, *_: m.log("x", value)))


def test_a_name_must_be_a_string() -> None:
    with pytest.raises(TypeError, match=r"self.log\(3"):
        fit(Logs(training_step=lambda m, *_: m.log(3, 1.0)))


@pytest.mark.parametrize("as_tensor", [True, False])
@pytest.mark.parametrize("reduce_fx", ["mean", "sum", "min", "max"])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_nan_stays_visible(where: int, reduce_fx: str, as_tensor: bool) -> None:
    def log(module: Logs, batch: Tensor, batch_idx: int, *_: Any) -> None:
        value = math.nan if batch_idx == where else 1.0
        module.log("x", torch.tensor(value) if as_tensor else value, reduce_fx=reduce_fx)

    [metrics] = quiet_trainer(strategy="single").validate(Logs(validation_step=log), ids(3, 1))
    assert math.isnan(metrics["x"])


@pytest.mark.parametrize("reduce_fx", [torch.mean, torch.sum, torch.min, torch.max, "avg"])
def test_torch_functions_name_a_reduction(reduce_fx: Any) -> None:
    module = Logs(validation_step=lambda m, batch, *_: m.log("x", batch.sum(), reduce_fx=reduce_fx))
    [metrics] = quiet_trainer(strategy="single").validate(module, ids(3, 1))
    assert metrics["x"] == {torch.mean: 1.0, "avg": 1.0, torch.sum: 3.0, torch.min: 0.0, torch.max: 2.0}[reduce_fx]


def test_an_unknown_reduction_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"'x', reduce_fx='median'.*mean, sum, min, max.*torchmetrics"):
        fit(Logs(training_step=lambda m, *_: m.log("x", 1.0, reduce_fx="median")))


def test_sums_keep_their_digits() -> None:
    """A thousand times 16777217 = 2^24 + 1, which float32 cannot hold, and its thousandth part."""

    def log(module: Logs, batch: Tensor, batch_idx: int, *_: Any) -> None:
        module.log("sum", torch.tensor(2**24 + 1, dtype=torch.int64), reduce_fx="sum")
        module.log("third", torch.tensor(1.0) / 3)

    [metrics] = quiet_trainer(strategy="single").validate(Logs(validation_step=log), ids(1000, 1))
    assert metrics["sum"] == 1000 * (2**24 + 1)
    assert metrics["third"] == pytest.approx(float(torch.tensor(1.0) / 3), rel=1e-15)


def test_many_values_with_many_weights() -> None:
    """More values than are kept as they are, of several types."""

    def log(module: Logs, batch: Tensor, batch_idx: int, *_: Any) -> None:
        value = batch.sum() if batch_idx % 2 else batch.sum().double()
        module.log("mean", value, batch_size=1 + batch_idx % 3)
        module.log("max", value, reduce_fx="max")
        module.log("mixed", value if batch_idx % 2 else float(value))

    [metrics] = quiet_trainer(strategy="single").validate(Logs(validation_step=log), ids(300, 1))
    weights = [1 + i % 3 for i in range(300)]
    assert metrics["mean"] == sum(i * w for i, w in enumerate(weights)) / sum(weights)
    assert metrics["max"] == 299.0
    assert metrics["mixed"] == 149.5


def test_a_logged_tensor_may_be_changed_afterwards() -> None:
    def log(module: Logs, batch: Tensor, *_: Any) -> None:
        value = batch.mean().clone()
        module.log("x", value, on_step=True, on_epoch=True, prog_bar=True)
        value.mul_(100.0)

    _, rows = fit(Logs(training_step=log), ids(3, 1))
    assert rows.of("x_step") == [(1, 0.0), (2, 1.0), (3, 2.0)]
    assert rows.of("x_epoch") == [(3, 1.0)]


def test_no_graph_and_no_big_tensor_is_kept_alive() -> None:
    """The loss's graph, and the tensor that the logged value is a view of, go with the batch."""
    kept: list[weakref.ref[Any]] = []

    def log(module: Logs, batch: Tensor, *_: Any) -> None:
        assert not [ref for ref in kept if ref() is not None]
        kept.clear()
        big = torch.zeros(1000) + module.w
        kept.extend([weakref.ref(big), weakref.ref(big.untyped_storage())])
        module.log("x", big[0], on_step=True, on_epoch=True, prog_bar=True)

    trainer, _ = fit(Logs(training_step=log), ids(5, 1))
    assert trainer.callback_metrics["x"].grad_fn is None
    assert not [ref for ref in kept if ref() is not None]


# --- flags -----------------------------------------------------------------------------------------------------------


def test_on_step_and_on_epoch_are_told_apart() -> None:
    seen = []

    class Look(Callback):
        runs_last = True

        def on_step(self, trainer: Trainer, module: TrainModule) -> None:
            seen.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    module = Logs(training_step=lambda m, batch, i: m.log("x", batch.mean(), on_step=True, on_epoch=True))
    trainer, rows = fit(module, ids(3, 1), callbacks=Look())
    assert seen == [{"x_step": v, "x": v} for v in (0.0, 1.0, 2.0)]
    assert rows.rows == [(1, {"x_step": 0.0}), (2, {"x_step": 1.0}), (3, {"x_step": 2.0}), (3, {"x_epoch": 1.0})]
    assert {n: float(v) for n, v in trainer.callback_metrics.items()} == {"x_step": 2.0, "x_epoch": 1.0, "x": 1.0}
    assert trainer.logged_metrics == {"x_step": 2.0, "x_epoch": 1.0}


def test_logger_and_progress_bar_get_what_they_are_given() -> None:
    def log(module: Logs, batch: Tensor, *_: Any) -> None:
        module.log("neither", 1.0, logger=False, on_epoch=True, on_step=False)
        module.log("bar", batch.sum(), logger=False, prog_bar=True)
        module.log("both", 3.0, prog_bar=True, on_epoch=True, on_step=True)

    trainer, rows = fit(Logs(training_step=log), ids(2, 1))
    assert {name for _, values in rows.rows for name in values} == {"both_step", "both_epoch"}
    assert trainer.progress_bar_metrics == {"bar": 1.0, "both_step": 3.0, "both_epoch": 3.0}
    assert set(trainer.callback_metrics) == {"neither", "bar", "both", "both_step", "both_epoch"}


def test_the_progress_bar_has_the_newest_value_between_shown_steps() -> None:
    seen = []

    class Look(Callback):
        def on_step(self, trainer: Trainer, module: TrainModule) -> None:
            seen.append(trainer.progress_bar_metrics)

    module = Logs(training_step=lambda m, batch, i: m.log("x", batch.mean(), prog_bar=True))
    _, rows = fit(module, ids(3, 1), log_every_n_steps=50, callbacks=Look())
    assert seen == [{"x": 0.0}, {"x": 1.0}, {"x": 2.0}]
    assert rows.rows == []


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        ({"prog_bar": True}, {}, "prog_bar=True and then prog_bar=False"),
        ({}, {"on_epoch": True}, "on_epoch=None and then on_epoch=True"),
        ({"reduce_fx": "sum"}, {"reduce_fx": "max"}, "reduce_fx='sum' and then reduce_fx='max'"),
    ],
)
@pytest.mark.parametrize("step", ["training_step", "validation_step"])
def test_a_key_keeps_its_arguments(step: str, first: Any, second: Any, text: str) -> None:
    module = Logs(**{step: lambda m, b, i, *_: m.log("x", 1.0, **(first if i == 0 else second))})
    with pytest.raises(ValueError, match=rf"self.log\('x'\) in {step} was called with {text}"):
        fit(module, ids(2, 1), ids(2, 1), num_sanity_val_steps=0)


def test_the_arguments_are_kept_over_validations() -> None:
    module = Logs(validation_step=lambda m, *_: m.log("x", 1.0, prog_bar=m.current_epoch == 1))
    with pytest.raises(ValueError, match="prog_bar=False and then prog_bar=True"):
        fit(module, ids(2, 1), ids(1, 1), max_epochs=2)
    # The next run may do it otherwise.
    fit(module, ids(2, 1), ids(1, 1))


def test_the_mean_of_an_epoch_goes_on_in_the_next_fit_and_not_with_another_module(tmp_path: Path) -> None:
    def log(module: Logs, batch: Tensor, *_: Any) -> None:
        module.log("x", batch.mean(), on_step=False, on_epoch=True)

    rows, module = Rows(), Logs(training_step=log)
    trainer = quiet_trainer(strategy="single", max_steps=2, logger=rows)
    trainer.fit(module, ids(4, 1))
    trainer.save_checkpoint(tmp_path / "saved")
    trainer.validate(module, ids(4, 1))
    trainer.max_steps = 4
    trainer.fit(module, ids(4, 1))
    # What was trained so far, then the whole epoch of 0, 1, 2, 3.
    assert rows.of("x") == [(2, 0.5), (4, 1.5)]
    # From a checkpoint only what comes after it is known.
    trainer.max_steps = 6
    trainer.fit(module, ids(4, 1))
    trainer.max_steps = 4
    trainer.fit(module, ids(4, 1), ckpt_path=tmp_path / "saved")
    assert rows.of("x")[2:] == [(6, 0.5), (4, 2.5)]
    trainer.max_steps = 6
    trainer.fit(module, ids(4, 1))
    trainer.max_steps, trainer.max_epochs = -1, 1
    trainer.fit(Logs(training_step=log), ids(4, 1))
    assert rows.of("x")[4:] == [(6, 0.5), (4, 1.5)]


class Looks(Callback):
    """What callbacks find where Lightning's find it."""

    def __init__(self) -> None:
        self.found: list[tuple[str, dict[str, float]]] = []

    def look(self, where: str, trainer: Trainer) -> None:
        self.found.append((where, {name: float(value) for name, value in trainer.callback_metrics.items()}))

    def on_validation_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.look("validation", trainer)

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.look("train", trainer)


@on_two_ranks
def test_the_last_hooks_of_an_epoch_find_its_values() -> None:
    def late(module: Logs) -> None:
        module.log("late", 7.0)

    looks = Looks()
    module = Logs(
        training_step=lambda m, batch, i: (m.log("loss", batch.mean()), m.log("x", batch.mean(), on_epoch=True)),
        validation_step=lambda m, batch, *_: (m.acc.update(batch), m.log("v", batch.mean()), m.log("acc", m.acc)),
        on_train_epoch_end=late,
    )
    module.acc = torchmetrics.MeanMetric()
    rows = Rows()
    trainer = quiet_trainer(
        strategy="ddp", max_epochs=2, callbacks=looks, logger=rows, log_every_n_steps=50, num_sanity_val_steps=0
    )
    trainer.fit(module, ids(8, 1), ids(4, 1))
    first, second = looks.found[1][1], looks.found[3][1]
    # Ids 0 to 7, each once; and the validation's 0 to 3.
    assert (first["x"], first["x_epoch"], first["v"], first["acc"]) == (3.5, 3.5, 1.5, 1.5)
    assert looks.found[0][1]["v"] == looks.found[0][1]["acc"] == 1.5
    assert 0 <= first["loss"] <= 7, "the last step's, though its interval has not come"
    assert "late" not in first
    assert second["x"] == 3.5
    assert second["late"] == 7.0
    assert trainer.callback_metrics["late"] == 7.0
    assert not trainer.is_global_zero or rows.of("loss") == [], "loggers keep to log_every_n_steps"


def test_two_hooks_cannot_show_one_name_at_once() -> None:
    module = Logs(training_step=lambda m, *_: m.log("x", 1.0), on_train_batch_end=lambda m, *_: m.log("x", 2.0))
    with pytest.raises(ValueError, match=r"self.log\('x'\) is called in .*on_train_batch_end.* another name"):
        fit(module)


@pytest.mark.parametrize("both_first", [True, False])
@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("x_step", {}),
        ("x_step", {"on_step": False, "on_epoch": True}),
        ("x_epoch", {}),
        ("x_epoch", {"on_epoch": True}),
    ],
)
def test_an_ending_cannot_make_a_name_that_is_there(name: str, flags: dict[str, bool], both_first: bool) -> None:
    def log(module: Logs, *_: Any) -> None:
        calls = [("x", {"on_step": True, "on_epoch": True}), (name, flags)]
        for one, arguments in calls if both_first else calls[::-1]:
            module.log(one, 1.0, **arguments)

    if flags == {"on_epoch": True}:
        # It has endings of its own; the plain name, which callbacks may use, is the other's ending.
        name = "x_epoch"
    with pytest.raises(ValueError, match=rf"(?s)self.log\('x(?=.*self.log\('x)(?=.*'{name}').*another name"):
        fit(Logs(training_step=log))


def test_endings_that_meet_nothing_are_names_like_others() -> None:
    def log(module: Logs, *_: Any) -> None:
        module.log("x", 1.0)
        module.log("x_step", 2.0)
        module.log("y_epoch", 3.0, on_step=True, on_epoch=True)

    trainer, _ = fit(Logs(training_step=log))
    assert trainer.logged_metrics == {"x": 1.0, "x_step": 2.0, "y_epoch_step": 3.0, "y_epoch_epoch": 3.0}


def test_one_name_for_the_steps_and_another_hooks_epoch() -> None:
    module = Logs(training_step=lambda m, *_: m.log("x", 1.0), on_train_epoch_end=lambda m: m.log("x", 2.0))
    _, rows = fit(module, ids(2, 1))
    assert rows.of("x") == [(1, 1.0), (2, 1.0), (2, 2.0)]


def test_a_value_that_nobody_would_see_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"on_step=False, on_epoch=False.*would never be shown"):
        fit(Logs(training_step=lambda m, *_: m.log("x", 1.0, on_step=False, on_epoch=False)))


def test_a_step_that_is_called_by_hand_warns_and_goes_on() -> None:
    module = Logs(training_step=lambda m, *_: m.log("x", 1.0))
    with pytest.warns(UserWarning, match=r"self.log\('x'\) outside of a Trainer does nothing"):
        module.training_step(torch.zeros(1), 0)


def test_arguments_by_position_have_lightnings_order() -> None:
    module = Logs(training_step=lambda m, batch, i: m.log("x", batch.sum(), True, False, True, True, "sum"))
    trainer, rows = fit(module, ids(2, 1))
    assert rows.rows == []
    assert trainer.progress_bar_metrics == {"x_step": 1.0, "x_epoch": 1.0}


def test_log_dict_logs_every_entry() -> None:
    module = Logs(validation_step=lambda m, batch, *_: m.log_dict({"a": 1.0, "b": batch.sum()}, reduce_fx="sum"))
    assert quiet_trainer(strategy="single").validate(module, ids(4, 2)) == [{"a": 2.0, "b": 6.0}]


# --- where -----------------------------------------------------------------------------------------------------------

BY_STEP = [
    "on_train_batch_start", "training_step", "on_before_zero_grad", "on_before_backward", "on_after_backward",
    "on_before_optimizer_step", "on_step", "on_train_batch_end",
]  # fmt: skip
EPOCHS = ["on_train_start", "on_train_epoch_start", "on_train_epoch_end"]
EVALUATIONS = [
    "on_{}_start", "on_{}_epoch_start", "on_{}_batch_start", "{}_step", "on_{}_batch_end", "on_{}_epoch_end",
]  # fmt: skip


@pytest.mark.parametrize("hook", BY_STEP)
@pytest.mark.parametrize("owner", ["module", "callback"])
def test_hooks_of_training_batches_log_steps(hook: str, owner: str) -> None:
    if owner == "callback" and hook == "training_step":
        pytest.skip("no callback has it")
    module, callback = Logs(), Callback()
    module.calls = 0

    def log(*_: Any) -> None:
        module.calls += 1
        module.log("x", float(module.calls))
        module.log("mean", float(module.calls), on_step=False, on_epoch=True)

    if hook == "training_step":
        module.steps[hook] = log
    else:
        setattr(module if owner == "module" else callback, hook, log)
    _, rows = fit(module, ids(2, 1), callbacks=callback)
    assert rows.of("x") == [(1, 1.0), (2, 2.0)]
    assert rows.of("mean") == [(2, 1.5)]


@pytest.mark.parametrize("hook", EPOCHS)
@pytest.mark.parametrize("owner", ["module", "callback"])
def test_hooks_around_training_batches_log_epochs(hook: str, owner: str) -> None:
    module, callback = Logs(), Callback()
    setattr(module if owner == "module" else callback, hook, lambda *_: module.log("x", float(module.current_epoch)))
    _, rows = fit(module, ids(2, 1), max_epochs=2, callbacks=callback)
    assert rows.of("x") == [(2, 0.0), (4, 1.0)][: 1 if hook == "on_train_start" else 2]
    setattr(module if owner == "module" else callback, hook, lambda *_: module.log("x", 1.0, on_step=True))
    with pytest.raises(ValueError, match=rf"'x', on_step=True\) in {hook}.*leave on_step out"):
        fit(module, ids(2, 1), callbacks=callback)


@pytest.mark.parametrize("stage", ["validation", "test"])
@pytest.mark.parametrize("hook", EVALUATIONS)
def test_hooks_of_evaluations_log_the_evaluation(hook: str, stage: str) -> None:
    module = Logs(**{hook.format(stage): lambda m, *_: m.log("x", 1.5)})
    trainer = quiet_trainer(strategy="single")
    assert (trainer.validate if stage == "validation" else trainer.test)(module, ids(3, 2)) == [{"x": 1.5}]
    if "batch" not in hook and "step" not in hook:
        module = Logs(**{hook.format(stage): lambda m, *_: m.log("x", 1.5, on_step=True)})
        with pytest.raises(ValueError, match="leave on_step out"):
            (trainer.validate if stage == "validation" else trainer.test)(module, ids(3, 2))


@pytest.mark.parametrize(
    ("hook", "text"),
    [
        ("setup", "training_step"),
        ("teardown", "training_step"),
        ("configure_optimizers", "training_step"),
        ("on_fit_start", "training_step"),
        ("on_fit_end", "training_step"),
        ("on_sanity_check_start", "training_step"),
        ("on_sanity_check_end", "training_step"),
        ("on_validation_end", "log in on_validation_epoch_end"),
        ("on_train_end", "log in on_train_epoch_end"),
    ],
)
def test_where_nothing_can_be_logged_the_error_names_the_hook(hook: str, text: str) -> None:
    module = Logs()

    def log(*_: Any) -> None:
        module.log("x", 1.0)

    # A function of the hook's own name, as a user writes it.
    scope: dict[str, Any] = {"log": log}
    exec(f"def {hook}(*arguments):\n    log(*arguments)", scope)
    setattr(module, hook, scope[hook])
    with pytest.raises(RuntimeError, match=rf"self.log\('x'\) is not possible in {hook}: .*{text}"):
        fit(module, ids(2, 1), ids(2, 1))


@pytest.mark.parametrize("hook", ["on_predict_batch_end", "predict_step", "on_predict_epoch_end"])
def test_a_prediction_run_has_no_metrics(hook: str) -> None:
    module = Logs(**{hook: lambda m, *_: m.log("x", 1.0)})
    with pytest.raises(
        RuntimeError, match=r"self.log\('x'\) is not possible in .*predict.*: .*return values from predict_step"
    ):
        quiet_trainer(strategy="single").predict(module, ids(2, 1))


@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_step"])
def test_a_callback_that_runs_last_is_too_late(hook: str) -> None:
    module, callback = Logs(), Callback()
    callback.runs_last = True
    setattr(callback, hook, lambda *_: module.log("x", 1.0))
    with pytest.raises(RuntimeError, match=f"not possible in {hook}: .*runs_last"):
        fit(module, callbacks=callback)


def test_an_exception_leaves_no_place_behind() -> None:
    module = Logs(training_step=lambda m, *_: m.log("x", [1.0]))
    module.teardown = lambda stage: module.log("x", 1.0)  # type: ignore[method-assign]
    with pytest.raises(TypeError, match="list"):
        fit(module)
    module.steps, module.teardown = {}, lambda stage: None  # type: ignore[method-assign]
    fit(module)


class Shared(TrainModule):
    """One torchmetrics object, and one collection, in both steps; another object in validation alone, over all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))
        self.samples = torchmetrics.SumMetric()
        self.pair = torchmetrics.MetricCollection(
            {"mse": torchmetrics.MeanSquaredError(), "mae": torchmetrics.MeanAbsoluteError()}
        )
        self.ever = torchmetrics.SumMetric()

    def run(self, stage: str, batch: Tensor) -> None:
        self.samples(len(batch))
        self.log(f"{stage}_n", self.samples, on_step=False, on_epoch=True)
        self.pair.update(batch, torch.zeros_like(batch))
        if stage == "train":
            self.log_dict(self.pair, on_step=False, on_epoch=True)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.run("train", batch)
        return (self.w * batch).sum()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.run("val", batch)
        self.ever.update(len(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def shared_metrics(strategy: str) -> None:
    train = DataLoader(torch.arange(20.0), batch_size=2)  # type: ignore[arg-type]
    val = DataLoader(torch.full((6,), 100.0), batch_size=1)  # type: ignore[arg-type]
    trainer = quiet_trainer(strategy=strategy, max_epochs=3, val_check_interval=0.5)
    trainer.fit(module := Shared(), train, val)
    shown = {name: float(value) for name, value in trainer.callback_metrics.items()}
    # Means of k and of k^2 for k = 0 ... 19.
    assert shown == {"train_n": 20.0, "val_n": 6.0, "mae": 9.5, "mse": pytest.approx(123.5)}
    assert float(trainer.core.sum(module.ever.sum_value.clone())) == 6 * 6, "what validation alone updates is its own"


def test_training_and_validation_may_share_a_metric() -> None:
    shared_metrics("single")


@on_two_ranks
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_training_and_validation_may_share_a_metric_on_two_ranks(strategy: str) -> None:
    shared_metrics(strategy)


# --- several loaders -------------------------------------------------------------------------------------------------


def test_the_names_of_a_dict_become_part_of_the_keys() -> None:
    def log(module: Logs, batch: Tensor, batch_idx: int, loader: int) -> None:
        module.log("acc", 1.0 if loader == 0 else 3.0)

    module = Logs(validation_step=log, on_validation_epoch_end=lambda m: m.log("whole", 5.0))
    trainer, rows = fit(module, ids(2, 1), {"a": ids(3, 2), "b": ids(5, 2)}, max_epochs=2)
    assert rows.of("acc/a") == [(2, 1.0), (4, 1.0)]
    assert rows.of("acc/b") == [(2, 3.0), (4, 3.0)]
    assert "acc" not in trainer.callback_metrics
    result = trainer.validate(module, {"a": ids(3, 2), "b": ids(5, 2)})
    assert result == [{"acc/a": 1.0, "whole": 5.0}, {"acc/b": 3.0, "whole": 5.0}]
    assert trainer.validate(module, {"a": ids(3, 2)}) == [{"acc/a": 1.0, "whole": 5.0}]
    assert set(trainer.callback_metrics) == {"acc/a", "whole"}
    assert trainer.validate(module, [ids(3, 2)]) == [{"acc": 1.0, "whole": 5.0}]
    result = trainer.test(Logs(test_step=log), [ids(3, 2), ids(5, 2)])
    assert result == [{"acc/dataloader_idx_0": 1.0}, {"acc/dataloader_idx_1": 3.0}]


@on_two_ranks
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_each_loader_has_its_own_values_on_two_ranks(strategy: str) -> None:
    def log(module: Measured, batch: Tensor, batch_idx: int, loader: int) -> None:
        # With the weight, which has to be gathered where it is sharded; it is 0.
        module.log("x", (batch + module.w).mean())
        module.mean.update(batch)
        module.log("mean", module.mean)

    module = Measured(validation_step=log)
    # One sample alone leaves a rank without any.
    trainer, _ = fit(module, ids(2, 1), {"a": ids(3, 2), "one": ids(1, 4), "b": ids(5, 1)}, strategy=strategy)
    shown = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert shown == {"x/a": 1.0, "mean/a": 1.0, "x/one": 0.0, "mean/one": 0.0, "x/b": 2.0, "mean/b": 2.0}


def test_a_monitor_without_the_loaders_name_is_an_error_that_lists_the_names() -> None:
    from acclight.callbacks import EarlyStopping

    module = Logs(validation_step=lambda m, *_: m.log("acc", 1.0))
    with pytest.raises(ValueError, match=r"'acc' was not logged.*acc/a.*acc/b"):
        fit(module, ids(2, 1), {"a": ids(2, 1), "b": ids(2, 1)}, callbacks=EarlyStopping("acc"))
    trainer, _ = fit(module, ids(2, 1), {"a": ids(2, 1), "b": ids(2, 1)}, callbacks=EarlyStopping("acc/b"))
    assert trainer.global_step == 2


def test_forked_names_of_several_loaders() -> None:
    module = Logs(validation_step=lambda m, batch, *_: m.log("x", batch.mean(), on_step=True, on_epoch=True))
    trainer, rows = fit(module, ids(1, 1), {"a": ids(2, 1), "b": ids(3, 1)}, num_sanity_val_steps=0)
    assert {n: float(v) for n, v in trainer.callback_metrics.items()} == {
        "x_epoch/a": 0.5, "x/a": 0.5, "x_epoch/b": 1.0, "x/b": 1.0,
    }  # fmt: skip
    assert rows.of("x_step/a") == [(0, 0.0), (1, 1.0)]
    assert rows.of("x_step/b") == [(0, 0.0), (1, 1.0), (2, 2.0)]


def test_a_key_of_all_loaders_together() -> None:
    def log(module: Logs, batch: Tensor, batch_idx: int, loader: int) -> None:
        module.log("all", batch.mean(), add_dataloader_idx=False)
        module.log(f"own{loader}", 1.0, add_dataloader_idx=False)

    result = quiet_trainer(strategy="single").validate(Logs(validation_step=log), [ids(2, 1), ids(4, 1)])
    # (0 + 1 + 0 + 1 + 2 + 3) / 6
    assert result == [{"all": pytest.approx(7 / 6), "own0": 1.0}, {"all": pytest.approx(7 / 6), "own1": 1.0}]


def test_a_loader_that_is_empty_keeps_its_place() -> None:
    module = Logs(validation_step=lambda m, batch, i, loader: m.log("x", float(loader)))
    with pytest.warns(UserWarning, match="validation loader 'none'.*0 samples") as warnings:
        result = quiet_trainer(strategy="single").validate(module, {"none": ids(0, 1), "some": ids(2, 1)})
    assert result == [{}, {"x/some": 1.0}]
    assert len([w for w in warnings if "gives no batches" in str(w.message)]) == 1


# --- single batches of an evaluation ---------------------------------------------------------------------------------


def test_single_batches_of_an_evaluation_go_to_the_loggers() -> None:
    """As in Lightning: the x axis is the number of batches that were evaluated before, over all validations of the run."""

    def log(module: Logs, batch: Tensor, *_: Any) -> None:
        module.log("x", batch.mean() + 10 * module.current_epoch, on_step=True)
        module.log("only", batch.mean(), on_step=True, on_epoch=False)

    trainer, rows = fit(Logs(validation_step=log), ids(2, 1), ids(3, 1), max_epochs=2)
    assert rows.of("x_step") == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 10.0), (4, 11.0), (5, 12.0)]
    assert rows.of("only") == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 0.0), (4, 1.0), (5, 2.0)]
    assert rows.of("x_epoch") == [(2, 1.0), (4, 11.0)]
    assert {n: float(v) for n, v in trainer.callback_metrics.items()} == {"x_epoch": 11.0, "x": 11.0}


# --- torchmetrics ----------------------------------------------------------------------------------------------------


class Measured(Logs):
    def __init__(self, **hooks: Any) -> None:
        super().__init__(**hooks)
        self.mean = torchmetrics.MeanMetric()
        self.largest = torchmetrics.MaxMetric()


def test_torchmetrics_in_training() -> None:
    def log(module: Measured, batch: Tensor, batch_idx: int) -> None:
        module.mean(batch)
        module.log("mean", module.mean, on_step=True, on_epoch=True)
        module.largest.update(batch)
        module.log("largest", module.largest, on_step=False, on_epoch=True)

    module = Measured(training_step=log)
    _, rows = fit(module, ids(5, 2), max_epochs=2)
    assert rows.of("mean_step") == [(1, 0.5), (2, 2.5), (3, 4.0), (4, 0.5), (5, 2.5), (6, 4.0)]
    # Over the samples, not the batches; and each epoch begins anew.
    assert rows.of("mean_epoch") == [(3, 2.0), (6, 2.0)]
    assert rows.of("largest") == [(3, 4.0), (6, 4.0)]
    assert not module.mean.update_called


def test_a_torchmetrics_object_that_is_logged_per_step_begins_anew_with_each_epoch() -> None:
    def log(module: Measured, batch: Tensor, batch_idx: int) -> None:
        module.mean(batch)
        module.log("mean", module.mean)

    module = Measured(training_step=log)
    _, rows = fit(module, ids(2, 1))
    assert rows.of("mean") == [(1, 0.0), (2, 1.0)]
    assert not module.mean.update_called


def test_update_gives_no_value_for_a_step(recwarn: pytest.WarningsRecorder) -> None:
    def log(module: Measured, batch: Tensor, batch_idx: int) -> None:
        module.mean.update(batch)
        module.log("mean", module.mean, on_epoch=True)

    _, rows = fit(Measured(training_step=log), ids(3, 1))
    assert rows.of("mean_step") == []
    assert rows.of("mean_epoch") == [(3, 1.0)]
    assert len([w for w in recwarn if "self.log('mean'), which shows values of single steps" in str(w.message)]) == 1


def test_update_where_steps_alone_are_shown(recwarn: pytest.WarningsRecorder) -> None:
    def log(module: Measured, batch: Tensor, batch_idx: int) -> None:
        module.mean.update(batch)
        module.log("mean", module.mean)

    _, rows = fit(Measured(training_step=log), ids(3, 1))
    assert rows.rows == []
    [warning] = [str(w.message) for w in recwarn if "self.log('mean')" in str(w.message)]
    assert "call it, metric(...), or pass on_step=False, on_epoch=True" in warning


def test_the_value_of_an_earlier_batch_is_not_shown_again(recwarn: pytest.WarningsRecorder) -> None:
    def log(module: Measured, batch: Tensor, batch_idx: int) -> None:
        (module.mean if batch_idx != 1 else module.mean.update)(batch)
        module.log("mean", module.mean)

    _, rows = fit(Measured(training_step=log), ids(3, 1))
    assert rows.of("mean") == [(1, 0.0), (3, 2.0)]
    assert len([w for w in recwarn if "self.log('mean')" in str(w.message)]) == 1


def test_one_torchmetrics_object_under_two_names() -> None:
    def log(module: Measured, batch: Tensor, *_: Any) -> None:
        module.mean.update(batch)
        module.log("a", module.mean)
        module.log("b", module.mean)

    assert quiet_trainer(strategy="single").validate(Measured(validation_step=log), ids(3, 1)) == [{"a": 1.0, "b": 1.0}]


def test_one_torchmetrics_object_gives_each_loader_its_own_value() -> None:
    def log(module: Measured, batch: Tensor, *_: Any) -> None:
        module.mean.update(batch)
        module.log("mean", module.mean)

    module = Measured(validation_step=log)
    result = quiet_trainer(strategy="single").validate(module, [ids(3, 1), ids(5, 1)])
    assert result == [{"mean/dataloader_idx_0": 1.0}, {"mean/dataloader_idx_1": 2.0}]


class Collected(Logs):
    """Accuracy and precision share their states."""

    def __init__(self) -> None:
        super().__init__()
        make = torchmetrics.classification.MulticlassAccuracy, torchmetrics.classification.MulticlassPrecision
        self.scores = torchmetrics.MetricCollection([m(num_classes=2, average="micro") for m in make], prefix="val_")
        self.ranked = torchmetrics.MetricCollection(
            {
                "auroc": torchmetrics.classification.BinaryAUROC(),
                "ap": torchmetrics.classification.BinaryAveragePrecision(),
            }
        )

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.scores.update((batch > 0.5).long(), torch.ones_like(batch).long())
        self.log_dict(self.scores)
        self.ranked.update(batch / 10, (batch > 1.5).long())
        self.log_dict(self.ranked)


COLLECTED = {"val_MulticlassAccuracy": 0.75, "val_MulticlassPrecision": 0.75, "auroc": 1.0, "ap": 1.0}


def test_a_collection_is_logged_as_a_dict() -> None:
    module, trainer = Collected(), quiet_trainer(strategy="single")
    assert trainer.validate(module, ids(4, 2)) == [COLLECTED]
    assert trainer.validate(module, ids(4, 1)) == [COLLECTED]


def test_a_torchmetrics_object_whose_value_is_no_number_is_an_error() -> None:
    class Matrix(Logs):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = torchmetrics.classification.BinaryConfusionMatrix()

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.matrix.update(torch.ones(2).long(), torch.ones(2).long())
            self.log("matrix", self.matrix)

    with pytest.raises(
        ValueError, match=r"self.log\('matrix'\) got a BinaryConfusionMatrix, whose value has the shape \(2, 2\)"
    ):
        quiet_trainer(strategy="single").validate(Matrix(), ids(2, 1))


def test_a_metric_that_was_reset_in_an_evaluation_can_be_used_in_training() -> None:
    """Its new state was made under inference mode; torch allows no change of such a tensor outside of it."""

    def validate(module: Measured, batch: Tensor, *_: Any) -> None:
        module.mean.update(batch)

    def end(module: Measured) -> None:
        module.log("val", module.mean.compute())
        module.mean.reset()

    module = Measured(
        validation_step=validate,
        on_validation_epoch_end=end,
        training_step=lambda m, batch, i: (m.mean(batch), m.log("train", m.mean, on_step=True, on_epoch=True)),
    )
    trainer, _ = fit(module, ids(2, 1), ids(3, 1), max_epochs=2)
    # Training's 0 and 1, and validation's 0, 1 and 2, each by themselves.
    assert float(trainer.callback_metrics["val"]) == 1.0
    assert float(trainer.callback_metrics["train_epoch"]) == 0.5


# --- the cost --------------------------------------------------------------------------------------------------------


class Reads:
    """Counts reads of tensors and collectives while it is on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        self.on = False
        for name in ("item", "tolist", "__float__", "__int__", "__bool__", "cpu", "numpy"):
            self._watch(patch, Tensor, name)
        for name in ("all_gather_object", "all_gather", "all_reduce", "broadcast", "barrier"):
            self._watch(patch, dist, name)

    def _watch(self, patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def watched(*arguments: Any, **keywords: Any) -> Any:
            if self.on:
                self.seen.append(name)
            return original(*arguments, **keywords)

        patch.setattr(owner, name, watched)


class Watched(Measured):
    """Logs in every way, and watches from its first step of an interval to the hook after its last."""

    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self.reads = reads

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = (self.w * batch).mean()
        self.reads.on = True
        self.log("loss", loss, prog_bar=True)
        self.log("both", loss, on_step=True, on_epoch=True)
        self.log("weighed", loss, on_epoch=True, on_step=False, batch_size=3)
        self.log("sum", loss, reduce_fx="sum", on_epoch=True)
        self.log("max", loss, reduce_fx="max", on_epoch=True)
        self.log("number", 1.0, on_epoch=True)
        self.log("metric", self.mean, on_epoch=True, on_step=False)
        self.reads.on = False
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.reads.on = (self.global_step + 1) % 10 > 1

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.reads.on = False


def nothing_is_read(strategy: str, steps: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        reads = Reads(patch)
        trainer = quiet_trainer(strategy=strategy, max_steps=steps, log_every_n_steps=10)
        # The ranks' question whether any wants to stop is no part of logging.
        patch.setattr("acclight.loops.interruption.Agreement.ask", lambda self, *wishes, now=False: wishes)
        trainer.fit(Watched(reads), ids(1000, 1))
        assert reads.seen == []
        assert set(trainer.callback_metrics) >= {"loss", "both_step"}


def test_nothing_is_read_on_steps_that_are_not_shown() -> None:
    nothing_is_read("single", 300)


def test_the_counter_counts() -> None:
    with pytest.MonkeyPatch.context() as patch:
        reads = Reads(patch)
        reads.on = True
        float(torch.tensor(1.0))
        torch.tensor(1.0).item()
        torch.tensor([1.0]).tolist()
        assert reads.seen == ["__float__", "item", "tolist"]


# --- two ranks -------------------------------------------------------------------------------------------------------


@on_two_ranks
def test_nothing_is_read_or_exchanged_on_steps_that_are_not_shown() -> None:
    nothing_is_read("ddp", 40)


@on_two_ranks
def test_a_shown_step_costs_one_collective() -> None:
    with pytest.MonkeyPatch.context() as patch:
        reads = Reads(patch)
        calls: list[list[str]] = []

        class Count(Callback):
            def on_step(self, trainer: Trainer, module: TrainModule) -> None:
                reads.seen, reads.on = [], True

        class Counted(Callback):
            runs_last = True

            def on_step(self, trainer: Trainer, module: TrainModule) -> None:
                calls.append(reads.seen)
                reads.on = False

        module = Logs(training_step=lambda m, b, i: [m.log(name, b.sum()) for name in ("a", "b", "c")])
        fit(module, ids(12, 1), strategy="ddp", callbacks=[Count(), Counted()])
        gathers = [[name for name in call if name.startswith("all_")] for call in calls]
        # The first time the ranks tell each other their keys; a tolist reads this rank's values, another those of all.
        assert gathers[1:] == [["all_gather"]] * 5
        assert calls[2] == ["tolist", "all_gather", "tolist"]


@on_two_ranks
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_ranks_that_log_different_keys_give_the_union(strategy: str) -> None:
    def log(module: Logs, batch: Tensor, *_: Any) -> None:
        rank = module.global_rank
        module.log("a" if rank == 0 else "b", 1.0 if rank == 0 else 2.0, on_epoch=True, on_step=True)
        if rank == 0 and batch.sum() == 2.0:
            module.log("late", 7.0, on_step=True, on_epoch=True)
        module.log("c", float(rank), on_step=False, on_epoch=True)

    trainer, rows = fit(Logs(training_step=log), ids(6, 1), strategy=strategy)
    shown = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert shown == {
        "a": 1.0, "b": 2.0, "late": 7.0, "c": 0.5, "a_step": 1.0, "b_step": 2.0, "late_step": 7.0, "a_epoch": 1.0,
        "b_epoch": 2.0, "late_epoch": 7.0,
    }  # fmt: skip
    if trainer.is_global_zero:
        # Sample 2 is rank 0's second one.
        assert rows.of("late_step") == [(2, 7.0)]
        assert rows.of("b_step") == [(1, 2.0), (2, 2.0), (3, 2.0)]


@on_two_ranks
def test_rank_zero_may_log_alone() -> None:
    def log(module: Logs, batch: Tensor, *_: Any) -> None:
        if module.trainer.is_global_zero:
            module.log("zero", batch.sum(), on_step=True, on_epoch=True)

    module = Logs(training_step=log, on_train_epoch_end=lambda m: m.global_rank == 0 and m.log("end", 1.0))
    trainer, rows = fit(module, ids(4, 1), strategy="ddp")
    assert float(trainer.callback_metrics["end"]) == 1.0
    if trainer.is_global_zero:
        # Samples 0 and 2 are rank 0's.
        assert rows.of("zero_step") == [(1, 0.0), (2, 2.0)]
        assert rows.of("zero_epoch") == [(2, 1.0)]


@on_two_ranks
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_collection_on_two_ranks(strategy: str) -> None:
    module, trainer = Collected(), quiet_trainer(strategy=strategy)
    assert trainer.validate(module, ids(4, 1)) == [COLLECTED]
    # One rank has no data at all.
    assert trainer.validate(module, ids(4, 4)) == [COLLECTED]


class Norms(Logs):
    """The gradient of w = zeros(4) is [3, 4, 0, 12], whose norm is 13."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.w @ torch.tensor([3.0, 4.0, 0.0, 12.0])

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        assert self.w.grad is not None
        self.log("norm", self.w.grad.norm(), on_step=True, on_epoch=True)


@on_two_ranks
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_sharded_value_is_logged_whole(strategy: str) -> None:
    trainer, _ = fit(Norms(), ids(4, 1), strategy=strategy)
    assert {name: float(value) for name, value in trainer.callback_metrics.items()} == {
        name: pytest.approx(13.0) for name in ("norm", "norm_step", "norm_epoch")
    }


@on_two_ranks
def test_rank_zero_only_heeds_rank_zero_alone() -> None:
    module = Logs(training_step=lambda m, batch, i: m.log("x", batch.sum(), rank_zero_only=True, on_epoch=True))
    trainer, _ = fit(module, ids(4, 1), strategy="ddp")
    # Of samples 0 and 2.
    assert float(trainer.callback_metrics["x_epoch"]) == 1.0


@on_two_ranks
def test_torchmetrics_in_training_on_two_ranks() -> None:
    def log(module: Measured, batch: Tensor, batch_idx: int) -> None:
        module.mean(batch)
        module.log("mean", module.mean, on_step=True, on_epoch=True)
        if module.global_rank == 1:
            module.largest.update(batch)
            module.log("largest", module.largest, on_step=False, on_epoch=True)

    trainer, rows = fit(Measured(training_step=log), ids(6, 1), strategy="ddp")
    if trainer.is_global_zero:
        assert rows.of("mean_step") == [(1, 0.5), (2, 2.5), (3, 4.5)]
        assert rows.of("mean_epoch") == [(3, 2.5)]
        assert rows.of("largest") == [(3, 5.0)]


@on_two_ranks
@pytest.mark.parametrize("reduce_fx", ["mean", "sum", "min", "max"])
def test_steps_and_epochs_over_ranks_and_micro_batches(reduce_fx: str) -> None:
    def log(module: Logs, batch: Tensor, *_: Any) -> None:
        module.log("x", batch.sum(), on_step=True, on_epoch=True, reduce_fx=reduce_fx, batch_size=int(batch.sum()))

    trainer, rows = fit(Logs(training_step=log), ids(8, 1), strategy="ddp", accumulate_grad_batches=2)
    values = [[0, 1, 2, 3], [4, 5, 6, 7]]
    reduced = {
        "mean": [sum(v * v for v in window) / sum(window) for window in values],
        "sum": [6.0, 22.0],
        "min": [0.0, 4.0],
        "max": [3.0, 7.0],
    }[reduce_fx]
    whole = {"mean": 140 / 28, "sum": 28.0, "min": 0.0, "max": 7.0}[reduce_fx]
    assert float(trainer.callback_metrics["x_step"]) == pytest.approx(reduced[1])
    assert float(trainer.callback_metrics["x_epoch"]) == pytest.approx(whole)
    if trainer.is_global_zero:
        assert [value for _, value in rows.of("x_step")] == pytest.approx(reduced)


@on_two_ranks
def test_a_key_logged_in_two_ways_is_an_error_on_every_rank() -> None:
    def log(module: Logs, *_: Any) -> None:
        module.log("x", 1.0, reduce_fx="mean" if module.global_rank == 0 else "sum")

    with pytest.raises(
        ValueError, match=r"self.log\('x'\) in training_step has reduce_fx='mean' and reduce_fx='sum' on diff"
    ):
        fit(Logs(training_step=log), strategy="ddp")


@on_two_ranks
def test_what_only_one_rank_shows_is_shown() -> None:
    module = Logs(training_step=lambda m, *_: m.log("x", 1.0, prog_bar=m.global_rank == 1, logger=m.global_rank == 1))
    trainer, _ = fit(module, ids(4, 1), strategy="ddp")
    assert trainer.progress_bar_metrics == {"x": 1.0}
    assert trainer.logged_metrics == {"x": 1.0}


@on_two_ranks
def test_nan_of_one_rank_stays_visible() -> None:
    def log(module: Logs, *_: Any) -> None:
        for reduce_fx in ("mean", "sum", "min", "max"):
            module.log(reduce_fx, math.nan if module.global_rank == 1 else 1.0, reduce_fx=reduce_fx)

    [metrics] = quiet_trainer(strategy="ddp").validate(Logs(validation_step=log), ids(4, 1))
    assert all(math.isnan(value) for value in metrics.values())


@on_two_ranks
def test_single_batches_come_in_the_order_of_the_dataset() -> None:
    module = Logs(validation_step=lambda m, batch, *_: m.log("x", batch.mean(), on_step=True))
    trainer, rows = fit(module, ids(2, 1), ids(5, 1), strategy="ddp", max_epochs=2)
    if trainer.is_global_zero:
        series = [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
        assert rows.of("x_step") == [*series, *((step + 5, value) for step, value in series)]


@on_two_ranks
def test_a_metric_on_one_rank_that_no_rank_can_find_is_an_error() -> None:
    found = torchmetrics.MeanMetric()

    def log(module: Logs, batch: Tensor, *_: Any) -> None:
        found.update(batch)
        module.log("x", found)

    with pytest.raises(
        ValueError, match=r"self.log\('x'\) got a torchmetrics object on some ranks only.*attribute of the mod"
    ):
        quiet_trainer(strategy="ddp").validate(Logs(validation_step=log), ids(1, 1))


def test_what_a_new_key_costs_does_not_grow_with_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[str] = []
    shown_as = Key.shown_as

    def counted(key: Key, ending: str) -> str:
        looks.append(key.name)
        return shown_as(key, ending)

    monkeypatch.setattr(Key, "shown_as", counted)

    def looks_of(keys: int) -> int:
        looks.clear()
        fit(Logs(training_step=lambda m, *_: [m.log(f"key {number}", 1.0) for number in range(keys)]))
        return len(looks)

    assert looks_of(400) < 5 * looks_of(100)
