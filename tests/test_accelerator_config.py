"""Trainer(accelerator_config=...): each key does what it says, and says what it cannot do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from acclight import TrainModule
from acclight.accelerator_config import AcceleratorConfig
from tests.distributed import RankChecks, run_ranks
from tests.scenarios import Scalar, quiet_trainer, whole

on_two_ranks = RankChecks(world_size=2, timeout=120.0)

DEFAULTS = {
    "split_batches": False, "dispatch_batches": None, "even_batches": True, "use_seedable_sampler": True, "data_seed": None,
    "non_blocking": False, "use_configured_state": False, "gradient_accumulation_kwargs": None,
}  # fmt: skip


# --- what can be given -----------------------------------------------------------------------------------------------------


def test_every_form_is_read(tmp_path: Path) -> None:
    from transformers.trainer_pt_utils import AcceleratorConfig as TransformersConfig

    (tmp_path / "config.json").write_text(json.dumps({"even_batches": False, "data_seed": 3}))
    expected = DEFAULTS | {"even_batches": False, "data_seed": 3}
    assert vars(AcceleratorConfig.read(None)) == DEFAULTS
    assert vars(AcceleratorConfig.read({"even_batches": False, "data_seed": 3})) == expected
    assert vars(AcceleratorConfig.read(tmp_path / "config.json")) == expected
    assert vars(AcceleratorConfig.read(str(tmp_path / "config.json"))) == expected
    made = AcceleratorConfig(split_batches=True)
    assert AcceleratorConfig.read(made) is made
    theirs = AcceleratorConfig.read(TransformersConfig(split_batches=True))
    assert vars(theirs) == DEFAULTS | {"split_batches": True}


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (AcceleratorConfig, TypeError, "AcceleratorConfig is a class: give an instance"),
        (7, TypeError, "accelerator_config is a int: give None, a dict"),
        ("nowhere.json", ValueError, "'nowhere.json': there is no such file"),
        ({"split_batch": True}, ValueError, "no key 'split_batch'; did you mean 'split_batches'"),
        ({"rank": 1}, ValueError, "no key 'rank'; it takes split_batches, dispatch_batches"),
        ({"split_batches": "yes"}, ValueError, "split_batches='yes' must be True or False"),
        ({"even_batches": None}, ValueError, "even_batches=None must be True or False"),
        ({"data_seed": -1}, ValueError, "data_seed=-1 must be a whole number"),
        ({"data_seed": 1, "use_seedable_sampler": False}, ValueError, "data_seed=1 needs use_seedable_sampler=True"),
        ({"gradient_accumulation_kwargs": {"steps": 2}}, ValueError, "no key 'steps'; did you mean 'num_steps'"),
        ({"gradient_accumulation_kwargs": {"num_steps": 0}}, ValueError, "num_steps=0 must be a whole number, 1 or more"),
        ({"gradient_accumulation_kwargs": {"sync_with_dataloader": False}}, ValueError, "sync_with_dataloader=False cannot be"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_named(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        quiet_trainer(strategy="single", accelerator_config=given)


def test_it_reaches_accelerate() -> None:
    """For loaders that a script prepares with trainer.accelerator itself."""
    config = {
        "split_batches": True, "dispatch_batches": False, "even_batches": False, "data_seed": 5, "non_blocking": True,
        "gradient_accumulation_kwargs": {"num_steps": 4, "sync_each_batch": True},
    }  # fmt: skip
    trainer = quiet_trainer(strategy="single", accelerator_config=config)
    theirs = trainer.accelerator.dataloader_config
    assert (theirs.split_batches, theirs.dispatch_batches, theirs.even_batches) == (True, False, False)
    assert (theirs.use_seedable_sampler, theirs.data_seed, theirs.non_blocking) == (True, 5, True)
    assert trainer.accumulate_grad_batches == 4
    assert trainer.accelerator.gradient_accumulation_steps == 1, "the loop weights its micro-batches itself"
    assert trainer.accelerator.gradient_state.plugin_kwargs["sync_each_batch"] is True


# --- accumulation ----------------------------------------------------------------------------------------------------------


def test_accumulation_is_given_once() -> None:
    given = {"gradient_accumulation_kwargs": {"num_steps": 4}}
    with pytest.raises(ValueError, match=r"given twice: accumulate_grad_batches=2, and num_steps=4"):
        quiet_trainer(strategy="single", accelerator_config=given, accumulate_grad_batches=2)
    module = Scalar(lr=1.0)
    trainer = quiet_trainer(strategy="single", accelerator_config=given, max_epochs=1)
    trainer.fit(module, DataLoader(torch.tensor([1.0, 2.0, 3.0, 6.0]), batch_size=1))
    assert trainer.global_step == 1
    assert module.w.item() == 3.0, "one step to the mean of four; divided twice it would be 0.75"


@on_two_ranks
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_gradients_may_be_averaged_after_every_batch(strategy: str) -> None:
    def fit(sync: bool) -> tuple[float, int]:
        averaged = 0

        class Watched(Scalar):
            def on_after_backward(self) -> None:
                nonlocal averaged
                wrapped = self.trainer.strategy.wrapped
                # A gradient that FSDP2 has not exchanged yet is not on the parameter.
                averaged += wrapped.require_backward_grad_sync if strategy == "ddp" else self.w.grad is not None

        kwargs = {"num_steps": 2, "sync_each_batch": sync}
        trainer = quiet_trainer(
            strategy=strategy, max_steps=1, accelerator_config={"gradient_accumulation_kwargs": kwargs}
        )
        trainer.fit(Watched(lr=1.0), DataLoader(torch.tensor([1.0, 2.0, 3.0, 6.0]), batch_size=1))
        return float(whole(trainer, "w")), averaged

    assert fit(sync=False) == (3.0, 1)
    assert fit(sync=True) == (3.0, 2)


@on_two_ranks
def test_no_loss_on_one_rank_where_every_batch_is_averaged() -> None:
    class Sometimes(Scalar):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return None if self.trainer.global_rank == 0 else super().training_step(batch, batch_idx)

    module = Sometimes(lr=1.0)
    kwargs = {"num_steps": 2, "sync_each_batch": True}
    trainer = quiet_trainer(strategy="ddp", max_steps=1, accelerator_config={"gradient_accumulation_kwargs": kwargs})
    trainer.fit(module, DataLoader(torch.tensor([1.0, 2.0, 3.0, 6.0]), batch_size=1))
    # Rank 1 has 2 and 6; rank 0 adds zeros: the mean of (0, 2, 0, 6).
    assert module.w.item() == 2.0


def test_deepspeed_averages_once_per_window() -> None:
    with pytest.raises(ValueError, match="sync_each_batch=True cannot be used with 'deepspeed_stage_2'"):
        quiet_trainer(
            strategy="deepspeed_stage_2",
            accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": True}},
        )


# --- sharing out -------------------------------------------------------------------------------------------------------------


class Seen(TrainModule):
    """Keeps what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))
        self.trained: list[list[int]] = []
        self.validated: list[list[int]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.trained.append(batch.tolist())
        return (self.w * batch).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.validated.append(batch.tolist())
        self.log("sum", batch.float().sum(), reduce_fx="sum")

    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        return batch

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fitted(loader: Any, validation: Any = None, *, strategy: str = "ddp", **config: Any) -> tuple[Seen, Any]:
    module = Seen()
    trainer = quiet_trainer(strategy=strategy, max_epochs=1, num_sanity_val_steps=0, accelerator_config=config)
    trainer.fit(module, loader, validation)
    return module, trainer


@on_two_ranks
def test_split_batches_makes_the_batch_size_that_of_all_ranks() -> None:
    import logging

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("acclight").addHandler(handler)
    try:
        module, trainer = fitted(DataLoader(range(8), batch_size=4), DataLoader(range(6), 4), split_batches=True)
    finally:
        logging.getLogger("acclight").removeHandler(handler)
    rank = trainer.global_rank
    assert module.trained == ([[0, 1], [4, 5]], [[2, 3], [6, 7]])[rank]
    assert module.validated == ([[0, 1], [4, 5]], [[2, 3]])[rank]
    if rank == 0:
        assert [line for line in said if "split_batches" in line] == [
            "split_batches: the loader's batch size counts for all 2 processes together"
        ]
        assert any("effective batch 2 x 2 processes x accumulation 1 = 4" in line for line in said)
    with pytest.raises(ValueError, match="the batch size 3 cannot be divided among 2 processes; give a multiple of 2"):
        fitted(DataLoader(range(8), batch_size=3), split_batches=True)


@on_two_ranks
def test_even_batches_fill_up_training_and_never_evaluation() -> None:
    for even, trained in ((True, ([[0], [2], [4]], [[1], [3], [0]])), (False, ([[0], [2]], [[1], [3]]))):
        module, trainer = fitted(DataLoader(range(5), batch_size=1), DataLoader(range(5), 1), even_batches=even)
        assert module.trained == trained[trainer.global_rank]
        assert module.validated == ([[0], [2], [4]], [[1], [3]])[trainer.global_rank]


def order(trainer: Any) -> list[int]:
    module = Seen()
    trainer.fit(module, DataLoader(range(32), batch_size=32, shuffle=True))
    return module.trained[-1]


def test_the_order_follows_data_seed_or_torchs_seed_or_the_global_generator() -> None:
    def first(seed: int, **config: Any) -> list[int]:
        torch.manual_seed(seed)
        torch.rand(seed)  # what a script may draw before
        return order(quiet_trainer(strategy="single", max_epochs=1, accelerator_config=config))

    assert first(1, data_seed=7) == first(2, data_seed=7)
    assert first(1, data_seed=7) != first(1, data_seed=8)
    assert first(1) == first(1) != first(2)
    torch.manual_seed(1)
    again = [order(quiet_trainer(strategy="single", max_epochs=1)) for _ in range(2)]
    assert again[0] == again[1]
    torch.manual_seed(1)
    config = {"use_seedable_sampler": False}
    drawn = [order(quiet_trainer(strategy="single", max_epochs=1, accelerator_config=config)) for _ in range(2)]
    assert drawn[0] != drawn[1], "the global generator goes on"
    torch.manual_seed(1)
    assert order(quiet_trainer(strategy="single", max_epochs=1, accelerator_config=config)) == drawn[0]


@on_two_ranks
def test_an_order_drawn_from_the_generator_is_one_for_all_ranks() -> None:
    import torch.distributed as dist

    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    module, _ = fitted(DataLoader(range(6), batch_size=1, shuffle=True), use_seedable_sampler=False)
    ranks: list[Any] = [None, None]
    dist.all_gather_object(ranks, module.trained)
    assert sorted(sample for rank in ranks for (sample,) in rank) == list(range(6))


def test_non_blocking_reaches_the_copy_and_wants_pinned_memory() -> None:
    class Copies(Tensor):
        given: list[bool]

        def to(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
            copies.append(bool(kwargs.get("non_blocking", False)))
            return super().to(*args, **kwargs).as_subclass(Tensor)

    copies: list[bool] = []
    for asked in (False, True):
        copies.clear()
        loader = DataLoader(
            torch.ones(2, 1), batch_size=1, collate_fn=lambda rows: torch.stack(rows).as_subclass(Copies)
        )
        module = Seen()
        trainer = quiet_trainer(strategy="single", max_steps=1, accelerator_config={"non_blocking": asked})
        if asked:
            with pytest.warns(
                UserWarning, match="non_blocking=True, but the training loader has pin_memory=False.*set both"
            ):
                trainer.fit(module, loader)
        else:
            trainer.fit(module, loader)
        assert set(copies) == {asked}


# --- rank 0 reads for all ------------------------------------------------------------------------------------------------------


class Stream(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length
        self.read: list[int] = []

    def __iter__(self) -> Iterator[int]:
        for i in range(self.length):
            self.read.append(i)
            yield i


class Rows(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


@on_two_ranks
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("kind", ["Stream", "Rows"])
@pytest.mark.parametrize("length", [0, 3, 8, 9, 10, 11])
def test_dispatched_batches_are_those_that_each_rank_would_read(kind: str, length: int, strategy: str) -> None:
    make: Any = {"Stream": Stream, "Rows": Rows}[kind]
    results = []
    for dispatch in (False, True):
        training, validation = make(length), make(length)
        module, trainer = fitted(
            DataLoader(training, batch_size=2), DataLoader(validation, batch_size=2), strategy=strategy,
            dispatch_batches=dispatch,
        )  # fmt: skip
        shown = float(trainer.callback_metrics.get("sum", -1.0))
        results.append((module.trained, module.validated, shown))
        if dispatch and trainer.global_rank > 0:
            assert not training.read
            assert not validation.read
        elif dispatch:
            assert sorted(set(training.read)) == list(range(length))
            assert len(training.read) <= length + 1, "one more at most, to fill up the end of an epoch"
            assert sorted(validation.read) == list(range(length)), "each sample once"
    assert results[0] == results[1]


@on_two_ranks
def test_a_stream_is_dispatched_where_that_is_asked_for() -> None:
    for asked, read_elsewhere in ((None, True), (True, False), (False, True)):
        stream = Stream(8)
        module, trainer = fitted(DataLoader(stream, batch_size=2), dispatch_batches=asked)
        assert module.trained == ([[0, 2], [4, 6]], [[1, 3], [5, 7]])[trainer.global_rank]
        assert bool(stream.read) is (trainer.global_rank == 0 or read_elsewhere)
    table = Rows(8)
    fitted(DataLoader(table, batch_size=2))
    assert len(table.read) == 4, "a map-style dataset is not: each rank reads its own"


class Divided(Stream):
    """Gives each worker its own part, as torch's documentation shows."""

    def __iter__(self) -> Iterator[int]:
        info: Any = torch.utils.data.get_worker_info()
        yield from range(info.id, self.length, info.num_workers)


@on_two_ranks
def test_dispatch_with_workers_and_without_batching() -> None:
    def samples(batches: list[list[int]]) -> list[int]:
        import torch.distributed as dist

        ranks: list[Any] = [None, None]
        dist.all_gather_object(ranks, batches)
        return sorted(sample for rank in ranks for batch in rank for sample in batch)

    # Parts of 7 and 6 samples: what each worker leaves over is put together, and no sample is lost or twice.
    for stream in (Stream(13), Divided(13)):
        module, _ = fitted(
            DataLoader(stream, 2, num_workers=2), DataLoader(stream, 2, num_workers=2), dispatch_batches=True
        )
        assert samples(module.validated) == list(range(13))
        trained = samples(module.trained)
        assert (len(trained), len(set(trained))) == (12, 12), "the last one is not enough for both ranks"
    module, trainer = fitted(DataLoader(Stream(5), batch_size=None, collate_fn=lambda i: torch.tensor([i])))
    assert module.trained == ([[0], [2]], [[1], [3]])[trainer.global_rank]
    module, trainer = fitted(DataLoader(Stream(7), batch_size=2, drop_last=True))
    assert module.trained == ([[0, 2]], [[1, 3]])[trainer.global_rank]


@on_two_ranks
def test_dispatched_predictions_come_in_order_and_a_resume_goes_on(tmp_path: Path) -> None:
    for data in (Stream(7), Rows(7)):
        trainer = quiet_trainer(strategy="ddp", accelerator_config={"dispatch_batches": True})
        predictions = trainer.predict(Seen(), DataLoader(data, batch_size=2))
        assert torch.cat(predictions).tolist() == list(range(7))
        limited = quiet_trainer(
            strategy="ddp", limit_predict_batches=1, accelerator_config={"dispatch_batches": True}
        ).predict(Seen(), DataLoader(data, batch_size=2))
        assert torch.cat(limited).tolist() == [0, 1, 2, 3]
    for kind in (Stream, Rows):
        first = quiet_trainer(strategy="ddp", max_steps=2, accelerator_config={"dispatch_batches": True})
        first.fit(Seen(), DataLoader(kind(16), batch_size=2))
        first.save_checkpoint(tmp_path / kind.__name__)
        module = Seen()
        second = quiet_trainer(strategy="ddp", max_epochs=1, accelerator_config={"dispatch_batches": True})
        second.fit(module, DataLoader(kind(16), batch_size=2), ckpt_path=tmp_path / kind.__name__)
        seen = {Stream: ([8, 10], [9, 11]), Rows: ([8, 9], [10, 11])}[kind][second.global_rank]
        assert module.trained[0] == seen
        assert len(module.trained) == 2


@on_two_ranks
def test_dispatch_says_what_it_cannot_do_and_what_rank_0_met() -> None:
    class Failing(Stream):
        def __iter__(self) -> Iterator[int]:
            yield 0
            raise OSError("the disk is gone")

    trainer = quiet_trainer(strategy="ddp", max_epochs=1, accelerator_config={"dispatch_batches": True})
    error, message = (
        (OSError, "the disk") if trainer.is_global_zero else (RuntimeError, "rank 0, .* OSError: the disk is gone")
    )
    with pytest.raises(error, match=message):
        trainer.fit(Seen(), DataLoader(Failing(4), batch_size=1))
    sampler = torch.utils.data.DistributedSampler(Rows(8))
    with pytest.raises(ValueError, match="the loader divides itself among the ranks"):
        fitted(DataLoader(Rows(8), sampler=sampler, batch_size=1), dispatch_batches=True)
    with pytest.raises(ValueError, match="needs a DataLoader, and this is a list"):
        fitted([torch.ones(1)], dispatch_batches=True)


# --- a state that is there already -----------------------------------------------------------------------------------------


def configured_state() -> None:
    from accelerate import Accelerator
    from accelerate.state import PartialState

    loader = DataLoader(torch.ones(4, 1), batch_size=1)
    asked = {"use_configured_state": True}
    with pytest.raises(ValueError, match=r"there is no state: make a PartialState\(\) or an Accelerator\(\)"):
        quiet_trainer(strategy="ddp", accelerator_config=asked)
    state = PartialState(cpu=True)
    for strategy in ("ddp", "fsdp2"):
        trainer = quiet_trainer(strategy=strategy, max_steps=1, accelerator_config=asked)
        trainer.fit(Seen(), loader)
        assert trainer.accelerator.state.backend == state.backend
        assert trainer.global_rank == state.process_index
        assert str(state.distributed_type.value) == "MULTI_CPU", "the script's own is as it was"
    with pytest.raises(ValueError, match=r"of the kind 'MULTI_CPU', and the Trainer's strategy is 'deepspeed'"):
        quiet_trainer(strategy="deepspeed_stage_2", accelerator_config=asked)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    trainer = quiet_trainer(max_steps=1, accelerator_config=asked)
    assert (trainer.strategy.name, trainer.core.precision) == ("ddp", "bf16-mixed")
    trainer.fit(Seen(), loader)
    assert quiet_trainer(precision="bf16", accelerator_config=asked).core.precision == "bf16-mixed"
    with pytest.raises(ValueError, match=r"precision='16-mixed', but the Accelerator .* has mixed_precision='bf16'"):
        quiet_trainer(precision="16-mixed", accelerator_config=asked)
    with pytest.raises(
        ValueError, match=r"of the kind 'MULTI_CPU', and the Trainer's strategy is 'fsdp2': use .*'ddp'"
    ):
        quiet_trainer(strategy="fsdp2", accelerator_config=asked)
    assert quiet_trainer().core.precision == "32-true", "without asking, a Trainer has a state of its own"
    assert accelerator.mixed_precision == "bf16"


def configured_fsdp() -> None:
    import torch.distributed as dist
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    from acclight.strategies import on_cpu

    dist.init_process_group("gloo")
    on_cpu.claim_fsdp()
    Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2), mixed_precision="bf16")
    asked = {"use_configured_state": True}
    trainer = quiet_trainer(strategy="fsdp2", max_steps=1, accelerator_config=asked)
    trainer.fit(Seen(), DataLoader(torch.ones(4, 1), batch_size=1))
    assert (trainer.strategy.name, trainer.core.precision) == ("fsdp2", "bf16-mixed")
    for strategy in ("ddp", "auto"):
        with pytest.raises(
            ValueError, match=r"of the kind 'FSDP', and the Trainer's strategy is 'ddp': use .* 'fsdp2'"
        ):
            quiet_trainer(strategy=strategy, accelerator_config=asked)
    assert quiet_trainer(strategy="ddp").strategy.name == "ddp", "what a script made by hand is no launcher's wish"


@pytest.mark.parametrize("state", [configured_state, configured_fsdp])
def test_a_state_that_is_there_already_is_used(state: Any) -> None:
    run_ranks(state, world_size=2)
