"""Small models and data whose right answers are worked out by hand or by a plain PyTorch loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from acclight import Callback, Trainer, TrainModule

DISTRIBUTED = ["ddp", "fsdp2", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"]


def quiet_trainer(**arguments: Any) -> Trainer:
    """A Trainer that writes nothing and shows nothing."""
    switches = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return Trainer(**(dict.fromkeys(switches, False) | arguments))


def whole(trainer: Trainer, name: str) -> Tensor:
    """A parameter by its name, whole and on the CPU, under any strategy. Every rank has to ask."""
    value = trainer.strategy.model_state(trainer.module)[name]
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().cpu().clone()


class Scalar(TrainModule):
    """One weight w = 0 and the loss mean((w - x)^2 / 2), whose gradient is w - mean(x)."""

    def __init__(self, lr: float = 0.5) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))
        self.lr = lr
        self.losses: list[float] = []
        self.batches: list[Tensor] = []

    def loss(self, x: Tensor) -> Tensor:
        return ((self.w - x) ** 2 / 2).mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.batches.append(batch.clone())
        loss = self.loss(batch)
        self.losses.append(float(loss))
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Vector(TrainModule):
    """w = zeros(4) and the loss w . [3, 4, 0, 12], whose gradient has the norm 13."""

    def __init__(self, lr: float = 1.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4))
        self.lr = lr

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.w @ torch.tensor([3.0, 4.0, 0.0, 12.0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Tokens(TrainModule):
    """A small language model with a tied head, a frozen part and sizes that two ranks cannot share evenly."""

    vocabulary = 7
    ignored = -100

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(self.vocabulary, 5)
        self.up = nn.Linear(5, 63)
        self.norm = nn.LayerNorm(63)
        self.frozen = nn.Linear(63, 65)
        self.down = nn.Linear(65, 5)
        self.head = nn.Linear(5, self.vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.down(torch.tanh(self.frozen(self.norm(self.up(self.embedding(tokens)))))))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        logits = self(batch["tokens"])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=self.ignored)
        self.log("loss", loss)
        return loss

    def count_items(self, batch: dict[str, Tensor]) -> Tensor:
        return (batch["labels"] != self.ignored).sum()

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)


def ragged_tokens(samples: int, length: int = 6) -> list[dict[str, Tensor]]:
    """Token rows of which between one and all positions count."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, Tokens.vocabulary, (samples, length), generator=generator)
    labels = (tokens * 3 + 1) % Tokens.vocabulary
    valid = torch.randint(1, length + 1, (samples, 1), generator=generator)
    labels[torch.arange(length) >= valid] = Tokens.ignored
    return [{"tokens": t, "labels": y} for t, y in zip(tokens, labels, strict=True)]


def repeated(values: list[float], world_size: int) -> DataLoader[Any]:
    """Batches of one sample, the list `values` on each of `world_size` ranks."""
    return DataLoader(torch.tensor([v for v in values for _ in range(world_size)]), batch_size=1)


class Recorder(Callback):
    """Keeps what a callback can see at every optimizer step."""

    def __init__(self, *, norms: bool = False) -> None:
        self.norms_wanted = norms
        self.norms: list[float] = []
        self.steps: list[int] = []
        self.rates: list[float] = []

    def on_step(self, trainer: Trainer, module: TrainModule) -> None:
        self.steps.append(trainer.global_step)
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        if self.norms_wanted:
            self.norms.append(trainer.grad_norm)
