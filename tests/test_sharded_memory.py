"""What each rank holds: counted from the live tensors, each storage once, during training and while a model is created."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from acclight import Callback, Trainer, TrainModule
from acclight.strategies import DeepSpeedStrategy, FSDP2Strategy
from tests.distributed import RankChecks
from tests.scenarios import quiet_trainer, whole

on_two_ranks = RankChecks(world_size=2, backend="gloo", timeout=180.0)

WIDTH, DEPTH = 1000, 40
#: 40 million float32 weights, in bytes; below, sizes are given in this unit.
MODEL = WIDTH * WIDTH * DEPTH * 4


class Deep(TrainModule):
    """Forty million weights in forty layers, created in `configure_model`."""

    def __init__(self, width: int = WIDTH, depth: int = DEPTH) -> None:
        super().__init__()
        self.sizes = width, depth

    def configure_model(self) -> None:
        width, depth = self.sizes
        self.layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def strategy_of(name: str, **fields: Any) -> Any:
    """FSDP2 with one unit per layer, and ZeRO whose buckets of a fixed size (2 GB by default) hold one layer."""
    if name == "fsdp2":
        return FSDP2Strategy(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=WIDTH * WIDTH, **fields)
    if name == "ddp":
        return name
    sizes = dict.fromkeys(("reduce_bucket_size", "allgather_bucket_size"), WIDTH * WIDTH)
    stage = int(name[-1])
    return DeepSpeedStrategy(stage=stage, ds_config={"zero_optimization": {"stage": stage, **sizes}}, **fields)


def storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """The memory behind a tensor on this rank; none for those on the meta device."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    if tensor.layout is torch.strided and tensor.device.type == "cpu":
        yield tensor.untyped_storage()


def collect() -> None:
    # Twice: what the end of a Trainer lets go is garbage only then.
    gc.collect()
    gc.collect()


def live_bytes() -> int:
    """What all tensors of this process take, and their gradients, each storage once."""
    collect()
    found: dict[int, int] = {}
    for tensor in [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]:
        for one in (tensor, *([tensor.grad] if tensor.is_leaf and tensor.grad is not None else [])):
            found |= {storage.data_ptr(): storage.nbytes() for storage in storages(one)}
    found.pop(0, None)
    return sum(found.values())


# --- training ------------------------------------------------------------------------------------------------------------


class Weigh(Callback):
    """Notes what is alive, beyond what was at the start, at three moments of one step with two micro-batches."""

    def __init__(self) -> None:
        self.before = live_bytes()
        self.found: dict[str, float] = {}

    def note(self, moment: str) -> None:
        self.found.setdefault(moment, (live_bytes() - self.before) / MODEL)

    def on_train_batch_end(self, trainer: Trainer, module: TrainModule, *args: Any) -> None:
        self.note("between micro-batches")

    def on_before_optimizer_step(self, trainer: Trainer, module: TrainModule, optimizer: Optimizer) -> None:
        self.note("before the step")

    def on_step(self, trainer: Trainer, module: TrainModule) -> None:
        self.note("after the step")


#: By hand, in models: whole weights 1, gradient 1, AdamW's two moments 2. Columns: between two micro-batches, before the step and
#: after it.
#:
#: - DDP shares nothing. (Its reducer's buckets lie beside, in C++, where they are not counted.)
#: - FSDP2 holds half of everything: 1/2 + 1/2, then also 2/2. Between micro-batches the gradient is whole (1/2 + 1): it is
#:   exchanged once per window.
#: - ZeRO steps float32 master weights of its own, a second copy beside those that the model computes with, so that unsharded it
#:   would hold 1 + 1 + 1 + 2 = 5.
#:   Stage 1: weights 1, master 1/2, moments 2/2; the gradient is whole until the window ends, then half: 5/2, 4/2, and after the
#:   step, which frees it, 5/2. Stage 2: the gradient is always half: 4/2, 4/2, 5/2. Stage 3: weights half too, and the gradient's
#:   buffer is kept: 3/2, 3/2, and half of 5.
HELD = {
    "ddp": (2.0, 2.0, 4.0),
    "fsdp2": (1.5, 1.0, 2.0),
    "deepspeed_stage_1": (2.5, 2.0, 2.5),
    "deepspeed_stage_2": (2.0, 2.0, 2.5),
    "deepspeed_stage_3": (1.5, 1.5, 2.5),
}


@on_two_ranks
@pytest.mark.parametrize("strategy", list(HELD))
def test_what_a_rank_holds_in_training(strategy: str) -> None:
    weigh = Weigh()
    assert weigh.before < 0.01 * MODEL, "an earlier test's model is still there"
    trainer = quiet_trainer(strategy=strategy_of(strategy), max_steps=1, accumulate_grad_batches=2, callbacks=weigh)
    trainer.fit(Deep(), DataLoader(torch.randn(4, WIDTH), batch_size=1))
    moments = ("between micro-batches", "before the step", "after the step")
    assert weigh.found == pytest.approx(dict(zip(moments, HELD[strategy], strict=True)), rel=0.03)


@on_two_ranks
@pytest.mark.parametrize("stage", [1, 2])
def test_a_zero_engine_goes_with_its_trainer(stage: int) -> None:
    trainer = quiet_trainer(strategy=DeepSpeedStrategy(stage=stage), max_steps=1)
    trainer.fit(Deep(8, 2), DataLoader(torch.randn(4, 8), batch_size=2))
    engine = weakref.ref(trainer.strategy.wrapped)
    assert engine() is not None
    del trainer
    collect()
    assert engine() is None


# --- creation ------------------------------------------------------------------------------------------------------------


class Peak(TorchDispatchMode):
    """The most bytes that tensors made under it took at once, each storage once."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._live: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, Tensor):
                self._live |= {storage._cdata: weakref.ref(storage) for storage in storages(tensor)}
        alive = {key: storage for key, ref in self._live.items() if (storage := ref()) is not None}
        self._live = {key: self._live[key] for key in alive}
        self.bytes = max(self.bytes, sum(storage.nbytes() for storage in alive.values()))
        return outputs


class WeighCreation(Callback):
    """Notes the peaks while `configure_model` runs and until the model is wrapped."""

    def __init__(self) -> None:
        self.peak = Peak()
        self.created = self.wrapped = 0.0

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        make = module.configure_optimizers

        def note() -> Any:
            self.created = self.peak.bytes / MODEL
            return make()

        module.configure_optimizers = note  # type: ignore[method-assign]
        self.peak.__enter__()

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        self.peak.__exit__(None, None, None)
        self.wrapped = self.peak.bytes / MODEL


#: What is created, and what there is at most until it is wrapped, in models: per rank. A layer is 1/40.
CREATED: dict[str, tuple[dict[str, Any], list[tuple[float, float]]]] = {
    # The whole model on every rank, then half of it beside.
    "fsdp2": ({}, [(1.0, 1.5)] * 2),
    # Layer by layer: nothing is kept; then half of the model, a whole layer, and what is sent of it.
    "fsdp2 created sharded": ({"create_sharded": True}, [(0.025, 0.5 + 0.075)] * 2),
    # Rank 0 alone has the model.
    "fsdp2 from rank 0": ({"cpu_ram_efficient_loading": True}, [(1.0, 1.5), (0.025, 0.5 + 0.075)]),
    # The engine makes half of the weights anew, in float32, and room for half of the gradient: not more with a whole model.
    "deepspeed_stage_3": ({}, [(1.0, 1.6)] * 2),
    "deepspeed_stage_3 created sharded": ({"zero3_init_flag": True}, [(0.5 + 0.05, 1.6)] * 2),
}


@on_two_ranks
@pytest.mark.parametrize("how", list(CREATED))
def test_no_rank_ever_holds_the_whole_model(how: str) -> None:
    fields, limits = CREATED[how]
    collect()
    weigh = WeighCreation()
    trainer = quiet_trainer(strategy=strategy_of(how.partition(" ")[0], **fields), max_steps=1, callbacks=weigh)
    trainer.fit(Deep(), DataLoader(torch.randn(2, WIDTH), batch_size=1))
    created, wrapped = limits[trainer.global_rank]
    assert weigh.created == pytest.approx(created, rel=0.06)
    assert weigh.wrapped == pytest.approx(wrapped, rel=0.08)


class Custom(nn.Module):
    """A parameter of its own, and no `reset_parameters` that could make it again."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.arange(7.0))


class Mixed(TrainModule):
    """Ties, odd sizes, buffers, a parameter of the module's own, and weights that a method of the model initializes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)

    def configure_model(self) -> None:
        self.inner = nn.Linear(7, 3)
        self.norm = nn.BatchNorm1d(7)
        self.custom = Custom()
        self.outer = nn.Linear(3, 7, bias=False)
        self.lifted = nn.Linear(7, 3, bias=False)
        self.lifted.weight = self.inner.weight
        self.outer.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        nn.init.constant_(module.weight, 0.02)  # type: ignore[arg-type]

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        x = self.norm(self.first(batch)) + self.custom.offset
        return (self.lifted(self.outer(self.inner(x))) - 1.0).square().mean()

    def configure_optimizers(self) -> Any:
        named = dict(self.named_parameters())
        plain = [p for name, p in named.items() if "bias" not in name]
        rest = {"params": [p for name, p in named.items() if "bias" in name], "weight_decay": 0.0}
        return torch.optim.AdamW([{"params": plain}, rest], lr=0.05, weight_decay=0.1)


@on_two_ranks
def test_a_sharded_creation_gives_the_weights_of_a_plain_one(tmp_path: Path) -> None:
    data = torch.randn(8, 5, generator=torch.Generator().manual_seed(1))
    found = []
    # The seeds of the ranks differ: rank 0's weights count.
    for fields in ({}, {"create_sharded": True}, {"cpu_ram_efficient_loading": True}):
        torch.manual_seed(3 + dist.get_rank())
        module = Mixed()
        trainer = quiet_trainer(strategy=FSDP2Strategy(auto_wrap_policy="NO_WRAP", **fields), max_steps=2)
        trainer.fit(module, DataLoader(data, batch_size=2))
        assert module.lifted.weight is module.inner.weight
        found.append({name: whole(trainer, name) for name in sorted(module.state_dict())})
    for values in found[1:]:
        assert values.keys() == found[0].keys()
        assert [name for name, value in values.items() if not torch.equal(value, found[0][name])] == []
    trainer.save_checkpoint(tmp_path / "saved")
    fresh = quiet_trainer(strategy=FSDP2Strategy(auto_wrap_policy="NO_WRAP", create_sharded=True), max_steps=2)
    fresh.fit(Mixed(), DataLoader(data, batch_size=2), ckpt_path=tmp_path / "saved")
    assert fresh.global_step == 2
    # Parameters alone: running means are each rank's own until they are saved, which rank 0's are.
    parameters = {name: whole(fresh, name) for name, _ in fresh.module.named_parameters()}
    assert [name for name, value in parameters.items() if not torch.equal(value, found[0][name])] == []


@on_two_ranks
def test_a_transformers_model_is_initialized_as_it_asks() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 101, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.5)

    class Llama(TrainModule):
        def configure_model(self) -> None:
            self.model = LlamaForCausalLM(config)

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return self.model(input_ids=batch, labels=batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    module = Llama()
    trainer = quiet_trainer(strategy=FSDP2Strategy(create_sharded=True), max_steps=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="create_sharded")
        trainer.fit(module, DataLoader(torch.randint(0, 101, (4, 6)), batch_size=2))
    # nn.Linear's own would be uniform, with a deviation of 1 / sqrt(3 * 64) = 0.07.
    assert float(whole(trainer, "model.model.layers.1.mlp.up_proj.weight").std()) == pytest.approx(0.5, rel=0.05)
    assert bool((whole(trainer, "model.model.norm.weight") == 1.0).all())
    frequencies = 1.0 / config.rope_parameters["rope_theta"] ** (torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(module.model.model.rotary_emb.inv_freq, frequencies)


@on_two_ranks
def test_what_a_sharded_creation_cannot_keep_is_said() -> None:
    class Scaled(Mixed):
        def configure_model(self) -> None:
            super().configure_model()
            nn.init.zeros_(self.inner.bias)

    class OnMeta(Mixed):
        def configure_model(self) -> None:
            with torch.device("meta"):
                super().configure_model()

    loader = DataLoader(torch.randn(4, 5), batch_size=2)
    trainer = quiet_trainer(strategy=FSDP2Strategy(auto_wrap_policy="NO_WRAP", create_sharded=True), max_steps=1)
    module = Scaled()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, loader)
    said = [str(one.message) for one in caught if "create_sharded" in str(one.message)]
    assert len(said) == (1 if trainer.is_global_zero else 0)
    assert all("configure_model has changed 'bias' of a Linear" in text for text in said)
    with pytest.raises(ValueError, match=r"'inner\.weight' is on the meta device, .*create_sharded=True"):
        quiet_trainer(strategy="fsdp2", max_steps=1).fit(OnMeta(), loader)


def test_two_ways_to_create_are_one_too_many() -> None:
    with pytest.raises(ValueError, match="create_sharded=True leaves no weights for rank 0 to load"):
        FSDP2Strategy(create_sharded=True, cpu_ram_efficient_loading=True)
