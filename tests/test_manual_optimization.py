"""Manual optimization: training_step runs backward and steps by itself, against plain PyTorch loops over the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from acclight import Callback, Trainer, TrainModule
from acclight.loops.manual import ModuleOptimizer
from acclight.strategies import DDPStrategy, DeepSpeedStrategy, FSDP2Strategy
from tests.distributed import RankChecks
from tests.scenarios import DISTRIBUTED, quiet_trainer, repeated, whole

on_two_ranks = RankChecks(world_size=2, timeout=90.0)
#: Strategies under which several optimizers can train.
SEVERAL = ["ddp", "fsdp2"]
ONE = ["deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"]
STEPS = 5
ROWS = 4


# --- two optimizers --------------------------------------------------------------------------------------------------


class Gan(TrainModule):
    """A generator with a parameter of the module's own, and a discriminator; noise comes with the data."""

    def __init__(self, variant: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.variant = variant
        self.generator = nn.Sequential(nn.Linear(2, 7), nn.Tanh(), nn.Linear(7, 3))
        self.discriminator = nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.Linear(9, 1))
        self.gain = nn.Parameter(torch.ones(3))

    def fake(self, noise: Tensor) -> Tensor:
        return self.generator(noise) * self.gain

    def fooled(self, noise: Tensor) -> Tensor:
        return nn.functional.softplus(-self.discriminator(self.fake(noise))).mean()

    def told_apart(self, real: Tensor, noise: Tensor) -> Tensor:
        fake = self.fake(noise).detach()
        return (
            nn.functional.softplus(-self.discriminator(real)).mean()
            + nn.functional.softplus(self.discriminator(fake)).mean()
        )

    def parts(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        return [*self.generator.parameters(), self.gain], list(self.discriminator.parameters())

    def configure_optimizers(self) -> Any:
        generator, discriminator = self.parts()
        return torch.optim.AdamW(generator, lr=0.05), torch.optim.SGD(discriminator, lr=0.1, momentum=0.9)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        tools = Tools(
            *self.optimizers(),
            self.manual_backward,
            lambda optimizer, norm: self.clip_gradients(optimizer, norm, "norm"),
            self.toggle_optimizer,
            self.untoggle_optimizer,
        )
        VARIANTS[self.variant](self, tools, batch[:, :3], batch[:, 3:])


class Tools:
    """What the variants below work with: acclight's in a fit, plain PyTorch's in the reference."""

    def __init__(self, g: Any, d: Any, backward: Any, clip: Any, toggle: Any, untoggle: Any) -> None:
        self.g, self.d, self.backward, self.clip, self.toggle, self.untoggle = g, d, backward, clip, toggle, untoggle


def in_turn(m: Gan, t: Tools, real: Tensor, noise: Tensor) -> None:
    t.toggle(t.g)
    loss = m.fooled(noise)
    t.g.zero_grad()
    t.backward(loss)
    t.g.step()
    t.untoggle(t.g)
    t.toggle(t.d)
    loss = m.told_apart(real, noise)
    t.d.zero_grad()
    t.backward(loss)
    t.d.step()
    t.untoggle(t.d)


def clipped_without_toggling(m: Gan, t: Tools, real: Tensor, noise: Tensor) -> None:
    t.d.zero_grad()
    t.backward(m.told_apart(real, noise))
    t.clip(t.d, 0.05)
    t.d.step()
    t.g.zero_grad()
    t.backward(m.fooled(noise))
    t.clip(t.g, 0.05)
    t.g.step()


def both_losses_first(m: Gan, t: Tools, real: Tensor, noise: Tensor) -> None:
    """One backward through everything, then another into the same gradients, then both steps."""
    t.g.zero_grad()
    t.d.zero_grad()
    first, second = m.told_apart(real, noise), m.fooled(noise)
    t.backward(first)
    t.backward(second)
    t.g.step()
    t.d.step()


def with_closures(m: Gan, t: Tools, real: Tensor, noise: Tensor) -> None:
    def discriminate() -> Tensor:
        t.d.zero_grad()
        loss = m.told_apart(real, noise)
        t.backward(loss)
        return loss

    loss = t.d.step(closure=discriminate)
    assert float(loss) > 0.0
    t.g.zero_grad()
    t.backward(m.fooled(noise))
    t.g.step()


def discriminator_twice(m: Gan, t: Tools, real: Tensor, noise: Tensor) -> None:
    for _ in range(2):
        t.d.zero_grad()
        t.backward(m.told_apart(real, noise))
        t.d.step()
    t.g.zero_grad()
    t.backward(m.fooled(noise))
    t.g.step()


VARIANTS: dict[str, Callable[[Gan, Tools, Tensor, Tensor], None]] = {
    f.__name__: f for f in (in_turn, clipped_without_toggling, both_losses_first, with_closures, discriminator_twice)
}


def data(world: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(STEPS * world * ROWS, 5, generator=generator)


def plain(module: Gan, world: int) -> dict[str, Tensor]:
    """The same variant by hand, over the batches of all ranks at once."""
    module = copy.deepcopy(module)
    parts = module.parts()
    g, d = module.configure_optimizers()

    def toggle(optimizer: Any) -> None:
        for one, parameters in zip((g, d), parts, strict=True):
            for p in parameters:
                p.requires_grad_(one is optimizer)

    def untoggle(optimizer: Any) -> None:
        module.requires_grad_(True)

    def clip(optimizer: Any, norm: float) -> None:
        nn.utils.clip_grad_norm_(parts[0] if optimizer is g else parts[1], norm)

    tools = Tools(g, d, lambda loss: loss.backward(), clip, toggle, untoggle)
    for batch in data(world).split(world * ROWS):
        VARIANTS[module.variant](module, tools, batch[:, :3], batch[:, 3:])
    return {name: p.detach() for name, p in module.named_parameters()}


def strategies(name: str) -> Any:
    if name == "fsdp2 in units":
        return FSDP2Strategy(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=1)
    if name == "deepspeed_stage_3 in parts":
        # Else DeepSpeed keeps parameters as small as these whole on every rank.
        whole_below = {"stage": 3, "stage3_param_persistence_threshold": 0}
        return DeepSpeedStrategy(ds_config={"zero_optimization": whole_below})
    if name == "ddp, unused parameters":
        return DDPStrategy(find_unused_parameters=True)
    return name


def check_gan(strategy: str, variant: str, world: int) -> None:
    torch.manual_seed(7)
    module = Gan(variant)
    expected = plain(module, world)
    trainer = quiet_trainer(strategy=strategies(strategy), max_epochs=1)
    trainer.fit(module, DataLoader(data(world), batch_size=ROWS))
    assert trainer.global_step == STEPS
    assert all(p.requires_grad for p in module.parameters())
    for name, value in expected.items():
        torch.testing.assert_close(
            whole(trainer, name), value, atol=1e-6, rtol=0.0, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_optimizers_in_one_process(variant: str) -> None:
    check_gan("single", variant, 1)


@on_two_ranks
@pytest.mark.parametrize("variant", list(VARIANTS))
@pytest.mark.parametrize("strategy", ["ddp", "ddp, unused parameters", "fsdp2", "fsdp2 in units"])
def test_two_optimizers_on_two_ranks(strategy: str, variant: str) -> None:
    check_gan(strategy, variant, 2)


# --- one optimizer, as ZeRO takes it ---------------------------------------------------------------------------------


class OneOptimizer(TrainModule):
    """Two layers and a parameter of the module's own, driven by hand in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.how = how
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 1)
        self.shift = nn.Parameter(torch.zeros(7))

    def loss(self, x: Tensor) -> Tensor:
        return (self.second(torch.tanh(self.first(x)) + self.shift) - 1.0).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, float]:
        optimizer = self.optimizers()
        assert isinstance(optimizer, ModuleOptimizer)
        HOW[self.how](
            self,
            optimizer,
            self.manual_backward,
            lambda norm: self.clip_gradients(optimizer, gradient_clip_val=norm, gradient_clip_algorithm="norm"),
            batch,
            batch_idx,
        )
        return {"seen": 1.0}


def plainly(m: OneOptimizer, optimizer: Any, backward: Any, clip: Any, x: Tensor, index: int) -> None:
    optimizer.zero_grad()
    backward(m.loss(x))
    optimizer.step()


def clipped(m: OneOptimizer, optimizer: Any, backward: Any, clip: Any, x: Tensor, index: int) -> None:
    # Every other step is clipped, far below its norm.
    backward(m.loss(x))
    if index % 2:
        clip(0.01)
    optimizer.step()
    optimizer.zero_grad()


def two_backwards(m: OneOptimizer, optimizer: Any, backward: Any, clip: Any, x: Tensor, index: int) -> None:
    optimizer.zero_grad()
    backward(m.loss(x) / 2)
    backward(m.loss(x * 2.0) / 2)
    optimizer.step()


def every_other_batch(m: OneOptimizer, optimizer: Any, backward: Any, clip: Any, x: Tensor, index: int) -> None:
    """Accumulation by hand: what the first of two batches leaves is added to the second's."""
    backward(m.loss(x) / 2)
    if index % 2:
        optimizer.step()
        optimizer.zero_grad()


def two_steps(m: OneOptimizer, optimizer: Any, backward: Any, clip: Any, x: Tensor, index: int) -> None:
    for scale in (1.0, 3.0):
        optimizer.zero_grad()
        backward(m.loss(x * scale))
        optimizer.step()


def thrown_away(m: OneOptimizer, optimizer: Any, backward: Any, clip: Any, x: Tensor, index: int) -> None:
    """The gradient of the first loss is cleared before the step."""
    backward(m.loss(x * 5.0))
    optimizer.zero_grad()
    backward(m.loss(x))
    optimizer.step()
    optimizer.zero_grad()


HOW: dict[str, Callable[..., None]] = {
    f.__name__: f for f in (plainly, clipped, two_backwards, every_other_batch, two_steps, thrown_away)
}


def plain_one(module: OneOptimizer, world: int) -> dict[str, Tensor]:
    module = copy.deepcopy(module)
    optimizer = module.configure_optimizers()

    def clip(norm: float) -> None:
        nn.utils.clip_grad_norm_(module.parameters(), norm)

    for index, batch in enumerate(data(world).split(world * ROWS)):
        HOW[module.how](module, optimizer, lambda loss: loss.backward(), clip, batch, index)
    return {name: p.detach() for name, p in module.named_parameters()}


def check_one(strategy: str, how: str, world: int) -> None:
    torch.manual_seed(8)
    module = OneOptimizer(how)
    expected = plain_one(module, world)
    trainer = quiet_trainer(strategy=strategies(strategy), max_epochs=1)
    trainer.fit(module, DataLoader(data(world), batch_size=ROWS))
    for name, value in expected.items():
        torch.testing.assert_close(
            whole(trainer, name), value, atol=1e-6, rtol=0.0, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("how", HOW)
def test_one_optimizer_in_one_process(how: str) -> None:
    check_one("single", how, 1)


@on_two_ranks
@pytest.mark.parametrize("how", list(HOW))
@pytest.mark.parametrize("strategy", [*DISTRIBUTED, "fsdp2 in units", "deepspeed_stage_3 in parts"])
def test_one_optimizer_on_two_ranks(strategy: str, how: str) -> None:
    check_one(strategy, how, 2)


# --- counting, hooks, schedulers -------------------------------------------------------------------------------------


class TwoScalars(TrainModule):
    """Two weights, each with an optimizer of its own; both step in every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.a = nn.Parameter(torch.zeros(1))
        self.b = nn.Parameter(torch.zeros(1))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for optimizer, weight in zip(self.optimizers(), (self.a, self.b), strict=True):
            loss = ((weight - batch) ** 2 / 2).mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.log("loss", loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.a], lr=0.5), torch.optim.SGD([self.b], lr=0.25)


class Axis(Callback):
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.outputs: list[Any] = []

    def on_step(self, trainer: Trainer, module: TrainModule) -> None:
        self.steps.append(trainer.global_step)

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.outputs.append(outputs)


def check_counts(strategy: str, world: int) -> None:
    axis = Axis()
    trainer = quiet_trainer(strategy=strategy, max_epochs=1, callbacks=axis, log_every_n_steps=1)
    trainer.fit(TwoScalars(), repeated([1.0] * 5, world))
    assert trainer.global_step == 5
    assert axis.steps == [1, 2, 3, 4, 5]
    assert axis.outputs == [{}] * 5
    # 1 - 0.5^5 and 1 - 0.75^5.
    assert float(whole(trainer, "a")) == pytest.approx(0.96875)
    assert float(whole(trainer, "b")) == pytest.approx(0.7626953)
    stopped = quiet_trainer(strategy=strategy, max_steps=3)
    module = TwoScalars()
    stopped.fit(module, repeated([1.0] * 5, world))
    assert stopped.global_step == 3
    assert float(whole(stopped, "a")) == pytest.approx(0.875)


def test_a_batch_counts_once_whatever_number_of_optimizers_step() -> None:
    check_counts("single", 1)


@on_two_ranks
@pytest.mark.parametrize("strategy", SEVERAL)
def test_a_batch_counts_once_on_two_ranks(strategy: str) -> None:
    check_counts(strategy, 2)


def test_the_loggers_axis_is_the_batch(tmp_path: Any) -> None:
    from acclight.loggers import CSVLogger

    logger = CSVLogger(tmp_path)
    trainer = quiet_trainer(strategy="single", max_epochs=1, logger=logger, log_every_n_steps=1)
    trainer.fit(TwoScalars(), repeated([1.0] * 5, 1))
    lines = (trainer.log_dir / "metrics.csv").read_text().splitlines()
    column = lines[0].split(",").index("step")
    assert [int(line.split(",")[column]) for line in lines[1:]] == [1, 2, 3, 4, 5]


def test_the_modules_optimizer_is_torchs_with_a_step_of_its_own() -> None:
    seen: dict[str, Any] = {}

    class Looks(TwoScalars):
        def on_train_start(self) -> None:
            first, second = self.optimizers()
            raw = self.optimizers(use_pl_optimizer=False)
            seen["raw"] = [first.optimizer is raw[0], second.optimizer is raw[1]]
            seen["lr"] = first.param_groups[0]["lr"]
            first.param_groups[0]["lr"] = 0.125
            seen["state"] = first.state_dict()["param_groups"][0]["lr"]
            seen["copy"] = copy.copy(first).optimizer is raw[0]

    quiet_trainer(strategy="single", max_steps=1).fit(Looks(), repeated([1.0], 1))
    assert seen == {"raw": [True, True], "lr": 0.5, "state": 0.125, "copy": True}


def test_nobody_steps_the_schedulers_but_the_step() -> None:
    class Scheduled(TwoScalars):
        def configure_optimizers(self) -> Any:
            optimizers = list(super().configure_optimizers())
            schedulers = [torch.optim.lr_scheduler.StepLR(one, 1, gamma=0.5) for one in optimizers]
            return optimizers, [{"scheduler": schedulers[0], "interval": "step"}, schedulers[1]]

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            super().training_step(batch, batch_idx)
            if batch_idx == 1:
                self.lr_schedulers()[0].step()

    trainer = quiet_trainer(strategy="single", max_epochs=2)
    trainer.fit(Scheduled(), repeated([1.0] * 3, 1))
    assert [one.param_groups[0]["lr"] for one in trainer.optimizers] == [0.125, 0.25]


# --- fp16, LBFGS -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clipped", [False, True])
def test_fp16_scales_the_loss_and_steps_with_the_true_gradient(clipped: bool) -> None:
    seen: list[float] = []

    class Watches(TwoScalars):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            a, b = self.optimizers()
            a.zero_grad()
            b.zero_grad()
            self.manual_backward(((self.a - batch) ** 2 / 2).mean() + ((self.b - batch) ** 2 / 2).mean())
            assert self.a.grad is not None
            seen.append(float(self.a.grad))
            if clipped:
                self.clip_gradients(a, 0.25, "value")
                self.clip_gradients(b, 0.25, "value")
            a.step()
            b.step()

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            seen.append(float(optimizer.param_groups[0]["params"][0].grad))

    module = Watches()
    quiet_trainer(strategy="single", precision="16-mixed", max_steps=1).fit(module, repeated([1.0], 1))
    true = -0.25 if clipped else -1.0
    # 65536 is torch's first scale.
    assert seen == [-65536.0, true, true]
    assert [float(module.a.detach()), float(module.b.detach())] == [-0.5 * true, -0.25 * true]


def test_an_fp16_overflow_skips_the_step_and_is_counted() -> None:
    class Overflows(TwoScalars):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            for optimizer, weight in zip(self.optimizers(), (self.a, self.b), strict=True):
                optimizer.zero_grad()
                loss = ((weight - batch) ** 2 / 2).mean()
                self.manual_backward(loss * (float("inf") if batch_idx == 1 else 1.0))
                optimizer.step()

    module = Overflows()
    trainer = quiet_trainer(strategy="single", precision="16-mixed", max_epochs=1)
    trainer.fit(module, repeated([1.0] * 3, 1))
    assert (trainer.global_step, trainer.skipped_steps) == (3, 1)
    assert float(module.a.detach()) == 0.75


class Accumulates(TrainModule):
    """a steps in every batch and overflows in the second; b gathers a gradient of 1 in each of two batches, then steps."""

    def __init__(self, sync: bool = True) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.sync = sync
        self.a = nn.Parameter(torch.zeros(2))
        self.b = nn.Parameter(torch.zeros(2))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        a, b = self.optimizers()
        self.manual_backward(self.a.sum() * (1e38 if batch_idx == 1 else 1.0))
        a.step()
        a.zero_grad()
        last = batch_idx % 2 == 1
        with b.toggle_model(sync_grad=self.sync or last):
            self.manual_backward(self.b.sum())
        if last:
            b.step()
            b.zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.a], lr=1.0), torch.optim.SGD([self.b], lr=1.0)


def check_accumulates(strategy: str, world: int, sync: bool) -> None:
    trainer = quiet_trainer(strategy=strategy, precision="16-mixed", max_epochs=1)
    trainer.fit(Accumulates(sync), repeated([1.0] * 4, world))
    assert trainer.skipped_steps == 1
    assert whole(trainer, "a").tolist() == [-3.0, -3.0]
    # Two steps with a gradient of 1 + 1, though the loss scale has changed between the two.
    assert whole(trainer, "b").tolist() == [-4.0, -4.0]


def test_an_fp16_overflow_of_one_optimizer_leaves_anothers_gradients_right() -> None:
    check_accumulates("single", 1, True)


@on_two_ranks
@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("strategy", SEVERAL)
def test_an_fp16_overflow_of_one_optimizer_leaves_anothers_gradients_right_on_two_ranks(
    strategy: str, sync: bool
) -> None:
    check_accumulates(strategy, 2, sync)


def test_fp16_gradients_that_are_clipped_before_anothers_backward_are_unscaled_once() -> None:
    class Interleaved(TwoScalars):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            a, b = self.optimizers()
            a.zero_grad()
            b.zero_grad()
            overflow = float("inf") if batch_idx == 1 else 1.0
            self.manual_backward(self.a.sum() * overflow)
            self.clip_gradients(a, 0.5, "value")
            b.step()
            self.manual_backward(self.b.sum())
            self.clip_gradients(b, 0.5, "value")
            b.step()
            a.step()

    module = Interleaved()
    trainer = quiet_trainer(strategy="single", precision="16-mixed", max_epochs=1)
    trainer.fit(module, repeated([1.0] * 3, 1))
    # Of 0.5 each: a with lr 0.5 in the first and the last batch, b with lr 0.25 in all.
    assert trainer.skipped_steps == 1
    assert [float(module.a.detach()), float(module.b.detach())] == [-0.5, -0.375]


def test_lbfgs_evaluates_its_closure_as_often_as_it_likes() -> None:
    class Newton(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.w = nn.Parameter(torch.tensor([5.0, -3.0]))
            self.evaluations = 0

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            optimizer = self.optimizers()

            def closure() -> Tensor:
                self.evaluations += 1
                optimizer.zero_grad()
                loss = ((self.w - batch) ** 2).sum()
                self.manual_backward(loss)
                return loss

            optimizer.step(closure)

        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=1.0, line_search_fn="strong_wolfe")

    module = Newton()
    quiet_trainer(strategy="single", max_steps=1).fit(module, repeated([2.0], 1))
    assert module.evaluations > 1
    assert module.w.tolist() == pytest.approx([2.0, 2.0], abs=1e-5)


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"accumulate_grad_batches": 2}, r"accumulate_grad_batches=2 .*TwoScalars.automatic_optimization=False"),
        ({"gradient_clip_val": 0.5}, r"gradient_clip_val=0.5 .*TwoScalars.automatic_optimization=False"),
    ],
)
def test_what_belongs_to_the_step_is_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        quiet_trainer(strategy="single", max_steps=1, **arguments).fit(TwoScalars(), repeated([1.0], 1))


@on_two_ranks
@pytest.mark.parametrize("strategy", ONE)
def test_deepspeed_refuses_two_optimizers_before_training(strategy: str) -> None:
    class Counts(TwoScalars):
        steps = 0

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            self.steps += 1

    module = Counts()
    with pytest.raises(ValueError, match="2 optimizers: a DeepSpeed engine trains with exactly one"):
        quiet_trainer(strategy=strategy, max_steps=1).fit(module, repeated([1.0], 2))
    assert module.steps == 0


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda m: m.manual_backward(m.a.sum()), r"manual_backward\(\) is the loop's own work"),
        (lambda m: m.optimizers()[0].step(), r"optimizer.step\(\) is the loop's own work"),
        (lambda m: m.optimizers()[0].zero_grad(), r"optimizer.zero_grad\(\) is the loop's own work"),
    ],
)
def test_manual_calls_are_refused_in_automatic_optimization(call: Callable[[TrainModule], None], text: str) -> None:
    class Automatic(TwoScalars):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = True

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            call(self)

    with pytest.raises(RuntimeError, match=text):
        quiet_trainer(strategy="single", max_steps=1).fit(Automatic(), repeated([1.0], 1))


def test_a_clip_that_cannot_be_is_refused() -> None:
    class Clips(TwoScalars):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            self.clip_gradients(self.optimizers()[0], 1.0, "max")

    with pytest.raises(ValueError, match=r"gradient_clip_algorithm='max'\): use 'norm' or 'value'"):
        quiet_trainer(strategy="single", max_steps=1).fit(Clips(), repeated([1.0], 1))
