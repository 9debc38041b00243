"""TransformersModule: gradients, weights and metrics are those of a plain PyTorch loop over the big batch."""

from __future__ import annotations

import copy
import importlib.util
import math
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForCausalLM,
    BertConfig,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from acclight import Callback, Trainer, TrainModule, checkpoint
from acclight.integrations.transformers import MeanLoss, TransformersModule
from acclight.strategies import DeepSpeedStrategy
from tests.distributed import RankChecks
from tests.scenarios import quiet_trainer, whole

on_two_ranks = RankChecks(world_size=2, timeout=120.0)

VOCABULARY = 23
LENGTH = 7
HAS_PEFT = importlib.util.find_spec("peft") is not None
Row = dict[str, Tensor]


def llama(**changes: Any) -> LlamaConfig:
    """Two layers with biases and norms, a tied head, and sizes that two ranks cannot share evenly."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=12,
        intermediate_size=15,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        initializer_range=0.3,
        **changes,
    )


def bert(**changes: Any) -> BertConfig:
    dropouts = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    return BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=12,
        intermediate_size=15,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        initializer_range=0.3,
        **dropouts,
        **changes,
    )


def ragged_rows(samples: int) -> list[Row]:
    """Token rows of which between one and all positions count, the first one included."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(1, VOCABULARY, (samples, LENGTH), generator=generator)
    labels = tokens.clone()
    labels[torch.arange(LENGTH) >= torch.randint(2, LENGTH + 1, (samples, 1), generator=generator)] = -100
    return [{"input_ids": t, "labels": y} for t, y in zip(tokens, labels, strict=True)]


def stacked(rows: list[Row]) -> Row:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def plain_groups(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    def decays(name: str) -> bool:
        return name.endswith("weight") and "norm" not in name.lower()

    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if decays(name)], "weight_decay": decay},
        {"params": [p for name, p in named if not decays(name)], "weight_decay": 0.0},
    ]


# --- the gradient of the big batch --------------------------------------------------------------------------------------

MICRO = 2
STEPS = 4
# The attention hardly depends on the bias of its keys; with a smaller one Adam would make a step of its gradient's rounding.
EPSILON = 1e-3


def plain_causal_lm(model: nn.Module, rows: list[Row], window: int) -> nn.Module:
    """Four AdamW steps over whole windows at once; the schedule rises over two steps and falls to zero at the fourth."""
    optimizer = torch.optim.AdamW(plain_groups(model, 0.1), lr=1e-2, eps=EPSILON)
    for step, factor in enumerate((0.0, 0.5, 1.0, 0.5)):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * factor
        batch = stacked(rows[step % 2 * window :][:window])
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    return model


def check_causal_lm(strategy: Any, world: int, **arguments: Any) -> None:
    window = world * MICRO * 2
    rows, held_out = ragged_rows(2 * window), ragged_rows(2 * window + 3)[2 * window :]
    torch.manual_seed(11)
    model = LlamaForCausalLM(llama())
    expected = plain_causal_lm(copy.deepcopy(model), rows, window)
    module = TransformersModule(
        model, learning_rate=1e-2, weight_decay=0.1, adam_epsilon=EPSILON, warmup_steps=2, **arguments
    )
    trainer = quiet_trainer(strategy=strategy, accumulate_grad_batches=2, max_epochs=2, num_sanity_val_steps=0)
    trainer.fit(module, DataLoader(rows, batch_size=MICRO), DataLoader(held_out, batch_size=1))
    assert trainer.global_step == STEPS
    for name, value in expected.named_parameters():
        own = whole(trainer, f"model.{name}")
        torch.testing.assert_close(own, value.detach(), atol=1e-6, rtol=0.0, msg=lambda text, n=name: f"{n}: {text}")
    assert module.model.lm_head.weight is module.model.model.embed_tokens.weight
    with torch.no_grad():
        loss = float(expected.eval()(**stacked(held_out)).loss)
    assert float(trainer.callback_metrics["val/loss"]) == pytest.approx(loss, abs=1e-6)
    assert float(trainer.callback_metrics["val/perplexity"]) == pytest.approx(math.exp(loss), rel=1e-6)


@pytest.mark.parametrize("recomputed", [False, True])
def test_causal_lm_in_one_process(recomputed: bool) -> None:
    check_causal_lm("single", 1, gradient_checkpointing=recomputed)


@on_two_ranks
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "deepspeed_stage_2", "deepspeed_stage_3"])
def test_causal_lm_on_two_ranks(strategy: str, recomputed: bool) -> None:
    check_causal_lm(strategy, 2, gradient_checkpointing=recomputed)


def test_the_data_tells_a_mean_of_means_from_the_mean() -> None:
    """Also when the first label of each row is counted, which no loss of a shifted row sees."""
    rows, model = ragged_rows(4), LlamaForCausalLM(llama())
    losses = [float(model(**stacked([row])).loss.detach()) for row in rows]
    counts = [int((row["labels"] != -100).sum()) for row in rows]
    true = float(model(**stacked(rows)).loss.detach())
    assert abs(sum(losses) / 4 - true) > 1e-3
    assert abs(sum(x * n for x, n in zip(losses, counts, strict=True)) / sum(counts) - true) > 1e-4


@pytest.mark.slow
def test_a_step_compiles_as_one_graph() -> None:
    losses = []
    for compilation in (None, {"backend": "eager", "fullgraph": True}):
        torch.manual_seed(3)
        module = TransformersModule(LlamaForCausalLM(llama()), learning_rate=1e-2)
        trainer = quiet_trainer(strategy="single", max_epochs=1, compile=compilation)
        trainer.fit(module, DataLoader(ragged_rows(8), batch_size=2), DataLoader(ragged_rows(8), batch_size=2))
        losses.append(float(trainer.callback_metrics["val/loss"]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_the_mean_loss_keeps_its_digits_and_its_nan() -> None:
    mean = MeanLoss().to(torch.bfloat16)
    for _ in range(300):
        mean.update(torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(3))
        mean.update(torch.tensor(0.0, dtype=torch.bfloat16), torch.tensor(1))
    assert float(mean.compute()) == 0.75
    mean.update(torch.tensor(math.nan), torch.tensor(1))
    assert math.isnan(mean.compute())


def classes(number: int, floating: bool = False) -> Callable[[list[Row]], list[Row]]:
    def label(rows: list[Row]) -> list[Row]:
        generator = torch.Generator().manual_seed(7)
        for index, row in enumerate(rows):
            drawn = torch.randint(0, number, (), generator=generator)
            # An ignored class is as rare as it is allowed: a whole micro-batch holds none but these.
            row["labels"] = drawn.float() if floating else torch.tensor(-100) if index in (0, 1, 4) else drawn
        return rows

    return label


def several_classes(rows: list[Row]) -> list[Row]:
    generator = torch.Generator().manual_seed(7)
    return [row | {"labels": torch.randint(0, 2, (3,), generator=generator).float()} for row in rows]


def answers(rows: list[Row]) -> list[Row]:
    """Start and end of each; two are outside of the text, as where a long one was cut."""
    names = ("start_positions", "end_positions")
    spans = [(0, 2), (LENGTH, LENGTH), (2, 2), (3, 6), (LENGTH, LENGTH)]
    return [
        {"input_ids": row["input_ids"], **dict(zip(names, map(torch.tensor, span), strict=True))}
        for row, span in zip(rows, spans, strict=True)
    ]


def some_rows(rows: list[Row]) -> list[Row]:
    return rows


def pairs(rows: list[Row]) -> list[Row]:
    return [{"input_ids": row["input_ids"], "labels": row["labels"].roll(1)} for row in rows]


def already_shifted(rows: list[Row]) -> list[Row]:
    return [row | {"shift_labels": row["labels"].roll(3)} for row in rows]


BART = BartConfig(
    vocab_size=VOCABULARY, d_model=12, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=15, dropout=0.0,
    max_position_embeddings=16, encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=15, init_std=0.3,
)  # fmt: skip
T5 = T5Config(
    vocab_size=VOCABULARY,
    d_model=12,
    d_kv=6,
    d_ff=15,
    num_layers=1,
    num_heads=2,
    dropout_rate=0.0,
    decoder_start_token_id=0,
)
GPT2 = GPT2Config(
    vocab_size=VOCABULARY, n_positions=16, n_embd=12, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    bos_token_id=0, eos_token_id=0,
)  # fmt: skip
KINDS: dict[str, tuple[Callable[[], Any], Callable[[list[Row]], list[Row]]]] = {
    "causal": (lambda: LlamaForCausalLM(llama()), some_rows),
    "causal, positional": (lambda: GPT2LMHeadModel(GPT2), some_rows),
    "causal, labels shifted by the data": (lambda: LlamaForCausalLM(llama()), already_shifted),
    # Its own loss does not shift, whatever its name says.
    "causal, not shifted": (lambda: BartForCausalLM(BART), some_rows),
    "masked": (lambda: BertForMaskedLM(bert()), some_rows),
    "encoder and decoder": (lambda: T5ForConditionalGeneration(T5), pairs),
    "token classes": (lambda: BertForTokenClassification(bert(num_labels=VOCABULARY)), some_rows),
    "classes": (lambda: BertForSequenceClassification(bert(num_labels=3)), classes(3)),
    "several classes": (lambda: BertForSequenceClassification(bert(num_labels=3)), several_classes),
    "regression": (lambda: BertForSequenceClassification(bert(num_labels=1)), classes(5, floating=True)),
    "question answering": (lambda: BertForQuestionAnswering(bert()), answers),
}


def changes(model: nn.Module, before: nn.Module) -> dict[str, Tensor]:
    return {
        name: p.detach() - q.detach()
        for (name, p), q in zip(model.named_parameters(), before.parameters(), strict=True)
    }


@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_weigh_what_their_loss_is_the_mean_of(kind: str) -> None:
    """Five rows as 2, 2 and 1 give the gradient of five; the reference is one step of plain SGD."""
    make, label = KINDS[kind]
    rows = label(ragged_rows(5))
    torch.manual_seed(3)
    model = make()
    before, plain = copy.deepcopy(model), copy.deepcopy(model)
    plain.train()(**stacked(rows)).loss.backward()
    with torch.no_grad():
        for p in plain.parameters():
            p -= p.grad if p.grad is not None else 0.0
    module = TransformersModule(model, optim="sgd", learning_rate=1.0, lr_scheduler_type="constant")
    trainer = quiet_trainer(strategy="single", accumulate_grad_batches=3, max_epochs=1)
    trainer.fit(module, DataLoader(rows, batch_size=2), DataLoader(rows, batch_size=2))
    expected = changes(plain, before)
    assert max(float(change.abs().max()) for change in expected.values()) > 1e-3
    for name, change in changes(model, before).items():
        torch.testing.assert_close(change, expected[name], atol=1e-6, rtol=1e-5, msg=lambda t, n=name: f"{n}: {t}")
    with torch.no_grad():
        loss = float(plain.eval()(**stacked(rows)).loss)
    assert float(trainer.callback_metrics["val/loss"]) == pytest.approx(loss, rel=1e-5)
    of_tokens = kind.startswith(("causal", "masked", "encoder"))
    assert ("val/perplexity" in trainer.callback_metrics) is of_tokens


@pytest.mark.parametrize(
    "kind", ["causal", "causal, labels shifted by the data", "encoder and decoder", "token classes", "classes"]
)
def test_label_smoothing_is_that_of_the_transformers_trainer(kind: str) -> None:
    from transformers.trainer_pt_utils import LabelSmoother

    make, label = KINDS[kind]
    rows = label(ragged_rows(5))
    torch.manual_seed(3)
    model = make()
    before, plain = copy.deepcopy(model), copy.deepcopy(model)
    batch = stacked(rows)
    smoother = LabelSmoother(epsilon=0.2)
    labels = batch.get("shift_labels", batch["labels"])
    smoother(plain.train()(**batch), labels, shift_labels=kind == "causal").backward()
    expected = {name: -p.grad for name, p in plain.named_parameters() if p.grad is not None}
    module = TransformersModule(
        model, optim="sgd", learning_rate=1.0, lr_scheduler_type="constant", label_smoothing_factor=0.2
    )
    trainer = quiet_trainer(strategy="single", accumulate_grad_batches=3, max_epochs=1)
    trainer.fit(module, DataLoader(rows, batch_size=2))
    for name, change in changes(model, before).items():
        if name in expected:
            torch.testing.assert_close(change, expected[name], atol=1e-6, rtol=1e-5)


@on_two_ranks
def test_sequence_classification_on_two_ranks() -> None:
    rows = classes(3)(ragged_rows(16))
    torch.manual_seed(3)
    model = BertForSequenceClassification(bert(num_labels=3))
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for window in (rows[:8], rows[8:]):
        optimizer.zero_grad()
        plain(**stacked(window)).loss.backward()
        optimizer.step()
    module = TransformersModule(
        model, optim="sgd", optim_args="momentum=0.9", learning_rate=0.1, lr_scheduler_type="constant"
    )
    trainer = quiet_trainer(strategy="ddp", accumulate_grad_batches=2, max_epochs=1)
    trainer.fit(module, DataLoader(rows, batch_size=2))
    for name, value in plain.named_parameters():
        own = whole(trainer, f"model.{name}")
        torch.testing.assert_close(own, value.detach(), atol=1e-6, rtol=0.0, msg=lambda text, n=name: f"{n}: {text}")


# --- how the model comes to be ------------------------------------------------------------------------------------------


@on_two_ranks
@pytest.mark.parametrize("sharded", [False, True])
def test_zero_3_makes_the_model_of_a_configuration(sharded: bool) -> None:
    module = TransformersModule(llama(), auto_class="AutoModelForCausalLM", optim="sgd", learning_rate=0.0)
    strategy = DeepSpeedStrategy(stage=3, zero3_init_flag=sharded)
    trainer = quiet_trainer(strategy=strategy, max_steps=1)
    trainer.fit(module, DataLoader(ragged_rows(4), batch_size=2))
    # As transformers draws them: norms are one, biases zero, and the rest has the configuration's spread.
    for name, parameter in module.named_parameters():
        value = whole(trainer, name)
        if "norm" in name:
            assert torch.equal(value, torch.ones_like(value)), name
        elif name.endswith("bias"):
            assert torch.equal(value, torch.zeros_like(value)), name
        else:
            assert 0.2 < float(value.std()) < 0.4, name
        assert parameter.numel() <= value.numel()
    assert module.model.lm_head.weight is module.model.model.embed_tokens.weight


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pretrained")
    torch.manual_seed(3)
    LlamaForCausalLM(llama()).save_pretrained(folder)
    return folder


@on_two_ranks
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "deepspeed_stage_2", "deepspeed_stage_3", "sharded creation"])
def test_pretrained_weights_reach_every_strategy(strategy: str, pretrained: Path) -> None:
    saved = LlamaForCausalLM.from_pretrained(pretrained)
    module = TransformersModule(pretrained, learning_rate=0.0)
    chosen: Any = DeepSpeedStrategy(stage=3, zero3_init_flag=True) if strategy == "sharded creation" else strategy
    trainer = quiet_trainer(strategy=chosen, max_steps=1)
    trainer.fit(module, DataLoader(ragged_rows(4), batch_size=2))
    for name, value in saved.named_parameters():
        assert torch.equal(whole(trainer, f"model.{name}"), value.detach()), name


def test_a_name_brings_its_class_and_weights_in_float32(tmp_path: Path) -> None:
    saved = LlamaForCausalLM(llama()).to(torch.bfloat16)
    saved.save_pretrained(tmp_path)
    module = TransformersModule(str(tmp_path))
    assert module.model is None
    module.configure_model()
    made = module.model
    assert type(made) is LlamaForCausalLM
    for ours, theirs in zip(made.parameters(), saved.parameters(), strict=True):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, theirs.float())
    module.configure_model()
    assert module.model is made, "a second Trainer would train another model"
    half = TransformersModule(tmp_path, model_kwargs={"dtype": "bfloat16"})
    half.configure_model()
    assert half.model.dtype == torch.bfloat16


def test_a_configuration_stays_as_it_was() -> None:
    config = llama(dtype="bfloat16")
    before = config.to_dict()
    for auto_class in ("AutoModelForCausalLM", LlamaForCausalLM, transformers.AutoModelForCausalLM):
        module = TransformersModule(config, auto_class=auto_class)
        module.configure_model()
        assert type(module.model) is LlamaForCausalLM
        assert module.model.dtype == torch.float32
    assert config.to_dict() == before


# --- optimizer and schedule ---------------------------------------------------------------------------------------------


def test_what_decays() -> None:
    module = TransformersModule(GPT2LMHeadModel(GPT2), weight_decay=0.1)
    module.model.transformer.wpe.requires_grad_(False)
    trainer = quiet_trainer(strategy="single", max_steps=1)
    trainer.fit(module, DataLoader(ragged_rows(2), batch_size=2))
    names = {id(p): name.removeprefix("model.transformer.") for name, p in module.named_parameters()}
    decayed, others = ([names[id(p)] for p in group["params"]] for group in trainer.optimizers[0].param_groups)
    block = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    # The head is tied, and listed once; the frozen positions are in no group.
    assert sorted(decayed) == sorted(["wte.weight", *(f"h.0.{part}.weight" for part in block)])
    norms = [f"{name}.{part}" for name in ("h.0.ln_1", "h.0.ln_2", "ln_f") for part in ("weight", "bias")]
    assert sorted(others) == sorted([*norms, *(f"h.0.{part}.bias" for part in block)])
    assert [group["weight_decay"] for group in trainer.optimizers[0].param_groups] == [0.1, 0.0]


@pytest.mark.parametrize(
    ("arguments", "kind", "values"),
    [
        (
            {"optim": "adamw_torch", "adam_beta1": 0.8, "adam_epsilon": 1e-6},
            "AdamW",
            {"betas": (0.8, 0.999), "eps": 1e-6},
        ),
        ({"optim": "sgd", "optim_args": "momentum=0.9,nesterov=true"}, "SGD", {"momentum": 0.9, "nesterov": True}),
        ({"optim": "sgd", "optim_args": {"momentum": 0.9}}, "SGD", {"momentum": 0.9, "nesterov": False}),
        ({"optim": "adafactor"}, "Adafactor", {"scale_parameter": False, "relative_step": False}),
        ({"optim": "adamw_torch_fused"}, "AdamW", {"fused": True}),
    ],
)
def test_optimizers_by_name(arguments: dict[str, Any], kind: str, values: dict[str, Any]) -> None:
    module = TransformersModule(LlamaForCausalLM(llama()), learning_rate=1e-3, **arguments)
    trainer = quiet_trainer(strategy="single", max_steps=1)
    trainer.fit(module, DataLoader(ragged_rows(2), batch_size=2))
    assert type(trainer.optimizers[0]).__name__ == kind
    assert {name: trainer.optimizers[0].defaults[name] for name in values} == values


@on_two_ranks
def test_adafactor_and_shards() -> None:
    for strategy in ("fsdp2", "deepspeed_stage_2"):
        module = TransformersModule(LlamaForCausalLM(llama()), optim="adafactor")
        trainer = quiet_trainer(strategy=strategy, max_steps=1)
        refused = pytest.raises(ValueError, match="optim='adafactor' cannot step the shards of 'fsdp2'")
        said = refused if strategy == "fsdp2" else nullcontext()
        with said:
            trainer.fit(module, DataLoader(ragged_rows(4), batch_size=2))


class StopAfter(Callback):
    def __init__(self, epochs: int) -> None:
        self.epochs = epochs

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        trainer.should_stop = trainer.current_epoch + 1 >= self.epochs


class Rates(Callback):
    """What each step is made with."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_before_optimizer_step(self, trainer: Trainer, module: TrainModule, optimizer: torch.optim.Optimizer) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize(
    ("arguments", "rates"),
    [
        ({"lr_scheduler_type": "linear", "warmup_steps": 2}, [0, 1 / 2, 1, 3 / 4, 2 / 4, 1 / 4]),
        ({"lr_scheduler_type": "linear", "warmup_ratio": 0.3}, [0, 1 / 2, 1, 3 / 4, 2 / 4, 1 / 4]),
        ({"lr_scheduler_type": "linear", "warmup_steps": 0.3}, [0, 1 / 2, 1, 3 / 4, 2 / 4, 1 / 4]),
        ({"lr_scheduler_type": "constant"}, [1] * 6),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 4}, [0, 1 / 4, 2 / 4, 3 / 4, 1, 1]),
        ({"lr_scheduler_type": "cosine"}, [(1 + math.cos(math.pi * step / 6)) / 2 for step in range(6)]),
        (
            {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2.0, "lr_end": 0.0}},
            [(1 - step / 6) ** 2 for step in range(6)],
        ),
    ],
)
def test_learning_rates_by_hand(arguments: dict[str, Any], rates: list[float]) -> None:
    """Six optimizer steps: two epochs of five batches, two at a time."""
    module = TransformersModule(LlamaForCausalLM(llama()), learning_rate=0.5, optim="sgd", **arguments)
    rates_seen = Rates()
    trainer = quiet_trainer(strategy="single", max_epochs=2, accumulate_grad_batches=2, callbacks=rates_seen)
    trainer.fit(module, DataLoader(ragged_rows(5), batch_size=1))
    assert rates_seen.rates == pytest.approx([0.5 * rate for rate in rates], abs=1e-7)


def test_a_schedule_that_watches() -> None:
    kwargs = {"factor": 0.5, "patience": 0, "mode": "max"}  # a falling loss is no success
    module = TransformersModule(
        LlamaForCausalLM(llama()),
        learning_rate=1e-3,
        lr_scheduler_type="reduce_lr_on_plateau",
        lr_scheduler_kwargs=kwargs,
    )
    trainer = quiet_trainer(strategy="single", max_epochs=3)
    trainer.fit(module, DataLoader(ragged_rows(4), batch_size=2), DataLoader(ragged_rows(4), batch_size=2))
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-3 * 0.25)


# --- what comes out -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_an_export_loads_with_equal_logits(tied: bool, tmp_path: Path) -> None:
    config = llama()
    config.tie_word_embeddings = tied
    module = TransformersModule(
        config, auto_class="AutoModelForCausalLM", learning_rate=1e-2, gradient_checkpointing=True
    )
    trainer = quiet_trainer(strategy="single", max_epochs=1)
    trainer.fit(module, DataLoader(ragged_rows(4), batch_size=2))
    trainer.save_checkpoint(tmp_path / "saved")
    checkpoint.export(tmp_path / "saved", tmp_path / "out")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = ragged_rows(3)[0]["input_ids"][None]
    with torch.no_grad():
        logits = module.model.eval()(tokens).logits
        assert torch.equal(exported(tokens).logits, logits)
        loaded = TransformersModule.load_from_checkpoint(tmp_path / "saved")
        assert torch.equal(loaded.model.eval()(tokens).logits, logits)
    assert (exported.lm_head.weight is exported.model.embed_tokens.weight) is tied
    assert loaded.hparams["learning_rate"] == 1e-2
    assert exported.config.use_cache, "what training does without is not taken from the model"


@on_two_ranks
def test_a_checkpoint_of_shards_is_exported(tmp_path: Path) -> None:
    module = TransformersModule(llama(), auto_class="AutoModelForCausalLM", learning_rate=1e-2)
    trainer = quiet_trainer(strategy="fsdp2", max_epochs=1)
    trainer.fit(module, DataLoader(ragged_rows(4), batch_size=2))
    trainer.save_checkpoint(tmp_path / "saved")
    weights = {name: whole(trainer, name) for name, _ in module.named_parameters()}
    if trainer.is_global_zero:
        checkpoint.export(tmp_path / "saved", tmp_path / "out")
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        for name, value in exported.named_parameters():
            assert torch.equal(value.detach(), weights[f"model.{name}"]), name


def test_a_name_is_not_read_again_on_loading(tmp_path: Path) -> None:
    BertForSequenceClassification(bert(num_labels=2)).save_pretrained(tmp_path / "pretrained")
    arguments = {"auto_class": "AutoModelForSequenceClassification", "model_kwargs": {"num_labels": 2}}
    module = TransformersModule(tmp_path / "pretrained", **arguments)
    trainer = quiet_trainer(strategy="single", max_epochs=1)
    trainer.fit(module, DataLoader(classes(2)(ragged_rows(8)), batch_size=4))
    trainer.save_checkpoint(tmp_path / "saved")
    (tmp_path / "pretrained").rename(tmp_path / "elsewhere")
    loaded = TransformersModule.load_from_checkpoint(tmp_path / "saved")
    assert type(loaded.model) is BertForSequenceClassification
    assert all(torch.equal(p, q) for p, q in zip(loaded.parameters(), module.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["causal", "encoder and decoder", "question answering"])
def test_predictions(kind: str) -> None:
    make, label = KINDS[kind]
    rows, model = label(ragged_rows(5)), make()
    predicted = quiet_trainer(strategy="single").predict(TransformersModule(model), DataLoader(rows, batch_size=2))
    assert predicted is not None
    with torch.no_grad():
        outputs = model.eval()(**stacked(rows))
    if kind == "question answering":
        assert {name for batch in predicted for name in batch} == {"start_logits", "end_logits"}
        predicted, expected = [batch["end_logits"] for batch in predicted], outputs.end_logits
    else:
        expected = outputs.logits
    torch.testing.assert_close(torch.cat(predicted), expected)


def test_several_loaders_and_a_test_run() -> None:
    model, rows = LlamaForCausalLM(llama()), ragged_rows(5)
    with torch.no_grad():
        losses = [float(model.eval()(**stacked(part)).loss) for part in (rows, rows[:2])]
    loaders = {"all": DataLoader(rows, batch_size=2), "two": DataLoader(rows[:2], batch_size=1)}
    results = quiet_trainer(strategy="single").test(TransformersModule(model), loaders)
    for name, result, loss in zip(loaders, results, losses, strict=True):
        values = {f"test/loss/{name}": loss, f"test/perplexity/{name}": math.exp(loss)}
        assert result == pytest.approx(values, rel=1e-6)


@pytest.mark.parametrize("schedule", ["cosine", "warmup_stable_decay", "reduce_lr_on_plateau", "greedy"])
def test_a_resume_goes_on_with_the_schedule(schedule: str, tmp_path: Path) -> None:
    def fit(epochs: int, **arguments: Any) -> tuple[Trainer, TransformersModule]:
        torch.manual_seed(3)
        kwargs = {"warmup_stable_decay": {"num_decay_steps": 2}, "reduce_lr_on_plateau": {"mode": "max", "patience": 0}}
        module = TransformersModule(
            llama(),
            auto_class="AutoModelForCausalLM",
            learning_rate=1e-2,
            lr_scheduler_type=schedule,
            lr_scheduler_kwargs=kwargs.get(schedule),
        )
        stop = StopAfter(epochs)
        trainer = quiet_trainer(strategy="single", max_epochs=4, callbacks=stop)
        loaders = [DataLoader(ragged_rows(4), batch_size=2) for _ in range(2)]
        trainer.fit(module, *loaders, **arguments)
        return trainer, module

    _, expected = fit(4)
    trainer, _ = fit(2)
    assert trainer.global_step == 4
    trainer.save_checkpoint(tmp_path / "half")
    trainer, resumed = fit(4, ckpt_path=tmp_path / "half")
    assert trainer.global_step == 8
    for ours, theirs in zip(resumed.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, theirs)


# --- adapters -----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not HAS_PEFT, reason="peft is not installed")
def test_only_adapters_are_trained_and_saved(tmp_path: Path) -> None:
    import peft

    torch.manual_seed(3)
    model = LlamaForCausalLM(llama())
    model.save_pretrained(tmp_path / "base")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    module = TransformersModule(tmp_path / "base", peft_config=lora, learning_rate=1e-2, lr_scheduler_type="constant")
    trainer = quiet_trainer(strategy="single", max_epochs=2)
    trainer.fit(module, DataLoader(ragged_rows(4), batch_size=2), DataLoader(ragged_rows(4), batch_size=2))
    assert "val/perplexity" in trainer.callback_metrics
    trained = [name for name, p in module.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    assert sum(len(group["params"]) for group in trainer.optimizers[0].param_groups) == len(trained)
    for name, p in module.model.get_base_model().named_parameters():
        if "lora_" not in name:
            assert torch.equal(p, before[name.replace(".base_layer", "")]), name
    trainer.save_checkpoint(tmp_path / "saved")
    loaded = TransformersModule.load_from_checkpoint(tmp_path / "saved")
    loaded.model.save_pretrained(tmp_path / "out")
    again = peft.PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "out")
    tokens = ragged_rows(1)[0]["input_ids"][None]
    with torch.no_grad():
        logits = module.model.eval()(tokens).logits
        assert not torch.allclose(logits, model.eval()(tokens).logits, atol=1e-4)
        assert torch.equal(again.eval()(tokens).logits, logits)


@pytest.mark.skipif(not HAS_PEFT, reason="peft is not installed")
@on_two_ranks
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "deepspeed_stage_2", "deepspeed_stage_3"])
def test_adapters_on_two_ranks(strategy: str, recomputed: bool) -> None:
    import peft

    rows = ragged_rows(8)
    torch.manual_seed(3)
    model = LlamaForCausalLM(llama())
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(4)
    plain = peft.get_peft_model(copy.deepcopy(model), lora)
    optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1)
    torch.manual_seed(4)
    module = TransformersModule(
        model,
        peft_config=lora,
        optim="sgd",
        learning_rate=0.1,
        lr_scheduler_type="constant",
        gradient_checkpointing=recomputed,
    )
    module.configure_model()
    for name, p in plain.named_parameters():
        assert torch.equal(p, module.model.get_parameter(name)), name
    plain(**stacked(rows)).loss.backward()
    optimizer.step()
    trainer = quiet_trainer(strategy=strategy, accumulate_grad_batches=2, max_epochs=1)
    trainer.fit(module, DataLoader(rows, batch_size=2))
    for name, value in plain.named_parameters():
        torch.testing.assert_close(whole(trainer, f"model.{name}"), value.detach(), atol=1e-6, rtol=0.0)


@pytest.mark.skipif(not HAS_PEFT, reason="peft is not installed")
@on_two_ranks
def test_adapters_of_a_model_that_is_born_sharded(pretrained: Path) -> None:
    import peft

    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    module = TransformersModule(pretrained, peft_config=lora, learning_rate=1e-2, lr_scheduler_type="constant")
    trainer = quiet_trainer(strategy=DeepSpeedStrategy(stage=3, zero3_init_flag=True), max_steps=2)
    trainer.fit(module, DataLoader(ragged_rows(8), batch_size=2))
    before = dict(LlamaForCausalLM.from_pretrained(pretrained).named_parameters())
    for name, parameter in module.named_parameters():
        value = whole(trainer, name)
        if "lora_" in name:
            # One of them starts as zero and one drawn; two steps move both.
            assert parameter.requires_grad
            assert 0.0 < float(value.abs().mean()) < 1.0, name
        else:
            base = name.removeprefix("model.base_model.model.").replace(".base_layer", "")
            assert torch.equal(value, before[base].detach()), name


@pytest.mark.skipif(HAS_PEFT, reason="peft is installed")
def test_adapters_need_peft() -> None:
    with pytest.raises(ImportError, match=r"pip install 'acclight\[peft\]'"):
        TransformersModule(llama(), peft_config={"peft_type": "LORA"})


# --- mistakes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"optim": "adamw_torhc"}, "optim='adamw_torhc' is unknown; did you mean 'adamw_torch'"),
        ({"optim": "adamw"}, "optim='adamw' is unknown; did you mean 'adamw_torch'"),
        ({"optim": "galore_adamw"}, "optim='galore_adamw' is unknown"),
        ({"lr_scheduler_type": "cosin"}, "lr_scheduler_type='cosin' is unknown; did you mean 'cosine'"),
        ({"auto_class": "AutoModelForCausalML"}, "no model class of transformers; did you mean 'AutoModelForCausalLM'"),
        ({"warmup_steps": 2, "warmup_ratio": 0.1}, "give one of them"),
        ({"warmup_ratio": 1.5}, "a ratio in"),
        ({"warmup_steps": -1}, "0 or more steps"),
        ({"label_smoothing_factor": 1.0}, r"label_smoothing_factor=1\.0"),
    ],
)
def test_mistakes_are_found_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TransformersModule(llama(), **arguments)


def test_what_is_no_model() -> None:
    with pytest.raises(TypeError, match="model is a dict"):
        TransformersModule({"vocab_size": 3})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="auto_class and model_kwargs make a model"):
        TransformersModule(LlamaForCausalLM(llama()), auto_class="AutoModelForCausalLM")
    with pytest.raises(ValueError, match=r"LlamaConfig without `architectures`.*auto_class='AutoModelForCausalLM'"):
        TransformersModule(llama()).configure_model()


def test_batches_that_cannot_be_used() -> None:
    def fit(module: TransformersModule, rows: list[Any], **arguments: Any) -> None:
        quiet_trainer(strategy="single", **({"max_steps": 1} | arguments)).fit(module, DataLoader(rows, batch_size=2))

    unlabelled = [{"input_ids": row["input_ids"]} for row in ragged_rows(2)]
    with pytest.raises(ValueError, match=r"LlamaForCausalLM returned no loss for a batch with input_ids: .* 'labels'"):
        fit(TransformersModule(LlamaForCausalLM(llama())), unlabelled)
    with pytest.raises(ValueError, match=r"label_smoothing_factor=0\.1 needs `labels`"):
        fit(TransformersModule(LlamaForCausalLM(llama()), label_smoothing_factor=0.1), unlabelled)
    with pytest.raises(ValueError, match=r"LlamaModel returned no loss .* use a class with a head"):
        fit(TransformersModule(llama(), auto_class="AutoModel"), unlabelled)
    with pytest.raises(TypeError, match="a batch is a Tensor"):
        fit(TransformersModule(LlamaForCausalLM(llama())), [row["input_ids"] for row in ragged_rows(2)])
    for arguments, message in (
        ({}, "needs the number of optimizer steps"),
        ({"warmup_ratio": 0.1}, "a warm-up over 0.1"),
    ):
        with pytest.raises(ValueError, match=message):
            fit(TransformersModule(LlamaForCausalLM(llama()), **arguments), ragged_rows(2), max_steps=-1, max_epochs=-1)


def test_acclight_does_not_load_transformers() -> None:
    code = "import sys, acclight, acclight.integrations; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["False"]
