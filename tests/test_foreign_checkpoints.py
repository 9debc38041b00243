"""Lightning's .ckpt files, weights in files, and folders of Accelerate's save_state; right values by plain loops."""

from __future__ import annotations

import argparse
import json
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from acclight import Trainer, TrainModule, checkpoint
from acclight.checkpoint import CheckpointError
from tests.distributed import RankChecks, run_ranks
from tests.scenarios import Scalar, quiet_trainer, repeated, whole

on_two_ranks = RankChecks(world_size=2, backend="gloo", timeout=90.0)

STRATEGIES = ["ddp", "fsdp2", "deepspeed_stage_2", "deepspeed_stage_3"]
STEPS, SAVED_AT = 6, 3
#: Two samples per step.
TOKENS = torch.randint(0, 7, (2 * STEPS, 4), generator=torch.Generator().manual_seed(3))


class Net(TrainModule):
    """A tied head, two parameter groups, and sizes that two ranks cannot share evenly."""

    def __init__(self, schedule: str | None = "inverse", per_step: int = 1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.middle = nn.Linear(5, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.gain = nn.Parameter(torch.ones(1))
        self.register_buffer("scale", torch.full((3,), 2.0))
        self.schedule, self.per_step = schedule, per_step
        self.seen: list[Tensor] = []

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.middle(self.embedding(tokens)))) * self.gain * self.scale[0]
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append(batch)
        return self(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self(batch))

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).detach()

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": self.middle.parameters(), "lr": 0.05, "weight_decay": 0.3},
            {"params": [self.gain, self.embedding.weight], "betas": (0.8, 0.95)},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.02)
        if self.schedule is None:
            return optimizer
        if self.schedule == "inverse":
            each = self.per_step
            scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 1 / (1 + count / each))
        else:
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8 * self.per_step)
        if self.schedule in ("chained", "sequential"):
            rising = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=2 * self.per_step)
            scheduler = (
                torch.optim.lr_scheduler.ChainedScheduler([rising, scheduler])
                if self.schedule == "chained"
                else torch.optim.lr_scheduler.SequentialLR(optimizer, [rising, scheduler], [2 * self.per_step])
            )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def made(**arguments: Any) -> Net:
    torch.manual_seed(7)
    return Net(**arguments)


def parts(module: Net) -> tuple[torch.optim.Optimizer, Any]:
    returned = module.configure_optimizers()
    if isinstance(returned, torch.optim.Optimizer):
        return returned, None
    return returned["optimizer"], returned["lr_scheduler"]["scheduler"]


def plain(steps: int = STEPS, **arguments: Any) -> dict[str, Tensor]:
    """The weights after so many unbroken steps of a plain PyTorch loop."""
    module = made(**arguments)
    optimizer, scheduler = parts(module)
    for step in range(steps):
        module(TOKENS[2 * step : 2 * step + 2]).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def accelerate_loop(
    folder: Path, schedule: str | None, per_step: int, safe: bool, prepared: bool, times: int = 1
) -> None:
    """Three steps of a plain Accelerate loop, and save_state; on every rank. `times`: of what it steps the scheduler."""
    accelerator = Accelerator(cpu=True)
    module = made(schedule=schedule, per_step=per_step)
    optimizer, scheduler = parts(module)
    wrapped, optimizer = accelerator.prepare(module, optimizer)
    if scheduler is not None and prepared:
        scheduler = accelerator.prepare(scheduler)
    for step in range(SAVED_AT):
        own = TOKENS[2 * step : 2 * step + 2].chunk(accelerator.num_processes)[accelerator.process_index]
        accelerator.backward(wrapped(own))
        optimizer.step()
        for _ in range(times if scheduler is not None else 0):
            scheduler.step()
        optimizer.zero_grad()
    accelerator.save_state(str(folder), safe_serialization=safe)
    accelerator.wait_for_everyone()


def write(folder: Path, *, schedule: str = "inverse", per_step: int = 1, prepared: bool = True) -> Path:
    """`accelerate_loop` in this process, of which nothing is left."""
    try:
        accelerate_loop(folder, schedule, per_step, True, prepared, per_step)
    finally:
        for state in (GradientState, AcceleratorState, PartialState):
            state._reset_state()
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("alone") / "state")


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two") / "state"
    run_ranks(accelerate_loop, [folder, "cosine", 2, False, True])
    return folder


@pytest.fixture
def copied(alone: Path, tmp_path: Path) -> Path:
    """The folder of one process, to be changed."""
    folder = tmp_path / "state"
    folder.mkdir()
    for file in alone.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def rest(world: int = 1) -> DataLoader[Any]:
    """The batches of the steps after the save."""
    return DataLoader(TOKENS[2 * SAVED_AT :], batch_size=2 // world)


def resumed(strategy: str, path: Path, module: Net | None = None, **arguments: Any) -> Trainer:
    """A fit that goes on from `path`, with other weights at first, to the last step."""
    torch.manual_seed(8)
    world = dist.get_world_size() if dist.is_initialized() else 1
    trainer = quiet_trainer(strategy=strategy, **{"max_steps": STEPS, **arguments})
    trainer.fit(module or Net(), rest(world), ckpt_path=path)
    return trainer


def check(trainer: Trainer, expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(whole(trainer, name), value, rtol=0, atol=1e-6)


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What is warned of, filled at each look."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")

        class Said(list[str]):
            def __contains__(self, text: object) -> bool:
                return any(str(text) in str(one.message) for one in seen)

        yield Said()


# -- a folder of save_state -----------------------------------------------------------------------------------------------


def test_a_plain_accelerate_loop_goes_on(alone: Path, said: list[str]) -> None:
    trainer = resumed("single", alone)
    check(trainer, plain())
    assert trainer.global_step == STEPS
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == STEPS
    assert [group["weight_decay"] for group in trainer.optimizers[0].param_groups] == [0.3, 0.01]
    assert trainer.module.head.weight is trainer.module.embedding.weight
    assert torch.equal(torch.cat(trainer.module.seen), TOKENS[2 * SAVED_AT :])
    assert f"{alone} was written by Accelerate: random states and the place in its data are not taken over" in said


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_two_ranks
def test_it_goes_on_under_every_strategy(alone: Path, strategy: str) -> None:
    trainer = resumed(strategy, alone)
    check(trainer, plain())
    assert trainer.global_step == STEPS


def test_a_run_of_two_processes_goes_on_in_one(of_two: Path, said: list[str]) -> None:
    assert (of_two / "pytorch_model.bin").exists()
    trainer = resumed("single", of_two, Net("cosine"))
    check(trainer, plain(schedule="cosine"))
    # Accelerate has counted both processes; this run's own length counts steps.
    state = trainer.lr_scheduler_configs[0].scheduler.state_dict()
    assert (state["last_epoch"], state["T_max"]) == (STEPS, 8)
    assert "it is taken as it is" not in said


@pytest.mark.parametrize("schedule", ["inverse", "chained", "sequential"])
def test_schedulers_that_have_counted_processes(tmp_path: Path, schedule: str, said: list[str]) -> None:
    # What two processes write, but for the averaging of gradients.
    folder = write(tmp_path / "state", schedule=schedule, per_step=2)
    (folder / "random_states_1.pkl").write_bytes(b"")
    check(resumed("single", folder, Net(schedule)), plain(schedule=schedule))
    assert "it is taken as it is" not in said


@on_two_ranks
def test_a_run_of_two_processes_goes_on_in_two(of_two: Path) -> None:
    check(resumed("ddp", of_two, Net("cosine")), plain(schedule="cosine"))


def test_what_is_saved_after_it_resumes_as_any_other(alone: Path, tmp_path: Path) -> None:
    trainer = resumed("single", alone, max_steps=4)
    trainer.save_checkpoint(tmp_path / "own")
    check(resumed("single", tmp_path / "own"), plain())


def test_an_evaluation_takes_the_weights(alone: Path) -> None:
    plainly = made()
    plainly.load_state_dict(plain(SAVED_AT))
    trainer = quiet_trainer(strategy="single")
    found = trainer.predict(Net(), DataLoader(TOKENS, batch_size=2), ckpt_path=alone)
    torch.testing.assert_close(torch.stack(found), torch.stack([plainly(two) for two in TOKENS.split(2)]).detach())


def test_weights_in_several_files(copied: Path) -> None:
    weights = load_file(copied / "model.safetensors")
    (copied / "model.safetensors").unlink()
    places = {}
    for number, (name, value) in enumerate(weights.items(), 1):
        places[name] = f"model-{number:05d}-of-{len(weights):05d}.safetensors"
        save_file({name: value}, copied / places[name])
    index = copied / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    check(resumed("single", copied), plain())
    index.write_text(json.dumps({"weight_map": dict.fromkeys(places, "../model.safetensors")}))
    with pytest.raises(CheckpointError, match="'weight_map' does not map to names of files"):
        resumed("single", copied)


def test_a_folder_without_an_optimizer_holds_weights_only(copied: Path, said: list[str]) -> None:
    (copied / "optimizer.bin").unlink()
    trainer = resumed("single", copied, max_steps=0)
    check(trainer, plain(SAVED_AT))
    assert f"{copied} holds weights only: optimizers, step and data start anew" in said


def test_a_scheduler_that_was_not_saved_begins_anew(tmp_path: Path, said: list[str]) -> None:
    write(tmp_path / "state", prepared=False)
    for more in (0, 1):
        trainer = resumed("single", tmp_path / "state", max_steps=SAVED_AT + more)
        assert [group["lr"] for group in trainer.optimizers[0].param_groups] == [0.05 / (1 + more), 0.02 / (1 + more)]
    assert "holds no scheduler: those of configure_optimizers begin anew" in said


def test_a_scheduler_of_another_count_is_told(copied: Path, said: list[str]) -> None:
    (copied / "random_states_1.pkl").write_bytes(b"")
    state = torch.load(copied / "scheduler.bin") | {"last_epoch": 4}
    torch.save(state, copied / "scheduler.bin")
    trainer = resumed("single", copied)
    assert (
        "scheduler.bin counts 4, which at step 3 is neither steps nor 2 processes x steps: it is taken as it is" in said
    )
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 7


def test_sgd_counts_no_steps(tmp_path: Path, said: list[str]) -> None:
    module = Scalar()
    module.w.data.fill_(0.25)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.125, momentum=0.5)
    module.loss(torch.ones(1)).backward()
    optimizer.step()
    torch.save(module.state_dict(), tmp_path / "pytorch_model.bin")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.bin")
    trainer = quiet_trainer(strategy="single", max_steps=1)
    trainer.fit(Scalar(), repeated([1.0], 1), ckpt_path=tmp_path)
    assert "counts its steps: trainer.global_step starts at 0" in said
    # Gradient -0.75: w = 0.25 + 0.09375. Then -0.65625 and half the momentum of -0.75.
    assert float(whole(trainer, "w")) == 0.34375 + 0.125 * (0.65625 + 0.375)


def test_the_loss_scale_is_taken(copied: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    torch.save(scaler.state_dict() | {"_growth_tracker": 5}, copied / "scaler.pt")
    trainer = resumed("single", copied, precision="16-mixed")
    assert trainer.strategy.scaler_state() == {"scale": 512.0, "good_steps": 5 + STEPS - SAVED_AT}


def test_another_order_of_parameters_is_named(copied: Path) -> None:
    class Turned(Net):
        def configure_optimizers(self) -> Any:
            groups = [{"params": self.middle.parameters()}, {"params": [self.embedding.weight, self.gain]}]
            return torch.optim.AdamW(groups)

    with pytest.raises(CheckpointError, match=r"optimizer\.bin does not fit: by the order of the parameters 'exp_avg"):
        resumed("single", copied, Turned())

    class OneGroup(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    with pytest.raises(CheckpointError, match=r"its parameter groups have \[2, 2\] parameters, and those of .* \[4\]"):
        resumed("single", copied, OneGroup())


def test_shards_of_other_engines_are_refused(tmp_path: Path) -> None:
    (tmp_path / "fsdp" / "pytorch_model_fsdp_0").mkdir(parents=True)
    (tmp_path / "zero" / "pytorch_model").mkdir(parents=True)
    (tmp_path / "zero" / "pytorch_model" / "mp_rank_00_model_states.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"written by Accelerate under FSDP, .*`accelerate merge-weights`"):
        resumed("single", tmp_path / "fsdp")
    for folder in (tmp_path / "zero", tmp_path / "zero" / "pytorch_model"):
        with pytest.raises(CheckpointError, match=r"written by DeepSpeed, .*zero_to_fp32\.py"):
            resumed("single", folder)


def test_several_models_are_told_apart(copied: Path) -> None:
    (copied / "model_1.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="holds the weights of several models, and a fit has one"):
        resumed("single", copied)


# -- files of weights -----------------------------------------------------------------------------------------------------


def lightnings(**changes: Any) -> dict[str, Any]:
    """What Lightning 2 puts into a .ckpt."""
    module = made()
    optimizer, scheduler = parts(module)
    module(TOKENS).backward()
    optimizer.step()
    return {
        "epoch": 1, "global_step": 12, "pytorch-lightning_version": "2.5.0", "state_dict": plain(SAVED_AT),
        "loops": {"fit_loop": {"state_dict": {}, "epoch_loop.batch_progress": {"total": {"ready": 12}}}},
        "callbacks": {"ModelCheckpoint{'monitor': None}": {"best_model_score": torch.tensor(1.0), "dirpath": "/runs"}},
        "optimizer_states": [optimizer.state_dict()], "lr_schedulers": [scheduler.state_dict()],
        "hparams_name": "kwargs", "hyper_parameters": {"schedule": "inverse"}, "notes": "of the module's hook",
    } | changes  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The weights after three steps, in every kind of file."""
    folder, weights = tmp_path_factory.mktemp("files"), plain(SAVED_AT)
    paths = {name: folder / name for name in ("lightning.ckpt", "plain.pt", "of_ddp.pth", "old.bin", "st.safetensors")}
    torch.save(lightnings(), paths["lightning.ckpt"])
    torch.save(weights, paths["plain.pt"])
    torch.save({f"module.{name}": value for name, value in weights.items()}, paths["of_ddp.pth"])
    torch.save(weights, paths["old.bin"], _use_new_zipfile_serialization=False)
    # As Accelerate and transformers write it: one name of tied weights.
    save_file({n: v for n, v in weights.items() if n != "embedding.weight"}, paths["st.safetensors"])
    return paths


@pytest.mark.parametrize("name", ["lightning.ckpt", "plain.pt", "of_ddp.pth", "old.bin", "st.safetensors"])
def test_fit_begins_with_the_weights_of_a_file(files: dict[str, Path], name: str, said: list[str]) -> None:
    trainer = resumed("single", files[name], max_steps=0)
    check(trainer, plain(SAVED_AT))
    assert f"{files[name]} holds weights only: optimizers, step and data start anew" in said


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_two_ranks
def test_a_file_under_every_strategy(files: dict[str, Path], strategy: str) -> None:
    for name in ("lightning.ckpt", "st.safetensors"):
        check(resumed(strategy, files[name], max_steps=0), plain(SAVED_AT))
        trainer = quiet_trainer(strategy=strategy)
        trainer.validate(Net(), rest(2), ckpt_path=files[name], verbose=False)
        check(trainer, plain(SAVED_AT))


def test_load_weights_of_a_file(files: dict[str, Path]) -> None:
    for name in ("lightning.ckpt", "plain.pt", "old.bin", "st.safetensors"):
        weights = checkpoint.load_weights(files[name])
        expected = {n: v for n, v in plain(SAVED_AT).items() if name != "st.safetensors" or n != "embedding.weight"}
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[n], expected[n]) for n in weights)
        with pytest.raises(CheckpointError, match="has no averaged weights: leave out averaged=True"):
            checkpoint.load_weights(files[name], averaged=True)


def test_the_module_sees_what_its_hook_has_saved(tmp_path: Path) -> None:
    class Noting(Net):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.found = checkpoint

    torch.save(lightnings(), tmp_path / "x.ckpt")
    assert resumed("single", tmp_path / "x.ckpt", Noting(), max_steps=0).module.found == {
        "notes": "of the module's hook"
    }


def test_names_that_do_not_fit_are_named(tmp_path: Path) -> None:
    torch.save({"state_dict": {"middle.weight": torch.zeros(5, 5), "other": torch.zeros(1)}}, tmp_path / "x.ckpt")
    with pytest.raises(CheckpointError, match=r"not in the checkpoint: .*scale, .*; only in the checkpoint: other\."):
        resumed("single", tmp_path / "x.ckpt")


def test_what_a_file_holds_instead_is_named(tmp_path: Path) -> None:
    for content, message in (
        ({"model": {"w": torch.zeros(1)}, "epoch": 3}, "it holds model, epoch, and no 'state_dict'"),
        ({"w": 3}, "'w' is a int where a tensor belongs"),
        ([torch.zeros(1)], "it holds a list where a state_dict belongs"),
    ):
        torch.save(content, tmp_path / "x.pt")
        with pytest.raises(CheckpointError, match=message):
            checkpoint.load_weights(tmp_path / "x.pt")
    for name in ("x.ckpt", "x.safetensors"):
        (tmp_path / name).write_text("no such file")
        with pytest.raises(CheckpointError, match=rf"cannot (load|read) .*{name}"):
            resumed("single", tmp_path / name)


# -- nothing in them is called --------------------------------------------------------------------------------------------


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


def test_a_class_in_a_lightning_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "x.ckpt"
    torch.save(lightnings(hyper_parameters={"args": argparse.Namespace(lr=1.0)}), file)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load_weights(file)
    assert str(caught.value) == (
        f"cannot load {file}: it holds argparse.Namespace, and nothing from a checkpoint is imported or called: load it where "
        "that is known (a .ckpt with Lightning), and save the state_dict alone, by torch.save or safetensors"
    )


@pytest.mark.parametrize("zipped", [True, False])
def test_a_hostile_file_is_refused(tmp_path: Path, zipped: bool) -> None:
    file, touched = tmp_path / "x.ckpt", tmp_path / "touched"
    torch.save(lightnings(hyper_parameters=Touch(touched)), file, _use_new_zipfile_serialization=zipped)
    for load in (checkpoint.load_weights, lambda path: resumed("single", path)):
        with pytest.raises(CheckpointError, match=r"x\.ckpt: it holds (io\.)?open, and nothing from a checkpoint is"):
            load(file)
    file.write_bytes(pickle.dumps(Touch(touched)))
    with pytest.raises(CheckpointError, match=r"cannot load .*x\.ckpt"):
        checkpoint.load_weights(file)
    assert not touched.exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "optimizer.bin", "scheduler.bin", "scaler.pt"])
def test_a_hostile_file_in_a_folder_is_refused(copied: Path, tmp_path: Path, name: str) -> None:
    if name == "pytorch_model.bin":
        (copied / "model.safetensors").unlink()
    torch.save({"w": Touch(tmp_path / "touched")}, copied / name)
    with pytest.raises(CheckpointError, match=rf"{name}: it holds (io\.)?open, and nothing from a checkpoint is"):
        resumed("single", copied)
    assert not (tmp_path / "touched").exists()


def test_pickles_are_not_opened(copied: Path, tmp_path: Path) -> None:
    for name in ("random_states_0.pkl", "custom_checkpoint_0.pkl", "sampler.bin"):
        (copied / name).write_bytes(pickle.dumps(Touch(tmp_path / "touched")))
    check(resumed("single", copied), plain())
    assert not (tmp_path / "touched").exists()
