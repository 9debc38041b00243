"""The example: its models, what it says to mistakes, and short runs of it as users start them."""

from __future__ import annotations

import csv
import itertools
import math
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from acclight.data import TrainData
from tests.distributed import ROOT, clean_environment, run_command

sys.path.insert(0, str(ROOT / "examples"))

import llama_fsdp
from llama_fsdp import PRESETS, Run, launched_strategy, parse, plot_loss, read_curve, warmup_then_cosine

SCRIPT = ROOT / "examples" / "llama_fsdp.py"
CONFIGS = ROOT / "examples" / "configs"
ACCELERATE = Path(sys.executable).with_name("accelerate")


# --- the model --------------------------------------------------------------------------------------------------------


def test_parameter_counts() -> None:
    def count(vocab: int, hidden: int, layers: int, heads: int, kv_heads: int, inner: int, tied: bool) -> int:
        attention = 2 * hidden * hidden + 2 * hidden * (hidden // heads * kv_heads)
        layer = attention + 3 * hidden * inner + 2 * hidden
        return layers * layer + hidden + vocab * hidden * (1 if tied else 2)

    expected = {
        "tiny": count(2048, 128, 3, 4, 2, 384, tied=False),
        "150m": count(32_768, 768, 14, 12, 12, 2048, tied=False),
        # Published: the model cards of Llama 3.2 1B (1.23 B) and Llama 3 8B (8.03 B), to the last weight on the Hub.
        "1b": 1_235_814_400,
        "8b": 8_030_261_248,
    }
    for name, preset in PRESETS.items():
        module = llama_fsdp.Llama(preset.shape, preset.learning_rate, seed=0)
        with torch.device("meta"):
            module.configure_model()
        assert sum(p.numel() for p in module.parameters()) == expected[name], name
        assert preset.seq_len <= preset.shape["max_position_embeddings"]
    source = SCRIPT.read_text(encoding="utf-8")
    for number in expected.values():
        assert f"{number:,} parameters" in source


def test_weights_follow_the_seed_alone() -> None:
    shape = PRESETS["tiny"].shape | {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16}

    def weights(seed: int) -> torch.Tensor:
        module = llama_fsdp.Llama(shape, 1e-3, seed)
        torch.rand(seed + 1)
        module.configure_model()
        return torch.cat([p.detach().flatten() for p in module.parameters()])

    assert torch.equal(weights(0), weights(0))
    assert not torch.equal(weights(0), weights(1))


def test_learning_rate_by_hand() -> None:
    # 100 steps: 5 of warm-up; half-way through the cosine, at step 52.5, it is at (1 + 0.1) / 2; then down to 0.1.
    assert [warmup_then_cosine(step, 100) for step in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    halves = (warmup_then_cosine(52, 100) + warmup_then_cosine(53, 100)) / 2
    assert halves == pytest.approx(0.55, abs=1e-4)
    assert warmup_then_cosine(100, 100) == pytest.approx(0.1)
    assert warmup_then_cosine(101, 100) == pytest.approx(0.1)
    assert [warmup_then_cosine(step, 1) for step in range(2)] == pytest.approx([1.0, 1.0])


# --- curve and folder -------------------------------------------------------------------------------------------------


def test_curve_of_a_resumed_run(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.csv"
    metrics.write_text(
        "step,epoch,val/loss,train/loss\n0,0,7.5,\n10,0,,7.0\n10,0,6.5,\n20,0,,9.0\n10,0,6.25,\n20,0,,6.0\n"
    )
    assert read_curve(metrics, "val/loss") == ([0, 10], [7.5, 6.25])
    assert read_curve(metrics, "train/loss") == ([10, 20], [7.0, 6.0])
    assert read_curve(metrics, "train/lr") == ([], [])
    plot_loss(metrics, tmp_path / "loss.png", 2048)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_earlier_run_is_kept_beside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "llama"
    run = Run(out)
    run.set_aside_earlier()
    assert not out.exists()
    for number in (1, 2):
        run.checkpoints.mkdir(parents=True)
        (run.checkpoints / "step").write_text(str(number))
        (out / "notes.txt").write_text("the user's own")
        run.set_aside_earlier()
        assert (tmp_path / f"llama-{number}" / "checkpoints" / "step").read_text() == str(number)
    assert [f.name for f in out.iterdir()] == ["notes.txt"]
    assert str(tmp_path / "llama-2") in capsys.readouterr().out


# --- strategy and arguments -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "strategy"),
    [
        ({}, "fsdp2"),
        # Plain `accelerate launch`: one process, no strategy.
        ({"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_CPU": "False"}, "fsdp2"),
        # torchrun.
        ({"RANK": "0", "WORLD_SIZE": "2"}, "fsdp2"),
        # ddp.yaml, fsdp2.yaml, deepspeed_stage_2.yaml.
        ({"RANK": "0", "WORLD_SIZE": "2", "ACCELERATE_MIXED_PRECISION": "no"}, "auto"),
        ({"RANK": "0", "WORLD_SIZE": "2", "ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_FSDP": "true"}, "auto"),
        ({"RANK": "0", "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_MIXED_PRECISION": "no"}, "auto"),
    ],
)
def test_strategy_of_the_launch(environment: dict[str, str], strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert launched_strategy() == strategy


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--preset", "tinny"], ["--preset", "'tinny'", "did you mean tiny?", "150m"]),
        (["--strategy", "fsdp"], ["--strategy", "'fsdp'", "did you mean fsdp2?"]),
        (["--strategy", "deepspeed_stage3"], ["did you mean deepspeed_stage_3?"]),
        (["--precision", "bf16"], ["did you mean bf16-mixed?"]),
        (["--max-step", "5"], ["unknown argument --max-step", "did you mean --max-steps?"]),
        (["--frobnicate"], ["unknown argument --frobnicate", "--help"]),
        (["stray.txt"], ["unknown argument stray.txt"]),
        (["--seq-len", "513"], ["--seq-len 513", "512 positions", "give 512 or less"]),
        (["--seq-len", "0"], ["--seq-len", "'0'", "1 or more"]),
        (["--batch-size", "two"], ["--batch-size", "'two'"]),
        (["--learning-rate", "-1"], ["--learning-rate", "between 0 and 1"]),
        (["--learning-rate", "nan"], ["--learning-rate", "between 0 and 1"]),
        (["--text", "a", "--hf-dataset", "b"], ["not allowed with"]),
        (["--resume", "nowhere"], ["--resume nowhere", "no such checkpoint folder", "--resume auto"]),
        (["--out", __file__], ["--out", "give a folder"]),
        (["--text", "missing.txt"], ["missing.txt", "no such file or folder", "give"]),
        (["--hf-dataset", "owner/name"], ["pip install datasets"]),
        (["--seed", "-1"], ["seed=-1"]),
    ],
)
def test_mistakes(
    arguments: list[str], words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setattr(sys, "argv", ["llama_fsdp.py", *arguments])
        with pytest.raises(SystemExit) as end:
            llama_fsdp.main()
        assert end.value.code == 2
        said = capsys.readouterr()
        assert said.out == ""
        if rank == "1":
            assert said.err == ""
            continue
        assert said.err.count("\n") == 1
        assert said.err.startswith("llama_fsdp.py: error: ")
        for word in words:
            assert word in said.err


def test_what_is_left_out_comes_from_the_preset() -> None:
    _, args = parse(["--preset", "1b", "--seq-len", "8192"])
    assert (args.seq_len, args.batch_size, args.max_steps) == (8192, PRESETS["1b"].batch_size, PRESETS["1b"].max_steps)
    assert parse(["--resume"])[1].resume == "auto"
    assert parse([])[1].resume is None


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_launch_files(path: Path) -> None:
    from accelerate.commands.config.config_args import ClusterConfig

    config = ClusterConfig.from_yaml_file(str(path))
    kind = {"ddp": "MULTI_GPU", "fsdp2": "FSDP", "two_machines": "FSDP"}.get(path.stem, "DEEPSPEED")
    assert config.distributed_type.value == kind
    assert config.mixed_precision == "no", "runs under all of them can be compared"
    if kind == "FSDP":
        assert config.fsdp_config["fsdp_version"] == 2
    if kind == "DEEPSPEED":
        assert f"deepspeed_stage_{config.deepspeed_config['zero_stage']}" == path.stem
    assert config.num_machines == (2 if path.stem == "two_machines" else 1)
    assert f"examples/configs/{path.name}" in path.read_text(encoding="utf-8"), "the comment shows how it is used"


def test_launch_files_are_all_there() -> None:
    names = {"ddp", "fsdp2", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3", "two_machines"}
    assert {path.stem for path in CONFIGS.iterdir()} == names


# --- short runs -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> list[str | Path]:
    """Arguments of a short run, with a text and a cache that all runs of this file share."""
    folder = tmp_path_factory.mktemp("example")
    (folder / "text.py").write_text((ROOT / "examples" / "packed_text.py").read_text(encoding="utf-8") * 4)
    return [
        "--text", folder / "text.py", "--cache", folder / "cache", "--seq-len", "32", "--max-steps", "20",
        "--val-every", "10", "--save-every", "10", "--log-every", "1", "--sample-tokens", "5",
    ]  # fmt: skip


def values(out: Path, name: str) -> dict[int, float]:
    with (out / "metrics" / "metrics.csv").open() as file:
        return {int(row["step"]): float(row[name]) for row in csv.DictReader(file) if row.get(name)}


def test_one_process_as_users_start_it(shared: list[Any], tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, *shared, "--batch-size", "8", "--out", tmp_path / "run"]
    done = run_command(command, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    out = tmp_path / "run"
    loss = values(out, "val/loss")
    assert sorted(loss) == [0, 10, 20]
    assert loss[0] == pytest.approx(math.log(2048), rel=0.02)
    assert loss[20] < loss[10] < loss[0]
    for step, perplexity in values(out, "val/perplexity").items():
        assert perplexity == pytest.approx(math.exp(loss[step]), rel=1e-4)
    for name in ("train/loss", "train/lr", "train/grad_norm", "throughput/items_per_sec"):
        assert sorted(values(out, name)) == list(range(1, 21)), name
    # The warm-up is one step of twenty; the last step's rate is that of step 19 of 20, counted from 0.
    rates = values(out, "train/lr")
    assert rates[1] == PRESETS["tiny"].learning_rate
    assert rates[20] == pytest.approx(PRESETS["tiny"].learning_rate * warmup_then_cosine(19, 20))
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((out / "tensorboard").glob("events.out.tfevents.*"))
    assert "--- a sample ---\ndef " in done.stdout
    for place in (out / "loss.png", out / "checkpoints" / "step-00000020", out / "tensorboard"):
        assert str(place) in done.stdout
    assert re.search(r"validation loss +\d\.\d{4} at step 20: \d\d\.\d% of ln\(2048\)", done.stdout)
    assert "Traceback" not in done.stdout


@pytest.fixture(scope="module")
def plain_loop(shared: list[Any]) -> dict[int, float]:
    """Train losses of a loop in plain PyTorch over the global batches, of 8 sequences, in the order of seed 0."""
    _, args = parse([str(part) for part in shared])
    preset = PRESETS[args.preset]
    data = llama_fsdp.PackedText(
        llama_fsdp.open_text(args),
        args.cache,
        vocab_size=preset.shape["vocab_size"],
        seq_len=args.seq_len,
        batch_size=8,
    )
    data.prepare_data()
    data.setup("fit")
    batches = TrainData(data.train_dataloader(), rank=0, world_size=1, seed=0)
    batches.begin_epoch(0)

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**preset.shape, bos_token_id=0, eos_token_id=0))
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    others = [p for name, p in model.named_parameters() if "norm" not in name]
    groups = [{"params": others, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    losses = {}
    for step, batch in enumerate(itertools.islice(batches, args.max_steps)):
        for group in optimizer.param_groups:
            group["lr"] = preset.learning_rate * warmup_then_cosine(step, args.max_steps)
        logits = model(input_ids=batch[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses[step + 1] = loss.item()
    return losses


def assert_losses_of(plain_loop: dict[int, float], out: Path) -> None:
    loss = values(out, "train/loss")
    assert sorted(loss) == sorted(plain_loop)
    for step, value in loss.items():
        assert value == pytest.approx(plain_loop[step], abs=1e-4), step


def test_one_device_with_accumulation(shared: list[Any], plain_loop: dict[int, float], tmp_path: Path) -> None:
    arguments = [*shared, "--strategy", "single", "--batch-size", "4", "--accumulate", "2", "--out", tmp_path]
    done = run_command([sys.executable, SCRIPT, *arguments])
    assert done.returncode == 0, done.stdout
    assert_losses_of(plain_loop, tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        "fsdp2",
        "deepspeed_stage_3",
        pytest.param("ddp", marks=pytest.mark.slow),
        pytest.param("deepspeed_stage_1", marks=pytest.mark.slow),
        pytest.param("deepspeed_stage_2", marks=pytest.mark.slow),
    ],
)
def test_launched_runs_agree(config: str, shared: list[Any], plain_loop: dict[int, float], tmp_path: Path) -> None:
    launch = [ACCELERATE, "launch", "--num_processes", "2", "--main_process_port", "0"]
    command = [*launch, "--config_file", CONFIGS / f"{config}.yaml", SCRIPT, *shared, "--batch-size", "4"]
    done = run_command([*command, "--out", tmp_path / "run"], timeout=240)
    assert done.returncode == 0, done.stdout
    assert_losses_of(plain_loop, tmp_path / "run")
    assert f"strategy {config}" in done.stdout, "the Trainer says what really runs"
    assert done.stdout.count("--- a sample ---") == 1


def test_a_killed_run_goes_on(shared: list[Any], tmp_path: Path) -> None:
    arguments = [*shared, "--strategy", "single", "--batch-size", "8"]
    whole = run_command([sys.executable, SCRIPT, *arguments, "--out", tmp_path / "whole"])
    assert whole.returncode == 0, whole.stdout

    command = [str(part) for part in (sys.executable, SCRIPT, *arguments, "--out", tmp_path / "killed")]
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=clean_environment())
        committed = tmp_path / "killed" / "checkpoints" / "step-00000010" / "manifest.json"
        limit = time.monotonic() + 120.0
        while not committed.exists() and process.poll() is None and time.monotonic() < limit:
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait(30.0)
    assert committed.exists(), (tmp_path / "output").read_text()
    assert process.returncode == -signal.SIGKILL, "it was through before it could be killed"

    done = run_command([*command, "--resume", "auto"])
    assert done.returncode == 0, done.stdout
    for name in ("train/loss", "val/loss"):
        resumed, expected = values(tmp_path / "killed", name), values(tmp_path / "whole", name)
        # What came after the checkpoint is there to the last bit; what came before may have been cut off by the kill.
        assert {s: v for s, v in resumed.items() if s > 10} == {s: v for s, v in expected.items() if s > 10}
        assert all(expected[step] == value for step, value in resumed.items())


def test_mistake_under_a_launch(tmp_path: Path) -> None:
    launch = [ACCELERATE, "launch", "--num_processes", "2", "--main_process_port", "0"]
    command = [*launch, "--config_file", CONFIGS / "ddp.yaml", SCRIPT, "--preset", "tinny", "--out", tmp_path]
    done = run_command(command)
    assert done.returncode != 0
    assert done.stdout.count("llama_fsdp.py: error: ") == 1
    # torchrun names the exit status of a rank that failed; that of the other is 2 as well, or it was ended before.
    assert re.search(r"exitcode +: 2 ", done.stdout)
    assert 'File "' + str(SCRIPT) not in done.stdout
