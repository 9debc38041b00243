"""Validation, test and prediction: each sample once under every strategy, and training finds everything as it was."""

from __future__ import annotations

import gc
import random
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from acclight import Callback, Trainer, TrainModule
from acclight.callbacks import BasePredictionWriter
from tests.distributed import RankChecks
from tests.scenarios import DISTRIBUTED, Scalar, quiet_trainer, repeated

on_two_ranks = RankChecks(world_size=2, timeout=120.0)


class Table(Dataset[dict[str, Tensor]]):
    """Row i: its index, a value x between 0 and 1, and a label that has to do with x."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"id": torch.tensor(index), "x": torch.tensor([x_of(index)]), "label": torch.tensor(label_of(index))}


def x_of(index: int) -> float:
    return (index * 37 % 101) / 128


def label_of(index: int) -> int:
    return int(x_of(index) + (index % 4) / 8 > 0.5)


def table(rows: int, batch_size: int = 4) -> DataLoader[Any]:
    return DataLoader(Table(rows), batch_size=batch_size)


def right_values(rows: int) -> dict[str, float]:
    """What `Measures` has to log, without torch."""
    xs, labels = [x_of(i) for i in range(rows)], [label_of(i) for i in range(rows)]
    right = sum(int(x > 0.5) == label for x, label in zip(xs, labels, strict=True))
    positive = [x for x, label in zip(xs, labels, strict=True) if label]
    negative = [x for x, label in zip(xs, labels, strict=True) if not label]
    # The share of pairs in the right order.
    pairs = [1.0 if p > n else 0.5 if p == n else 0.0 for p in positive for n in negative]
    auroc = sum(pairs) / len(pairs) if pairs else 0.0
    return {
        "mean": sum(xs) / rows, "sum": float(sum(xs)), "min": min(xs), "max": max(xs), "count": float(rows),
        "mean_metric": sum(xs) / rows, "accuracy": right / rows, "auroc": auroc,
        "mean_computed": sum(xs) / rows, "accuracy_computed": right / rows, "auroc_computed": auroc,
    }  # fmt: skip


class Measures(TrainModule):
    """The network gives x, 2x, 3x, 4x; logs in every way, as plain values and by torchmetrics objects."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 4)
        with torch.no_grad():
            self.net.weight.copy_(torch.tensor([[1.0], [2.0], [3.0], [4.0]]))
            self.net.bias.zero_()
        for ending in ("", "_computed"):
            setattr(self, f"mean{ending}", torchmetrics.MeanMetric())
            setattr(self, f"accuracy{ending}", torchmetrics.classification.BinaryAccuracy())
            setattr(self, f"auroc{ending}", torchmetrics.classification.BinaryAUROC())
        self.ids = torchmetrics.CatMetric()
        self.ids_seen: list[float] = []
        self.outputs: list[Tensor] = []
        self.computed_at: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)[:, 0]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch["x"]).sum() * 0.0

    def measure(self, batch: Any) -> None:
        # As users do it: the step takes the batch apart.
        x, label = self(batch.pop("x")), batch.pop("label")
        self.log("mean", x.mean())
        for reduce_fx in ("sum", "min", "max"):
            self.log(reduce_fx, getattr(x, reduce_fx)(), reduce_fx=reduce_fx)
        self.log("count", len(x), reduce_fx="sum")
        for ending in ("", "_computed"):
            getattr(self, f"mean{ending}").update(x)
            getattr(self, f"accuracy{ending}").update(x, label)
            getattr(self, f"auroc{ending}").update(x, label)
        self.log("mean_metric", self.mean)
        self.log("accuracy", self.accuracy)
        self.log("auroc", self.auroc)
        self.ids.update(batch["id"])
        self.outputs.append(batch["id"])

    def finish(self) -> None:
        for name in ("mean", "accuracy", "auroc"):
            metric = getattr(self, f"{name}_computed")
            self.log(f"{name}_computed", metric.compute())
            metric.reset()
        self.ids_seen = self.ids.compute().tolist()
        self.ids.reset()
        self.log("listed", sum(len(part) for part in self.outputs), reduce_fx="sum")
        self.outputs.clear()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.measure(batch)

    def on_validation_epoch_end(self) -> None:
        self.finish()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.measure(batch)

    def on_test_epoch_end(self) -> None:
        self.finish()

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return {"id": batch["id"], "x": self(batch["x"])}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def each_sample_once(strategy: str, rows: int, path: Path) -> None:
    """Before, in and after a fit, which changes nothing, and with a checkpoint."""
    module, right = Measures(), right_values(rows) | {"listed": float(rows)}
    trainer = quiet_trainer(strategy=strategy, max_epochs=1)

    def check(metrics: Any) -> None:
        assert {name: float(value) for name, value in metrics.items()} == pytest.approx(right, abs=1e-6)
        assert module.ids_seen == list(range(rows))

    def predictions() -> None:
        batches = trainer.predict(module, table(rows))
        assert torch.cat([batch["id"] for batch in batches]).tolist() == list(range(rows))
        assert torch.cat([batch["x"] for batch in batches]).tolist() == pytest.approx([x_of(i) for i in range(rows)])

    check(trainer.validate(module, table(rows))[0])
    check(trainer.test(module, table(rows))[0])
    predictions()
    trainer.fit(module, table(8), table(rows))
    assert trainer.global_step == 8 // 4 // trainer.world_size
    check(trainer.callback_metrics)
    trainer.save_checkpoint(path / "saved")
    check(trainer.validate(module, table(rows))[0])
    check(trainer.test(module, table(rows), ckpt_path=path / "saved")[0])
    predictions()
    other = Measures()
    with torch.no_grad():
        other.net.weight.zero_()
    module, trainer = other, quiet_trainer(strategy=strategy)
    check(trainer.validate(module, table(rows), ckpt_path=path / "saved")[0])
    predictions()


@pytest.mark.parametrize("rows", [97, 3])
def test_each_sample_once_in_one_process(rows: int, tmp_path: Path) -> None:
    each_sample_once("single", rows, tmp_path)


@on_two_ranks
@pytest.mark.parametrize("rows", [97, 3])
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_each_sample_once_on_two_ranks(strategy: str, rows: int, tmp_path: Path) -> None:
    """97 samples in 25 batches: one rank has one batch fewer. 3 samples in one batch: one rank has none."""
    each_sample_once(strategy, rows, tmp_path)


def logs_x(loader: Any, strategy: str, **arguments: Any) -> dict[str, float]:
    class LogsX(Scalar):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            # With the weight, which has to be gathered where it is sharded; it is 0.
            self.log("x", (batch + self.w).mean())
            self.log("samples", len(batch), reduce_fx="sum")
            self.log("ids", batch.sum(), reduce_fx="sum")

    return quiet_trainer(strategy=strategy, **arguments).validate(LogsX(), loader)[0]


def few_samples(strategy: str) -> None:
    ends = DataLoader(torch.tensor([0.0, 0.0, 0.0, 0.0, 10.0]), batch_size=2)
    assert logs_x(ends, strategy) == {"x": 2.0, "samples": 5.0, "ids": 10.0}
    assert logs_x(DataLoader(torch.tensor([7.0]), batch_size=4), strategy) == {"x": 7.0, "samples": 1.0, "ids": 7.0}


def test_few_samples_in_one_process() -> None:
    few_samples("single")


@on_two_ranks
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_few_samples_on_two_ranks(strategy: str) -> None:
    few_samples(strategy)


@on_two_ranks
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_a_limit_counts_each_sample_once(strategy: str) -> None:
    ids = DataLoader(torch.arange(9.0), batch_size=2)
    # A number is per rank, a fraction is of all batches.
    assert logs_x(ids, strategy, limit_val_batches=1) == {"x": 1.5, "samples": 4.0, "ids": 6.0}
    assert logs_x(ids, strategy, limit_val_batches=0.6) == {"x": 2.5, "samples": 6.0, "ids": 15.0}
    assert logs_x(ids, strategy, limit_val_batches=3) == {"x": 4.0, "samples": 9.0, "ids": 36.0}


class Stream(IterableDataset[Any]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(float(self.length)))


@on_two_ranks
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "deepspeed_stage_3"])
def test_a_stream_is_evaluated_once(strategy: str, workers: int) -> None:
    stream = DataLoader(Stream(10), batch_size=2, num_workers=workers)
    assert logs_x(stream, strategy) == {"x": 4.5, "samples": 10.0, "ids": 45.0}
    assert logs_x(DataLoader(Stream(1), batch_size=2, num_workers=workers), strategy)["samples"] == 1.0


class OwnValues(IterableDataset[Any]):
    """Each rank has a stream of its own."""

    def __init__(self, value: float, length: int) -> None:
        self.value, self.length = value, length

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.full((self.length,), self.value))


@on_two_ranks
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_ranks_with_different_numbers_of_batches_are_all_counted(strategy: str) -> None:
    trainer = quiet_trainer(strategy=strategy)
    own = DataLoader(OwnValues(1.0, 3) if trainer.global_rank == 0 else OwnValues(2.0, 5), batch_size=1)
    assert logs_x(own, strategy) == {"x": 13 / 8, "samples": 8.0, "ids": 13.0}


@on_two_ranks
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "deepspeed_stage_2"])
def test_ranks_with_different_loaders_are_refused_on_all(strategy: str) -> None:
    trainer = quiet_trainer(strategy=strategy, max_epochs=1)
    loaders = [repeated([1.0], 1)] * (5 if trainer.global_rank == 0 else 3)
    with pytest.raises(ValueError, match=r"different validation loaders \(rank 0: 5, rank 1: 3\)"):
        trainer.fit(SeesBatches(), repeated([1.0], 2), loaders)
    with pytest.raises(ValueError, match=r"different validation loaders \(rank 0: 1, rank 1: 0\)"):
        trainer.fit(SeesBatches(), repeated([1.0], 2), repeated([1.0], 1) if trainer.global_rank == 0 else None)


@on_two_ranks
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_a_rank_whose_own_loader_is_empty_joins_the_others(strategy: str) -> None:
    trainer = quiet_trainer(strategy=strategy)
    rows = torch.full((0 if trainer.global_rank == 0 else 3,), 2.0)
    # Datasets that differ, and a plain list of batches: both tell their length.
    for own in (DataLoader(rows, batch_size=2), [list(rows.split(2)) if len(rows) else []]):
        assert logs_x(own, strategy) == {"x": 2.0, "samples": 3.0, "ids": 6.0}


class Buckets(Sampler[list[int]]):
    batches = ([0], [1, 2], [3, 4, 5], [6])

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def __iter__(self) -> Iterator[list[int]]:
        return iter([list(batch) for batch in self.batches])

    def __len__(self) -> int:
        return len(self.batches)

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class SeesBatches(Scalar):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[int]] = []

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.seen.append(batch.int().tolist())
        self.log("x", batch.mean())


def whole_buckets(strategy: str, world: int, rank: int) -> None:
    buckets, module = Buckets(), SeesBatches()
    trainer = quiet_trainer(strategy=strategy, max_epochs=3)
    trainer.fit(module, DataLoader(torch.arange(7.0), batch_sampler=buckets))
    assert [batch.int().tolist() for batch in module.batches] == 3 * list(Buckets.batches[rank::world])
    assert trainer.num_training_batches == 4 // world
    assert buckets.epochs == [0, 1, 2]
    [metrics] = trainer.validate(module, DataLoader(torch.arange(7.0), batch_sampler=Buckets()))
    assert metrics == {"x": 3.0}
    assert module.seen == list(Buckets.batches[rank::world])


def test_the_batches_of_a_batch_sampler_stay_whole() -> None:
    whole_buckets("single", 1, 0)


@on_two_ranks
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_the_batches_of_a_batch_sampler_go_to_one_rank_each(strategy: str) -> None:
    whole_buckets(strategy, 2, torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)


class Collects(Scalar):
    """Keeps of each batch what its epoch-end hook needs, in plain attributes and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.listed: list[float] = []
        self.by_id: dict[int, float] = {}
        self.counted = 0
        self.summed = torch.zeros(())
        self.register_buffer("total", torch.zeros(()))

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.listed.append(float(loss))
        self.by_id[len(self.by_id)] = 1.0
        self.counted += len(batch)
        self.summed += batch.sum()
        self.total += batch.sum()

    def on_validation_epoch_end(self) -> None:
        for name in ("counted", "summed", "total"):
            self.log(name, getattr(self, name), reduce_fx="sum")
        self.log("listed", len(self.listed), reduce_fx="sum")
        self.log("by_id", len(self.by_id), reduce_fx="sum")


@on_two_ranks
@pytest.mark.parametrize("strategy", ["fsdp2", "deepspeed_stage_3"])
@pytest.mark.parametrize("rows", [7, 1])
def test_a_throw_away_forward_leaves_nothing_in_the_module(strategy: str, rows: int) -> None:
    [metrics] = quiet_trainer(strategy=strategy).validate(
        Collects(), DataLoader(torch.arange(1.0, rows + 1), batch_size=2)
    )
    batches, total = -(-rows // 2), rows * (rows + 1) / 2
    assert metrics == {"counted": rows, "summed": total, "total": total, "listed": batches, "by_id": batches}


# --- prediction ------------------------------------------------------------------------------------------------------


class Ids(Scalar):
    def predict_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return batch + 0 * self.w


def predicts_in_order(strategy: str) -> None:
    trainer, module, loader = quiet_trainer(strategy=strategy), Ids(), DataLoader(torch.arange(5.0), batch_size=2)
    batches = trainer.predict(module, loader)
    assert [batch.tolist() for batch in batches] == [[0.0, 1.0], [2.0, 3.0], [4.0]]
    several = trainer.predict(module, [loader, DataLoader(torch.arange(3.0), batch_size=1)])
    assert [[batch.tolist() for batch in part] for part in several] == [[[0, 1], [2, 3], [4]], [[0], [1], [2]]]
    assert trainer.predict(module, loader, return_predictions=False) is None
    # A user goes on with them.
    batches[0] += 1.0
    (batches[0] * nn.Parameter(torch.ones(2))).sum().backward()


def test_predictions_in_one_process() -> None:
    predicts_in_order("single")


@on_two_ranks
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_predictions_on_two_ranks_come_in_the_order_of_the_dataset(strategy: str) -> None:
    predicts_in_order(strategy)


class Indices(Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_predict_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.seen.append((trainer.batch_indices, outputs.tolist(), dataloader_idx))


@on_two_ranks
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "deepspeed_stage_3"])
def test_callbacks_see_which_samples_a_batch_holds(strategy: str) -> None:
    seen, loader = Indices(), DataLoader(torch.arange(5.0), batch_size=2)
    trainer = quiet_trainer(strategy=strategy, callbacks=seen)
    trainer.predict(Ids(), [loader, DataLoader(Stream(3), batch_size=2)], return_predictions=False)
    assert (
        seen.seen
        == [
            [([0, 1], [0, 1], 0), ([4], [4], 0), (None, [0, 1], 1)],
            [([2, 3], [2, 3], 0), (None, [2], 1)],
        ][trainer.global_rank]
    )
    assert trainer.batch_indices is None


class Writer(BasePredictionWriter):
    def __init__(self, write_interval: str) -> None:
        super().__init__(write_interval)
        self.written: list[Any] = []

    def write_on_batch_end(
        self,
        trainer: Trainer,
        module: TrainModule,
        prediction: Any,
        batch_indices: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        self.written.append((batch_indices, prediction.tolist(), batch.tolist(), batch_idx, dataloader_idx))

    def write_on_epoch_end(self, trainer: Trainer, module: TrainModule, predictions: Any, batch_indices: Any) -> None:
        self.written.append(([[p.tolist() for p in part] for part in predictions], batch_indices))


@on_two_ranks
def test_a_writer_gets_each_sample_once_with_its_index() -> None:
    each, end = Writer("batch"), Writer("epoch")
    trainer = quiet_trainer(strategy="ddp", callbacks=[each, end])
    trainer.predict(Ids(), DataLoader(torch.arange(10.0, 15.0), batch_size=2), return_predictions=False)
    assert (
        each.written
        == [
            [([0, 1], [10, 11], [10, 11], 0, 0), ([4], [14], [14], 1, 0)],
            [([2, 3], [12, 13], [12, 13], 0, 0)],
        ][trainer.global_rank]
    )
    assert (
        end.written
        == [
            [([[[10, 11], [14]]], [[[0, 1], [4]]])],
            [([[[12, 13]]], [[[2, 3]]])],
        ][trainer.global_rank]
    )


def test_a_writer_has_an_interval() -> None:
    with pytest.raises(ValueError, match=r"write_interval='step'.*'batch', 'epoch', 'batch_and_epoch'"):
        Writer("step")


#: A megabyte of a shape that nothing else has, so that other tests' tensors are not counted.
BALLAST = 2**18 + 7


def live_ballast() -> int:
    """How many tensors of that shape are alive."""
    gc.collect()
    return sum(1 for o in gc.get_objects() if type(o) is Tensor and o.shape == (BALLAST,))


class Watch(Callback):
    """Counts the live ballast at every so many batches."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.counts: list[int] = []

    def on_predict_batch_start(
        self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if batch_idx % self.every == 0:
            self.counts.append(live_ballast())

    on_validation_batch_start = on_predict_batch_start


class Ballast(Scalar):
    """Every step gives a megabyte."""

    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        return torch.zeros(BALLAST)

    def validation_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss)
        return {"big": torch.zeros(BALLAST), "loss": loss}


def test_predictions_that_are_not_returned_are_not_kept() -> None:
    watch = Watch(20)
    trainer = quiet_trainer(strategy="single", callbacks=watch)
    trainer.predict(Ballast(), DataLoader(torch.arange(100.0)), return_predictions=False)
    assert len(watch.counts) == 5
    assert max(watch.counts) <= 2


def test_outputs_of_validation_steps_are_not_kept() -> None:
    watch = Watch(40)
    quiet_trainer(strategy="single", callbacks=watch).validate(Ballast(), DataLoader(torch.arange(200.0)))
    assert len(watch.counts) == 5
    assert max(watch.counts) <= 2


def keeps_the_loss_alone(strategy: str, accumulate: int) -> None:
    class Big(Scalar):
        kept: Any = ()
        steps = graphs = 0

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            assert not any(known() is not None for known in self.kept)
            big = torch.zeros(1000) + self.w
            self.kept = (weakref.ref(big),)
            self.log("big", big.mean())
            return {"loss": self.loss(batch), "big": big}

        def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
            # DeepSpeed 0.19.8 hands on, at stage 3, detached tensors in the place of those that a forward returned.
            assert (outputs["big"] is self.kept[0]()) == (strategy != "deepspeed_stage_3")
            self.kept += (weakref.ref(outputs["big"]),)
            self.steps += 1
            self.graphs += outputs["loss"].requires_grad

    module = Big()
    trainer = quiet_trainer(strategy=strategy, max_epochs=1, accumulate_grad_batches=accumulate)
    trainer.fit(module, DataLoader(torch.arange(8.0)))
    assert [known() for known in module.kept] == [None, None]
    assert (module.steps, module.graphs) == (8 // trainer.world_size, 0)
    assert not trainer.callback_metrics["big"].requires_grad


@pytest.mark.parametrize("accumulate", [1, 3])
def test_what_training_step_returns_beside_the_loss_is_dead_by_the_next_batch(accumulate: int) -> None:
    keeps_the_loss_alone("single", accumulate)


@on_two_ranks
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_what_training_step_returns_is_dead_by_the_next_batch_on_two_ranks(strategy: str) -> None:
    keeps_the_loss_alone(strategy, 2)


# --- training finds everything as it was -----------------------------------------------------------------------------


class Mixed(Scalar):
    """Training with a frozen part in evaluation mode; every hook of an evaluation draws from all generators."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.frozen = nn.Sequential(nn.BatchNorm1d(1), nn.Dropout(0.5))
        self.frozen[1].eval()
        self.modes: list[dict[str, bool]] = []
        self.fail_in = ""
        self.grads: list[tuple[bool, bool]] = []

    def draw(self, hook: str) -> None:
        random.random()
        np.random.rand(3)
        torch.rand(5)
        # A user's own change of the mode is put back too.
        self.frozen[0].train()
        if hook == self.fail_in:
            raise RuntimeError("boom")

    def on_validation_start(self) -> None:
        assert not any(part.training for part in self.modules())
        self.draw("on_validation_start")

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.grads.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        self.draw("validation_step")
        self.log("val", 1.0)

    def on_validation_epoch_end(self) -> None:
        self.draw("on_validation_epoch_end")

    def on_validation_end(self) -> None:
        assert not self.drop.training
        assert not torch.is_grad_enabled()
        self.draw("on_validation_end")

    test_step = validation_step

    def predict_step(self, batch: Tensor, batch_idx: int) -> None:
        self.draw("predict_step")


def random_numbers() -> list[float]:
    return [random.random(), float(np.random.rand()), float(np.random.randn()), float(torch.rand(()))]


@pytest.mark.parametrize(
    "fail_in", ["", "on_validation_start", "validation_step", "on_validation_epoch_end", "on_validation_end"]
)
def test_modes_and_random_state_are_put_back(fail_in: str) -> None:
    module, trainer = Mixed(), quiet_trainer(strategy="single")
    module.fail_in = fail_in
    modes = {name: part.training for name, part in module.named_modules()}
    assert modes["drop"]
    assert not modes["frozen.1"]
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    np.random.randn()  # leaves the second value of a pair behind
    expected, again = random_numbers(), (random.seed(3), np.random.seed(3), torch.manual_seed(3), np.random.randn())
    assert again is not None
    if fail_in:
        with pytest.raises(RuntimeError, match="boom"):
            trainer.validate(module, repeated([1.0], 1))
    else:
        trainer.validate(module, repeated([1.0], 1))
        trainer.test(module, repeated([1.0], 1))
        trainer.predict(module, repeated([1.0], 1))
    assert random_numbers() == expected
    assert {name: part.training for name, part in module.named_modules()} == modes


@on_two_ranks
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_random_state_is_put_back_under_every_strategy(strategy: str) -> None:
    module, trainer = Mixed(), quiet_trainer(strategy=strategy)
    trainer.validate(module, repeated([1.0], 2))  # what is made at the first use may draw
    torch.manual_seed(3 + trainer.global_rank)
    expected = torch.rand(3)
    torch.manual_seed(3 + trainer.global_rank)
    trainer.validate(module, repeated([1.0, 2.0, 3.0], 1))
    assert torch.equal(torch.rand(3), expected)
    assert module.drop.training
    assert not module.frozen[1].training
    # Under inference mode sharded parameters would be gathered into tensors that training cannot use.
    assert set(module.grads) == {(False, strategy not in ("fsdp2", "deepspeed_stage_3"))}


@pytest.mark.parametrize("inference", [True, False])
def test_inference_mode_is_the_users_choice(inference: bool) -> None:
    module = Mixed()
    quiet_trainer(strategy="single", inference_mode=inference).validate(module, repeated([1.0], 1))
    assert module.grads == [(False, inference)]


def test_a_module_may_set_its_own_mode() -> None:
    class Own(Mixed):
        def on_validation_model_eval(self) -> None:
            self.drop.eval()

        def on_validation_start(self) -> None:
            self.modes.append({name: part.training for name, part in self.named_modules()})

    module = Own()
    quiet_trainer(strategy="single").validate(module, repeated([1.0], 1))
    assert module.modes[0]["frozen.0"]
    assert not module.modes[0]["drop"]


class Tracks(Callback):
    """A callback that does not know of the sanity check."""

    def __init__(self) -> None:
        self.lowest = float("inf")
        self.at_train_start: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"lowest": self.lowest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.lowest = state_dict["lowest"]

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.lowest = min(self.lowest, float(trainer.callback_metrics["val"]))

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        shown = trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics
        self.at_train_start = [dict(values) for values in shown]


class Sanity(Scalar):
    """The validation gives 0 in the sanity check and 5 afterwards; dropout draws in training and, by hand, in validation."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.mean = torchmetrics.MeanMetric()
        self.best = torchmetrics.MinMetric()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.loss(self.drop(batch))
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        value = 0.0 if self.trainer.sanity_checking else 5.0
        torch.rand(3)
        self.mean.update(value)
        self.best.update(value)
        self.log("val", value, prog_bar=True)

    def on_validation_epoch_end(self) -> None:
        self.log("mean", self.mean.compute(), on_epoch=True)
        self.log("best", self.best.compute())


def sanity_leaves_no_trace(strategy: str, world: int, steps: int) -> None:
    from acclight.callbacks import EarlyStopping
    from tests.test_logging import Rows

    torch.manual_seed(1)
    module, rows, tracks, stopping = Sanity(), Rows(), Tracks(), EarlyStopping("val", patience=1)
    trainer = quiet_trainer(
        strategy=strategy, max_epochs=1, num_sanity_val_steps=steps, logger=rows, callbacks=[tracks, stopping]
    )
    trainer.validate(module, repeated([1.0], world))
    module.mean.reset()
    module.best.reset()
    tracks.lowest, rows.rows = float("inf"), []
    trainer.fit(module, repeated([1.0, 2.0, 3.0], world), repeated([1.0] * 3, world))
    assert tracks.at_train_start == [{}, {}, {}]
    assert tracks.lowest == 5.0
    assert stopping.wait_count == 0
    assert stopping.best_score == 5.0
    written = [(3, {"val": 5.0, "mean": 5.0, "best": 5.0})]
    assert rows.rows == (written if trainer.is_global_zero else [])
    torch.manual_seed(1)
    plain = Sanity()
    quiet_trainer(strategy=strategy, max_epochs=1).fit(plain, repeated([1.0, 2.0, 3.0], world))
    assert module.losses == plain.losses


@pytest.mark.parametrize("steps", [0, 2, -1])
def test_the_sanity_check_leaves_no_trace(steps: int) -> None:
    sanity_leaves_no_trace("single", 1, steps)


@on_two_ranks
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_the_sanity_check_leaves_no_trace_on_two_ranks(strategy: str) -> None:
    sanity_leaves_no_trace(strategy, 2, 2)


def test_the_sanity_check_tries_so_many_batches() -> None:
    module = SeesBatches()
    trainer = quiet_trainer(strategy="single", max_epochs=0, num_sanity_val_steps=2)
    trainer.fit(module, repeated([1.0], 1), DataLoader(torch.arange(9.0), batch_size=2))
    assert module.seen == []
    trainer.max_epochs = 1
    trainer.fit(module, repeated([1.0], 1), DataLoader(torch.arange(9.0), batch_size=2))
    assert module.seen == [[0, 1], [2, 3], [0, 1], [2, 3], [4, 5], [6, 7], [8]]


class SavesInValidation(Callback):
    def __init__(self, path: Path, hook: str) -> None:
        setattr(self, hook, lambda trainer, module: self.save(trainer, path))

    def save(self, trainer: Trainer, path: Path) -> None:
        torch.rand(2)
        if trainer.fitting and trainer.global_step == 3:
            trainer.save_checkpoint(path)


@pytest.mark.parametrize("hook", ["on_validation_start", "on_validation_epoch_end", "on_validation_end"])
def test_a_checkpoint_of_a_validation_goes_on_with_trainings_random_state(hook: str, tmp_path: Path) -> None:
    def trained(path: Path, **arguments: Any) -> list[float]:
        torch.manual_seed(2)
        module = Sanity()
        trainer = quiet_trainer(strategy="single", max_epochs=3, callbacks=SavesInValidation(path, hook))
        trainer.fit(module, repeated([1.0, 2.0, 3.0], 1), repeated([1.0], 1), **arguments)
        return module.losses

    whole = trained(tmp_path / "saved")
    assert trained(tmp_path / "other", ckpt_path=tmp_path / "saved") == whole[3:]


class Validations(Callback):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
        self.steps.append(trainer.global_step)


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        # Seven steps in each epoch; half of them are three, counted from the start of each.
        ({"val_check_interval": 0.5}, [3, 6, 10, 13, 17, 20]),
        ({"val_check_interval": 0.29}, [2, 4, 6, 9, 11, 13, 16, 18, 20]),
        ({"val_check_interval": 0.5, "check_val_every_n_epoch": 2}, [10, 13]),
        ({"val_check_interval": 5}, [5, 10, 15, 20]),
        ({"check_val_every_n_epoch": 2}, [14]),
        ({}, [7, 14, 21]),
    ],
)
def test_a_fraction_counts_from_the_start_of_the_epoch(arguments: dict[str, Any], steps: list[int]) -> None:
    seen = Validations()
    trainer = quiet_trainer(
        strategy="single", max_epochs=3, accumulate_grad_batches=2, num_sanity_val_steps=0, callbacks=seen, **arguments
    )
    trainer.fit(Scalar(), repeated([1.0] * 13, 1), repeated([1.0], 1))
    assert seen.steps == steps


class PlateauSaved(Scalar):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", 1.0)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val"}}


def test_a_checkpoint_of_a_validation_holds_its_schedulers_step(tmp_path: Path) -> None:
    class Saves(Callback):
        def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
            if trainer.fitting and trainer.current_epoch == 1:
                trainer.save_checkpoint(tmp_path / "saved")

    trainer = quiet_trainer(strategy="single", max_epochs=2, callbacks=Saves())
    trainer.fit(PlateauSaved(), repeated([1.0], 1), repeated([1.0], 1))
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1)
    resumed = quiet_trainer(strategy="single", max_epochs=2)
    resumed.fit(PlateauSaved(), repeated([1.0], 1), repeated([1.0], 1), ckpt_path=tmp_path / "saved")
    assert resumed.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1)


# --- loaders without data --------------------------------------------------------------------------------------------


def emptiness(recorder: pytest.WarningsRecorder) -> list[str]:
    return [str(w.message) for w in recorder if "no batches" in str(w.message)]


@pytest.mark.parametrize(
    ("loader", "described"),
    [
        (DataLoader(torch.arange(0.0), batch_size=4), "DataLoader, 0 samples, batch_size=4, drop_last=False"),
        (DataLoader(torch.arange(3.0), batch_size=4, drop_last=True), "3 samples, batch_size=4, drop_last=True"),
        (DataLoader(Stream(0), batch_size=4), "unknown samples, batch_size=4"),
        ([], ""),
    ],
)
def test_an_empty_validation_loader_is_skipped_with_one_warning(
    loader: Any, described: str, recwarn: pytest.WarningsRecorder
) -> None:
    trainer, module = quiet_trainer(strategy="single", max_epochs=3), Scalar()
    trainer.fit(module, repeated([1.0, 2.0], 1), loader)
    assert trainer.global_step == 6
    assert "val_loss" not in trainer.callback_metrics
    if described:
        [text] = emptiness(recwarn)
        assert "the validation loader" in text
        assert described in text
    else:
        assert emptiness(recwarn) == []


@on_two_ranks
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_an_empty_validation_loader_is_skipped_on_every_rank(strategy: str) -> None:
    loaders: list[Any] = [
        DataLoader(torch.arange(0.0), batch_size=4),  # type: ignore[arg-type]
        DataLoader(torch.arange(3.0), batch_size=4, drop_last=True),  # type: ignore[arg-type]
    ]
    for loader in loaders:
        trainer = quiet_trainer(strategy=strategy, max_epochs=2)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            trainer.fit(Scalar(), repeated([1.0, 2.0], 2), loader)
        assert trainer.global_step == 4
        assert "val_loss" not in trainer.callback_metrics
        said = [str(w.message) for w in seen if "the validation loader" in str(w.message)]
        assert len(said) == (1 if trainer.global_rank == 0 else 0), said


def test_validation_can_be_switched_off_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    trainer = quiet_trainer(strategy="single", max_epochs=1, limit_val_batches=0)
    trainer.fit(Scalar(), repeated([1.0], 1), repeated([1.0], 1))
    assert trainer.callback_metrics.keys() == {"loss"}, "the training's alone"
    assert emptiness(recwarn) == []


@pytest.mark.parametrize(
    ("loader", "described"),
    [
        (DataLoader(torch.arange(3.0), batch_size=4, drop_last=True), "3 samples, batch_size=4, drop_last=True"),
        (DataLoader(torch.arange(0.0), batch_size=4), "0 samples, batch_size=4"),
        (DataLoader(Stream(0), batch_size=4), "no batches in epoch 0"),
        (iter(()), "no batches in epoch 0"),
    ],
)
@pytest.mark.parametrize("limit", [{"max_epochs": 3}, {"max_steps": 5}])
def test_a_training_loader_without_batches_ends_with_a_warning(
    loader: Any, described: str, limit: dict[str, int], recwarn: pytest.WarningsRecorder
) -> None:
    trainer = quiet_trainer(strategy="single", **limit)
    trainer.fit(Scalar(), loader)
    assert trainer.global_step == 0
    [text] = emptiness(recwarn)
    assert "the training loader" in text
    assert described in text


def test_a_generator_that_is_used_up_ends_the_training(recwarn: pytest.WarningsRecorder) -> None:
    trainer = quiet_trainer(strategy="single", max_steps=5)
    trainer.fit(Scalar(), (batch for batch in torch.ones(3, 1)))
    assert trainer.global_step == 3
    [text] = emptiness(recwarn)
    assert "no batches in epoch 1: training ends at step 3" in text


@on_two_ranks
def test_loaders_without_batches_on_two_ranks() -> None:
    trainer = quiet_trainer(strategy="ddp", max_epochs=2)
    trainer.fit(Scalar(), DataLoader(torch.ones(2)), DataLoader(Stream(0)))
    assert trainer.global_step == 2
    trainer = quiet_trainer(strategy="ddp", max_steps=2)
    trainer.fit(Scalar(), DataLoader(Stream(0)))
    assert trainer.global_step == 0
    # One rank alone has data.
    trainer = quiet_trainer(strategy="ddp", max_steps=2)
    trainer.fit(Scalar(), DataLoader(OwnValues(1.0, 3 * trainer.global_rank)))
    assert trainer.global_step == 0


# --- hooks and signatures --------------------------------------------------------------------------------------------


class Written(Scalar):
    """Hooks and steps as short as Lightning lets them be."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def validation_step(self, batch: Tensor) -> Any:  # type: ignore[override]
        self.log("x", batch.mean())
        return "output"

    test_step = validation_step

    def predict_step(self, batch: Tensor) -> Any:  # type: ignore[override]
        return batch

    def on_validation_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.calls.append(("start", batch_idx))

    def on_validation_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.calls.append(("end", outputs, batch_idx))


def test_steps_and_hooks_may_leave_out_their_last_arguments() -> None:
    module, trainer = Written(), quiet_trainer(strategy="single")
    assert trainer.validate(module, repeated([3.0], 1)) == [{"x": 3.0}]
    assert trainer.test(module, repeated([3.0], 1)) == [{"x": 3.0}]
    assert trainer.predict(module, repeated([3.0], 1)) == [torch.tensor([3.0])]
    assert module.calls == [("start", 0), ("end", "output", 0)]


@pytest.mark.parametrize("step", ["validation_step", "test_step", "predict_step"])
def test_several_loaders_need_the_argument_for_them(step: str) -> None:
    run = {"validation_step": "validate", "test_step": "test", "predict_step": "predict"}[step]
    with pytest.raises(TypeError, match=rf"2 loaders, but Written.{step}.*dataloader_idx=0"):
        getattr(quiet_trainer(strategy="single"), run)(Written(), [repeated([3.0], 1), repeated([3.0], 1)])


class Transfers(Scalar):
    def __init__(self) -> None:
        super().__init__()
        self.moved: list[Any] = []

    def on_before_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        self.moved.append((float(batch), dataloader_idx))
        return batch

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.moved.append((float(batch), batch_idx, dataloader_idx))


def test_transfer_hooks_and_steps_learn_the_loader() -> None:
    module = Transfers()
    loaders = {"a": DataLoader(torch.arange(0.0)), "b": repeated([1.0, 2.0], 1), "c": repeated([3.0], 1)}
    with pytest.warns(UserWarning, match="'a'.*no batches"):
        quiet_trainer(strategy="single").validate(module, loaders)
    assert module.moved == [(1, 1), (1, 0, 1), (2, 1), (2, 1, 1), (3, 2), (3, 0, 2)]
