"""The hooks run in the order that Callback's docstring shows, with their arguments, under every strategy."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from acclight import Callback, DataModule, Trainer, TrainModule
from acclight.callback import HOOKS, MODULE_HOOKS, REFUSED
from tests.distributed import RankChecks
from tests.hook_order import Player, Scenario
from tests.recorded_fit import COMPARED, recorded
from tests.recorded_fit import MODULE_HOOKS as RECORDED_MODULE_HOOKS
from tests.scenarios import DISTRIBUTED, Recorder, Scalar, Vector, quiet_trainer, repeated, whole

on_two_ranks = RankChecks(world_size=2, timeout=90.0)

FITS = {
    "validation at the end": Scenario(saves_at=2),
    "validation inside": Scenario(inside=2, saves_at=4),
    "manual": Scenario(manual=True, accumulate=1, optimizers=(0.5, 0.25), saves_at=3),
}


def assert_same(ran: list[str], written: list[str]) -> None:
    for number, (one, other) in enumerate(zip(ran, written, strict=False)):
        around = "\n".join(ran[max(0, number - 4) : number + 4])
        assert one == other, f"line {number}: ran {one}, written is {other}; around it ran\n{around}"
    assert len(ran) == len(written)


# --- the order -------------------------------------------------------------------------------------------------------


def check(name: str, strategy: str, world: int, folder: Path) -> None:
    scenario = FITS[name]
    lines, module, callbacks = recorded(TrainModule, Callback, scenario.manual, scenario.saves_at, folder)
    trainer = quiet_trainer(
        strategy=strategy,
        max_epochs=scenario.epochs,
        accumulate_grad_batches=scenario.accumulate,
        gradient_clip_val=None if scenario.manual else 1.0,
        num_sanity_val_steps=1,
        val_check_interval=scenario.inside or 1.0,
        callbacks=callbacks,
    )
    trainer.fit(module)
    scenario = Scenario(**{**vars(scenario), "rank": trainer.global_rank, "world": world})
    if strategy.startswith("deepspeed"):
        scenario.optimizers = (0.5,)
    assert_same(lines, Player(scenario).play("fit"))


def test_every_hook_is_in_the_order() -> None:
    text = Callback.__doc__ or ""
    block = text[text.index("code-block") : text.index("`validate`, `test`")]
    elsewhere = {name for name in (*HOOKS, *MODULE_HOOKS) if "_test_" in name or "_predict_" in name}
    elsewhere |= {"on_load_checkpoint", "on_exception"}
    assert [name for name in (*HOOKS, *MODULE_HOOKS) if name not in block and name not in elsewhere] == []
    assert set(RECORDED_MODULE_HOOKS) == set(MODULE_HOOKS)


@pytest.mark.parametrize("name", FITS)
def test_the_order_in_one_process(name: str, tmp_path: Path) -> None:
    check(name, "single", 1, tmp_path)


@on_two_ranks
@pytest.mark.parametrize("name", list(FITS))
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_the_order_on_two_ranks(strategy: str, name: str, tmp_path: Path) -> None:
    check(name, strategy, 2, tmp_path)


# --- as in Lightning -------------------------------------------------------------------------------------------------


def lightnings(name: str) -> list[str]:
    text = (Path(__file__).parent / "lightning_order.txt").read_text()
    return text.split(f"## {name}\n")[1].split("\n#")[0].splitlines()


#: What Callback's docstring says to be different: lines with these are left out.
DIFFERENT = (".on_step(", "module.on_sanity_check", ".train_dataloader(", ".val_dataloader(", "(scheduler gamma 0.75")


@pytest.mark.parametrize("name", COMPARED)
def test_the_order_is_lightnings(name: str) -> None:
    manual, both, _, ours = COMPARED[name]
    lines, module, callbacks = recorded(TrainModule, Callback, manual)
    # Lightning knows no callbacks that come after the module.
    type(callbacks[1]).runs_last = False
    arguments: dict[str, Any] = {"max_epochs": 2, "num_sanity_val_steps": 1, "callbacks": callbacks, **both, **ours}
    quiet_trainer(strategy="single", **arguments).fit(module)
    theirs = [
        line.replace(", 1.0, None)", ", 1.0, norm)").replace(", None, None)", ", None, norm)")
        for line in lightnings(name)
    ]
    different = (*DIFFERENT, ".on_before_zero_grad(") if manual else DIFFERENT
    assert_same(
        [line for line in lines if not any(part in line for part in different)],
        [line for line in theirs if not any(part in line for part in different)],
    )
    for part in (".train_dataloader(", ".val_dataloader(", "(scheduler gamma 0.75"):
        assert sum(part in line for line in lines) == sum(part in line for line in theirs), part


# --- validate, test, predict, resume ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["validation", "test", "predict"])
def test_the_order_of_an_evaluation(stage: str) -> None:
    lines, module, callbacks = recorded(TrainModule, Callback, manual=False)
    trainer = quiet_trainer(strategy="single", callbacks=callbacks)
    name = "validate" if stage == "validation" else stage
    getattr(trainer, name)(module)
    player = Player(Scenario())
    player.stage = "validation"
    middle = [line.replace("validation", stage) for line in player.play("validation")]
    loader = {"validation": "val_dataloader", "test": "test_dataloader", "predict": "predict_dataloader"}[stage]
    owners = ("first", "last", "module")
    before = ["module.configure_callbacks()", "module.prepare_data()", *(f"{one}.setup({name})" for one in owners)]
    before += [f"module.{loader}()", "module.configure_model()"]
    after = [f"{one}.teardown({name})" for one in owners]
    assert_same(lines, [*before, *middle, *after])


def test_a_resume_loads_after_the_optimizers_and_before_the_fit(tmp_path: Path) -> None:
    _, module, callbacks = recorded(TrainModule, Callback, manual=False)
    trainer = quiet_trainer(strategy="single", max_epochs=1, callbacks=callbacks)
    trainer.fit(module)
    trainer.save_checkpoint(tmp_path / "one")
    lines, module, callbacks = recorded(TrainModule, Callback, manual=False)
    quiet_trainer(strategy="single", max_epochs=2, callbacks=callbacks).fit(module, ckpt_path=tmp_path / "one")
    start = lines.index("module.configure_optimizers()")
    assert lines[start + 1 : start + 5] == [
        "module.on_load_checkpoint({})", "first.on_load_checkpoint({})", "last.on_load_checkpoint({})", "first.on_fit_start()",
    ]  # fmt: skip


# --- leaving an epoch ------------------------------------------------------------------------------------------------


class Leaves(Scalar):
    """The last rank leaves each epoch before batch `at`; gradients that were gathered by then are dropped."""

    def __init__(self, at: int) -> None:
        super().__init__(lr=0.5)
        self.at = at
        self.validated: list[int] = []

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> int | None:
        return -1 if batch_idx == self.at and self.global_rank == self.trainer.world_size - 1 else None

    def on_validation_start(self) -> None:
        self.validated.append(self.global_step)


def check_leaving(strategy: str, world: int) -> None:
    for at, accumulate, steps, w in ((2, 1, 4, 0.9375), (3, 2, 2, 0.75), (0, 1, 0, 0.0)):
        module = Leaves(at)
        trainer = quiet_trainer(
            strategy=strategy, max_epochs=2, accumulate_grad_batches=accumulate, num_sanity_val_steps=0
        )
        trainer.fit(module, repeated([1.0] * 6, world), repeated([1.0], world))
        assert trainer.global_step == steps
        assert len(module.batches) == 2 * at
        assert float(whole(trainer, "w")) == pytest.approx(w)
        assert module.validated == ([steps // 2, steps] if steps else [0])


def test_minus_one_leaves_the_rest_of_the_epoch_in_one_process() -> None:
    check_leaving("single", 1)


@on_two_ranks
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_minus_one_of_one_rank_leaves_the_rest_of_the_epoch_on_all(strategy: str) -> None:
    check_leaving(strategy, 2)


def test_minus_one_of_a_callback_says_nothing() -> None:
    class Minus(Callback):
        def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> Any:
            return -1

    trainer = quiet_trainer(strategy="single", max_epochs=1, callbacks=Minus())
    trainer.fit(Scalar(), repeated([1.0] * 3, 1))
    assert trainer.global_step == 3


# --- clipping by the module ------------------------------------------------------------------------------------------


class Clips(Vector):
    """Its gradient has the norm 13; steps are clipped to 6.5 in the first, to nothing in the second, not at all in the third."""

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        assert (gradient_clip_val, gradient_clip_algorithm) == (None, "norm")
        if self.global_step == 0:
            self.clip_gradients(optimizer, gradient_clip_val=6.5, gradient_clip_algorithm="norm")
        elif self.global_step == 1:
            self.clip_gradients(optimizer, gradient_clip_val=13.0e-6)


def check_clips(strategy: str, world: int) -> None:
    recorder = Recorder(norms=True)
    trainer = quiet_trainer(strategy=strategy, max_steps=3, callbacks=recorder)
    trainer.fit(Clips(), repeated([0.0] * 3, world))
    # 0.5 + 1e-6 + 1 of [3, 4, 0, 12].
    assert whole(trainer, "w").tolist() == pytest.approx([-4.5, -6.0, 0.0, -18.0], abs=2e-4)
    assert recorder.norms == pytest.approx([13.0, 13.0, 13.0], abs=1e-4)


def test_the_module_clips_in_one_process() -> None:
    check_clips("single", 1)


@on_two_ranks
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_the_module_clips_on_two_ranks(strategy: str) -> None:
    check_clips(strategy, 2)


def test_the_modules_clip_value_must_not_contradict_the_trainers() -> None:
    class Contradicts(Vector):
        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any
        ) -> None:
            self.clip_gradients(optimizer, gradient_clip_val=1.0)

    trainer = quiet_trainer(strategy="single", max_steps=1, gradient_clip_val=2.0)
    with pytest.raises(ValueError, match=r"gradient_clip_val=1.0\) contradicts Trainer\(gradient_clip_val=2.0\)"):
        trainer.fit(Contradicts(), repeated([0.0], 1))


# --- what belongs to the module --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REFUSED)
def test_a_method_that_is_not_called_is_refused(name: str) -> None:
    module = type("Ported", (Scalar,), {name: lambda self, *args: None})()
    trainer = quiet_trainer(strategy="single", max_steps=1)
    with pytest.raises(TypeError, match=rf"Ported defines {name}, which acclight does not call: .+"):
        trainer.fit(module, repeated([1.0], 1))
    # The Trainer is as before.
    trainer.fit(Scalar(), repeated([1.0], 1))


def test_a_callbacks_old_hook_is_refused_and_its_other_methods_are_not() -> None:
    class Old(Callback):
        def on_batch_end(self, trainer: Trainer, module: TrainModule) -> None:
            pass

    class Own(Callback):
        def backward(self) -> None:
            pass

    with pytest.raises(TypeError, match=r"Old defines on_batch_end.*on_train_batch_end"):
        quiet_trainer(strategy="single", max_steps=1, callbacks=Old()).fit(Scalar(), repeated([1.0], 1))
    quiet_trainer(strategy="single", max_steps=1, callbacks=Own()).fit(Scalar(), repeated([1.0], 1))


class Named(Callback):
    def __init__(self, name: str) -> None:
        self.name = name


class Special(Named):
    pass


def test_the_modules_callbacks_replace_the_trainers_and_keep_their_state() -> None:
    class Brings(Scalar):
        asked = 0

        def configure_callbacks(self) -> list[Callback]:
            self.asked += 1
            return [Special("module's")]

    module, other = Brings(), Scalar()
    trainer = quiet_trainer(strategy="single", max_epochs=1, callbacks=[Named("trainer's"), Recorder()])
    trainer.fit(module, repeated([1.0], 1))
    mine = trainer.callbacks
    assert [type(c).__name__ for c in mine] == ["Recorder", "Special"]
    trainer.validate(module, repeated([1.0], 1))
    assert trainer.callbacks == mine
    assert module.asked == 1
    trainer.fit(other, repeated([1.0], 1))
    assert [type(c).__name__ for c in trainer.callbacks] == ["Named", "Recorder"]


def test_what_is_no_callback_is_refused() -> None:
    class Wrong(Scalar):
        def configure_callbacks(self) -> Any:
            return [Callback]

    with pytest.raises(TypeError, match=r"Wrong.configure_callbacks returned a type"):
        quiet_trainer(strategy="single", max_steps=1).fit(Wrong(), repeated([1.0], 1))


def test_a_step_may_leave_out_the_index() -> None:
    class Short(Scalar):
        def training_step(self, batch: Tensor) -> Any:  # type: ignore[override]
            return self.loss(batch)

    module = Short(lr=0.5)
    quiet_trainer(strategy="single", max_epochs=1).fit(module, repeated([1.0, 1.0], 1))
    assert float(module.w.detach()) == 0.75


def test_a_scheduler_of_the_users_own_kind_is_stepped_by_the_module() -> None:
    class ByEpoch:
        """Wants the epoch, as timm's schedulers do."""

        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer
            self.seen: list[int] = []

        def step(self, epoch: int) -> None:
            self.seen.append(epoch)

        def state_dict(self) -> dict[str, Any]:
            return {"seen": self.seen}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.seen = state["seen"]

    class Ported(Scalar):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [ByEpoch(optimizer)]

    class Steps(Ported):
        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            scheduler.step(epoch=self.current_epoch)

    trainer = quiet_trainer(strategy="single", max_epochs=3)
    trainer.fit(Steps(), repeated([1.0], 1))
    assert trainer.lr_scheduler_configs[0].scheduler.seen == [0, 1, 2]
    with pytest.raises(TypeError, match=r"ByEpoch.step\(\) needs the argument 'epoch': override lr_scheduler_step"):
        quiet_trainer(strategy="single", max_epochs=3).fit(Ported(), repeated([1.0], 1))


def test_the_module_chooses_its_modes_in_an_evaluation() -> None:
    seen: list[bool] = []

    class KeepsDropout(Scalar):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = torch.nn.Dropout(0.5)

        def on_validation_model_eval(self) -> None:
            super().on_validation_model_eval()
            self.dropout.train()

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            seen.extend([self.training, self.dropout.training])

    module = KeepsDropout()
    quiet_trainer(strategy="single").validate(module, repeated([1.0], 1))
    assert seen == [False, True]
    assert module.training
    assert module.dropout.training


def test_a_copy_of_the_module_is_not_attached() -> None:
    class Averages(Scalar):
        def on_train_start(self) -> None:
            copies.append(copy.deepcopy(self))

    copies: list[TrainModule] = []
    quiet_trainer(strategy="single", max_steps=1).fit(Averages(), repeated([1.0], 1))
    assert copies[0]._trainer is None
    assert float(copies[0].w.detach()) == 0.0


class Inner(TrainModule):
    """A TrainModule that is a part of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: list[tuple[int, int]] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.append((self.global_step, self.current_epoch))
            self.log("inner", float(self.global_step), on_step=False, on_epoch=True)
        return self.layer(x)  # type: ignore[no-any-return]


class Outer(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Inner()])

    def configure_model(self) -> None:
        if len(self.parts) == 1:
            self.parts.append(Inner())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for part in self.parts:
            batch = part(batch.reshape(-1, 1))
        return batch.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def inner_modules(strategy: str, world: int) -> None:
    trainer = quiet_trainer(strategy=strategy, max_epochs=2)
    trainer.fit(module := Outer(), repeated([1.0, 2.0], world))
    for part in module.parts:
        assert part.seen == [(0, 0), (1, 0), (2, 1), (3, 1)]
        assert part._trainer is None
    assert float(trainer.callback_metrics["inner"]) == 2.5  # of the steps 2 and 3


def test_train_modules_inside_know_the_trainer() -> None:
    inner_modules("single", 1)


@on_two_ranks
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_train_modules_inside_know_the_trainer_on_two_ranks(strategy: str) -> None:
    inner_modules(strategy, 2)


def all_gathered(strategy: str) -> None:
    seen: dict[str, Any] = {}

    class Gathers(Scalar):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            seen["batch"] = self.all_gather({"x": batch, "name": "kept"})
            everybodys = self.all_gather(self.w * (self.global_rank + 1.0) - batch, sync_grads=True)
            seen["shape"] = list(everybodys.shape)
            return (everybodys**2 / 2).mean()

    trainer = quiet_trainer(strategy=strategy, max_steps=1)
    module = Gathers(lr=1.0)
    trainer.fit(module, DataLoader(torch.tensor([1.0, 3.0]), batch_size=1))
    assert seen["batch"]["x"].flatten().tolist() == [1.0, 3.0]
    assert seen["batch"]["name"] == "kept"
    assert seen["shape"] == [2, 1]
    # Of ((w - 1)^2 + (2 w - 3)^2) / 4 on both ranks: -(1 + 6) / 2, half of it through each rank's own term, summed over both.
    assert float(whole(trainer, "w")) == pytest.approx(3.5)


@on_two_ranks
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_all_gather_with_gradients(strategy: str) -> None:
    all_gathered(strategy)


class Helped(Scalar):
    """Names near hooks that mean something else: what the class calls itself, variants, longer names."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.training_steps(batch)

    def training_steps(self, batch: Any) -> Any:
        return self.loss(batch)

    def validation_steps_done(self) -> int:
        return 0

    def on_train_epoch_end_(self) -> None: ...

    def _validation_step(self) -> None: ...

    def test_step_2(self) -> None: ...

    def on_fit_end(self) -> None: ...

    def on_fit_ends(self) -> None: ...

    def on_val_epoch(self) -> None: ...

    def train_step(self) -> None: ...

    def loss_step(self) -> None: ...


def test_a_method_that_is_nearly_a_hook_is_warned_of_once(recwarn: pytest.WarningsRecorder) -> None:
    class Typos(Scalar):
        def validaton_step(self, batch: Any, batch_idx: int) -> None: ...

        def test_steps(self, batch: Any, batch_idx: int) -> None: ...

        def on_train_epoch_ends(self) -> None: ...

    class Watch(Callback):
        def on_train_epoch_ends(self, trainer: Trainer, module: TrainModule) -> None: ...

    class Data(DataModule):
        def train_dataloader(self) -> Any:
            return repeated([1.0], 1)

        def val_dataloaders(self) -> Any: ...

    trainer = quiet_trainer(strategy="single", max_epochs=1, callbacks=[Watch()])
    module = Typos()
    trainer.fit(module, datamodule=Data())
    trainer.validate(module, repeated([1.0], 1), verbose=False)
    said = [str(one.message) for one in recwarn if "is no hook" in str(one.message)]
    assert said == [
        f"{method} is no hook and will not be called: did you mean {hook}?"
        for method, hook in [
            ("Typos.validaton_step", "validation_step"),
            ("Typos.test_steps", "test_step"),
            ("Typos.on_train_epoch_ends", "on_train_epoch_end"),
            ("Watch.on_train_epoch_ends", "on_train_epoch_end"),
            ("Data.val_dataloaders", "val_dataloader"),
        ]
    ]


def test_plain_names_near_hooks_are_not_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    quiet_trainer(strategy="single", max_epochs=1).fit(Helped(), repeated([1.0], 1))
    assert [str(one.message) for one in recwarn if "is no hook" in str(one.message)] == []
