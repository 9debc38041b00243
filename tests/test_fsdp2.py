"""FSDP2Strategy's fields that decide what is exported, what a launch file says, and what only a TPU can run."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from acclight import TrainModule, checkpoint
from acclight.callbacks import ModelCheckpoint
from acclight.strategies import FSDP2Strategy
from tests.distributed import ROOT, RankChecks, run_command, run_ranks
from tests.scenarios import quiet_trainer, whole

on_two_ranks = RankChecks(world_size=2, timeout=120.0)


class Layers(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return (self.net(batch) - 1.0).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        # Worse with each epoch, so that the first is the best.
        self.log("val_loss", float(self.trainer.current_epoch) if self.trainer.state == "fit" else -1.0)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader() -> DataLoader[Any]:
    return DataLoader(torch.randn(8, 4, generator=torch.Generator().manual_seed(1)), batch_size=2)


# --- what is exported --------------------------------------------------------------------------------------------------------


@on_two_ranks
@pytest.mark.parametrize("given", ["SHARDED_STATE_DICT", "full_state_dict", None])
def test_state_dict_type_decides_the_exported_files(given: str | None, tmp_path: Path) -> None:
    fields = {} if given is None else {"fsdp_state_dict_type": given}
    trainer = quiet_trainer(strategy=FSDP2Strategy(fields), max_steps=1)
    trainer.fit(Layers(), loader())
    assert trainer.accelerator.state.fsdp_plugin.state_dict_type.name == (given or "SHARDED_STATE_DICT").upper()
    trainer.save_checkpoint(tmp_path / "saved")
    shards = sorted(file.name for file in (tmp_path / "saved" / "model").iterdir())
    assert len(shards) == 2, "a checkpoint to resume from is always sharded"
    expected = {name: whole(trainer, name) for name in ("net.0.weight", "net.0.bias", "net.1.weight", "net.1.bias")}
    if not trainer.is_global_zero:
        return
    out = checkpoint.export(tmp_path / "saved", tmp_path / "out")
    files = sorted(file.name for file in out.iterdir())
    if given == "SHARDED_STATE_DICT":
        parts = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
        assert files == [*parts, "model.safetensors.index.json"]
        index = json.loads((out / "model.safetensors.index.json").read_text())
        # 24 + 6 + 12 + 2 numbers of 4 bytes.
        assert index["metadata"]["total_size"] == 176
        held = {name: part for part in parts for name in safetensors.torch.load_file(out / part)}
        assert index["weight_map"] == held
        found = {name: v for part in parts for name, v in safetensors.torch.load_file(out / part).items()}
    else:
        assert files == ["model.safetensors"]
        found = safetensors.torch.load_file(out / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def save_gpt(folder: str) -> None:
    import transformers

    class Gpt(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=4)
            self.model = transformers.GPT2LMHeadModel(config)

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return self.model(batch, labels=batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = quiet_trainer(strategy=FSDP2Strategy(state_dict_type="SHARDED_STATE_DICT"), max_steps=1)
    trainer.fit(Gpt(), DataLoader(torch.arange(16).reshape(4, 4) % 11, batch_size=2))
    trainer.save_checkpoint(Path(folder) / "saved")


def test_a_sharded_export_loads_in_transformers(tmp_path: Path) -> None:
    import transformers

    run_ranks(save_gpt, [str(tmp_path)], world_size=2)
    out = checkpoint.export(tmp_path / "saved", tmp_path / "out")
    assert len(list(out.glob("model-*.safetensors"))) == 2
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    weights = checkpoint.load_weights(tmp_path / "saved")
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, weights[f"model.{name}"]), name


@on_two_ranks
def test_weights_alone_are_saved_sharded_and_the_best_is_loaded_at_the_end(tmp_path: Path) -> None:
    saver = ModelCheckpoint(dirpath=tmp_path, monitor="val_loss", save_weights_only=True)
    trainer = quiet_trainer(
        strategy=FSDP2Strategy(state_dict_type="SHARDED_STATE_DICT"),
        max_epochs=2,
        callbacks=saver,
        num_sanity_val_steps=0,
    )
    module = Layers()
    trainer.fit(module, loader(), loader())
    last = whole(trainer, "net.0.weight")
    best = checkpoint.load_weights(saver.best_model_path)["net.0.weight"]
    assert not list(Path(saver.best_model_path).glob("optimizer/*")), "weights only"
    assert not torch.equal(best, last), "the first of two epochs is the best"
    trainer.validate(module, loader(), ckpt_path="best")
    with trainer.core.active():
        assert torch.equal(whole(trainer, "net.0.weight"), best)


# --- the launch file ---------------------------------------------------------------------------------------------------------


SCRIPT = """
import sys
from acclight import Trainer
trainer = Trainer(logger=False, enable_progress_bar=False)
sys.stdout.write(f"offload {trainer.strategy.cpu_offload}\\n")
"""


@pytest.mark.parametrize(
    ("key", "offload"),
    [("fsdp_cpu_offload", False), pytest.param("fsdp_offload_params", True, marks=pytest.mark.slow)],
)
def test_a_spelling_that_only_the_launcher_reads_is_warned_of(key: str, offload: bool, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "launch.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_machines: 1\nnum_processes: 2\nmixed_precision: 'no'\n"
        f"main_process_port: 0\nfsdp_config:\n  fsdp_version: 2\n  {key}: true\n"
    )
    accelerate = Path(sys.executable).parent / "accelerate"
    command = [accelerate, "launch", "--config_file", "launch.yaml", "train.py"]
    done = run_command(command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(f"offload {offload}") == 2, done.stdout
    text = "fsdp_cpu_offload: true in "
    assert done.stdout.count(text) == int(not offload), done.stdout
    assert offload or "write fsdp_offload_params: true there" in done.stdout


def test_class_names_are_case_sensitive() -> None:
    trainer = quiet_trainer(strategy=FSDP2Strategy(transformer_cls_names_to_wrap="linear"), max_steps=1)
    with pytest.raises(
        ValueError, match=r"no module of the model is a 'linear'; did you mean 'Linear'\? There are: Linear, Sequential"
    ):
        trainer.fit(Layers(), loader())


# --- TPUs ----------------------------------------------------------------------------------------------------------------------


def test_xla_needs_its_package_and_says_so() -> None:
    with pytest.raises(
        ImportError, match=r"xla=True\) needs torch_xla, which is not installed: `pip install torch_xla`"
    ):
        FSDP2Strategy({"xla": True})
    with pytest.warns(UserWarning, match="xla_fsdp_grad_ckpt=True has no effect without xla=True"):
        strategy = FSDP2Strategy(
            {"xla": False, "xla_fsdp_settings": {"compute_dtype": "bfloat16"}, "xla_fsdp_grad_ckpt": True}
        )
    assert strategy.xla_fsdp_settings == {"compute_dtype": "bfloat16"}
    with pytest.raises(ValueError, match="no field 'xla_fsdp_setting'; did you mean 'xla_fsdp_settings'"):
        FSDP2Strategy(xla_fsdp_setting={})


STAND_IN = """
from torch import nn
calls = []

def checkpoint_module(module):
    calls.append(("checkpointed", type(module).__name__))
    return module

class XlaFullyShardedDataParallel(nn.Module):
    def __init__(self, module, auto_wrap_policy=None, auto_wrapper_callable=None, **settings):
        super().__init__()
        self.module = module
        calls.append((type(module).__name__, settings))
        if auto_wrap_policy is not None:
            for part in list(module.modules()):
                if part is not module and auto_wrap_policy(part, False, 0):
                    auto_wrapper_callable(part, **settings)

    def forward(self, *args):
        calls.append("forward")
        return self.module(*args)
"""


def validated_by_a_stand_in(folder: str) -> None:
    package = Path(folder) / "torch_xla" / "distributed"
    package.mkdir(parents=True)
    (package / "fsdp.py").write_text(STAND_IN)
    sys.path.insert(0, folder)
    strategy = FSDP2Strategy(
        xla=True, xla_fsdp_settings={"compute_dtype": "bfloat16", "shard_param_on_dim_0": True}, xla_fsdp_grad_ckpt=True,
        transformer_cls_names_to_wrap="Linear",
    )  # fmt: skip
    quiet_trainer(strategy=strategy).validate(Layers(), loader())
    from torch_xla.distributed import fsdp

    settings = {"compute_dtype": torch.bfloat16, "shard_param_on_dim_0": True}
    inner = [("checkpointed", "Linear"), ("Linear", settings)]
    assert fsdp.calls == [("StepModule", settings), *inner, *inner, *["forward"] * 4]
    assert os.environ["WORLD_SIZE"] == "1"


def test_xla_settings_reach_its_wrapper(tmp_path: Path) -> None:
    """With a stand-in for torch_xla, which has no wheel for this torch and needs a TPU."""
    run_ranks(validated_by_a_stand_in, [str(tmp_path)], world_size=1)


# --- the version of Accelerate ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ("1.14.0", "acclight needs accelerate 1.15 or newer, and 1.14.0 is installed"),
        (None, "1.15 or newer, and none is"),
    ],
)
def test_an_accelerate_that_is_missing_or_too_old_is_named(found: str | None, message: str, tmp_path: Path) -> None:
    script = tmp_path / "old.py"
    script.write_text(
        "import importlib.metadata as metadata\nreal = metadata.version\n"
        "def version(name):\n"
        f"    if name == 'accelerate' and {found!r} is None:\n        raise metadata.PackageNotFoundError(name)\n"
        f"    return {found!r} if name == 'accelerate' else real(name)\n"
        "metadata.version = version\n"
        "try:\n    import acclight\nexcept ImportError as error:\n    print(error)\n"
    )
    done = run_command([sys.executable, script], env={"PYTHONPATH": str(ROOT)})
    assert message in done.stdout
    assert "`pip install 'accelerate>=1.15'`" in done.stdout


def test_newer_versions_are_taken_and_the_floor_is_the_projects(monkeypatch: pytest.MonkeyPatch) -> None:
    import tomllib

    from acclight import accelerate_version

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"accelerate>={accelerate_version.NEEDED}" in project["dependencies"]
    for found in ("1.15.0", "1.15.0.dev0", "1.16rc1", "2.0"):
        monkeypatch.setattr(accelerate_version, "version", lambda name, found=found: found)
        accelerate_version.check_accelerate()
