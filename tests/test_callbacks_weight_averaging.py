"""Averaged weights: what they are, when they stand in the model's place, and what checkpoints hold of them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from acclight import Callback, Trainer, TrainModule, checkpoint, seed_everything
from acclight.callbacks import EMAWeightAveraging, ModelCheckpoint, WeightAveraging
from acclight.strategies import DeepSpeedStrategy
from tests.distributed import RankChecks
from tests.scenarios import DISTRIBUTED, quiet_trainer, whole
from tests.test_collectives import NEEDED, STRATEGIES, WINDOW, Layers, Watch

on_two_ranks = RankChecks(world_size=2, timeout=120.0)


class Falling(TrainModule):
    """w = 0 and the loss w, so that SGD of rate 1 makes it -1, -2, ...; each validation notes the w that it runs with."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))
        self.validated: list[float] = []
        self.tested: list[float] = []
        self.fail: BaseException | None = None

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.w.float().sum() * batch.float().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.validated.append(self.w.item())
        self.log("val", self.w.sum())
        if self.fail is not None and len(self.validated) == 2:
            raise self.fail

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.tested.append(self.w.item())

    def predict_step(self, batch: Tensor, batch_idx: int) -> float:
        return self.w.item()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def ones(samples: int = 8) -> DataLoader[Any]:
    return DataLoader(torch.ones(samples), batch_size=1)


def fit(averaging: Callback, steps: int = 3, module: Any = None, **arguments: Any) -> tuple[Trainer, Any]:
    """Trains `Falling` with a validation after every step."""
    module = Falling() if module is None else module
    ckpt_path, samples = arguments.pop("ckpt_path", None), arguments.pop("samples", 8)
    callbacks = [averaging, *arguments.pop("callbacks", [])]
    trainer = quiet_trainer(max_steps=steps, callbacks=callbacks, val_check_interval=1, **arguments)
    trainer.fit(module, ones(samples), ones(1), ckpt_path=ckpt_path)
    return trainer, module


# --- what the average is ---------------------------------------------------------------------------------------------


def test_an_ema_starts_at_the_initial_weights() -> None:
    trainer, module = fit(EMAWeightAveraging(decay=0.5), steps=2)
    # The sanity check saw the raw w = 0.
    assert module.validated == [0.0, -0.5, -1.25]
    assert trainer.callback_metrics["val"] == -1.25


def test_the_mean_begins_with_the_first_update() -> None:
    _, module = fit(WeightAveraging())
    assert module.validated == [0.0, -1.0, -1.5, -2.0]


def test_functions_of_ones_own() -> None:
    def keep_three_quarters(averaged: Tensor, current: Tensor, updates: int) -> Tensor:
        return averaged * 0.75 + current * 0.25

    def add(averaged: list[Tensor], current: list[Tensor], updates: int) -> None:
        for one, new in zip(averaged, current, strict=True):
            one.add_(new * updates)

    assert fit(WeightAveraging(avg_fn=keep_three_quarters))[1].validated == [0.0, -1.0, -1.25, -1.6875]
    # -1, then -1 - 2 * 1, then -3 - 3 * 2.
    assert fit(WeightAveraging(multi_avg_fn=add))[1].validated == [0.0, -1.0, -3.0, -9.0]


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        # Raw weights up to the first update.
        ({"update_every_n_steps": 2}, [0.0, -1.0, -1.0, -1.0, -2.5]),
        ({"update_starting_at_step": 2}, [0.0, -1.0, -2.0, -2.5, -3.25]),
        # Two steps make an epoch.
        ({"update_starting_at_epoch": 1}, [0.0, -1.0, -2.0, -2.5, -3.25]),
        ({"update_starting_at_step": 1, "update_starting_at_epoch": 1}, [0.0, -1.0, -2.0, -2.5, -3.25]),
        ({"update_starting_at_step": 9}, [0.0, -1.0, -2.0, -3.0, -4.0]),
    ],
)
def test_when_an_ema_starts_and_is_updated(arguments: dict[str, int], seen: list[float]) -> None:
    _, module = fit(EMAWeightAveraging(decay=0.5, **arguments), steps=4, samples=2)
    assert module.validated == seen
    assert module.w.item() == seen[-1]


class AtEpochEnds(WeightAveraging):
    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return epoch_idx is not None and epoch_idx > 0


def test_updates_at_epoch_ends() -> None:
    # After steps 4 and 6, the ends of the epochs 1 and 2.
    averaging = AtEpochEnds()
    _, module = fit(averaging, steps=7, samples=2)
    assert module.validated == [0.0, -1.0, -2.0, -3.0, -4.0, -4.0, -4.0, -5.0]


def test_a_16_bit_model_averages_in_float32(tmp_path: Path) -> None:
    trainer, module = fit(EMAWeightAveraging(decay=0.9), precision="bf16-true")
    expected = torch.zeros(1)
    for step in (1, 2, 3):
        expected = expected * 0.9 - step * 0.1
    assert module.w.dtype == torch.bfloat16
    assert torch.equal(module.w, expected.bfloat16())
    trainer.save_checkpoint(tmp_path / "c")
    raw, averaged = checkpoint.load_weights(tmp_path / "c"), checkpoint.load_weights(tmp_path / "c", averaged=True)
    assert torch.equal(raw["w"], torch.tensor([-3.0]).bfloat16())
    assert torch.equal(averaged["w"], expected.bfloat16())
    reader = checkpoint.Reader(tmp_path / "c")
    into = {"w": torch.zeros(1)}
    reader.load_averaged(into)
    assert reader.averaged_tensors["w"].dtype == torch.float32
    assert torch.allclose(into["w"], expected, rtol=0, atol=1e-7)


class Normed(TrainModule):
    """A BatchNorm whose running mean is 2 (1 - 0.5^n) after n steps on batches of twos."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1, momentum=0.5)
        self.seen: list[tuple[float, int]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.norm(batch).sum()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.seen.append((self.norm.running_mean.item(), int(self.norm.num_batches_tracked)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.parametrize(("use_buffers", "means"), [(True, [0.5, 1.0]), (False, [1.0, 1.5])])
def test_buffers(use_buffers: bool, means: list[float]) -> None:
    module = Normed()
    trainer = quiet_trainer(
        max_steps=2,
        callbacks=EMAWeightAveraging(decay=0.5, use_buffers=use_buffers),
        val_check_interval=1,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, DataLoader(torch.full((4, 1), 2.0), batch_size=2), DataLoader(torch.ones(1, 1)))
    # What counts is not averaged.
    assert module.seen == [(means[0], 1), (means[1], 2)]


class Later(Falling):
    """v = 0, with the gradient 1 too, is trained from the second step on."""

    def __init__(self) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.zeros(1), requires_grad=False)
        self.seen: list[float] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.v.requires_grad_(batch_idx > 0)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return (self.w + self.v).sum()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.seen.append(self.v.item())


def test_a_parameter_that_is_trained_later_joins_with_its_weights_after_its_first_step() -> None:
    averaging = EMAWeightAveraging(decay=0.5)
    _, module = fit(averaging, module=Later())
    assert module.validated == [0.0, -0.5, -1.25, -2.125]
    assert module.seen == [0.0, 0.0, -1.0, -1.5]


# --- in the place of the weights -------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError("boom"), KeyboardInterrupt()])
def test_an_exception_in_validation_leaves_the_raw_weights(error: BaseException) -> None:
    module = Falling()
    module.fail = error
    with pytest.raises(type(error)):
        fit(EMAWeightAveraging(decay=0.5), module=module)
    assert module.validated == [0.0, -0.5]
    assert module.w.item() == -1.0


def test_after_fit_the_module_holds_the_average_and_the_next_fit_goes_on_with_the_raw_weights() -> None:
    trainer, module = fit(EMAWeightAveraging(decay=0.5), steps=2)
    assert module.w.item() == -1.25
    trainer.test(module, ones(1))
    assert module.tested == [-1.25]
    assert trainer.predict(module, ones(1)) == [-1.25]
    trainer.max_steps = 3
    trainer.fit(module, ones(), ones(1))
    assert module.validated[-1] == module.w.item() == -2.125
    # A fit with nothing left to do ends the same way.
    trainer.fit(module, ones(), ones(1))
    assert module.w.item() == -2.125


def test_weights_that_the_module_is_given_after_fit_stay(tmp_path: Path) -> None:
    trainer, module = fit(EMAWeightAveraging(decay=0.5), steps=2)
    module.load_state_dict({"w": torch.tensor([8.0])})
    trainer.save_checkpoint(tmp_path / "c")
    assert checkpoint.load_weights(tmp_path / "c")["w"].item() == 8.0
    trainer.max_steps = 3
    trainer.fit(module, ones(), ones(1))
    # The average goes on: half of -1.25 and of 8 - 1.
    assert module.validated[-1] == 2.875


def test_a_new_run_begins_a_new_average() -> None:
    averaging = EMAWeightAveraging(decay=0.5)
    fit(averaging, steps=2)
    _, module = fit(averaging, steps=2)
    assert module.validated == [0.0, -0.5, -1.25]


def test_evaluation_of_a_checkpoint_uses_what_is_averaged_in_it(tmp_path: Path) -> None:
    saved, _ = fit(EMAWeightAveraging(decay=0.5), steps=2)
    saved.save_checkpoint(tmp_path / "c", weights_only=True)
    module = Falling()
    quiet_trainer(callbacks=EMAWeightAveraging()).test(module, ones(1), ckpt_path=tmp_path / "c")
    quiet_trainer().test(module, ones(1), ckpt_path=tmp_path / "c")
    # The Trainer's own average is of other weights.
    trainer, other = fit(EMAWeightAveraging(decay=0.5), steps=4)
    trainer.test(other, ones(1), ckpt_path=tmp_path / "c")
    assert module.tested == [-1.25, -2.0]
    assert other.tested == [-1.25]
    quiet_trainer(callbacks=EMAWeightAveraging(decay=0.5), max_steps=1).fit(module, ones(), ckpt_path=tmp_path / "c")
    # Weights alone: a fit begins anew with the raw ones, -2 and -3.
    assert module.w.item() == -2.5


# --- in checkpoints --------------------------------------------------------------------------------------------------


class SavesEverywhere(Callback):
    """Saves inside the validation after step 2, when it has ended, and at the end of training."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_validation_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if trainer.global_step == 2 and batch_idx == 0:
            trainer.save_checkpoint(self.folder / "inside")

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.folder / "end")

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        trainer.save_checkpoint(self.folder / "last")

    def on_fit_end(self, trainer: Trainer, module: TrainModule) -> None:
        trainer.save_checkpoint(self.folder / "fit_end")


@pytest.mark.parametrize("averaging_first", [True, False])
def test_a_checkpoint_holds_both_weights_whenever_it_is_saved(tmp_path: Path, averaging_first: bool) -> None:
    saves, averaging = SavesEverywhere(tmp_path), EMAWeightAveraging(decay=0.5)
    first, second = (averaging, saves) if averaging_first else (saves, averaging)
    trainer, module = fit(first, callbacks=[second], steps=3)
    assert module.validated == [0.0, -0.5, -1.25, -2.125]
    trainer.save_checkpoint(tmp_path / "after")
    values = {"inside": (-2.0, -1.25), "end": (-2.0, -1.25)}
    values |= dict.fromkeys(("last", "fit_end", "after"), (-3.0, -2.125))
    for name, (raw, averaged) in values.items():
        assert checkpoint.verify(tmp_path / name) == []
        assert checkpoint.load_weights(tmp_path / name)["w"].item() == raw, name
        assert checkpoint.load_weights(tmp_path / name, averaged=True)["w"].item() == averaged, name


class Small(TrainModule):
    """A model whose weights rounding can tell apart, trained by AdamW on ones that are scaled."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.net(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.net(batch).sum())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("saved_in", ["inside", "end"])
def test_a_resume_goes_on_bit_for_bit(tmp_path: Path, saved_in: str, every: int) -> None:
    points = torch.randn(16, 1, generator=torch.Generator().manual_seed(1))

    def run(steps: int, callbacks: list[Callback], ckpt_path: Path | None = None) -> tuple[Trainer, Path]:
        trainer = quiet_trainer(
            max_steps=steps,
            callbacks=[*callbacks, EMAWeightAveraging(decay=0.9, update_every_n_steps=every)],
            val_check_interval=1,
        )
        trainer.fit(Small(), DataLoader(points, batch_size=4, shuffle=True), DataLoader(points), ckpt_path=ckpt_path)
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}-{steps}"
        trainer.save_checkpoint(path)
        return trainer, path

    seed_everything(3)
    unbroken, expected = run(6, [SavesEverywhere(tmp_path)])
    seed_everything(4)
    resumed, path = run(6, [], tmp_path / saved_in)
    assert torch.equal(resumed.callback_metrics["val"], unbroken.callback_metrics["val"])
    for averaged in (False, True):
        found, wanted = (checkpoint.load_weights(one, averaged=averaged) for one in (path, expected))
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    raw, average = checkpoint.load_weights(path), checkpoint.load_weights(path, averaged=True)
    assert not torch.equal(raw["net.0.weight"], average["net.0.weight"])


def test_resume_without_an_average_starts_one(tmp_path: Path) -> None:
    fit(Callback(), callbacks=[SavesEverywhere(tmp_path)])
    _, module = fit(EMAWeightAveraging(decay=0.5), steps=4, ckpt_path=tmp_path / "end")
    # From -2 on.
    assert module.validated == [-2.5, -3.25]


def test_a_resume_without_the_callback_takes_the_raw_weights(tmp_path: Path) -> None:
    fit(EMAWeightAveraging(decay=0.5), callbacks=[SavesEverywhere(tmp_path)])
    _, module = fit(Callback(), steps=4, ckpt_path=tmp_path / "end")
    assert module.w.item() == -4.0


def test_model_checkpoint_keeps_raw_weights_with_the_score_of_the_average(tmp_path: Path) -> None:
    saving = ModelCheckpoint(dirpath=tmp_path, monitor="val", save_top_k=-1, every_n_train_steps=1)
    fit(EMAWeightAveraging(decay=0.5), callbacks=[saving], steps=2)
    assert saving.best_model_score == -1.25
    assert checkpoint.load_weights(saving.best_model_path)["w"].item() == -2.0


class Tied(TrainModule):
    """Embedding(6, 4) tied to Linear(4, 6), a Linear(3, 5) and a frozen layer; every gradient is that of a sum.

    So a step of rate 0.25 takes 0.25 off each weight, and 0.5 off the tied ones, under every strategy.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight
        self.uneven = nn.Linear(3, 5)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.register_buffer("scale", torch.ones(()))
        self.validated: list[float] = []
        self.fail = False

    def forward(self) -> Tensor:
        sums = self.embedding(torch.arange(6)).sum() + self.head(torch.eye(4)).sum()
        sums = sums + self.uneven(torch.eye(3)).sum() - 2 * self.uneven(torch.zeros(1, 3)).sum()
        return sums + self.frozen(torch.ones(2)).sum() * self.scale

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self() * batch.mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.validated.append(self().item())
        if self.fail:
            raise ValueError("boom")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.25)


def by_hand(steps: int) -> tuple[Tied, Tied, list[float]]:
    """The weights and their EMA of decay 0.5 after some steps, and what the validations have seen of the latter."""
    module = Tied()
    average = copy.deepcopy(module)
    seen = []
    for _ in range(steps):
        with torch.no_grad():
            for (name, parameter), (_, averaged) in zip(
                module.named_parameters(), average.named_parameters(), strict=True
            ):
                if parameter.requires_grad:
                    parameter -= 0.5 if name == "embedding.weight" else 0.25
                    averaged += (parameter - averaged) * 0.5
            seen.append(average().item())
    return module, average, seen


def assert_holds(path: Path, raw: nn.Module, averaged: nn.Module) -> None:
    for which, expected in ((False, raw), (True, averaged)):
        weights = checkpoint.load_weights(path, averaged=which)
        Tied().load_state_dict(weights)
        for name, value in expected.state_dict().items():
            assert torch.allclose(weights[name], value, rtol=0, atol=1e-7), (name, which)


def train_tied(strategy: Any, steps: int, callbacks: list[Callback], **arguments: Any) -> tuple[Trainer, Tied]:
    module, ckpt_path = arguments.pop("module", None) or Tied(), arguments.pop("ckpt_path", None)
    trainer = quiet_trainer(
        strategy=strategy,
        max_steps=steps,
        callbacks=[EMAWeightAveraging(decay=0.5), *callbacks],
        val_check_interval=1,
        num_sanity_val_steps=0,
        **arguments,
    )
    # Of mean 1 over the ranks.
    trainer.fit(module, DataLoader(torch.tensor([0.5, 1.5] * 16), batch_size=2), ones(2), ckpt_path=ckpt_path)
    return trainer, module


def test_tied_and_frozen_weights_on_one_process(tmp_path: Path) -> None:
    trainer, module = train_tied("single", 3, [])
    raw, averaged, seen = by_hand(3)
    assert module.validated[::2] == pytest.approx(seen, abs=1e-5)
    assert module.head.weight is module.embedding.weight
    trainer.save_checkpoint(tmp_path / "c")
    assert_holds(tmp_path / "c", raw, averaged)
    # What is frozen is stored once, and so is what is tied.
    assert set(checkpoint.Reader(tmp_path / "c").averaged_tensors) == {
        "embedding.weight", "uneven.weight", "uneven.bias", "scale"
    }  # fmt: skip
    out = checkpoint.export(tmp_path / "c", tmp_path / "out", averaged=True, keep_tied=True)
    exported = load_file(out / "model.safetensors")
    assert torch.allclose(exported["head.weight"], averaged.head.weight, rtol=0, atol=1e-7)
    assert torch.equal(exported["frozen.weight"], raw.frozen.weight)


def test_a_checkpoint_without_averaged_weights_says_so(tmp_path: Path) -> None:
    fit(Callback(), callbacks=[SavesEverywhere(tmp_path / "plain")])
    with pytest.raises(
        checkpoint.CheckpointError, match=r"plain/end holds no averaged weights: train with the callback"
    ):
        checkpoint.load_weights(tmp_path / "plain" / "end", averaged=True)
    fit(EMAWeightAveraging(update_every_n_steps=9), callbacks=[SavesEverywhere(tmp_path / "early")])
    with pytest.raises(checkpoint.CheckpointError, match=r"early/end holds no averaged weights: they were not updated"):
        checkpoint.export(tmp_path / "early" / "end", tmp_path / "out", averaged=True)


def test_damage_to_averaged_weights_is_found(tmp_path: Path) -> None:
    fit(EMAWeightAveraging(), callbacks=[SavesEverywhere(tmp_path)])
    (file,) = (tmp_path / "end" / "averaged").iterdir()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert "averaged/shard-00001" in checkpoint.verify(tmp_path / "end")[0]


# --- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"decay": 1.5}, "decay=1.5 must be from 0 to 1"),
        ({"update_every_n_steps": 0}, "update_every_n_steps=0 must be 1 or more"),
        ({"update_starting_at_step": -1}, "update_starting_at_step=-1 must be 0 or more"),
        ({"update_starting_at_epoch": -1}, "update_starting_at_epoch=-1 must be 0 or more"),
    ],
)
def test_arguments_out_of_range(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EMAWeightAveraging(**arguments)


def test_two_averages_are_refused() -> None:
    with pytest.raises(ValueError, match="avg_fn and multi_avg_fn are both given"):
        WeightAveraging(avg_fn=lambda a, b, n: a, multi_avg_fn=lambda a, b, n: None)
    with pytest.raises(ValueError, match="EMAWeightAveraging and AtEpochEnds would both average the weights"):
        fit(EMAWeightAveraging(), callbacks=[AtEpochEnds()])


def test_weights_on_nvme_are_refused() -> None:
    strategy = DeepSpeedStrategy(stage=3)
    strategy.config = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}
    with pytest.raises(ValueError, match="cannot be averaged while DeepSpeed keeps them on NVMe: offload to 'cpu'"):
        strategy.weight_shards(nn.Linear(1, 1), buffers=True)


# --- two ranks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", DISTRIBUTED)
@on_two_ranks
def test_two_ranks_average_as_one_process_does(tmp_path: Path, strategy: str) -> None:
    saves = SavesEverywhere(tmp_path)
    trainer, module = train_tied(strategy, 3, [saves])
    raw, averaged, seen = by_hand(3)
    assert module.validated == pytest.approx(seen, abs=1e-5)
    assert_holds(tmp_path / "last", raw, averaged)
    early_raw, early_averaged, _ = by_hand(2)
    for name in ("inside", "end"):
        assert_holds(tmp_path / name, early_raw, early_averaged)
    # Fit has ended with the average in the model.
    assert torch.allclose(whole(trainer, "uneven.weight"), averaged.uneven.weight, rtol=0, atol=1e-7)
    trainer.save_checkpoint(tmp_path / "after")
    assert_holds(tmp_path / "after", raw, averaged)
    trainer.validate(module, ones(2), verbose=False)
    assert module.validated[-1] == pytest.approx(seen[-1], abs=1e-5)
    # The next fit goes on with the raw weights.
    trainer.max_steps, saves.folder = 4, tmp_path / "next"
    trainer.fit(module, DataLoader(torch.tensor([0.5, 1.5] * 16), batch_size=2), ones(2))
    raw, averaged, seen = by_hand(4)
    assert module.validated[-1] == pytest.approx(seen[-1], abs=1e-5)
    trainer.save_checkpoint(tmp_path / "second")
    assert_holds(tmp_path / "second", raw, averaged)
    # Another Trainer finds the average.
    other = quiet_trainer(strategy="ddp")
    other.validate(module, ones(2), verbose=False)
    assert module.validated[-1] == pytest.approx(seen[-1], abs=1e-5)


@pytest.mark.parametrize("strategy", DISTRIBUTED)
@on_two_ranks
def test_an_exception_in_a_validation_of_two_ranks_leaves_the_raw_weights(strategy: str) -> None:
    module = Tied()
    module.fail = True
    with pytest.raises(ValueError, match="boom"):
        train_tied(strategy, 3, [], module=module)
    raw, _, seen = by_hand(1)
    assert module.validated == pytest.approx(seen, abs=1e-5)
    module.fail = False
    quiet_trainer(strategy=strategy).validate(module, ones(2), verbose=False)
    assert module.validated[-1] == pytest.approx(raw().item(), abs=1e-5)


@pytest.fixture(scope="module")
def saved_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    train_tied("single", 3, [SavesEverywhere(folder)])
    return folder / "inside"


@pytest.mark.parametrize("strategy", DISTRIBUTED)
@on_two_ranks
def test_a_checkpoint_of_one_process_resumes_on_two_ranks(saved_alone: Path, tmp_path: Path, strategy: str) -> None:
    train_tied(strategy, 4, [SavesEverywhere(tmp_path)], ckpt_path=saved_alone)
    raw, averaged, _ = by_hand(4)
    assert_holds(tmp_path / "last", raw, averaged)
    module = Tied()
    tested = quiet_trainer(strategy=strategy, callbacks=EMAWeightAveraging())
    tested.validate(module, ones(2), ckpt_path=tmp_path / "last", verbose=False)
    assert module.validated[-1] == pytest.approx(averaged().item(), abs=1e-5)


def save_on_two_ranks(folder: str, strategy: str) -> None:
    train_tied(strategy, 3, [SavesEverywhere(Path(folder))])


@pytest.mark.parametrize("strategy", ["fsdp2", "deepspeed_stage_2", "deepspeed_stage_3"])
def test_a_checkpoint_of_two_ranks_resumes_on_one(
    tmp_path: Path, strategy: str, request: pytest.FixtureRequest
) -> None:
    on_two_ranks.call(save_on_two_ranks, {"folder": str(tmp_path), "strategy": strategy}, request.session)
    trainer, _ = train_tied("single", 4, [], ckpt_path=tmp_path / "inside")
    trainer.save_checkpoint(tmp_path / "c")
    raw, averaged, _ = by_hand(4)
    assert_holds(tmp_path / "c", raw, averaged)


@pytest.mark.parametrize("strategy", list(NEEDED))
@on_two_ranks
def test_a_window_with_an_average_runs_no_other_collective(strategy: str) -> None:
    watch = Watch()
    trainer = quiet_trainer(
        strategy=STRATEGIES[strategy](), max_steps=4, accumulate_grad_batches=WINDOW,
        callbacks=[EMAWeightAveraging(), watch], log_every_n_steps=100,
    )  # fmt: skip
    trainer.fit(Layers(), DataLoader(torch.randn(2 * WINDOW * 5, 512), batch_size=1))
    assert watch.found == NEEDED[strategy]
