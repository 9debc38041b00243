"""Warnings name the user's line."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
from torch import Tensor

import acclight
from acclight.messages import warn
from acclight.strategies import FSDP2Strategy
from tests.scenarios import Scalar, quiet_trainer, repeated


class Warns(Scalar):
    """Has something to be warned of in a step, and before it."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
        warn("from a step")
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return None


def places(caught: list[warnings.WarningMessage], text: str) -> list[tuple[str, int]]:
    return [(w.filename, w.lineno) for w in caught if text in str(w.message)]


def test_a_warning_points_at_the_line_that_called_acclight() -> None:
    module = Warns()
    trainer = quiet_trainer(strategy="single", max_epochs=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
        trainer.fit(module, repeated([1.0], 1))
        FSDP2Strategy({"sharding_strategy": "FULL_SHARD"})
    # Within the loop the nearest line of the user's is in the step; elsewhere it is where the user has called.
    assert places(caught, "from a step") == [(__file__, module.line)]
    assert places(caught, "configure_optimizers returned None") == [(__file__, line)]
    assert places(caught, "sharding_strategy") == [(__file__, line + 1)]


def test_a_warning_without_a_user_still_comes() -> None:
    with pytest.warns(UserWarning, match="nobody"):
        exec("warn('nobody')", {"warn": warn, "__name__": "acclight.made"})


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("ModelCheckpoint", "from acclight.callbacks import ModelCheckpoint"),
        ("CSVLogger", "from acclight.loggers import CSVLogger"),
        ("DDPStrategy", "from acclight.strategies import DDPStrategy"),
        ("LightningModule", "from acclight import TrainModule"),
        ("TransformersModule", "from acclight.integrations.transformers import TransformersModule"),
    ],
)
def test_a_name_that_lies_elsewhere_is_said_to(name: str, line: str) -> None:
    with pytest.raises(ImportError, match=f"acclight has no '{name}': use `{line}`"):
        exec(f"from acclight import {name}")
    exec(line, {})
    assert not hasattr(acclight, "NoSuchThing")
