r"""Pre-trains a Llama on source code: one script for a laptop, one GPU, or many machines.

On two CPU cores the defaults take one to two minutes and need no network:

    python examples/llama_fsdp.py

More processes, and what spreads the model over them, are the launcher's affair:

    accelerate launch --num_processes 2 --config_file examples/configs/fsdp2.yaml examples/llama_fsdp.py --batch-size 4
    accelerate launch --num_processes 8 --config_file examples/configs/deepspeed_stage_3.yaml --mixed_precision bf16 \
        examples/llama_fsdp.py --preset 1b --hf-dataset Salesforce/wikitext:wikitext-103-raw-v1

A run that was stopped goes on, also with another strategy or another number of processes:

    python examples/llama_fsdp.py --resume
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import difflib
import math
import os
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from packed_text import PackedText, Text, TextError, files_text, hf_dataset_text, stdlib_text
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import MeanMetric
from transformers import LlamaConfig, LlamaForCausalLM

from acclight import Callback, Trainer, TrainModule, checkpoint, seed_everything
from acclight.callbacks import ModelCheckpoint, ThroughputMonitor
from acclight.loggers import CSVLogger, TensorBoardLogger

# --- the model --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Preset:
    """A model and how it is trained: the shape is `LlamaConfig`'s, the batch is that of one rank."""

    shape: dict[str, Any]
    seq_len: int
    batch_size: int
    learning_rate: float
    max_steps: int


_SIZES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
    "max_position_embeddings",
)  # fmt: skip
_LLAMA_3: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}, "rms_norm_eps": 1e-5}


def _shape(*sizes: int, **others: Any) -> dict[str, Any]:
    return dict(zip(_SIZES, sizes, strict=True)) | others


PRESETS = {
    # 1,115,008 parameters: minutes on two CPU cores
    "tiny": Preset(_shape(2048, 128, 3, 4, 2, 384, 512), 128, 8, 2.5e-3, 500),
    # 149,444,352 parameters
    "150m": Preset(_shape(32_768, 768, 14, 12, 12, 2048, 2048), 1024, 16, 6e-4, 10_000),
    # 1,235,814,400 parameters: the shape of Llama 3.2 1B
    "1b": Preset(
        _shape(128_256, 2048, 16, 32, 8, 8192, 8192, tie_word_embeddings=True, **_LLAMA_3), 2048, 8, 3e-4, 20_000
    ),
    # 8,030,261,248 parameters: the shape of Llama 3 8B
    "8b": Preset(_shape(128_256, 4096, 32, 32, 8, 14_336, 8192, **_LLAMA_3), 4096, 2, 3e-4, 50_000),
}


class Perplexity(MeanMetric):
    """exp of the mean loss over the samples of all ranks; the mean of the batches' perplexities is another number."""

    def compute(self) -> Tensor:
        return super().compute().exp()


class Llama(TrainModule):
    """A Llama that learns to predict the next token.

    Args:
        shape: Arguments of `LlamaConfig`.
        learning_rate: The highest, after the warm-up.
        seed: Of the weights.
    """

    def __init__(self, shape: dict[str, Any], learning_rate: float, seed: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.perplexity = Perplexity()

    def configure_model(self) -> None:
        torch.manual_seed(self.hparams["seed"])  # the same weights on every rank, whatever has drawn numbers before
        self.model = LlamaForCausalLM(LlamaConfig(**self.hparams["shape"], bos_token_id=0, eos_token_id=0))

    def loss(self, batch: Tensor) -> Tensor:
        """The mean over all tokens of a batch of shape [batch, seq_len + 1]."""
        logits = self.model(input_ids=batch[:, :-1], use_cache=False).logits
        return cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = self.loss(batch)
        self.perplexity.update(loss, weight=len(batch))
        self.log("val/loss", loss, prog_bar=True)
        self.log("val/perplexity", self.perplexity)

    def configure_optimizers(self) -> dict[str, Any]:
        # By name, as a parameter that was born sharded may have lost its shape: norms do not decay.
        norms = [p for name, p in self.named_parameters() if "norm" in name]
        others = [p for name, p in self.named_parameters() if "norm" not in name]
        groups = [{"params": others, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
        optimizer = AdamW(groups, lr=self.hparams["learning_rate"], betas=(0.9, 0.95))
        total = int(self.trainer.estimated_stepping_batches)
        schedule = LambdaLR(optimizer, lambda step: warmup_then_cosine(step, total))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.log("train/lr", optimizer.param_groups[0]["lr"])

    def on_step(self) -> None:
        if self.global_step % self.trainer.log_every_n_steps == 0:  # reading the norm waits for the device
            self.log("train/grad_norm", self.trainer.grad_norm)


def warmup_then_cosine(step: int, total: int) -> float:
    """The part of the highest learning rate at `step` of `total`: up over the first 5 %, then down to a tenth."""
    warmup = max(1, total // 20)
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup))))


class StartOfCurve(Callback):
    """Logs the validation before the first step: about ln(vocabulary). The Trainer's own check of all batches gives it."""

    def on_sanity_check_end(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.is_global_zero:
            values = {name: float(value) for name, value in trainer.callback_metrics.items()}
            for logger in trainer.loggers:
                logger.log_metrics({"epoch": 0, **values}, step=0)


# --- after the training -----------------------------------------------------------------------------------------------


def write_sample(saved: Path, tokenizer: Tokenizer, tokens: int) -> str:
    """What the model of a checkpoint writes; it is whole on one process, whatever strategy saved it."""
    model = Llama.load_from_checkpoint(saved).model.eval()
    start = torch.tensor([tokenizer.encode("def __init__(self, ").ids])
    torch.manual_seed(0)
    settings = {"do_sample": True, "temperature": 0.7, "top_k": 40, "pad_token_id": 0}
    # Under ZeRO-3 transformers would wait for the other ranks, which do not generate.
    written = model.generate(start, max_new_tokens=tokens, synced_gpus=False, **settings)
    return tokenizer.decode(written[0].tolist())


def read_curve(metrics: Path, name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric of CSVLogger's file; of a step that was done twice (a resume) the later value."""
    with metrics.open(newline="", encoding="utf-8") as file:
        values = {int(row["step"]): float(row[name]) for row in csv.DictReader(file) if row.get(name)}
    steps = sorted(values)
    return steps, [values[step] for step in steps]


def plot_loss(metrics: Path, png: Path, vocab_size: int) -> None:
    """Draws training and validation loss over the steps, and the loss of a guess, ln(vocabulary)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    axes.plot(*read_curve(metrics, "train/loss"), linewidth=1, alpha=0.7, label="training")
    axes.plot(*read_curve(metrics, "val/loss"), marker="o", label="validation")
    guess = math.log(vocab_size)
    axes.axhline(guess, color="gray", linestyle="--", label=f"ln({vocab_size}) = {guess:.2f}")
    axes.set(xlabel="optimizer steps", ylabel="loss (nats per token)", title="Llama pre-training", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(png, dpi=120)
    pyplot.close(figure)


def report(run: Run, tokenizer: Tokenizer, vocab_size: int, sample_tokens: int) -> None:
    """Says how it went and where everything is."""
    saved = checkpoint.latest(run.checkpoints)
    if saved is not None and sample_tokens > 0:
        print(f"\n--- a sample ---\n{write_sample(saved, tokenizer, sample_tokens)}\n---\n")
    plot_loss(run.metrics, run.png, vocab_size)
    steps, losses = read_curve(run.metrics, "val/loss")
    for step, loss in list(zip(steps, losses, strict=True))[:: max(1, len(steps) - 1)]:
        print(f"validation loss  {loss:.4f} at step {step}: {loss / math.log(vocab_size):.1%} of ln({vocab_size})")
    _, speeds = read_curve(run.metrics, "throughput/items_per_sec")
    print(f"speed            {speeds[-1]:,.0f} tokens/s" if speeds else "speed            not logged")
    print(f"loss curve       {run.png}\ncheckpoint       {saved}\nTensorBoard      {run.tensorboard}")


# --- the run ----------------------------------------------------------------------------------------------------------


class Run:
    """The folder of a run, and what is where in it."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.checkpoints = out / "checkpoints"
        self.tensorboard = out / "tensorboard"
        self.metrics = out / "metrics" / "metrics.csv"
        self.png = out / "loss.png"

    def set_aside_earlier(self) -> None:
        """Moves what an earlier run has left here to a folder beside it: two runs in one curve would tell nothing."""
        parts = [p for p in (self.checkpoints, self.tensorboard, self.metrics.parent, self.png) if p.exists()]
        if not parts:
            return
        out = self.out.resolve()
        beside = next(p for n in range(1, sys.maxsize) if not (p := out.with_name(f"{out.name}-{n}")).exists())
        beside.mkdir()
        for part in parts:
            part.rename(beside / part.name)
        print(f"an earlier run was moved to {beside}; --resume goes on with one")


def main() -> None:
    """Trains, then reports."""
    parser, args = parse()
    preset, run = PRESETS[args.preset], Run(args.out)
    vocab_size = preset.shape["vocab_size"]
    try:
        seed_everything(args.seed)
        data = PackedText(
            open_text(args), args.cache, vocab_size=vocab_size, seq_len=args.seq_len, batch_size=args.batch_size
        )
        trainer = Trainer(
            strategy=launched_strategy() if args.strategy == "auto" else args.strategy,
            precision=args.precision,
            max_steps=args.max_steps,
            accumulate_grad_batches=args.accumulate,
            gradient_clip_val=1.0,
            val_check_interval=min(args.val_every, args.max_steps),
            log_every_n_steps=args.log_every,
            num_sanity_val_steps=-1,
            callbacks=[
                StartOfCurve(),
                ModelCheckpoint(run.checkpoints, every_n_train_steps=args.save_every, save_last=True, save_top_k=2),
                ThroughputMonitor(len, length_fn=lambda batch: len(batch) * args.seq_len),
            ],
            logger=[
                CSVLogger(run.out, name="", version="metrics"),
                TensorBoardLogger(run.out, name="", version="tensorboard"),
            ],
            default_root_dir=run.out,
        )
    except (ValueError, ImportError) as error:
        parser.error(str(error))
    if args.resume is None and trainer.is_global_zero:
        run.set_aside_earlier()
    module = Llama(preset.shape, args.learning_rate, args.seed)
    try:
        trainer.fit(module, datamodule=data, ckpt_path=args.resume)
    except (TextError, checkpoint.CheckpointError) as error:
        parser.error(str(error))
    if trainer.is_global_zero:
        report(run, data.tokenizer(), vocab_size, args.sample_tokens)


def open_text(args: argparse.Namespace) -> Text:
    """The text that the arguments ask for."""
    if args.hf_dataset:
        return hf_dataset_text(args.hf_dataset)
    return files_text(args.text) if args.text else stdlib_text()


def launched_strategy() -> str:
    """FSDP2 for plain Python, torchrun and a plain `accelerate launch`; else "auto", which follows the launch file."""
    processes = "ACCELERATE_MIXED_PRECISION" in os.environ and "RANK" in os.environ
    return "auto" if processes or "ACCELERATE_USE_DEEPSPEED" in os.environ else "fsdp2"


# --- arguments --------------------------------------------------------------------------------------------------------

STRATEGIES = ("auto", "single", "ddp", "fsdp2", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3")
PRECISIONS = ("32", "bf16-mixed", "16-mixed")


class Parser(argparse.ArgumentParser):
    """Answers a mistake with one line, once: the processes of a launch all get the same arguments."""

    def error(self, message: str) -> NoReturn:
        if os.environ.get("RANK", "0") == "0":
            print(f"{self.prog}: error: {message}", file=sys.stderr)
        sys.exit(2)


def one_of(kind: str, names: Collection[str]) -> Callable[[str], str]:
    """An argument's type: one of the names; the nearest is named for any other."""

    def check(name: str) -> str:
        if name in names:
            return name
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}? " if near else ""
        raise argparse.ArgumentTypeError(f"there is no {kind} {name!r}; {hint}choose from {', '.join(names)}")

    return check


def whole(text: str) -> int:
    """An argument's type: a whole number, 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, 1 or more")
    return int(text)


def rate(text: str) -> float:
    """An argument's type: a number between 0 and 1."""
    with contextlib.suppress(ValueError):
        if 0.0 < float(text) < 1.0:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} must be a number between 0 and 1")


def parse(arguments: Sequence[str] | None = None) -> tuple[Parser, argparse.Namespace]:
    """Reads and checks the command line; what is left out comes from the preset."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="llama_fsdp.py", description=__doc__, formatter_class=raw, allow_abbrev=False)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "acclight" / "text"
    preset, strategy, precision = (
        one_of("preset", PRESETS),
        one_of("strategy", STRATEGIES),
        one_of("precision", PRECISIONS),
    )
    add, text = parser.add_argument, parser.add_mutually_exclusive_group().add_argument
    text("--text", nargs="+", metavar="PATH", help="text files or folders; default: Python's standard library")
    text("--hf-dataset", metavar="NAME[:CONFIG]", help="a dataset of the Hugging Face Hub, or a local folder")
    add("--preset", type=preset, default="tiny", metavar="NAME", help=f"{', '.join(PRESETS)}; default tiny")
    add("--seq-len", type=whole, metavar="N", help="tokens of a sequence")
    add("--batch-size", type=whole, metavar="N", help="sequences of a batch on one process")
    add("--accumulate", type=whole, default=1, metavar="N", help="batches of an optimizer step; default 1")
    add("--max-steps", type=whole, metavar="N", help="optimizer steps in all")
    add("--learning-rate", type=rate, metavar="RATE", help="the highest, after the warm-up")
    kinds = f"{', '.join(STRATEGIES)}; auto, the default, is the launch file's, else fsdp2"
    add("--strategy", type=strategy, default="auto", metavar="NAME", help=kinds)
    add("--precision", type=precision, metavar="NAME", help=f"{', '.join(PRECISIONS)}; default: the launcher's, or 32")
    add("--resume", nargs="?", const="auto", metavar="FOLDER", help="a checkpoint; alone or auto: the newest in --out")
    add("--out", type=Path, default=Path("runs/llama"), help="folder of the run; default runs/llama")
    add("--cache", type=Path, default=cache, help=f"folder of tokenized texts; default {cache}")
    add("--val-every", type=whole, default=100, metavar="N", help="steps between validations; default 100")
    add("--save-every", type=whole, default=100, metavar="N", help="steps between checkpoints; default 100")
    add("--log-every", type=whole, default=10, metavar="N", help="steps between logged values; default 10")
    add("--seed", type=int, default=0, help="of weights and data order; default 0")
    add("--sample-tokens", type=int, default=100, metavar="N", help="tokens of the sample; default 100, 0 for none")
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        near = difflib.get_close_matches(unknown[0], list(parser._option_string_actions), n=1)
        parser.error(f"unknown argument {unknown[0]}; {f'did you mean {near[0]}?' if near else '--help lists all'}")
    chosen = PRESETS[args.preset]
    for name in ("seq_len", "batch_size", "max_steps", "learning_rate"):
        if getattr(args, name) is None:
            setattr(args, name, getattr(chosen, name))
    most = chosen.shape["max_position_embeddings"]
    if args.seq_len > most:
        parser.error(f"--seq-len {args.seq_len}: preset {args.preset} has {most} positions; give {most} or less")
    if args.resume not in (None, "auto") and not Path(args.resume).is_dir():
        parser.error(f"--resume {args.resume}: no such checkpoint folder; --resume auto takes the newest in {args.out}")
    if args.out.exists() and not args.out.is_dir():
        parser.error(f"--out {args.out} is a file; give a folder")
    return parser, args


if __name__ == "__main__":
    main()
