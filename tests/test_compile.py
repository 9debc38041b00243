"""torch.compile through the Trainer, and by the user's own hand: same numbers, whole graphs, clean names."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics.classification import BinaryPrecision, BinaryRecall

from acclight import Trainer, TrainModule, checkpoint
from tests.distributed import RankChecks
from tests.scenarios import quiet_trainer, whole

on_two_ranks = RankChecks(world_size=2, timeout=240.0)


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


class Graphs:
    """A backend that runs graphs as they are and counts them.

    Attributes:
        operations: Per graph that was captured the names of what it calls.
    """

    def __init__(self) -> None:
        self.operations: list[list[str]] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        calls = [n for n in graph.graph.nodes if n.op in ("call_function", "call_method")]
        self.operations.append([getattr(n.target, "__name__", str(n.target)) for n in calls])
        return graph.forward


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Net(TrainModule):
    """Three equal blocks; every step logs, in the middle and at the end, and reads what the Trainer knows."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(6, 2)
        self.logged: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.to(self.device))

    def step(self, batch: Tensor, name: str) -> Tensor:
        out = self(batch)
        self.log(f"{name}_mean", out.mean(), on_step=True, on_epoch=True)
        loss = (out**2).mean()
        self.log_dict({f"{name}_loss": loss, f"{name}_constant": 2.5}, prog_bar=True)
        return loss

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.step(batch, "train")
        self.log("step", self.global_step)
        self.log("batch", batch_idx)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.step(batch, "val")

    def on_step(self) -> None:
        self.logged.append(float(self.trainer.callback_metrics.get("train_loss", torch.tensor(-1.0))))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def rows(number: int = 20) -> Tensor:
    return torch.randn(number, 6, generator=torch.Generator().manual_seed(1))


def fitted(module: TrainModule, **arguments: Any) -> tuple[Trainer, dict[str, float]]:
    """Two epochs of ten steps with a validation each; the metrics at the end."""
    trainer = quiet_trainer(max_epochs=2, log_every_n_steps=1, **({"strategy": "single"} | arguments))
    trainer.fit(module, DataLoader(rows(), batch_size=2), DataLoader(rows(6), batch_size=2))
    return trainer, {name: float(value) for name, value in trainer.callback_metrics.items()}


def net() -> Net:
    torch.manual_seed(7)
    return Net()


def same(module: nn.Module, other: nn.Module) -> None:
    theirs = dict(other.named_parameters())
    for name, value in module.named_parameters():
        torch.testing.assert_close(value, theirs[name], atol=1e-6, rtol=0.0)


@pytest.fixture(scope="module")
def reference() -> tuple[Net, dict[str, float]]:
    module = net()
    return module, fitted(module)[1]


def test_whole_steps_are_one_graph_with_their_logs(reference: tuple[Net, dict[str, float]]) -> None:
    graphs = Graphs()
    module = net()
    _, metrics = fitted(module, compile={"backend": graphs, "fullgraph": True})
    assert metrics == pytest.approx(reference[1], abs=1e-6)
    assert metrics["step"] == 19.0
    assert metrics["batch"] == 9.0
    same(module, reference[0])
    assert not torch._dynamo.utils.counters["graph_break"]
    # Training once, and once more when the step and batch counts turn out to change; validation likewise.
    assert 2 <= len(graphs.operations) <= 4
    assert all(operations.count("linear") == 4 for operations in graphs.operations)


@pytest.mark.parametrize("what", ["module", "training_step", "both"])
def test_what_the_user_compiles_by_hand(what: str, reference: tuple[Net, dict[str, float]]) -> None:
    module = net()
    if what in ("module", "both"):
        module.compile(backend="eager")
    if what in ("training_step", "both"):
        module.training_step = torch.compile(module.training_step, backend="eager")  # type: ignore[method-assign]
    _, metrics = fitted(module)
    assert metrics == pytest.approx(reference[1], abs=1e-6)
    same(module, reference[0])
    assert 1 <= torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4, "no graph for every value of a counter"
    assert not torch._dynamo.utils.counters["graph_break"]


def test_a_module_from_torch_compile(reference: tuple[Net, dict[str, float]]) -> None:
    graphs = Graphs()
    compiled: Any = torch.compile(net(), backend=graphs, fullgraph=True)
    trainer, metrics = fitted(compiled)
    assert metrics == pytest.approx(reference[1], abs=1e-6)
    assert isinstance(trainer.module, Net)
    assert [operations.count("linear") for operations in graphs.operations] == [4] * len(graphs.operations)
    assert 1 <= len(graphs.operations) <= 3
    assert trainer.validate(compiled, DataLoader(rows(6), batch_size=2))[0]["val_loss"] == pytest.approx(
        metrics["val_loss"], abs=1e-6
    )


def test_regions(reference: tuple[Net, dict[str, float]]) -> None:
    graphs = Graphs()
    module = net()
    _, metrics = fitted(module, compile={"backend": graphs, "regional": True})
    assert metrics == pytest.approx(reference[1], abs=1e-6)
    same(module, reference[0])
    # One graph for all three blocks; once for training and once without gradients.
    assert [operations.count("linear") for operations in graphs.operations] == [1] * len(graphs.operations)
    assert 1 <= len(graphs.operations) <= 3
    with pytest.raises(ValueError, match="has no ModuleList or Sequential"):
        fitted(Tied(), compile="regional")


@pytest.mark.parametrize("given", [pytest.param(True, marks=pytest.mark.slow), "regional"])
def test_inductor(given: Any, reference: tuple[Net, dict[str, float]]) -> None:
    module = net()
    trainer = quiet_trainer(strategy="single", max_steps=4, compile=given)
    trainer.fit(module, DataLoader(rows(), batch_size=2))
    other = net()
    quiet_trainer(strategy="single", max_steps=4).fit(other, DataLoader(rows(), batch_size=2))
    same(module, other)


class Tied(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.head(self.embedding(batch.long().clamp(0, 4))).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@on_two_ranks
@pytest.mark.parametrize(
    "given", [{"backend": "eager"}, {"backend": "aot_eager"}, {"backend": "eager", "regional": True}]
)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "deepspeed_stage_2", "deepspeed_stage_3"])
def test_compiled_training_is_the_same_on_two_ranks(strategy: str, given: dict[str, Any], tmp_path: Path) -> None:
    torch._dynamo.reset()
    results = []
    for compilation in (None, given):
        torch.manual_seed(7)
        module = Net()
        trainer = quiet_trainer(strategy=strategy, max_steps=6, compile=compilation, log_every_n_steps=1)
        trainer.fit(module, DataLoader(rows(24), batch_size=2), DataLoader(rows(7), batch_size=2))
        weights = {name: whole(trainer, name) for name in sorted(trainer.strategy.model_state(module))}
        results.append((weights, {n: float(v) for n, v in trainer.callback_metrics.items()}))
    (plain, expected), (compiled, metrics) = results
    assert metrics == pytest.approx(expected, abs=1e-6)
    for name, value in plain.items():
        torch.testing.assert_close(compiled[name], value, atol=1e-6, rtol=0.0)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    trainer.save_checkpoint(tmp_path / "saved")
    assert set(checkpoint.load_weights(tmp_path / "saved")) == set(net().state_dict())


@on_two_ranks
@pytest.mark.parametrize("regional", [False, True])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_no_graph_breaks_on_two_ranks(strategy: str, regional: bool) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    graphs = Graphs()
    trainer = quiet_trainer(
        strategy=strategy, max_steps=6, compile={"backend": graphs, "regional": regional}, log_every_n_steps=1
    )
    trainer.fit(Net(), DataLoader(rows(24), batch_size=2), DataLoader(rows(7), batch_size=2))
    assert not torch._dynamo.utils.counters["graph_break"]
    # Whole steps, or single blocks: for training, for validation and for its smaller last batch.
    assert 2 <= len(graphs.operations) <= 4
    assert all(operations.count("linear") == (1 if regional else 4) for operations in graphs.operations)


@on_two_ranks
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_inductor_on_two_ranks(strategy: str) -> None:
    torch._dynamo.reset()
    results = []
    for compilation in (None, True):
        torch.manual_seed(7)
        module = Net()
        trainer = quiet_trainer(strategy=strategy, max_steps=3, compile=compilation)
        trainer.fit(module, DataLoader(rows(12), batch_size=2))
        results.append({name: whole(trainer, name) for name in sorted(trainer.strategy.model_state(module))})
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, atol=1e-6, rtol=0.0)


class Measured(TrainModule):
    """The output is the input: what is predicted is its largest column, and the label the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))
        for stage in ("train", "val", "test"):
            setattr(self, f"{stage}_f1", torchmetrics.F1Score(task="multiclass", num_classes=2, average="macro"))
        self.parts = torchmetrics.MetricCollection(
            {"precision": BinaryPrecision(), "recall": BinaryRecall()}, prefix="test_"
        )
        self.called: list[float] = []

    def step(self, batch: Tensor, stage: str) -> Tensor:
        out, labels = self.w * batch[:, :2], batch[:, 2].long()
        f1 = getattr(self, f"{stage}_f1")
        self.called.append(f1(out, labels))
        self.log(f"{stage}_f1", f1, on_step=False, on_epoch=True)
        return 0.0 * out.mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.step(batch, "train")

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.step(batch, "val")

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.step(batch, "test")
        self.parts.update(batch[:, 1] > batch[:, 0], batch[:, 2].long())
        self.log_dict(self.parts)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def check_measured() -> None:
    """Predictions 1 1 1 0 0 0 0 0, labels 1 1 0 1 0 0 0 1: of class 1 2 hits, 1 false alarm and 2 misses, of class 0 3, 2, 1."""
    predicted, labels = torch.tensor([1, 1, 1, 0, 0, 0, 0, 0]), torch.tensor([1, 1, 0, 1, 0, 0, 0, 1])
    data = torch.stack([1.0 - predicted, predicted.float(), labels.float()], dim=1)
    expected = (2 * 2 / (2 * 2 + 1 + 2) + 2 * 3 / (2 * 3 + 2 + 1)) / 2
    module = Measured()
    trainer = quiet_trainer(max_epochs=2, compile={"backend": "eager"})
    trainer.fit(module, DataLoader(data, batch_size=2), DataLoader(data, batch_size=2))
    assert float(trainer.callback_metrics["train_f1"]) == pytest.approx(expected)
    assert float(trainer.callback_metrics["val_f1"]) == pytest.approx(expected)
    module.called.clear()
    (tested,) = trainer.test(module, DataLoader(data, batch_size=2), verbose=False)
    assert tested == pytest.approx({"test_f1": expected, "test_precision": 2 / 3, "test_recall": 2 / 4})
    # Each call gives the value of its batch: 1 1 for 1 1, say, leaves class 0 out, 0 0 for 0 0 class 1.
    of_batches = [1.0, 0.0, 1.0, (0.0 + 2 / 3) / 2]
    own = of_batches[trainer.global_rank :: trainer.world_size]
    assert list(map(float, module.called)) == pytest.approx(own)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 3
    assert not {"forward", "reset"} & vars(module.test_f1).keys()
    copy.deepcopy(module.test_f1)


def test_torchmetrics_objects_are_not_traced() -> None:
    check_measured()


@on_two_ranks
def test_torchmetrics_objects_are_not_traced_on_two_ranks() -> None:
    torch._dynamo.reset()
    check_measured()


class HalfCompiled(Net):
    """A part is wrapped by torch.compile in the user's own code, which puts `_orig_mod` into its names."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.compile(self.head, backend="eager")  # type: ignore[assignment]


def test_names_are_clean_and_checkpoints_go_from_compiled_to_plain_and_back(tmp_path: Path) -> None:
    torch.manual_seed(7)
    module = HalfCompiled()
    trainer, _ = fitted(module, compile={"backend": "eager"})
    trainer.save_checkpoint(tmp_path / "compiled")
    weights = checkpoint.load_weights(tmp_path / "compiled")
    plain = Net()
    plain.load_state_dict(weights, strict=True)
    second = quiet_trainer(strategy="single", max_epochs=3)
    second.fit(plain, DataLoader(rows(), batch_size=2), ckpt_path=tmp_path / "compiled")
    assert second.global_step == 30
    second.save_checkpoint(tmp_path / "plain")
    third = quiet_trainer(strategy="single", max_epochs=4, compile={"backend": "eager"})
    third.fit(HalfCompiled(), DataLoader(rows(), batch_size=2), ckpt_path=tmp_path / "plain")
    assert third.global_step == 40


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_precision_is_kept(precision: str) -> None:
    class Typed(Net):
        def step(self, batch: Tensor, name: str) -> Tensor:
            out = self(batch)
            self.log(f"{name}_low", float(out.dtype is torch.bfloat16))
            return (out.float() ** 2).mean()

    _, metrics = fitted(Typed(), precision=precision, compile={"backend": "eager", "fullgraph": True})
    assert metrics["train_low"] == metrics["val_low"] == 1.0


def test_the_launchers_settings_are_followed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_FULLGRAPH", "true")
    module = net()
    trainer, _ = fitted(module)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 2
    assert all("_orig_mod" not in name for name, _ in trainer.core.step_module.named_parameters())
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    caplog.clear()
    fitted(net(), compile=False)
    assert not torch._dynamo.utils.counters["stats"]
    assert "compile=False of the script wins over the launcher's dynamo settings" in caplog.text
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "NO")
    fitted(net())
    assert not torch._dynamo.utils.counters["stats"]


def test_what_compile_takes() -> None:
    with pytest.raises(ValueError, match="compile has no key 'backnd'; did you mean 'backend'"):
        quiet_trainer(strategy="single", compile={"backnd": "eager"})
    with pytest.raises(ValueError, match="compile='fast'"):
        quiet_trainer(strategy="single", compile="fast")


def test_nothing_of_dynamo_is_touched_without_compilation() -> None:
    before = torch._dynamo.config.allow_unspec_int_on_nn_module
    fitted(net(), compile={"backend": "eager"})
    assert torch._dynamo.config.allow_unspec_int_on_nn_module is before
