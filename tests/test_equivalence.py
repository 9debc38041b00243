"""Every strategy, world size and accumulation gives the gradient of the one big batch: against a plain PyTorch loop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.distributed import RankChecks
from tests.scenarios import DISTRIBUTED, Recorder, Tokens, quiet_trainer, ragged_tokens, whole

STEPS = 8
MICRO = 2
#: (accumulate_grad_batches, micro-batches per rank and epoch): the last one cuts every third window short.
WINDOWS = {"1": (1, 4), "3": (3, 6), "cut": (3, 7)}

on_two_ranks = RankChecks(world_size=2, timeout=120.0)


def plain_loop(accumulate: int, batches: int, clip: float | None, world: int) -> tuple[dict[str, Tensor], list[float]]:
    """Eight AdamW steps over whole windows of all ranks at once: weights by name, and the norms before clipping."""
    torch.manual_seed(11)
    model = Tokens()
    optimizer = model.configure_optimizers()
    trained = [p for p in model.parameters() if p.requires_grad]
    rows = ragged_tokens(world * batches * MICRO)
    micro = [rows[i : i + world * MICRO] for i in range(0, len(rows), world * MICRO)]
    windows = [micro[i : i + accumulate] for i in range(0, len(micro), accumulate)]
    norms = []
    for step in range(STEPS):
        window = [row for batch in windows[step % len(windows)] for row in batch]
        logits = model(torch.stack([row["tokens"] for row in window])).flatten(0, 1)
        labels = torch.stack([row["labels"] for row in window]).flatten()
        loss = nn.functional.cross_entropy(logits, labels, ignore_index=Tokens.ignored)
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(trained, clip if clip is not None else float("inf"))))
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}, norms


def check(strategy: str, windows: str, clip: float | None, world: int) -> None:
    accumulate, batches = WINDOWS[windows]
    expected, norms = plain_loop(accumulate, batches, clip, world)
    torch.manual_seed(11)
    module = Tokens()
    recorder = Recorder(norms=True)
    trainer = quiet_trainer(
        strategy=strategy,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=clip,
        max_steps=STEPS,
        callbacks=recorder,
    )
    trainer.fit(module, DataLoader(ragged_tokens(world * batches * MICRO), batch_size=MICRO))
    assert trainer.global_step == STEPS
    assert trainer.strategy.name == strategy
    for name, value in expected.items():
        torch.testing.assert_close(
            whole(trainer, name), value, atol=1e-6, rtol=0.0, msg=lambda text, n=name: f"{n}: {text}"
        )
    assert recorder.norms == pytest.approx(norms, abs=1e-6)
    assert module.head.weight is module.embedding.weight


@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("windows", WINDOWS)
def test_one_process(windows: str, clip: float | None) -> None:
    check("single", windows, clip, 1)


@on_two_ranks
@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("windows", list(WINDOWS))
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_two_processes(strategy: str, windows: str, clip: float | None) -> None:
    check(strategy, windows, clip, 2)


def test_the_reference_feels_a_wrong_average() -> None:
    """The ragged data tells a mean of means from the mean over tokens: else the comparison above could not fail."""
    rows = ragged_tokens(8)
    model = Tokens()

    def loss(part: list[dict[str, Tensor]]) -> Tensor:
        logits = model(torch.stack([row["tokens"] for row in part])).flatten(0, 1)
        labels = torch.stack([row["labels"] for row in part]).flatten()
        return nn.functional.cross_entropy(logits, labels, ignore_index=Tokens.ignored)

    mean_of_means = (loss(rows[:4]) + loss(rows[4:])) / 2
    assert abs(float(mean_of_means - loss(rows))) > 1e-3
