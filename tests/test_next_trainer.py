"""One module in the hands of several Trainers, one after the other in one process: each starts from the weights so far."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from acclight.strategies import FSDP2Strategy
from tests.distributed import RankChecks
from tests.scenarios import DISTRIBUTED, Tokens, quiet_trainer, ragged_tokens, whole

on_two_ranks = RankChecks(world_size=2, timeout=120.0)
SHARDING = ["fsdp2", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"]


class Evaluated(Tokens):
    """Tokens with a validation."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val", self(batch["tokens"]).mean())


def expected_weights(fits: int) -> dict[str, Tensor]:
    """Plain PyTorch: as many fits of 2 steps on 4 rows each, every one with an optimizer of its own."""
    torch.manual_seed(4)
    module, rows = Tokens(), ragged_tokens(8)
    for _ in range(fits):
        optimizer = module.configure_optimizers()
        for start in (0, 4):
            tokens, labels = (torch.stack([r[key] for r in rows[start : start + 4]]) for key in ("tokens", "labels"))
            loss = nn.functional.cross_entropy(module(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return {name: p.detach() for name, p in module.named_parameters()}


def loader(world: int) -> DataLoader[Any]:
    return DataLoader(ragged_tokens(8), batch_size=4 // world)


def check(trainer: Any, fits: int) -> None:
    for name, value in expected_weights(fits).items():
        found = whole(trainer, name)
        torch.testing.assert_close(found, value, atol=2e-6, rtol=0.0, msg=lambda text, n=name: f"{n}: {text}")
    # Ties are kept.
    assert trainer.module.head.weight is trainer.module.embedding.weight


def check_in_turn(strategies: list[Any], world: int) -> None:
    torch.manual_seed(4)
    module = Evaluated()
    trainers = []
    for fits, strategy in enumerate(strategies, start=1):
        trainer = quiet_trainer(strategy=strategy, max_epochs=1)
        trainers.append(trainer)
        trainer.fit(module, loader(world), loader(world))
        assert trainer.global_step == 2
        # Whole parameters of an evaluation are left behind for the next one.
        trainer.validate(module, loader(world))
        check(trainer, fits)
        trainer.validate(module, loader(world))


@on_two_ranks
@pytest.mark.parametrize("second", DISTRIBUTED)
@pytest.mark.parametrize("first", SHARDING)
def test_two_trainers_on_two_ranks(first: str, second: str) -> None:
    check_in_turn([first, second, first], world=2)


@pytest.mark.parametrize("first", SHARDING)
def test_a_single_process_after_shards(first: str) -> None:
    check_in_turn([first, "single", first], world=1)


class Fails(Tokens):
    """Raises in the middle of a step, with what the strategy has gathered for it, as long as it is told to."""

    fails = True

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.fails:
            raise KeyError("of the user")
        return loss


@pytest.mark.parametrize("first", SHARDING)
def test_after_a_fit_that_has_failed(first: str) -> None:
    torch.manual_seed(4)
    module = Fails()
    with pytest.raises(KeyError, match="of the user"):
        quiet_trainer(strategy=first, max_epochs=1).fit(module, loader(1))
    module.fails = False
    for fits, strategy in enumerate(["single", first], start=1):
        trainer = quiet_trainer(strategy=strategy, max_epochs=1)
        trainer.fit(module, loader(1))
        check(trainer, fits)


@on_two_ranks
def test_units_and_their_checkpoints_are_taken_off() -> None:
    strategy = FSDP2Strategy(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=60, activation_checkpointing=True)
    other = FSDP2Strategy(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=200, activation_checkpointing=True)
    check_in_turn([strategy, other, "ddp"], world=2)


@on_two_ranks
@pytest.mark.parametrize("strategy", SHARDING)
def test_a_trainer_comes_back_to_a_module_that_another_has_had(strategy: str) -> None:
    torch.manual_seed(4)
    module = Tokens()
    first = quiet_trainer(strategy=strategy, max_epochs=1)
    first.fit(module, loader(2))
    second = quiet_trainer(strategy="ddp", max_epochs=1)
    second.fit(module, loader(2))
    check(second, 2)
    first.max_epochs = 2
    first.fit(module, loader(2))
    assert first.global_step == 4
    check(first, 3)
    second.max_epochs = 2
    second.fit(module, loader(2))
    check(second, 4)


@on_two_ranks
@pytest.mark.parametrize("second", ["ddp", "fsdp2", "deepspeed_stage_3"])
@pytest.mark.parametrize("first", SHARDING)
def test_a_trainer_that_only_evaluates_leaves_a_whole_module(first: str, second: str) -> None:
    torch.manual_seed(4)
    module = Evaluated()
    quiet_trainer(strategy=first).validate(module, loader(2))
    trainer = quiet_trainer(strategy=second, max_epochs=1)
    trainer.fit(module, loader(2))
    check(trainer, 1)
    quiet_trainer(strategy=first).validate(module, loader(2))
    other = quiet_trainer(strategy=second, max_epochs=1)
    other.fit(module, loader(2))
    check(other, 2)


@on_two_ranks
@pytest.mark.parametrize("strategy", SHARDING)
def test_a_trainer_that_nobody_keeps_leaves_a_module_that_can_be_used(strategy: str) -> None:
    torch.manual_seed(4)
    module = Tokens()
    quiet_trainer(strategy=strategy, max_epochs=1).fit(module, loader(2))
    gc.collect()
    trainer = quiet_trainer(strategy=strategy, max_epochs=1)
    trainer.fit(module, loader(2))
    check(trainer, 2)


@on_two_ranks
@pytest.mark.parametrize("strategies", [("fsdp2", "ddp"), ("ddp", "fsdp2"), ("deepspeed_stage_3", "fsdp2")])
def test_a_trainer_cannot_save_what_another_has_taken(tmp_path: Path, strategies: list[str]) -> None:
    module = Tokens()
    trainers = [quiet_trainer(strategy=strategy, max_epochs=1) for strategy in strategies]
    for trainer in trainers:
        trainer.fit(module, loader(2))
    with pytest.raises(RuntimeError, match="another Trainer has prepared this module since"):
        trainers[0].save_checkpoint(tmp_path / "first")
    trainers[1].save_checkpoint(tmp_path / "second")


@on_two_ranks
@pytest.mark.parametrize("strategy", SHARDING)
def test_one_trainer_goes_back_to_an_earlier_module(strategy: str) -> None:
    torch.manual_seed(4)
    module = Tokens()
    other = copy.deepcopy(module)
    trainer = quiet_trainer(strategy=strategy, max_epochs=1)
    for fits in (1, 2):
        trainer.fit(module, loader(2))
        check(trainer, fits)
        trainer.fit(other, loader(2))
        check(trainer, fits)
