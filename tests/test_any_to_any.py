"""Any checkpoint resumes anywhere: every ordered pair of strategies against training without a break."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from acclight import TrainModule, checkpoint
from acclight.checkpoint import Reader
from acclight.checkpoint.stored import read_tensors
from tests.distributed import RankChecks, run_ranks
from tests.scenarios import DISTRIBUTED, quiet_trainer

on_two_ranks = RankChecks(world_size=2, timeout=120.0)

EVERYWHERE = ["single", *DISTRIBUTED]
#: Optimizer steps before and after the break, and the rows of one, over all ranks.
STEPS, ROWS = 4, 12
#: Rows of an epoch: six steps, so that the break is in the middle of the first and the end in the middle of the second.
EPOCH = 6 * ROWS


class Odd(TrainModule):
    """Tied weights, sizes that neither two nor three ranks share evenly, a frozen part, two groups, dropout if asked."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.up = nn.Linear(7, 13)
        self.frozen = nn.Linear(13, 5).requires_grad_(False)
        self.down = nn.Linear(5, 7)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.seen: list[int] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        ids, tokens, labels = batch
        self.seen += ids.tolist()
        hidden = self.down(self.frozen(torch.tanh(self.up(self.embedding(tokens)))))
        return nn.functional.cross_entropy(self.head(self.dropout(hidden)), labels)

    def configure_optimizers(self) -> Any:
        trained = {name: p for name, p in self.named_parameters() if p.requires_grad}
        biases = [p for name, p in trained.items() if name.endswith("bias")]
        rest = [p for name, p in trained.items() if not name.endswith("bias")]
        # A large epsilon: where a gradient is next to nothing, AdamW would make a step of its rounding.
        groups = [{"params": rest, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=0.02, eps=1e-4)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    tokens, labels = torch.randint(0, 11, (2, EPOCH), generator=generator)
    return TensorDataset(torch.arange(EPOCH), tokens, labels)


class Noisy(TensorDataset):
    """Blanks tokens at random, so that the random state of workers shows."""

    def __getitem__(self, index: Any) -> Any:
        number, token, label = super().__getitem__(index)
        return number, token if torch.rand(()) > 0.3 else torch.zeros_like(token), label


def run(
    strategy: str, folder: Path, *, steps: int, world: int, resume: Path | None = None, random: bool = False
) -> list[int]:
    """Trains up to a step, saves to `folder`, and returns the samples of all ranks, step by step.

    With `random` there is dropout, and two workers draw.
    """
    torch.manual_seed(7)
    module = Odd(dropout=0.3 if random else 0.0)
    trainer = quiet_trainer(strategy=strategy, max_steps=steps, gradient_clip_val=0.5)
    assert trainer.world_size == world
    data = Noisy(*rows().tensors) if random else rows()
    loader = DataLoader(data, batch_size=ROWS // world, shuffle=True, num_workers=2 if random else 0)
    trainer.fit(module, loader, ckpt_path=resume)
    assert (trainer.global_step, trainer.strategy.name) == (steps, strategy)
    assert module.head.weight is module.embedding.weight
    trainer.save_checkpoint(folder)
    if trainer.is_global_zero:
        assert json.loads((folder / "trainer.json").read_text())["world_size"] == world
    everywhere = trainer.core.gather_objects(module.seen)
    each = list(zip(*everywhere, strict=True))
    return [number for step in each for number in step]


def stored(path: Path) -> dict[str, Tensor]:
    """Weights and optimizer state of a checkpoint, whole, by name."""
    reader = Reader(path)
    numbers = {name: torch.tensor(float(value)) for name, value in reader.optimizer_meta["plain"].items()}
    state = read_tensors(path / "optimizer") | numbers
    return checkpoint.load_weights(path) | {f"optimizer/{name}": value for name, value in state.items()}


def compare(path: Path, reference: Path, *, within: float) -> None:
    """Every weight and every value of optimizer state."""
    found, expected = stored(path), stored(reference)
    # Seven tensors that train, with two moments and a step each; a head's other name; a frozen weight and bias.
    assert len(expected) == 5 * 4 + 1 + 2
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=within, rtol=0.0, msg=lambda text, n=name: f"{n}: {text}")


def save_everywhere(folder: Path) -> dict[str, list[int]]:
    return {name: run(name, folder / name, steps=STEPS, world=2) for name in DISTRIBUTED}


@pytest.fixture(scope="module")
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of step 4 by the names of their strategies, `unbroken` at step 8, and the samples of the four steps."""
    folder = tmp_path_factory.mktemp("saved")
    seen = on_two_ranks.call(save_everywhere, {"folder": folder}, request.node)[0]
    seen["single"] = run("single", folder / "single", steps=STEPS, world=1)
    unbroken = run("single", folder / "unbroken", steps=2 * STEPS, world=1)
    # The order of samples does not depend on the number of ranks: every step has the same ones.
    for numbers in seen.values():
        assert by_step(numbers) == by_step(unbroken)[:STEPS]
    assert sorted(unbroken[:EPOCH]) == list(range(EPOCH))
    (folder / "seen.json").write_text(json.dumps(by_step(unbroken)))
    return folder


def by_step(numbers: list[int]) -> list[list[int]]:
    return [sorted(numbers[start : start + ROWS]) for start in range(0, len(numbers), ROWS)]


def resume(source: str, target: str, saved: Path, folder: Path, world: int) -> None:
    seen = run(target, folder / "resumed", steps=2 * STEPS, world=world, resume=saved / source)
    assert by_step(seen) == json.loads((saved / "seen.json").read_text())[STEPS:]
    compare(folder / "resumed", saved / "unbroken", within=1e-6)


@pytest.mark.parametrize("source", EVERYWHERE)
def test_from_any_to_one_process(source: str, saved: Path, tmp_path: Path) -> None:
    resume(source, "single", saved, tmp_path, world=1)


@on_two_ranks
@pytest.mark.parametrize("source", EVERYWHERE)
@pytest.mark.parametrize("target", DISTRIBUTED)
def test_from_any_to_two_processes(source: str, target: str, saved: Path, tmp_path: Path) -> None:
    resume(source, target, saved, tmp_path, world=2)


def go_on_bit_for_bit(strategy: str, folder: Path, world: int) -> None:
    unbroken = run(strategy, folder / "unbroken", steps=2 * STEPS, world=world, random=True)
    first = run(strategy, folder / "first", steps=STEPS, world=world, random=True)
    second = run(strategy, folder / "second", steps=2 * STEPS, world=world, random=True, resume=folder / "first")
    assert first + second == unbroken
    compare(folder / "second", folder / "unbroken", within=0.0)


def test_bit_for_bit_with_dropout_and_workers_in_one_process(tmp_path: Path) -> None:
    go_on_bit_for_bit("single", tmp_path, 1)


@on_two_ranks
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_bit_for_bit_with_dropout_and_workers_on_two_ranks(strategy: str, tmp_path: Path) -> None:
    go_on_bit_for_bit(strategy, tmp_path, 2)


def resume_all(saved: Path, folder: Path, steps: int, world: int, shift: int) -> dict[str, list[int]]:
    """Each strategy goes on from the checkpoint of the one that stands `shift` places before it."""
    names = DISTRIBUTED[shift:] + DISTRIBUTED[:shift]
    pairs = zip(DISTRIBUTED, names, strict=True)
    return {
        source: run(target, folder / source, steps=steps, world=world, resume=saved / source)
        for source, target in pairs
    }


@pytest.mark.slow
@pytest.mark.parametrize("shift", range(len(DISTRIBUTED)))
def test_from_two_processes_to_one_to_three(shift: int, saved: Path, tmp_path: Path) -> None:
    expected = json.loads((saved / "seen.json").read_text())
    one, three = tmp_path / "one", tmp_path / "three"
    for source in DISTRIBUTED:
        seen = run("single", one / source, steps=STEPS + 1, world=1, resume=saved / source)
        assert by_step(seen) == expected[STEPS : STEPS + 1]
    last = run_ranks(resume_all, [one, three, 2 * STEPS, 3, shift], world_size=3, timeout=200.0)[0]
    for source in DISTRIBUTED:
        assert by_step(last[source]) == expected[STEPS + 1 :]
        compare(three / source, saved / "unbroken", within=1e-6)
