"""What every strategy promises: nothing silently replaced, whole exports, kept ties, and nothing left behind in the process."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from acclight import Callback, Trainer, TrainModule, checkpoint
from acclight.callbacks import ModelCheckpoint
from acclight.strategies import DDPStrategy, DeepSpeedStrategy, FSDP2Strategy
from acclight.strategies.wrapping import choose_units
from tests.distributed import ROOT, RankChecks, run_command, run_ranks
from tests.scenarios import DISTRIBUTED, Scalar, quiet_trainer, repeated, whole

on_two_ranks = RankChecks(world_size=2, timeout=120.0)


class Regression(TrainModule):
    """Wraps a network; the loss is the mean square of what it gives, minus one."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return (self.net(batch) - 1.0).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", (self.net(batch) - 1.0).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.05)


def rows(number: int, width: int) -> Tensor:
    return torch.randn(number, width, generator=torch.Generator().manual_seed(2))


def twin(module: TrainModule, data: Tensor, steps: int, batch: int) -> dict[str, Tensor]:
    """The weights after plain PyTorch steps on whole global batches."""
    optimizer = module.configure_optimizers()
    for step in range(steps):
        optimizer.zero_grad()
        module.training_step(data[step * batch : (step + 1) * batch], step).backward()
        optimizer.step()
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert type(found[name]) is Tensor, name
        assert found[name].device.type == "cpu"
        torch.testing.assert_close(found[name], value, atol=1e-6, rtol=0.0, msg=lambda text, n=name: f"{n}: {text}")


# --- whole weights out of any strategy -----------------------------------------------------------------------------------


@on_two_ranks
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_uneven_shards_come_out_whole(strategy: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    expected = twin(Regression(nn.Linear(3, 5)), rows(12, 3), steps=3, batch=4)
    torch.manual_seed(0)
    module = Regression(nn.Linear(3, 5))
    trainer = quiet_trainer(strategy=strategy, max_steps=3)
    trainer.fit(module, DataLoader(rows(12, 3), batch_size=2))
    trainer.save_checkpoint(tmp_path / "saved")
    weights = checkpoint.load_weights(tmp_path / "saved")
    assert {name: tuple(value.shape) for name, value in weights.items()} == {"net.weight": (5, 3), "net.bias": (5,)}
    close(weights, expected)
    Regression(nn.Linear(3, 5)).load_state_dict(weights, strict=True)


PLAIN_READER = """
import sys
from safetensors.torch import load_file
from torch import nn
weights = load_file(sys.argv[1])
module = nn.Module()
module.net = nn.Linear(3, 5)
module.load_state_dict(weights, strict=True)
assert not {"torch.distributed.fsdp", "deepspeed", "acclight"} & set(sys.modules)
print("loaded", *sorted(weights))
"""


def save_for_others(strategy: str, folder: str) -> None:
    trainer = quiet_trainer(strategy=strategy, max_steps=1)
    trainer.fit(Regression(nn.Linear(3, 5)), DataLoader(rows(4, 3), batch_size=2))
    trainer.save_checkpoint(Path(folder) / "saved")


@pytest.mark.parametrize("strategy", ["fsdp2", "deepspeed_stage_3"])
def test_an_export_loads_without_acclight(strategy: str, tmp_path: Path) -> None:
    run_ranks(save_for_others, [strategy, str(tmp_path)], world_size=2)
    checkpoint.export(tmp_path / "saved", tmp_path / "out")
    script = tmp_path / "read.py"
    script.write_text(PLAIN_READER)
    done = run_command([sys.executable, script, tmp_path / "out" / "model.safetensors"])
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "loaded net.bias net.weight"), done.stdout


class Tied(TrainModule):
    """An embedding tied to a head, in a module without get_input_embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.between = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        logits = self.head(torch.tanh(self.between(self.embedding(batch[:, 0]))))
        return nn.functional.cross_entropy(logits, batch[:, 1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def pairs(number: int) -> Tensor:
    return torch.randint(0, 6, (number, 2), generator=torch.Generator().manual_seed(4))


def check_tie(strategy: Any, world: int, folder: Path) -> None:
    torch.manual_seed(0)
    expected = twin(Tied(), pairs(12), steps=3, batch=4)
    torch.manual_seed(0)
    module = Tied()
    trainer = quiet_trainer(strategy=strategy, max_steps=3)
    trainer.fit(module, DataLoader(pairs(12), batch_size=4 // world))
    assert module.head.weight is module.embedding.weight
    close({name: whole(trainer, name) for name in sorted(expected)}, expected)
    trainer.save_checkpoint(folder / "saved")
    from acclight.checkpoint.reader import Reader

    assert sorted(Reader(folder / "saved").model_tensors) == ["between.bias", "between.weight", "embedding.weight"]
    weights = checkpoint.load_weights(folder / "saved")
    close(weights, expected)
    again = Tied()
    again.load_state_dict(weights, strict=True)
    assert again.head.weight is again.embedding.weight
    resumed = Tied()
    second = quiet_trainer(strategy=strategy, max_steps=3)
    second.fit(resumed, DataLoader(pairs(12), batch_size=4 // world), ckpt_path=folder / "saved")
    assert resumed.head.weight is resumed.embedding.weight
    close({name: whole(second, name) for name in sorted(expected)}, expected)


class Shared(TrainModule):
    """One layer under two names, used under both."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = self.first

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return (self.second(torch.tanh(self.first(batch))) - 1.0).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def stays_shared(strategy: Any, world: int, folder: Path) -> None:
    from acclight.checkpoint.reader import Reader

    torch.manual_seed(0)
    expected = twin(Shared(), rows(24, 3), steps=3, batch=4)
    torch.manual_seed(0)
    module = Shared()
    trainer = quiet_trainer(strategy=strategy, max_steps=3)
    trainer.fit(module, DataLoader(rows(24, 3), batch_size=4 // world))
    assert module.second is module.first
    trainer.save_checkpoint(folder / "saved")
    assert sorted(Reader(folder / "saved").model_tensors) == ["first.bias", "first.weight"]
    weights = checkpoint.load_weights(folder / "saved")
    close(weights, expected)
    again = Shared()
    again.load_state_dict(weights, strict=True)
    assert again.second is again.first
    # After a resume both uses move the one layer on.
    torch.manual_seed(0)
    further = twin(Shared(), rows(24, 3), steps=6, batch=4)
    resumed = Shared()
    second = quiet_trainer(strategy=strategy, max_steps=6)
    second.fit(resumed, DataLoader(rows(24, 3), batch_size=4 // world), ckpt_path=folder / "saved")
    assert resumed.second is resumed.first
    close({name: whole(second, name) for name in sorted(further)}, further)


def test_a_module_under_two_names_in_one_process(tmp_path: Path) -> None:
    stays_shared("single", 1, tmp_path)


@on_two_ranks
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "deepspeed_stage_3"])
def test_a_module_under_two_names_on_two_ranks(strategy: str, tmp_path: Path) -> None:
    # Under FSDP2 the shared layer becomes a unit of its own.
    own = FSDP2Strategy(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=4)
    stays_shared(own if strategy == "fsdp2" else strategy, 2, tmp_path)


def test_a_tie_in_one_process(tmp_path: Path) -> None:
    check_tie("single", 1, tmp_path)


@on_two_ranks
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_a_tie_on_two_ranks(strategy: str, tmp_path: Path) -> None:
    check_tie(strategy, 2, tmp_path)


@on_two_ranks
def test_a_tie_is_not_torn_by_fsdp2s_size_policy(tmp_path: Path) -> None:
    check_tie(FSDP2Strategy(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=16), 2, tmp_path)


@on_two_ranks
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_frozen_parts_and_buffers_come_out_of_zero(stage: int, tmp_path: Path) -> None:
    torch.manual_seed(0)  # rank 0's weights count
    net = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4), nn.BatchNorm1d(4))
    net[1].requires_grad_(False)
    module = Regression(net)
    shapes = {name: value.shape for name, value in module.state_dict().items()}
    frozen = {name: value.clone() for name, value in module.state_dict().items() if name.startswith("net.1.")}
    trainer = quiet_trainer(strategy=f"deepspeed_stage_{stage}", max_steps=2)
    trainer.fit(module, DataLoader(rows(8, 3), batch_size=2))
    live = {name: whole(trainer, name) for name in sorted(shapes)}
    trainer.save_checkpoint(tmp_path / "saved")
    weights = checkpoint.load_weights(tmp_path / "saved")
    assert {name: value.shape for name, value in weights.items()} == shapes
    assert all(value.numel() for value in weights.values())
    kinds = {name: value.dtype for name, value in weights.items()}
    assert kinds == {n: torch.int64 if n.endswith("num_batches_tracked") else torch.float32 for n in shapes}
    # Buffers are each rank's own (no strategy but DDP shares them); rank 0's are saved.
    names = list(live) if trainer.global_rank == 0 else [n for n, _ in module.named_parameters()]
    for name in names:
        torch.testing.assert_close(weights[name], live[name], atol=1e-6, rtol=0.0)
    torch.testing.assert_close({name: weights[name] for name in frozen}, frozen, atol=0.0, rtol=0.0)
    fresh = Regression(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4), nn.BatchNorm1d(4)))
    fresh.load_state_dict(weights, strict=True)
    assert int(weights["net.2.num_batches_tracked"]) == 2


@on_two_ranks
def test_an_engine_that_goes_imports_nothing() -> None:
    name = "deepspeed.utils.pin_memory"
    for hidden in (False, True):
        sys.modules.pop(name, None)
        trainer = quiet_trainer(strategy="deepspeed_stage_3", max_steps=1)
        trainer.fit(Regression(nn.Linear(3, 4)), DataLoader(rows(4, 3), batch_size=2))
        if hidden:
            del sys.modules[name]
        before = set(sys.modules)
        trainer.strategy._release()  # type: ignore[attr-defined]
        # DeepSpeed would still import it by itself; once it does not, nothing has to be imported beforehand.
        assert set(sys.modules) - before == ({name} if hidden else set())


# --- nothing is left behind ----------------------------------------------------------------------------------------------


def traces() -> dict[str, Any]:
    """All that a Trainer might leave in the process."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    integration = sys.modules.get("transformers.integrations.deepspeed")
    return {
        "environment": dict(os.environ),
        "singletons": [id(cls._shared_state) for cls in (PartialState, AcceleratorState, GradientState)],
        "contents": [dict(cls._shared_state) for cls in (PartialState, AcceleratorState, GradientState)],
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)],
        "linear": torch.nn.functional.linear,
        "transformers": getattr(integration, "_hf_deepspeed_config_weak_ref", None),
        "dtype": torch.get_default_dtype(),
    }


def changed(before: dict[str, Any]) -> dict[str, Any]:
    """What is not as it was, before and now."""
    now = traces()
    differences = {key: (value, now[key]) for key, value in before.items() if value != now[key]}
    for key in set(differences) & {"environment"}:
        old, new = differences[key]
        differences[key] = [(n, old.get(n), new.get(n)) for n in old.keys() | new.keys() if old.get(n) != new.get(n)]
    return differences


@on_two_ranks
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_a_fit_leaves_the_process_as_it_was(strategy: str) -> None:
    before = traces()
    trainer = quiet_trainer(strategy=strategy, max_steps=1)
    assert not changed(before), changed(before)
    trainer.fit(Regression(nn.Linear(3, 5)), DataLoader(rows(4, 3), batch_size=2))
    assert not changed(before), changed(before)


@on_two_ranks
def test_zero_init_leaves_nothing_behind() -> None:
    class Born(Regression):
        def __init__(self) -> None:
            super().__init__(nn.Identity())

        def configure_model(self) -> None:
            from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

            self.net = nn.Linear(3, 5)
            self.partitioned = hasattr(self.net.weight, "ds_id")
            self.transformers_knows = is_deepspeed_zero3_enabled()

    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    before = traces()
    for _ in range(2):
        module = Born()
        trainer = quiet_trainer(strategy=DeepSpeedStrategy(stage=3, zero3_init_flag=True), max_steps=1)
        trainer.fit(module, DataLoader(rows(4, 3), batch_size=2))
        assert module.partitioned
        assert module.transformers_knows
        assert not is_deepspeed_zero3_enabled(), "models of the next Trainer would be read as ZeRO-3 does"
        assert not changed(before), changed(before)


@on_two_ranks
def test_an_exception_that_was_caught_is_not_held_against_the_next_fit() -> None:
    class Failing(Regression):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            raise RuntimeError(self.message)

    for message in ("the first", "the second"):
        module = Failing(nn.Linear(3, 5))
        module.message = message  # type: ignore[assignment]
        with pytest.raises(RuntimeError, match=message):
            quiet_trainer(strategy="ddp", max_steps=1).fit(module, DataLoader(rows(4, 3), batch_size=2))


class SignalsItself(Callback):
    """Rank 0 alone gets SIGTERM at one step, or in the validation after it.

    Attributes:
        validated: The steps after which a validation came to its end.
    """

    def __init__(self, *, in_validation: bool) -> None:
        self.in_validation = in_validation
        self.validated: list[int] = []

    def signal(self, trainer: Trainer, *, in_validation: bool) -> None:
        if self.in_validation == in_validation and trainer.global_rank == 0 and trainer.global_step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_step(self, trainer: Trainer, module: TrainModule) -> None:
        self.signal(trainer, in_validation=False)

    def on_validation_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if batch_idx == 0:
            self.signal(trainer, in_validation=True)

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        # The validation that was interrupted counts all that it should: the samples 0 and 2 of both ranks.
        w = float(whole(trainer, "w"))
        assert trainer.callback_metrics["val_loss"].item() == pytest.approx((w**2 + (w - 2.0) ** 2) / 4, rel=1e-5)
        self.validated.append(trainer.global_step)


@on_two_ranks
@pytest.mark.parametrize(
    ("strategy", "in_validation"), [*((strategy, False) for strategy in DISTRIBUTED), ("fsdp2", True)]
)
def test_a_signal_to_one_rank_saves_on_all_and_the_run_goes_on(
    strategy: str, in_validation: bool, tmp_path: Path
) -> None:
    values, expected = [float(i % 7) for i in range(24)], 0.0
    for value in values:
        expected -= 0.1 * (expected - value)
    seen: list[int] = []
    former = signal.signal(signal.SIGTERM, lambda signum, frame: seen.append(signum))
    try:
        saving = ModelCheckpoint(tmp_path / "saved")
        signals = SignalsItself(in_validation=in_validation)
        stopped = quiet_trainer(
            strategy=strategy, max_epochs=1, callbacks=[signals, saving], val_check_interval=3, num_sanity_val_steps=0
        )
        stopped.fit(Scalar(lr=0.1), repeated(values, 2), repeated([0.0, 2.0], 2) if in_validation else None)
    finally:
        signal.signal(signal.SIGTERM, former)
    # Also the rank that the system did not tell hears of it; quick steps ask each other every 16th time at the latest.
    assert (seen, stopped.interrupted) == ([signal.SIGTERM], True)
    assert 3 <= stopped.global_step <= 19
    assert signals.validated == (list(range(3, stopped.global_step + 1, 3)) if in_validation else [])
    assert [p.name for p in (tmp_path / "saved").iterdir()] == [f"step-{stopped.global_step:08d}"]
    trainer = quiet_trainer(strategy=strategy, max_epochs=1)
    module = Scalar(lr=0.1)
    trainer.fit(module, repeated(values, 2), ckpt_path=tmp_path / "saved" / f"step-{stopped.global_step:08d}")
    assert (trainer.global_step, len(module.losses)) == (24, 24 - stopped.global_step)
    assert float(whole(trainer, "w")) == pytest.approx(expected, abs=1e-5)


@on_two_ranks
def test_trainers_of_several_strategies_take_turns() -> None:
    torch.manual_seed(0)
    expected = twin(Regression(nn.Linear(3, 5)), rows(16, 3), steps=4, batch=4)
    loader = DataLoader(rows(16, 3), batch_size=2)
    trainers: dict[str, tuple[Trainer, TrainModule]] = {}
    for strategy in DISTRIBUTED:
        torch.manual_seed(0)
        trainers[strategy] = quiet_trainer(strategy=strategy, max_steps=2), Regression(nn.Linear(3, 5))
    for limit in (2, 4):
        for strategy, (trainer, module) in trainers.items():
            trainer.max_steps = limit
            trainer.fit(module, loader)
            assert (trainer.strategy.name, trainer.global_step) == (strategy, limit)
    for trainer, _ in trainers.values():
        with trainer.core.active():
            close({name: whole(trainer, name) for name in sorted(expected)}, expected)


def hand_made_beside_a_trainer(strategy: str) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Linear(3, 5)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(rows(16, 3), batch_size=2)
    )
    batches = iter(loader)

    def one_step() -> bool:
        with accelerator.accumulate(model):
            accelerator.backward(model(next(batches)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            return bool(accelerator.sync_gradients)

    kind, precision = accelerator.distributed_type, accelerator.mixed_precision
    synced = [one_step()]
    quiet_trainer(strategy=strategy, precision="bf16-mixed", max_steps=1).fit(
        Regression(nn.Linear(3, 5)), DataLoader(rows(4, 3), batch_size=2)
    )
    synced += [one_step(), one_step(), one_step()]
    assert synced == [False, True, False, True]
    assert (accelerator.distributed_type, accelerator.mixed_precision) == (kind, precision)
    assert Accelerator(cpu=True).distributed_type == kind


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "deepspeed_stage_3"])
def test_a_hand_made_accelerator_keeps_working(strategy: str) -> None:
    run_ranks(hand_made_beside_a_trainer, [strategy], world_size=2)


# --- launcher and script -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "strategy", "names"),
    [
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "WORLD_SIZE": "2"}, "ddp", ["'ddp'", "'fsdp2'"]),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, DeepSpeedStrategy(stage=2), ["stage_2", "'fsdp2'"]),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, FSDP2Strategy(), ["'fsdp2'", "'deepspeed'"]),
        ({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}, "deepspeed_stage_3", ["3", "stage_2"]),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "single", ["'single'", "2 processes", "'ddp'"]),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, "auto", ["version 1", "accelerate to-fsdp2"]),
        ({"ACCELERATE_USE_FSDP": "true"}, "fsdp2", ["version 1", "accelerate to-fsdp2"]),
        ({}, "fdsp2", ["'fdsp2'", "did you mean 'fsdp2'"]),
        ({}, "deepspeed", ["did you mean 'deepspeed_stage_"]),
        ({}, "zero", ["Known are: auto, single, ddp"]),
    ],
)  # fmt: skip
def test_conflicts_name_both_sides(
    environment: dict[str, str], strategy: Any, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError) as error:  # noqa: PT011  # the names are what is checked
        quiet_trainer(strategy=strategy)
    for name in names:
        assert name in str(error.value)


def test_a_strategy_is_a_name_or_an_object() -> None:
    with pytest.raises(TypeError, match="give a name"):
        quiet_trainer(strategy=FSDP2Strategy)


LAUNCHED = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader
from acclight import Trainer, TrainModule

class Model(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 2)

    def training_step(self, batch, batch_idx):
        out = self.net(batch)
        self.seen = str(out.dtype)
        return out.float().square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

module = Model()
trainer = Trainer(
    precision="32", max_steps=1, accumulate_grad_batches=2, default_root_dir=sys.argv[1], enable_progress_bar=False
)
trainer.fit(module, DataLoader(torch.ones(4, 3), batch_size=1))
line = f"rank {trainer.global_rank} of {trainer.world_size} {trainer.strategy.name} {module.seen} {trainer.log_dir}"
sys.stdout.write(line + "\\n")  # at once: print() writes the end of the line by itself, and the ranks' lines mingle
"""


@pytest.mark.parametrize("launcher", [pytest.param("torchrun", marks=pytest.mark.slow), "accelerate"])
def test_the_scripts_precision_wins_and_the_ranks_share_a_folder(launcher: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(LAUNCHED)
    binaries = Path(sys.executable).parent
    if launcher == "torchrun":
        command = [
            binaries / "torchrun",
            "--nproc-per-node",
            "2",
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            "localhost:0",
        ]
    else:
        command = [binaries / "accelerate", "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1",
                   "--main_process_port", "0", "--mixed_precision", "bf16"]  # fmt: skip
    env = {"PYTHONPATH": str(ROOT), "ACCELERATE_MIXED_PRECISION": "bf16" if launcher == "torchrun" else None}
    done = run_command([*command, script, tmp_path / "runs"], env=env)
    assert done.returncode == 0, done.stdout
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("rank "))
    folders = {line.split()[-1] for line in lines}
    assert len(lines) == 2
    assert len(folders) == 1, done.stdout
    assert [path for path in (tmp_path / "runs").glob("*/*") if path.is_dir()] == [Path(folders.pop())]
    assert all("of 2 ddp torch.float32" in line for line in lines), done.stdout
    assert done.stdout.count("precision='32' of the script wins over 'bf16' of the launcher") == 1
    assert done.stdout.count("precision 32-true") == 1
    [saved] = (tmp_path / "runs").rglob("trainer.json")
    in_force(saved, strategy="ddp", world_size=2, precision="32-true", accumulate_grad_batches=2)


def in_force(saved: Path, **settings: Any) -> None:
    """A checkpoint's trainer.json has these settings."""
    document = json.loads(saved.read_text())
    assert {name: document[name] for name in settings} == settings


@on_two_ranks
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_a_checkpoint_says_what_was_in_force(strategy: str, tmp_path: Path) -> None:
    trainer = quiet_trainer(strategy=strategy, precision="bf16-mixed", accumulate_grad_batches=3, max_steps=1)
    trainer.fit(Scalar(), repeated([1.0, 2.0, 3.0], 2))
    trainer.save_checkpoint(tmp_path / "saved")
    in_force(
        tmp_path / "saved" / "trainer.json",
        strategy=strategy,
        world_size=2,
        precision="bf16-mixed",
        accumulate_grad_batches=3,
    )


# --- FSDP2: what becomes a unit, and what cannot work ----------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Stack(nn.Module):
    """Like a transformers model: it names the class of its layers."""

    _no_split_modules = ("Layer", "NotHere")

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(3)])
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


LAYERS = [f"net.layers.{i}" for i in range(3)]


def unit_names(module: nn.Module, **arguments: Any) -> list[str]:
    names = {id(m): name for name, m in module.named_modules()}
    given = {"policy": "TRANSFORMER_BASED_WRAP", "names": None, "min_num_params": 0} | arguments
    return sorted(names[id(unit)] for unit in choose_units(module, **given))


def test_units_by_class_and_by_size() -> None:
    module = Regression(Stack())
    assert unit_names(module) == LAYERS
    assert unit_names(module, names=["Linear"]) == [*(f"{name}.linear" for name in LAYERS), "net.out"]
    assert unit_names(module, policy="NO_WRAP") == []
    # A layer has 20 parameters and the network 70: what a unit holds already does not count again.
    assert unit_names(module, policy="SIZE_BASED_WRAP", min_num_params=20) == [f"{name}.linear" for name in LAYERS]
    assert unit_names(module, policy="SIZE_BASED_WRAP", min_num_params=60) == ["net"]
    with pytest.raises(
        ValueError, match=r"is a 'layer'; did you mean 'Layer'\? There are: Layer, Linear, ModuleList, Stack"
    ):
        unit_names(module, names=["Layer", "layer"])
    for arguments in ({"module": Regression(nn.Linear(3, 2))}, {"policy": "SIZE_BASED_WRAP", "min_num_params": 1000}):
        with pytest.warns(UserWarning, match="one unit, gathered whole"):
            assert unit_names(**({"module": module} | arguments)) == []


@on_two_ranks
@pytest.mark.parametrize(
    ("arguments", "units"),
    [
        ({}, ["", *LAYERS]),
        ({"transformer_cls_names_to_wrap": ["Layer", "Linear"]}, ["", *LAYERS, *(f"{n}.linear" for n in LAYERS), "net.out"]),
        ({"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 30}, ["", "net"]),
        ({"auto_wrap_policy": "no_wrap"}, [""]),
        ({"activation_checkpointing": True}, ["", *LAYERS]),
        ({"cpu_offload": True}, ["", *LAYERS]),
        ({"reshard_after_forward": False}, ["", *LAYERS]),
    ],
)  # fmt: skip
def test_fsdp2_wraps_what_it_is_told_and_trains_the_same(arguments: dict[str, Any], units: list[str]) -> None:
    from torch.distributed.fsdp import FSDPModule

    torch.manual_seed(0)
    expected = twin(Regression(Stack()), rows(12, 4), steps=3, batch=4)
    torch.manual_seed(0)
    module = Regression(Stack())
    trainer = quiet_trainer(strategy=FSDP2Strategy(**arguments), max_steps=3)
    trainer.fit(module, DataLoader(rows(12, 4), batch_size=2), DataLoader(rows(5, 4), batch_size=2))
    wrapped = {
        name.removeprefix("module").removeprefix(".").replace("._checkpoint_wrapped_module", "")
        for name, part in trainer.strategy.wrapped.named_modules()
        if isinstance(part, FSDPModule)
    }
    assert wrapped == set(units)
    close({name: whole(trainer, name) for name in sorted(expected)}, expected)


def test_accelerates_own_size_policy_takes_what_torch_refuses_still() -> None:
    """When this fails, `only_units` in acclight/strategies/wrapping.py can go."""
    run_ranks(wrap_by_accelerate, world_size=2)


def wrap_by_accelerate() -> None:
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    from acclight.strategies import on_cpu

    torch.distributed.init_process_group("gloo")
    on_cpu.claim_fsdp()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=30)
    accelerator = Accelerator(fsdp_plugin=plugin)
    model = Stack()
    with pytest.raises(ValueError, match="does not support containers"):
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


@on_two_ranks
def test_a_module_named_like_a_norm_is_no_unit() -> None:
    class NormalNorm(Regression):
        pass

    trainer = quiet_trainer(strategy="fsdp2", max_steps=1)
    trainer.fit(NormalNorm(nn.Linear(4, 2)), DataLoader(rows(4, 4), batch_size=2))
    assert trainer.global_step == 1


@on_two_ranks
def test_weights_that_rank_0_alone_has_are_sharded_with_ties_and_buffers(tmp_path: Path) -> None:
    def forget_elsewhere(module: nn.Module) -> None:
        if int(os.environ["RANK"]) > 0:
            for tensor in (*module.parameters(), *(b for b in module.buffers() if b.is_floating_point())):
                tensor.data.fill_(float("nan"))

    torch.manual_seed(0)
    expected = twin(Tied(), pairs(12), steps=3, batch=4)
    torch.manual_seed(0)
    module = Tied()
    forget_elsewhere(module)
    trainer = quiet_trainer(strategy=FSDP2Strategy(cpu_ram_efficient_loading=True), max_steps=3)
    trainer.fit(module, DataLoader(pairs(12), batch_size=2))
    assert module.head.weight is module.embedding.weight
    close({name: whole(trainer, name) for name in sorted(expected)}, expected)
    net = Regression(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    names = sorted(net.state_dict())
    forget_elsewhere(net)
    second = quiet_trainer(strategy=FSDP2Strategy(cpu_ram_efficient_loading=True), max_steps=2)
    second.fit(net, DataLoader(rows(8, 3), batch_size=2))
    assert sorted(net.state_dict()) == names, "buffers are as persistent as before"
    assert all(bool(value.isfinite().all()) for value in net.buffers())
    second.save_checkpoint(tmp_path / "saved")
    fresh = Regression(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    fresh.load_state_dict(checkpoint.load_weights(tmp_path / "saved"), strict=True)
    assert all(bool(p.isfinite().all()) for p in fresh.parameters())


@on_two_ranks
def test_activation_checkpointing_is_asked_for_once() -> None:
    module = Regression(Stack())
    module.net.gradient_checkpointing = True  # type: ignore[assignment]  # what transformers sets
    loader = DataLoader(rows(4, 4), batch_size=2)
    with pytest.raises(
        ValueError, match=r"asked for twice: .*activation_checkpointing=True.*'net' has gradient_checkpointing"
    ):
        quiet_trainer(strategy=FSDP2Strategy(activation_checkpointing=True), max_steps=1).fit(module, loader)
    trainer = quiet_trainer(strategy=FSDP2Strategy(), max_steps=1)
    if trainer.is_global_zero:
        with pytest.warns(UserWarning, match="gathered once more in the backward"):
            trainer.fit(module, loader)
    else:
        trainer.fit(module, loader)


@on_two_ranks
def test_a_scalar_parameter_is_refused_with_the_way_out() -> None:
    class Scaled(Regression):
        def __init__(self) -> None:
            super().__init__(nn.Linear(3, 2))
            self.scale = nn.Parameter(torch.tensor(1.0))

    with pytest.raises(ValueError, match=r"the scalar parameter 'scale': make it nn.Parameter\(torch.zeros\(1\)\)"):
        quiet_trainer(strategy="fsdp2", max_steps=1).fit(Scaled(), DataLoader(rows(4, 3), batch_size=2))


@on_two_ranks
def test_ignored_modules_stay_whole_and_must_be_frozen() -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    loader = DataLoader(rows(4, 4), batch_size=2)
    with pytest.raises(ValueError, match=r"ignored_modules: 'net.0.weight' is trained, but .* freeze it"):
        quiet_trainer(strategy=FSDP2Strategy(ignored_modules=r"net\.0"), max_steps=1).fit(Regression(net), loader)
    with pytest.raises(ValueError, match="matches no module"):
        quiet_trainer(strategy=FSDP2Strategy(ignored_modules="net.7"), max_steps=1).fit(Regression(net), loader)
    net[0].requires_grad_(False)
    for ignored in (r"net\.0", [net[0]]):
        module = Regression(nn.Sequential(net[0], nn.Linear(6, 2)))
        trainer = quiet_trainer(strategy=FSDP2Strategy(ignored_modules=ignored), max_steps=1)
        trainer.fit(module, loader)
        assert type(net[0].weight.data) is Tensor
        assert trainer.strategy.local(module.net[1].weight).numel() == 6


def test_fields_from_a_dict_or_a_file(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    launch_file = tmp_path / "launch.yaml"
    launch_file.write_text(
        "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n  fsdp_cpu_offload: true\n"
        "  fsdp_auto_wrap_policy: SIZE_BASED_WRAP\n  fsdp_min_num_params: 100\n  fsdp_use_orig_params: true\n"
        "  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer,Other\n"
    )
    strategy = FSDP2Strategy(launch_file, min_num_params=7, fsdp_reshard_after_forward=False)
    assert (strategy.cpu_offload, strategy.auto_wrap_policy, strategy.min_num_params) == (True, "SIZE_BASED_WRAP", 7)
    assert strategy.transformer_cls_names_to_wrap == ["LlamaDecoderLayer", "Other"]
    assert strategy.reshard_after_forward is False
    assert "fsdp_use_orig_params=True has no effect" in str(recwarn[0].message)
    for given in ({"offload_params": True}, {"fsdp_offload_params": True}, {"cpu_offload": True}):
        assert FSDP2Strategy(given).cpu_offload
    plain = tmp_path / "ddp.json"
    plain.write_text('{"find_unused_parameters": true, "ddp_bucket_cap_mb": 5, "ddp_timeout": 60}')
    ddp = DDPStrategy(str(plain))
    assert (ddp._arguments["find_unused_parameters"], ddp._arguments["bucket_cap_mb"]) == (True, 5)
    assert ddp.timeout.total_seconds() == 60
    zero = DeepSpeedStrategy({"zero_stage": 3, "zero3_init_flag": True, "deepspeed_multinode_launcher": "standard"})
    assert (zero.stage, zero.zero3_init_flag) == (3, True)
    whole_config = {"zero_optimization": {"stage": 1}, "gradient_clipping": 0.5}
    assert (DeepSpeedStrategy(whole_config).stage, DeepSpeedStrategy(whole_config).configured_clip) == (1, 0.5)
    for make, message in (
        (lambda: FSDP2Strategy(reshard_after=True), "no field 'reshard_after'; did you mean 'reshard_after_forward'"),
        (lambda: FSDP2Strategy({"fsdp_version": 1}), "accelerate to-fsdp2"),
        (lambda: DDPStrategy({"find_unused": True}), "no field 'find_unused'; did you mean 'find_unused_parameters'"),
        (lambda: DeepSpeedStrategy(zero_stag=3), "no field 'zero_stag'; did you mean 'zero_stage'"),
        (lambda: FSDP2Strategy(tmp_path / "none.yaml"), "no such file"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


def test_the_launcher_completes_a_scripts_strategy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from acclight.strategies.resolve import resolve_strategy

    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "false")
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    given = FSDP2Strategy(reshard_after_forward=True)
    assert resolve_strategy(given) is given
    assert (given.reshard_after_forward, given.cpu_offload) == (True, True)
    said = "reshard_after_forward=True of the script's strategy wins over False of the launcher"
    assert [r.getMessage() for r in caplog.records] == [said]
    caplog.clear()
    launched = resolve_strategy("fsdp2")
    assert isinstance(launched, FSDP2Strategy)
    assert (launched.reshard_after_forward, launched.cpu_offload) == (False, True)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    monkeypatch.setenv("ACCELERATE_GRADIENT_CLIPPING", "0.25")
    zero = resolve_strategy(DeepSpeedStrategy(stage=3))
    assert (zero.name, zero.configured_clip) == ("deepspeed_stage_3", 0.25)
    assert not caplog.records


@on_two_ranks
def test_clipping_of_a_ds_config_clips() -> None:
    strategy = DeepSpeedStrategy(ds_config={"zero_optimization": {"stage": 2}, "gradient_clipping": 0.01})
    module = Regression(nn.Linear(3, 5))
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=1.0)  # type: ignore[method-assign]
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    trainer = quiet_trainer(strategy=strategy, max_steps=1)
    trainer.fit(module, DataLoader(rows(4, 3), batch_size=2))
    moved = torch.cat([(whole(trainer, name) - value).flatten() for name, value in before.items()]).norm()
    # Rank 0's weights were given to all; those of the other rank say nothing.
    assert trainer.global_rank > 0 or float(moved) == pytest.approx(0.01, rel=1e-3)
    assert trainer.gradient_clip_val == 0.01


@on_two_ranks
@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps=4 contradicts accumulate_grad_batches=1"),
        (
            {"train_micro_batch_size_per_gpu": 8},
            "train_micro_batch_size_per_gpu=8 contradicts the loader's batch size 2",
        ),
        ({"train_batch_size": 16}, "train_batch_size=16 contradicts batch 2 x accumulation 1 x 2 ranks = 4"),
    ],
)
def test_a_window_that_contradicts_the_ds_config(config: dict[str, int], message: str) -> None:
    loader = DataLoader(rows(4, 3), batch_size=2)
    with pytest.raises(ValueError, match=message):
        quiet_trainer(strategy=DeepSpeedStrategy(stage=1, ds_config=config), max_steps=1).fit(
            Regression(nn.Linear(3, 5)), loader
        )
    agreeing = {"gradient_accumulation_steps": 1, "train_micro_batch_size_per_gpu": "auto", "train_batch_size": 4}
    trainer = quiet_trainer(strategy=DeepSpeedStrategy(stage=1, ds_config=agreeing), max_steps=1)
    trainer.fit(Regression(nn.Linear(3, 5)), loader)
    assert trainer.global_step == 1


# --- DDP -------------------------------------------------------------------------------------------------------------------


@on_two_ranks
def test_ddps_fields_are_seen_on_the_wrapped_model() -> None:
    trainer = quiet_trainer(
        strategy=DDPStrategy(
            find_unused_parameters=True, bucket_cap_mb=3, broadcast_buffers=False, static_graph=False,
            gradient_as_bucket_view=True, backend="gloo",
        ),
        max_steps=1,
    )  # fmt: skip
    trainer.fit(Regression(nn.Linear(3, 5)), DataLoader(rows(4, 3), batch_size=2))
    wrapped: Any = trainer.strategy.wrapped
    assert (wrapped.find_unused_parameters, wrapped.broadcast_buffers, wrapped.gradient_as_bucket_view) == (
        True,
        False,
        True,
    )
    assert wrapped.bucket_bytes_cap == 3 * 2**20


@on_two_ranks
@pytest.mark.parametrize(("hook", "function"), [("fp16", "fp16_compress_hook"), ("power_sgd", "powerSGD_hook")])
def test_communication_hooks(hook: str, function: str) -> None:
    """What torch 2.13 can do on gloo: its hook for bf16 needs NCCL, and its batched PowerSGD asserts in every run."""
    powers = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2, "orthogonalization_epsilon": 1e-8}
    option = powers if "power" in hook else None
    torch.manual_seed(0)
    expected = twin(Regression(nn.Linear(3, 5)), rows(16, 3), steps=4, batch=4)
    torch.manual_seed(0)
    trainer = quiet_trainer(strategy=DDPStrategy(comm_hook=hook, comm_state_option=option), max_steps=4)
    trainer.fit(Regression(nn.Linear(3, 5)), DataLoader(rows(16, 3), batch_size=2))
    wrapped: Any = trainer.strategy.wrapped
    ((used, state),) = wrapped._comm_hooks
    assert used.__name__ == function
    assert state is None or state.matrix_approximation_rank == 2
    found = {name: whole(trainer, name) for name in expected}
    assert not all(torch.equal(found[name], value) for name, value in expected.items()), "nothing was compressed"


@on_two_ranks
def test_unused_parameters_are_named() -> None:
    class Partly(Regression):
        def __init__(self) -> None:
            super().__init__(nn.Linear(3, 5))
            self.spare = nn.Linear(2, 2)

    loader = DataLoader(rows(12, 3), batch_size=2)
    with pytest.raises(RuntimeError, match=r"spare\.weight, spare\.bias.*find_unused_parameters=True"):
        quiet_trainer(strategy="ddp", max_steps=3).fit(Partly(), loader)
    trainer = quiet_trainer(strategy=DDPStrategy(find_unused_parameters=True), max_steps=3)
    trainer.fit(Partly(), loader)
    assert trainer.global_step == 3


def test_a_static_graph_cannot_accumulate() -> None:
    trainer = quiet_trainer(strategy=DDPStrategy(static_graph=True), accumulate_grad_batches=2, max_steps=1)
    with pytest.raises(ValueError, match="static_graph=True cannot be used with accumulate_grad_batches=2"):
        trainer.fit(Regression(nn.Linear(3, 5)), DataLoader(rows(4, 3), batch_size=2))


def test_the_launchers_accumulation_counts_where_the_script_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    assert quiet_trainer(strategy="single").accumulate_grad_batches == 4
    assert quiet_trainer(strategy="single", accumulate_grad_batches=1).accumulate_grad_batches == 1


def test_a_backend_that_is_not_there_and_a_hook_that_is_not_known() -> None:
    with pytest.raises(ValueError, match="backend='nccl' is not available here; use 'gloo'"):
        DDPStrategy(backend="nccl")
    with pytest.raises(ValueError, match="comm_hook='int8': use one of no, fp16"):
        DDPStrategy(comm_hook="int8")


def offloaded(stage: int) -> None:
    """In processes of its own; DeepSpeed compiles its CPU optimizer the first time, which takes minutes."""
    data = rows(24, 3)

    class Decaying(Regression):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    torch.manual_seed(0)
    plain = Decaying(nn.Linear(3, 5))
    made = plain.configure_optimizers()
    for step in range(6):
        made["optimizer"].zero_grad()
        plain.training_step(data[4 * step : 4 * step + 4], step).backward()
        made["optimizer"].step()
        made["lr_scheduler"]["scheduler"].step()
    fields: dict[str, Any] = {"stage": stage, "offload_optimizer_device": "cpu"}
    fields |= {"offload_param_device": "cpu"} if stage == 3 else {}
    torch.manual_seed(0)
    first = quiet_trainer(strategy=DeepSpeedStrategy(**fields), max_steps=3)
    first.fit(Decaying(nn.Linear(3, 5)), DataLoader(data, batch_size=2))
    first.save_checkpoint("saved")
    second = quiet_trainer(strategy=DeepSpeedStrategy(**fields), max_steps=6)
    second.fit(Decaying(nn.Linear(3, 5)), DataLoader(data, batch_size=2), ckpt_path="saved")
    expected = {name: p.detach() for name, p in plain.named_parameters()}
    close({name: whole(second, name) for name in sorted(expected)}, expected)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("stage", [2, 3])
def test_offload_to_the_cpu_trains_and_resumes_the_same(stage: int) -> None:
    run_ranks(offloaded, [stage], world_size=2, timeout=800.0)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="given stage=2 and zero_stage=3, which is the same field"):
        DeepSpeedStrategy(stage=2, zero_stage=3)
    with pytest.raises(ValueError, match="auto_wrap_policy='SIZE'"):
        FSDP2Strategy(auto_wrap_policy="SIZE")
    with pytest.raises(ValueError, match="needs min_num_params"):
        FSDP2Strategy(auto_wrap_policy="SIZE_BASED_WRAP")
    with pytest.raises(ValueError, match="no field 'param_type'"):
        FSDP2Strategy(mixed_precision_policy={"param_type": "bf16"})
    with pytest.raises(ValueError, match="offload_param_device='cpu' needs stage=3"):
        DeepSpeedStrategy(stage=2, offload_param_device="cpu")
    with pytest.raises(ValueError, match="needs offload_optimizer_nvme_path"):
        DeepSpeedStrategy(offload_optimizer_device="nvme")
    with pytest.raises(ValueError, match="stage=4"):
        DeepSpeedStrategy(stage=4)
    with pytest.raises(ValueError, match="no such file"):
        DeepSpeedStrategy(ds_config="nowhere.json")
    with pytest.raises(ValueError, match=r"gradient_clipping=0\.5 contradicts gradient_clip_val=2\.0"):
        quiet_trainer(strategy=DeepSpeedStrategy(ds_config={"gradient_clipping": 0.5}), gradient_clip_val=2.0)
    assert DDPStrategy(bucket_cap_mb=3)._arguments["bucket_cap_mb"] == 3
