"""Training on machines without an accelerator device: what is asked for really runs, and each workaround is still needed.

A test whose name ends in "still" fails when its dependency has changed: then the workaround that it names can go.
"""

from __future__ import annotations

import os
import warnings
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from acclight import TrainModule
from acclight.strategies import DeepSpeedStrategy, FSDP2Strategy
from acclight.strategies.strategy import canonical_name
from tests.distributed import RankChecks, run_ranks
from tests.scenarios import DISTRIBUTED, Scalar, quiet_trainer, repeated, whole

on_two_ranks = RankChecks(world_size=2, timeout=120.0)


class Even(TrainModule):
    """Sizes that two ranks can share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


@on_two_ranks
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_what_is_asked_for_really_wraps_the_model(strategy: str) -> None:
    from torch.distributed.fsdp import FSDPModule
    from torch.nn.parallel import DistributedDataParallel

    module = Even()
    sizes = {name: p.numel() for name, p in module.named_parameters()}
    trainer = quiet_trainer(strategy=strategy, max_steps=1)
    trainer.fit(module, DataLoader(torch.ones(4, 6), batch_size=2))
    assert trainer.strategy.name == strategy
    assert trainer.world_size == 2
    assert trainer.device == torch.device("cpu")
    wrapped: Any = trainer.strategy.wrapped
    local = {canonical_name(n): trainer.strategy.local(p).numel() for n, p in module.named_parameters()}
    states = [s["exp_avg"] for s in trainer.optimizers[0].state.values()]
    held = sum(trainer.strategy.local(state).numel() for state in states)
    whole = sum(sizes.values())
    if strategy == "ddp":
        assert isinstance(wrapped, DistributedDataParallel)
        assert local == sizes
        assert held == whole
    elif strategy == "fsdp2":
        assert isinstance(wrapped, FSDPModule)
        assert local == {name: size // 2 for name, size in sizes.items()}
        assert held == whole // 2
    else:
        assert wrapped.zero_optimization_stage() == int(strategy[-1])
        # The flat partitions are padded to an even size.
        assert whole // 2 <= held <= whole // 2 + 4
        if strategy == "deepspeed_stage_3":
            shards = {canonical_name(n): p.ds_tensor.numel() for n, p in module.named_parameters()}
            assert shards == {name: size // 2 for name, size in sizes.items()}


@pytest.mark.parametrize(
    "strategy",
    [
        "ddp",
        "fsdp2",
        "deepspeed_stage_3",
        pytest.param("deepspeed_stage_1", marks=pytest.mark.slow),
        pytest.param("deepspeed_stage_2", marks=pytest.mark.slow),
    ],
)
def test_a_group_of_one(strategy: str) -> None:
    run_ranks(fit_alone, [strategy], world_size=1)


def fit_alone(strategy: str) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    trainer = quiet_trainer(strategy=strategy, max_steps=2)
    trainer.fit(Even(), DataLoader(torch.ones(4, 6), batch_size=2))
    assert (trainer.strategy.name, trainer.world_size, trainer.global_step) == (strategy, 1, 2)
    # Windows of 2, 2 and 1: 0 -> 0.5 -> 0.75 -> 0.75 + (3 - 0.75) / 2; the loss is the batch's own, unscaled.
    module = Scalar(lr=0.5)
    trainer = quiet_trainer(strategy=strategy, max_epochs=1, accumulate_grad_batches=2, log_every_n_steps=1)
    trainer.fit(module, repeated([1.0, 1.0, 1.0, 1.0, 3.0], 1))
    assert (float(whole(trainer, "w")), trainer.global_step) == (1.875, 3)
    assert module.losses == [0.5, 0.5, 0.125, 0.125, 2.53125]
    assert float(trainer.callback_metrics["loss"]) == 2.53125


# --- on_cpu.claim_fsdp -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cpu", [True, False])
def test_accelerate_chooses_another_kind_for_fsdp_on_a_cpu_still(cpu: bool) -> None:
    """When this fails, acclight/strategies/on_cpu.py can go."""
    kinds = run_ranks(kind_of_a_plain_accelerator, [cpu], world_size=2)
    assert "FSDP" not in kinds, "Accelerate runs FSDP2 on a CPU by itself now"


def kind_of_a_plain_accelerator(cpu: bool) -> str:
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    accelerator = Accelerator(cpu=cpu, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    return str(accelerator.distributed_type.value)


def test_without_the_claim_the_strategy_refuses_to_run() -> None:
    messages = run_ranks(fit_unclaimed, world_size=2)
    assert all(m.startswith("strategy 'fsdp2' was asked for, but Accelerate set up") for m in messages)


def fit_unclaimed() -> str:
    strategy = FSDP2Strategy()
    strategy.claim_process_state = lambda device_type: None  # type: ignore[method-assign]
    with pytest.raises(RuntimeError) as error:
        quiet_trainer(strategy=strategy)
    return str(error.value)


# --- DeepSpeed's operator ------------------------------------------------------------------------------------------------


@on_two_ranks
@pytest.mark.parametrize("hidden", [True, False])
def test_deepspeed_calls_deprecated_functions_still(hidden: bool) -> None:
    """When this fails with `hidden` False, `_quieten_deprecations` in acclight/strategies/deepspeed.py can go."""
    replaced = patch("acclight.strategies.deepspeed._quieten_deprecations") if not hidden else nullcontext()
    with replaced, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        quiet_trainer(strategy="deepspeed_stage_2", max_steps=1).fit(Scalar(), repeated([1.0], 1))
    said = [str(w.message) for w in seen if "is deprecated" in str(w.message) and w.category is FutureWarning]
    assert bool(said) is not hidden, said


def test_a_deepspeed_that_is_not_installed_is_told_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ImportError, match=r"needs the package deepspeed.*DS_BUILD_OPS=0 pip install --no-build-isolation"
    ):
        quiet_trainer(strategy="deepspeed_stage_2")


def test_deepspeed_builds_its_shared_memory_operator_still() -> None:
    """When this fails, `_skip_shared_memory_operator` in acclight/strategies/deepspeed.py can go."""
    assert run_ranks(start_deepspeed, [False], world_size=1) == [1]


def test_the_strategy_keeps_deepspeed_from_building_it() -> None:
    assert run_ranks(start_deepspeed, [True], world_size=1) == [0]


def start_deepspeed(through_the_strategy: bool) -> int:
    """How often DeepSpeed would have compiled the operator."""
    import deepspeed
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    builds: list[str] = []
    ShareMemCommBuilder.load = lambda builder: builds.append(builder.NAME)
    if through_the_strategy:
        trainer = quiet_trainer(strategy=DeepSpeedStrategy(stage=1), max_steps=1)
        trainer.fit(Even(), DataLoader(torch.ones(4, 6), batch_size=2))
    else:
        deepspeed.init_distributed(dist_backend="gloo")
    return len(builds)


# --- outputs that ZeRO-3 cannot look into ------------------------------------------------------------------------------------


class Labelling(Even):
    """Its steps return what is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), 0: "x"}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(outputs[0])

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        self.net(batch)
        return (0.5, "ok", None, [1], {"a": 1}, {0: "b"})[batch_idx]

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append(outputs)


@on_two_ranks
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_a_step_may_return_anything(strategy: str) -> None:
    module, plain = Labelling(), Even()
    plain.load_state_dict(module.state_dict())
    loader = DataLoader(torch.arange(72.0).view(12, 6) / 72.0, batch_size=1)
    quiet_trainer(strategy=strategy).validate(module, loader)
    assert module.seen == [0.5, "ok", None, [1], {"a": 1}, {0: "b"}]
    module.seen.clear()
    trainer = quiet_trainer(strategy=strategy, max_steps=2)
    trainer.fit(module, loader)
    assert module.seen == ["x", "x"]
    trained = {name: whole(trainer, name) for name, _ in plain.named_parameters()}
    other = quiet_trainer(strategy=strategy, max_steps=2)
    other.fit(plain, loader)
    for name, value in trained.items():
        torch.testing.assert_close(value, whole(other, name), atol=0.0, rtol=0.0)


def test_zero_3_looks_for_parameters_in_every_output_still() -> None:
    """When this fails, `_Opaque` in acclight/strategies/deepspeed.py can go."""
    ((of_a_name, of_a_number),) = run_ranks(outputs_of_an_engine, world_size=1)
    assert of_a_name == "vars() argument must have __dict__ attribute"
    assert of_a_number == "'int' object has no attribute 'startswith'"


def outputs_of_an_engine() -> list[str]:
    import deepspeed

    class Naming(nn.Linear):
        returned: Any = None

        def forward(self, batch: torch.Tensor) -> Any:
            super().forward(batch)
            return self.returned

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    engine, *_ = deepspeed.initialize(
        model=Naming(6, 4), config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    )
    errors = []
    for returned in ("a name", {0: "a number as a key"}):
        engine.module.returned = returned
        with pytest.raises((TypeError, AttributeError)) as error:
            engine(torch.ones(1, 6))
        errors.append(str(error.value))
    return errors
