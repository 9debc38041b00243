"""What a strategy's fields, a launch file and a ds_config say where they are odd, or contradict each other."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from acclight import Trainer, TrainModule
from acclight.strategies import DDPStrategy, DeepSpeedStrategy, FSDP2Strategy
from acclight.strategies.resolve import resolve_strategy
from acclight.strategies.wrapping import choose_units
from tests.scenarios import Scalar, quiet_trainer, repeated


@pytest.mark.parametrize(
    ("text", "flag"), [("false", False), ("False", False), (0, False), ("true", True), ("yes", True)]
)
def test_yes_and_no_as_a_file_may_write_them(text: Any, flag: bool) -> None:
    fields = {"fsdp_activation_checkpointing": text, "fsdp_cpu_offload": text, "fsdp_reshard_after_forward": text}
    strategy = FSDP2Strategy(fields)
    assert strategy.activation_checkpointing is strategy.cpu_offload is strategy.reshard_after_forward is flag
    assert DDPStrategy(find_unused_parameters=text).given_fields["find_unused_parameters"] is flag


def test_what_is_neither_yes_nor_no_is_named() -> None:
    with pytest.raises(ValueError, match="FSDP2Strategy: fsdp_activation_checkpointing='flase': give True or False"):
        FSDP2Strategy({"fsdp_activation_checkpointing": "flase"})
    with pytest.raises(ValueError, match="FSDP2Strategy: reshard_after_forward='FULL_SHARD': give True or False"):
        FSDP2Strategy(reshard_after_forward="FULL_SHARD")


def test_a_launcher_that_says_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "FULL_SHARD"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    says = r"FSDP_RESHARD_AFTER_FORWARD='FULL_SHARD' \(a sharding strategy of FSDP 1\): give true or false"
    with pytest.raises(ValueError, match=says):
        resolve_strategy("auto")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"stage": 3, "ds_config": {"zero_optimization": {"stage": 2}}}, "stage=3 contradicts ds_config stage=2"),
        (
            {"gradient_clipping": 1.0, "ds_config": {"gradient_clipping": 2.0}},
            "gradient_clipping=1.0 contradicts ds_config",
        ),
        (
            {"gradient_accumulation_steps": 2, "ds_config": {"gradient_accumulation_steps": 4}},
            "gradient_accumulation_steps=2 contradicts ds_config gradient_accumulation_steps=4",
        ),
        (
            {"ds_config": {"zero_optimisation": {"stage": 3}}},
            "no key 'zero_optimisation'; did you mean 'zero_optimization'?",
        ),
        ({"ds_config": {"gradient_cliping": 1.0}}, "did you mean 'gradient_clipping'?"),
        ({"ds_config": {"bf61": {"enabled": True}}}, "did you mean 'bf16'?"),
        (
            {"ds_config": {"scheduler": {"type": "WarmupLR"}}},
            "a section 'scheduler', which is not used: .*configure_optimizers",
        ),
        (
            {"ds_config": {"optimizer": {"type": "AdamW"}}},
            "a section 'optimizer', which is not used: configure_optimizers",
        ),
        ({"ds_config": {"torch_autocast": {"enabled": True}}}, "a section 'torch_autocast', .*precision"),
    ],
)
def test_a_ds_config_that_contradicts_or_does_nothing(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        DeepSpeedStrategy(**fields)


@pytest.mark.parametrize(
    ("strategy", "fields", "says"),
    [
        (DDPStrategy, {"timeout": 0}, "timeout=0: give seconds, more than 0, or a timedelta"),
        (FSDP2Strategy, {"timeout": None}, "timeout=None: give seconds"),
        (DeepSpeedStrategy, {"timeout": float("inf")}, "timeout=inf: give seconds"),
        (DDPStrategy, {"bucket_cap_mb": "25"}, "bucket_cap_mb='25': give a number of MiB"),
        (DDPStrategy, {"comm_wrapper": "fp16"}, "comm_wrapper='fp16' belongs to a PowerSGD hook, and comm_hook='no'"),
        (DDPStrategy, {"comm_state_option": {"a": 1}, "comm_hook": "fp16"}, "comm_state_option=.*and comm_hook='fp16'"),
        (FSDP2Strategy, {"version": "two"}, "version='two': acclight runs FSDP version 2"),
        (FSDP2Strategy, {"auto_wrap_policy": None}, "auto_wrap_policy=None: choose one of"),
        (FSDP2Strategy, {"min_num_params": -3}, "min_num_params=-3: give a number of parameters"),
        (FSDP2Strategy, {"ignored_modules": "("}, r"ignored_modules='\(' is no regular expression"),
        (
            FSDP2Strategy,
            {"ignored_modules": ["head"]},
            "ignored_modules='head': give modules, or one regular expression",
        ),
        (FSDP2Strategy, {"mixed_precision_policy": {"param_dtype": 16}}, "param_dtype=16 is no type; use bf16"),
        (DeepSpeedStrategy, {"stage": 2.5}, r"stage=2\.5: DeepSpeed ZeRO has the stages 1, 2 and 3"),
        (DeepSpeedStrategy, {"stage": True}, "stage=True: DeepSpeed ZeRO"),
        (DeepSpeedStrategy, {"stage": "auto"}, "stage='auto': DeepSpeed ZeRO"),
        (DeepSpeedStrategy, {"ds_config": {"bf16": True}}, "ds_config bf16=True: give a section"),
        (DeepSpeedStrategy, {"ds_config": {"zero_optimization": 2}}, "ds_config zero_optimization=2: give a section"),
        (DeepSpeedStrategy, {"ds_config": {"gradient_clipping": None}}, "gradient_clipping=None: give a number"),
        (DeepSpeedStrategy, {"ds_config": {"gradient_clipping": -1}}, "gradient_clipping=-1: give a number"),
        (DeepSpeedStrategy, {"ds_config": {"train_batch_size": "2"}}, "train_batch_size='2': give a whole number"),
    ],
)
def test_values_that_cannot_be(strategy: Any, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        strategy(**fields)


def test_forms_that_can_be() -> None:
    assert DDPStrategy(timeout=timedelta(minutes=2)).timeout == timedelta(seconds=120)
    assert FSDP2Strategy(transformer_cls_names_to_wrap="Block,").transformer_cls_names_to_wrap == ["Block"]
    assert FSDP2Strategy(transformer_cls_names_to_wrap=[nn.Linear]).transformer_cls_names_to_wrap == ["Linear"]


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    for name, text in (("bad.yaml", "a: [1"), ("bad.json", "{")):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=rf"FSDP2Strategy\('.*{name}'\) cannot be read: "):
            FSDP2Strategy(tmp_path / name)


def test_other_arguments_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="gradient_accumulation_kwargs=3: give a dict"):
        Trainer(accelerator_config={"gradient_accumulation_kwargs": 3})
    with pytest.raises(ValueError, match="sync_each_batch='false': give True or False"):
        Trainer(accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": "false"}})
    with pytest.raises(ValueError, match="parallelism: dp_shard_size='2': give a whole number"):
        Trainer(strategy="fsdp2", parallelism={"dp_shard_size": "2"}, logger=False)


def test_what_agrees_or_is_not_known_is_left_alone() -> None:
    config = {"zero_optimization": {"stage": 2}, "some_new_key": 1, "torch_autocast": {"enabled": False}}
    assert DeepSpeedStrategy(stage=2, ds_config=config).stage == 2
    assert DeepSpeedStrategy(ds_config={"zero_optimization": {"stage": 1}}).stage == 1
    assert DeepSpeedStrategy(gradient_clipping=1.0, ds_config={"gradient_clipping": "auto"}).configured_clip == 1.0


AUTO = dict.fromkeys(
    ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"), "auto"
)


class Language(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        sizes = dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 1) | {"intermediate_size": 8}
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=20, **sizes))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def zero_section(module: TrainModule, data: Any) -> Any:
    strategy = DeepSpeedStrategy(stage=3, ds_config={"zero_optimization": {"stage": 3, **AUTO}})
    trainer = quiet_trainer(strategy=strategy, max_steps=1)
    trainer.fit(module, data)
    return trainer.strategy.wrapped._config.zero_config  # type: ignore[attr-defined]


def test_auto_goes_by_the_models_width_or_is_deepspeeds_default() -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    ids: Any = DataLoader(torch.zeros(2, 4, dtype=torch.long), batch_size=2)  # type: ignore[arg-type]
    zero = zero_section(Language(), ids)
    # As Accelerate fills them in for a width of 20: 20^2, 0.9 * 20^2 and 10 * 20.
    assert (zero.reduce_bucket_size, zero.prefetch_bucket_size, zero.param_persistence_threshold) == (400, 360, 200)
    zero, default = zero_section(Scalar(), repeated([1.0], 1)), DeepSpeedZeroConfig(stage=3)
    for name in ("reduce_bucket_size", "prefetch_bucket_size", "param_persistence_threshold"):
        assert getattr(zero, name) == getattr(default, name)


def test_the_rest_of_a_launch_file_is_not_dropped_in_silence(tmp_path: Path) -> None:
    (tmp_path / "launch.yaml").write_text(
        "distributed_type: FSDP\nmixed_precision: bf16\ngradient_accumulation_steps: 4\nfsdp_config:\n  fsdp_version: 2\n"
    )
    with pytest.warns(
        UserWarning, match=r"mixed_precision='bf16' of the file has no effect here: give Trainer\(precision="
    ):
        FSDP2Strategy(tmp_path / "launch.yaml")
    with pytest.warns(UserWarning, match=r"gradient_accumulation_steps=4 .*Trainer\(accumulate_grad_batches="):
        FSDP2Strategy(tmp_path / "launch.yaml")
    (tmp_path / "empty.yaml").write_text("distributed_type: FSDP\nmixed_precision: 'no'\nfsdp_config:\n")
    assert FSDP2Strategy(tmp_path / "empty.yaml").given_fields == {}


def test_the_scripts_accumulation_wins_over_the_launchers_with_a_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "2")
    quiet_trainer(strategy="single", max_steps=1, accumulate_grad_batches=4).fit(Scalar(), repeated([1.0] * 4, 1))
    assert (
        "accumulate_grad_batches=4 of the script wins over gradient_accumulation_steps=2 of the launcher" in caplog.text
    )


def test_a_scripts_ds_config_wins_over_the_launchers_fields_with_a_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launched = {"USE_DEEPSPEED": "true", "DEEPSPEED_ZERO_STAGE": "2", "GRADIENT_CLIPPING": "0.7"}
    for name, value in launched.items():
        monkeypatch.setenv(f"ACCELERATE_{name}", value)
    config = {"zero_optimization": {"stage": 3}, "gradient_clipping": 0.1}
    strategy = resolve_strategy(DeepSpeedStrategy(ds_config=config))
    assert (strategy.name, strategy.configured_clip) == ("deepspeed_stage_3", 0.1)
    assert "stage=3 of the script wins over stage=2 of the launcher" in caplog.text
    assert "gradient_clipping=0.1 of the script wins over gradient_clipping=0.7 of the launcher" in caplog.text


class Block(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


def test_a_tie_between_units_is_named() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    module = nn.Sequential(Block(first), Block(second))
    says = "'0.inner.weight' and '1.inner.weight' are one parameter, but are wrapped in different units"
    with pytest.raises(ValueError, match=re.escape(says)):
        choose_units(module, "TRANSFORMER_BASED_WRAP", ["Block"], 0)
    # Within one unit, or in none, it is well.
    outer = nn.Sequential(Block(nn.Sequential(first, second)))
    assert choose_units(outer, "TRANSFORMER_BASED_WRAP", ["Block"], 0) == [outer[0]]
    assert choose_units(nn.Sequential(first, second, Block(nn.Linear(1, 1))), "TRANSFORMER_BASED_WRAP", ["Block"], 0)


def test_trainers_are_made_with_such_strategies() -> None:
    assert Trainer(strategy=FSDP2Strategy({"fsdp_cpu_offload": "false"}), logger=False).strategy.name == "fsdp2"
