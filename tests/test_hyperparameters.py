"""save_hyperparameters keeps what __init__ was given, and load_from_checkpoint gives it back."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from acclight import TrainModule
from tests.scenarios import quiet_trainer, repeated


class Base(TrainModule):
    """What every module here shares: one weight per unit of `width`."""

    def make(self, width: int) -> None:
        self.w = nn.Parameter(torch.zeros(width))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return ((self.w - batch) ** 2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Plain(Base):
    def __init__(self, width: int, rate: float = 0.1, *, name: str = "a", **options: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.make(width)


class Early(Base):
    def __init__(self, width: int = 2) -> None:
        self.save_hyperparameters()
        super().__init__()
        self.make(width)


class Some(Base):
    def __init__(self, width: int, rate: float = 0.1, *rest: int) -> None:
        super().__init__()
        self.save_hyperparameters("width")
        self.make(width)


class Ignores(Base):
    def __init__(self, width: int, net: Any = None, rate: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters(ignore="net")
        self.make(width)


class Parent(Base):
    def __init__(self, width: int = 2, depth: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.make(width)


class Child(Parent):
    def __init__(self, rate: float, width: int = 3) -> None:
        super().__init__(width=width + 1, depth=7)


class Adds(Parent):
    def __init__(self, rate: float, width: int = 3) -> None:
        super().__init__(width=width)
        self.save_hyperparameters("rate", ignore=["depth"])


class Whole(Base):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.save_hyperparameters(config)
        self.make(self.hparams["width"])
        self.rate = config.rate if isinstance(config, Namespace) else config["rate"]


@dataclass(eq=False)
class Fields(Base):
    width: int
    rate: float = 0.5

    def __post_init__(self) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.make(self.width)


CASES: list[tuple[TrainModule, dict[str, Any]]] = [
    (Plain(3, 0.5, extra=[1, 2]), {"width": 3, "rate": 0.5, "name": "a", "extra": [1, 2]}),
    (Early(), {"width": 2}),
    (Some(4), {"width": 4}),
    (Ignores(2, net=nn.Linear(1, 1)), {"width": 2, "rate": 0.1}),
    (Parent(), {"width": 2, "depth": 1}),
    # The outermost class's arguments win, as in Lightning.
    (Child(0.25, 3), {"width": 3, "depth": 7, "rate": 0.25}),
    (Adds(0.25), {"width": 3, "rate": 0.25}),
    (Whole({"width": 2, "rate": 0.5}), {"width": 2, "rate": 0.5}),
    (Whole(Namespace(width=2, rate=0.5)), {"width": 2, "rate": 0.5}),
    (Fields(3), {"width": 3, "rate": 0.5}),
]


@pytest.mark.parametrize(("module", "kept"), CASES)
def test_what_is_kept(module: TrainModule, kept: dict[str, Any]) -> None:
    assert module.hparams == kept
    assert module.hparams_initial == kept
    assert module.hparams.width == kept["width"]


def test_hparams_can_be_changed_and_the_initial_ones_stay() -> None:
    module = Plain(3)
    module.hparams.rate = 0.7
    module.hparams["name"] = "b"
    module.hparams_initial["width"] = 99
    assert (module.hparams["rate"], module.hparams.name) == (0.7, "b")
    assert module.hparams_initial == {"width": 3, "rate": 0.1, "name": "a"}
    with pytest.raises(AttributeError, match=r"no hyper-parameter 'depth'; there are \['name', 'rate', 'width'\]"):
        _ = module.hparams.depth


def test_errors_name_the_argument() -> None:
    class Wrong(Base):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.save_hyperparameters("widht")

    class Odd(Base):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.save_hyperparameters(3)

    with pytest.raises(ValueError, match=r"'widht' is no argument of __init__; there are \['width'\]"):
        Wrong(1)
    with pytest.raises(TypeError, match="save_hyperparameters got a int"):
        Odd(1)
    with pytest.raises(RuntimeError, match=r"must be called inside Plain\.__init__"):
        Plain(1).save_hyperparameters()


def saved(module: TrainModule, folder: Path) -> Path:
    trainer = quiet_trainer(strategy="single", max_steps=1)
    trainer.fit(module, repeated([1.0], 1))
    trainer.save_checkpoint(folder / "checkpoint")
    return folder / "checkpoint"


@pytest.mark.parametrize(("module", "kept"), CASES)
def test_the_round_trip(module: TrainModule, kept: dict[str, Any], tmp_path: Path) -> None:
    loaded = type(module).load_from_checkpoint(saved(module, tmp_path))
    assert loaded.hparams == kept
    assert torch.equal(loaded.w, module.w)
    if isinstance(module, Whole):
        assert loaded.rate == 0.5


def test_arguments_replace_and_complete_what_was_saved(tmp_path: Path) -> None:
    path = saved(Ignores(2, net=nn.Linear(1, 1)), tmp_path)
    loaded = Ignores.load_from_checkpoint(path, rate=0.9, net="other")
    assert loaded.hparams == {"width": 2, "rate": 0.9}
    whole = Whole.load_from_checkpoint(saved(Whole({"width": 2, "rate": 0.5}), tmp_path / "whole"), rate=0.125)
    assert whole.rate == 0.125


def test_a_missing_argument_is_named(tmp_path: Path) -> None:
    class Needs(Base):
        def __init__(self, width: int, rate: float) -> None:
            super().__init__()
            self.make(width)

    path = saved(Needs(2, 0.5), tmp_path)
    with pytest.raises(
        TypeError, match=r"does not hold the argument 'width' of __init__; give it, as in .*width=\.\.\."
    ):
        Needs.load_from_checkpoint(path, rate=0.5)
    assert Needs.load_from_checkpoint(path, rate=0.5, width=2).w.tolist() == [0.5, 0.5]


def test_what_a_checkpoint_cannot_hold_is_left_out_and_said(tmp_path: Path) -> None:
    class Holds(Base):
        def __init__(self, width: int, net: Any) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.make(width)

    with pytest.warns(UserWarning, match=r"'net' is a Linear, which a checkpoint cannot hold.*ignore=\['net'\]"):
        module = Holds(2, nn.Linear(1, 1))
    assert isinstance(module.hparams.net, nn.Linear)
    path = saved(module, tmp_path)
    with pytest.raises(TypeError, match="does not hold the argument 'net'"):
        Holds.load_from_checkpoint(path)


def test_nested_settings_come_back_with_attributes(tmp_path: Path) -> None:
    class Nested(Base):
        def __init__(self, width: int, optim: Any) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.make(width)
            self.rate = optim.rate

    loaded = Nested.load_from_checkpoint(saved(Nested(2, Namespace(rate=0.5, betas=[0.9])), tmp_path))
    assert loaded.rate == 0.5
    assert loaded.hparams.optim == {"rate": 0.5, "betas": [0.9]}


def test_the_module_sees_what_it_has_saved(tmp_path: Path) -> None:
    class Remembers(Parent):
        seen: Any = None

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["words"] = ["a", "b"]

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.seen = checkpoint["words"]

    loaded = Remembers.load_from_checkpoint(saved(Remembers(), tmp_path), map_location="cpu")
    assert loaded.seen == ["a", "b"]


def test_loggers_hear_of_them_unless_told_otherwise(tmp_path: Path) -> None:
    from acclight.loggers import Logger

    class Hears(Logger):
        def __init__(self) -> None:
            self.version = 0
            self.heard: list[Any] = []

        name = "hears"
        log_dir = None

        def log_hyperparams(self, params: Any) -> None:
            self.heard.append(dict(params))

        def log_metrics(self, metrics: Any, step: int) -> None:
            pass

        def finalize(self, status: str) -> None:
            pass

    class Silent(Base):
        def __init__(self, width: int = 2) -> None:
            super().__init__()
            self.save_hyperparameters(logger=False)
            self.make(width)

    logger = Hears()
    quiet_trainer(strategy="single", max_steps=1, logger=logger).fit(Plain(2), repeated([1.0], 1))
    quiet_trainer(strategy="single", max_steps=1, logger=logger).fit(Silent(2), repeated([1.0], 1))
    assert logger.heard == [{"width": 2, "rate": 0.1, "name": "a"}]
