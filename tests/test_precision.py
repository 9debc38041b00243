"""A precision means the same under every strategy; and fp16's loss scale, which skips a step on all ranks or on none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader

from acclight import Callback, Trainer, TrainModule
from acclight.strategies import DeepSpeedStrategy, FSDP2Strategy
from acclight.strategies.loss_scale import LossScale
from tests.distributed import RankChecks
from tests.scenarios import DISTRIBUTED, Scalar, quiet_trainer, repeated, whole

on_two_ranks = RankChecks(world_size=2, timeout=120.0)

STEPS = ("training_step", "validation_step", "test_step", "predict_step")
TYPES = {
    "32-true": ("float32", "float32", "float32", "float32"),
    "bf16-mixed": ("float32", "bfloat16", "float32", "float32"),
    "16-mixed": ("float32", "float16", "float32", "float32"),
    "bf16-true": ("bfloat16", "bfloat16", "bfloat16", "bfloat16"),
    "16-true": ("float16", "float16", "float16", "float16"),
    "64-true": ("float64", "float64", "float64", "float64"),
}
"""Precision -> type of the parameters, of what matrix products give, of the loss, and of the batch inside a step."""


class Probe(TrainModule):
    """A linear classifier that notes the types it meets."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 6)
        self.norm = nn.LayerNorm(6)
        self.down = nn.Linear(6, 4)
        self.mix = nn.Parameter(torch.eye(8))
        self.seen: dict[str, dict[str, str]] = {}

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(torch.tanh(self.up(x))))

    def step(self, name: str, batch: dict[str, Tensor]) -> Tensor:
        product = batch["x"] @ self.mix
        logits = self(batch["x"])
        loss = nn.functional.cross_entropy(logits, batch["y"])
        kinds = {"batch": batch["x"], "matmul": product, "forward": logits, "loss": loss, "labels": batch["y"]}
        self.seen[name] = {key: str(value.dtype).removeprefix("torch.") for key, value in kinds.items()}
        return loss + 0.0 * product.sum().to(loss.dtype)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = self.step("training_step", batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.step("validation_step", batch))

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.step("test_step", batch))

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.step("predict_step", batch)
        return self(batch["x"])

    def configure_optimizers(self) -> Any:
        # Adam's own eps of 1e-8 is zero in float16.
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-4)


class GradientTypes(Callback):
    """The types and the norm of the gradients that a hook before the optimizer step sees."""

    def __init__(self) -> None:
        self.types: set[str] = set()
        self.largest: list[float] = []

    def on_before_optimizer_step(self, trainer: Trainer, module: TrainModule, optimizer: Any) -> None:
        grads = [p.grad for p in module.parameters() if p.grad is not None and p.grad.numel()]
        self.types |= {str(g.dtype).removeprefix("torch.") for g in grads}
        local = [trainer.strategy.local(g) for g in grads]
        self.largest.append(max((float(g.abs().max()) for g in local if g.numel()), default=0.0))


def samples(number: int = 8) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [{"x": torch.randn(8, generator=generator), "y": torch.tensor(i % 4)} for i in range(number)]


def check_types(strategy: str, precision: str) -> None:
    parameters, product, loss, batch = TYPES[precision]
    torch.manual_seed(0)
    module = Probe()
    gradients = GradientTypes()
    trainer = quiet_trainer(
        strategy=strategy, precision=precision, max_steps=4, callbacks=gradients, log_every_n_steps=1
    )
    loader = DataLoader(samples(), batch_size=2)
    trainer.fit(module, loader, loader)
    assert trainer.callback_metrics["loss"].isfinite()
    trainer.test(module, loader)
    predictions = trainer.predict(module, loader)
    engine = strategy.startswith("deepspeed")
    names = {str(p.dtype).removeprefix("torch.") for p in module.parameters()}
    assert names == {parameters}
    states = {v.dtype for o in trainer.optimizers for s in o.state.values() for k, v in s.items() if k != "step"}
    assert states == {torch.float32 if engine else getattr(torch, parameters)}
    assert gradients.types <= ({parameters} if not engine else set(TYPES[precision]))
    assert engine or gradients.types == {parameters}
    for step in STEPS:
        assert module.seen[step] == {
            "batch": batch, "matmul": product, "forward": product, "loss": loss, "labels": "int64"
        }, step  # fmt: skip
    assert predictions is not None
    assert {p.dtype for p in predictions} == {getattr(torch, product)}
    assert trainer.skipped_steps <= (2 if precision == "16-mixed" else 0), "the loss scale starts high"


@pytest.mark.parametrize("precision", TYPES)
def test_one_process(precision: str) -> None:
    check_types("single", precision)


@on_two_ranks
@pytest.mark.parametrize("precision", list(TYPES))
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_two_processes(strategy: str, precision: str) -> None:
    if precision in ("64-true", "16-true") and strategy.startswith("deepspeed"):
        # A CPU with fp16 matrix units would run "16-true".
        with pytest.raises(ValueError, match=f"precision='{precision}'"):
            quiet_trainer(strategy=strategy, precision=precision)
        return
    check_types(strategy, precision)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_train_and_validate_agree_on_the_loss_of_a_batch(precision: str) -> None:
    torch.manual_seed(0)
    module = Probe()
    loader = DataLoader(samples(), batch_size=8)
    trainer = quiet_trainer(strategy="single", precision=precision, max_steps=1, log_every_n_steps=1)
    before = trainer.validate(module, loader)[0]["val_loss"]
    trainer.fit(module, loader)
    assert float(trainer.callback_metrics["loss"]) == pytest.approx(before, abs=1e-3)
    logits = nn.functional.linear(torch.zeros(1), torch.zeros(1, 1))
    assert logits.dtype is torch.float32, "autocast has ended with the step"


def by_hand(dtype: torch.dtype, steps: int) -> dict[str, Tensor]:
    """Plain PyTorch: each rank's loss under autocast, float32 gradients averaged over two ranks, SGD on float32 weights."""
    torch.manual_seed(0)
    module = Probe()
    rows = samples(4 * steps)
    for step in range(steps):
        module.zero_grad()
        for rank in range(2):
            own = rows[4 * step + 2 * rank : 4 * step + 2 * rank + 2]
            with torch.autocast("cpu", dtype=dtype):
                logits = module(torch.stack([row["x"] for row in own]))
                loss = nn.functional.cross_entropy(logits, torch.stack([row["y"] for row in own]))
            (loss / 2).backward()
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter -= 0.5 * parameter.grad
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


@on_two_ranks
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_mixed_precision_trains_as_plain_autocast_does(strategy: str, precision: str) -> None:
    class WithSGD(Probe):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.5)

    torch.manual_seed(0)
    module = WithSGD()

    class Scale(Callback):
        def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
            # Small enough never to overflow here, so that no step is skipped; a power of two changes no digit.
            trainer.strategy.load_scaler_state({"scale": 256.0, "good_steps": 0})

    trainer = quiet_trainer(strategy=strategy, precision=precision, max_steps=4, callbacks=Scale())
    trainer.fit(module, DataLoader(samples(16), batch_size=2))
    assert trainer.skipped_steps == 0
    expected = by_hand(torch.bfloat16 if precision == "bf16-mixed" else torch.float16, 4)
    tolerance = 1e-6 if precision == "bf16-mixed" else 1e-4  # float16 gradients below 2**-14 gain digits by the scale
    for name, value in expected.items():
        torch.testing.assert_close(whole(trainer, name), value, atol=tolerance, rtol=0.0)


@pytest.mark.parametrize(("precision", "expected"), [("bf16-mixed", torch.float32), ("32-true", torch.bfloat16)])
def test_trained_sixteen_bit_weights_become_float32_under_mixed(precision: str, expected: torch.dtype) -> None:
    class Loaded(Probe):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
            return self.down(batch["x"][:, :6].bfloat16()).float().sum() + 0.0 * sum(p.sum() for p in self.parameters())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    module = Loaded().bfloat16()
    module.up.requires_grad_(False)
    quiet_trainer(strategy="single", precision=precision, max_steps=1).fit(module, DataLoader(samples(), batch_size=2))
    assert module.down.weight.dtype is expected
    assert module.up.weight.dtype is torch.bfloat16, "frozen weights keep their memory"


def test_the_model_is_born_in_the_type_of_true_precision() -> None:
    class Late(Probe):
        def configure_model(self) -> None:
            self.late = nn.Linear(4, 4)
            self.born = self.late.weight.dtype

    module = Late()
    trainer = quiet_trainer(strategy="single", precision="bf16-true", max_steps=1)
    trainer.fit(module, DataLoader(samples(), batch_size=2))
    assert module.born is torch.bfloat16
    assert torch.get_default_dtype() is torch.float32


class Norms(TrainModule):
    """Normalization layers on float inputs, whose weights and buffers must be of a type that the layers take."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LayerNorm(8)
        self.net = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        self.register_buffer("table", torch.arange(8.0))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self.net(self.first(batch["x"] + self.table)), batch["y"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@on_two_ranks
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true"])
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_normalization_layers_work_under_every_strategy(strategy: str, precision: str) -> None:
    module = Norms()
    trainer = quiet_trainer(strategy=strategy, precision=precision, max_steps=2)
    trainer.fit(module, DataLoader(samples(), batch_size=2))
    assert trainer.global_step == 2
    buffers = {str(b.dtype) for b in module.buffers() if b.is_floating_point()}
    assert buffers == {"torch.bfloat16" if precision == "bf16-true" else "torch.float32"}


@on_two_ranks
def test_the_users_own_policy_decides_what_fsdp2_casts() -> None:
    class Weights(Probe):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
            self.inside = self.mix.dtype
            return super().training_step(batch, batch_idx)

    for policy, inside in ((None, torch.float32), ({"param_dtype": "bf16"}, torch.bfloat16), ("bf16", torch.bfloat16)):
        module = Weights()
        strategy = FSDP2Strategy(mixed_precision_policy=policy)
        trainer = quiet_trainer(strategy=strategy, precision="bf16-mixed", max_steps=1)
        trainer.fit(module, DataLoader(samples(), batch_size=2))
        assert module.inside is inside
        assert module.mix.dtype is torch.float32
        assert module.seen["training_step"]["forward"] == "bfloat16"


@on_two_ranks
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_ds_config_with_a_bf16_section_gets_deepspeeds_own_mode(stage: int) -> None:
    module = Probe()
    strategy = DeepSpeedStrategy(ds_config={"zero_optimization": {"stage": stage}, "bf16": {"enabled": "auto"}})
    trainer = quiet_trainer(strategy=strategy, precision="bf16-mixed", max_steps=2)
    trainer.fit(module, DataLoader(samples(), batch_size=2))
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert module.seen["training_step"] == {
        "batch": "float32", "matmul": "bfloat16", "forward": "bfloat16", "loss": "float32", "labels": "int64"
    }  # fmt: skip
    assert whole(trainer, "up.weight").dtype is torch.float32, "the master weights are what counts"


def test_what_a_ds_config_and_the_trainer_say_must_agree() -> None:
    on = {"bf16": {"enabled": True}}
    assert quiet_trainer(strategy=DeepSpeedStrategy(stage=1, ds_config=on)).core.precision == "bf16-mixed"
    for config, precision in ((on, "32"), (on, "16-mixed"), ({"bf16": {"enabled": False}}, "bf16-mixed")):
        with pytest.raises(ValueError, match=r"bf16\.enabled=.* contradicts precision="):
            quiet_trainer(strategy=DeepSpeedStrategy(stage=1, ds_config=config), precision=precision)


def test_names_of_precisions(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    names = {
        "32": "32-true",
        32: "32-true",
        "bf16": "bf16-mixed",
        16: "16-mixed",
        "64": "64-true",
        "16-true": "16-true",
    }
    for given, name in names.items():
        assert quiet_trainer(strategy="single", precision=given).core.precision == name
    assert quiet_trainer(strategy="single").core.precision == "32-true"
    with pytest.raises(ValueError, match="precision='bf16-mix' is unknown; did you mean 'bf16-mixed'"):
        quiet_trainer(strategy="single", precision="bf16-mix")
    with pytest.raises(ImportError, match="pip install torchao"):
        quiet_trainer(strategy="single", precision="fp8")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert quiet_trainer(strategy="single").core.precision == "bf16-mixed"
    caplog.clear()
    assert quiet_trainer(strategy="single", precision="bf16-mixed").core.precision == "bf16-mixed"
    assert not caplog.records, "nothing to say where they agree"
    assert quiet_trainer(strategy="single", precision="32").core.precision == "32-true"
    assert [r.getMessage() for r in caplog.records] == ["precision='32' of the script wins over 'bf16' of the launcher"]


# --- the fp16 loss scale ---------------------------------------------------------------------------------------------

SLOPE = torch.tensor([3.0, 4.0, 0.0, 12.0])


class Line(TrainModule):
    """w = 0 and the loss w . SLOPE; the steps in `broken` have an infinite loss, on rank 1 where there are two ranks."""

    def __init__(self, broken: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4))
        self.broken = broken
        self.weights: list[Tensor] = []
        self.rates: list[float] = []
        self.hook_saw: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        # No matrix product, which would be in float16, where a scale of 2**16 is infinite.
        loss = (self.w * SLOPE).sum() * batch.mean()
        if self.global_step in self.broken and self.global_rank == self.trainer.world_size - 1:
            loss = loss * float("inf")
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.w.grad is not None:
            grad = self.w.grad
            self.hook_saw.append((grad.full_tensor() if hasattr(grad, "full_tensor") else grad).clone())

    def on_step(self) -> None:
        self.weights.append(whole(self.trainer, "w"))
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def ones(steps: int, world: int = 1) -> DataLoader[Any]:
    return DataLoader(torch.ones(steps * world, 1), batch_size=1)


def check_skipped(strategy: str, world: int) -> None:
    module = Line(broken=(1,))
    trainer = quiet_trainer(strategy=strategy, precision="16-mixed", max_steps=4)
    trainer.fit(module, ones(4, world))
    # The learning rates are 1, (skipped), 1/2, 1/4.
    expected = [-SLOPE, -SLOPE, -1.5 * SLOPE, -1.75 * SLOPE]
    torch.testing.assert_close(torch.stack(module.weights), torch.stack(expected))
    assert module.rates == [0.5, 0.5, 0.25, 0.125]
    assert (trainer.global_step, trainer.skipped_steps) == (4, 1)
    assert trainer.strategy.scaler_state() == {"scale": 2.0**15, "good_steps": 2}
    if not strategy.startswith("deepspeed"):
        assert [bool(g.isfinite().all()) for g in module.hook_saw] == [True, False, True, True]
        torch.testing.assert_close(module.hook_saw[0], SLOPE)


def test_an_overflow_skips_the_step() -> None:
    check_skipped("single", 1)


@on_two_ranks
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_an_overflow_on_one_rank_skips_the_step_on_all(strategy: str) -> None:
    check_skipped(strategy, 2)


@on_two_ranks
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "deepspeed_stage_2", "deepspeed_stage_3"])
def test_clipping_sees_unscaled_gradients(strategy: str) -> None:
    module = Line()
    trainer = quiet_trainer(strategy=strategy, precision="16-mixed", max_steps=1, gradient_clip_val=6.5)
    trainer.fit(module, ones(1, 2))
    assert trainer.grad_norm == pytest.approx(13.0)
    torch.testing.assert_close(module.weights[0], -SLOPE / 2, atol=1e-5, rtol=0.0)


def test_the_engines_scale_follows_torchs_rule() -> None:
    ours = LossScale(growth_interval=3)
    scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for overflow in (False, False, True, False, False, False, True, True, False):
        optimizer.zero_grad()
        scaler.scale((weight * (float("inf") if overflow else 1.0)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        ours.update(overflow)
        assert (ours.scale, ours.good_steps) == (scaler.get_scale(), scaler._get_growth_tracker())


def test_two_optimizers_of_a_window_share_one_scale_and_are_skipped_by_themselves() -> None:
    class Pair(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.zeros(1))
            self.b = nn.Parameter(torch.zeros(1))

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return (self.a + self.b * (float("inf") if batch_idx == 0 else 1.0)).sum()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD([self.a], lr=1.0), torch.optim.SGD([self.b], lr=1.0)]

    module = Pair()
    trainer = quiet_trainer(strategy="single", precision="16-mixed", max_steps=2)
    trainer.fit(module, ones(2))
    assert (float(module.a), float(module.b)) == (-2.0, -1.0)
    assert trainer.skipped_steps == 1
    assert trainer.strategy.scaler_state()["scale"] == 2.0**15


@on_two_ranks
@pytest.mark.parametrize("reader", ["ddp", "fsdp2", "deepspeed_stage_2"])
@pytest.mark.parametrize("writer", ["ddp", "fsdp2", "deepspeed_stage_3"])
def test_the_scale_goes_on_after_a_resume(writer: str, reader: str, tmp_path: Any) -> None:
    folder = tmp_path / "saved"
    module = Line(broken=(1,))
    first = quiet_trainer(strategy=writer, precision="16-mixed", max_steps=3)
    first.fit(module, ones(6, 2))
    first.save_checkpoint(folder)
    second = quiet_trainer(strategy=reader, precision="16-mixed", max_steps=4)
    seen: list[dict[str, Any]] = []

    class Resumed(Line):
        def on_train_start(self) -> None:
            seen.append(self.trainer.strategy.scaler_state())

    second.fit(Resumed(), ones(6, 2), ckpt_path=folder)
    assert seen == [{"scale": 2.0**15, "good_steps": 1}]
    assert second.strategy.scaler_state() == {"scale": 2.0**15, "good_steps": 2}
    assert (second.global_step, second.skipped_steps) == (4, 1)


def test_metrics_keep_their_type_under_a_true_precision() -> None:
    class Halves(Scalar):
        def __init__(self) -> None:
            super().__init__()
            self.mean = torchmetrics.MeanMetric()

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.mean.update(1.0)
            self.mean.update(0.0)
            self.log("mean", self.mean)

    module = Halves()
    trainer = quiet_trainer(strategy="single", precision="bf16-true")
    # 600 values: a sum of ones stands still at 256 in bfloat16.
    shown = trainer.validate(module, repeated([0.0] * 300, 1))
    assert shown[0]["mean"] == 0.5
    assert module.w.dtype == torch.bfloat16
