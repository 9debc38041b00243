"""EarlyStopping: at which epoch it stops, by hand, and what does not count."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from acclight import Trainer, TrainModule
from acclight.callbacks import EarlyStopping
from tests.scenarios import quiet_trainer


class Scripted(TrainModule):
    """Its validation metric is what the script says for the epoch, 0 in the sanity check."""

    def __init__(self, script: list[float]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.script = script

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = ((self.w - batch) ** 2 / 2).mean()
        self.log("train", self.script[self.current_epoch], on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val", 0.0 if self.trainer.sanity_checking else self.script[self.current_epoch])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def loader(batches: int = 2) -> DataLoader[Any]:
    return DataLoader(torch.ones(batches).unbind(), batch_size=1)  # type: ignore[arg-type]


def fit(root: Path, callback: EarlyStopping, script: list[float], **arguments: Any) -> Trainer:
    settings: dict[str, Any] = {
        "max_epochs": len(script), "logger": False, "default_root_dir": root, "enable_progress_bar": False,
        "enable_model_summary": False, "enable_checkpointing": False,
    }  # fmt: skip
    trainer = Trainer(callbacks=[callback], **(settings | arguments))
    trainer.fit(Scripted(script), loader(), loader())
    return trainer


@pytest.mark.parametrize(
    ("arguments", "script", "epochs"),
    [
        # Better in the first two epochs, then no better three times: stops after epoch 5.
        ({"patience": 3}, [5.0, 4.0, 4.0, 4.5, 4.1, 1.0], 5),
        ({"patience": 1}, [5.0, 4.0, 4.0, 1.0], 3),
        ({"patience": 0}, [5.0, 4.0, 4.0, 1.0], 3),
        ({"patience": 2}, [5.0, 5.1, 4.9, 5.0, 4.8, 5.0], 6),
        ({"patience": 2, "mode": "max"}, [1.0, 2.0, 2.0, 1.0, 3.0], 4),
        # 4.6 is better than 5 by less than 0.5, 4.4 by more.
        ({"patience": 2, "min_delta": 0.5}, [5.0, 4.6, 4.4, 4.0, 4.1, 1.0], 5),
        ({"patience": 2, "min_delta": 0.5, "mode": "max"}, [1.0, 1.5, 1.6, 1.7, 9.0, 9.0], 6),
        ({"stopping_threshold": 1.0}, [3.0, 1.0, 0.9, 0.5], 3),
        ({"stopping_threshold": 0.9, "mode": "max"}, [0.5, 0.95, 0.99], 2),
        ({"divergence_threshold": 10.0}, [3.0, 10.0, 11.0, 0.5], 3),
        ({"divergence_threshold": 0.1, "mode": "max"}, [0.5, 0.05, 0.9], 2),
        ({"check_finite": True}, [3.0, math.nan, 1.0], 2),
        ({"check_finite": True}, [3.0, math.inf, 1.0], 2),
        ({"check_finite": False, "patience": 2}, [3.0, math.nan, 1.0, 2.0, 2.0, 0.0], 5),
    ],
)
@pytest.mark.parametrize("monitor", ["val", "train"])
def test_epoch_after_which_it_stops(
    tmp_path: Path, arguments: dict[str, Any], script: list[float], epochs: int, monitor: str
) -> None:
    callback = EarlyStopping(monitor, **arguments)
    trainer = fit(tmp_path, callback, script)
    assert trainer.global_step == 2 * epochs
    if epochs < len(script):
        assert trainer.should_stop
        assert callback.stopped_epoch == epochs - 1


def test_it_says_why_it_stops(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "acclight")
    fit(tmp_path, EarlyStopping("val", patience=2, verbose=True), [5.0, 4.0, 4.5, 4.25, 1.0])
    assert [message for message in caplog.messages if message.startswith("EarlyStopping")] == [
        "EarlyStopping: val got better, from inf to 5",
        "EarlyStopping: val got better, from 5 to 4",
        "EarlyStopping ends the training at step 8: val was no better than its best, 4, 2 time(s) in a row",
    ]


def test_only_new_values_count(tmp_path: Path) -> None:
    # Validated after epochs 2, 4, 6 and 8: 5, 6, 6 - two no better after epoch 6.
    callback = EarlyStopping("val", patience=2)
    trainer = fit(tmp_path, callback, [9.0, 5.0, 9.0, 6.0, 9.0, 6.0, 9.0, 1.0], check_val_every_n_epoch=2)
    assert trainer.global_step == 2 * 6
    assert callback.best_score == 5.0


def test_several_validations_in_an_epoch_each_count(tmp_path: Path) -> None:
    callback = EarlyStopping("val", patience=3)
    trainer = fit(tmp_path, callback, [1.0, 1.0, 1.0], val_check_interval=1)
    assert trainer.global_step == 4


@pytest.mark.parametrize("at_epoch_end", [True, False])
def test_where_it_looks_can_be_chosen(tmp_path: Path, at_epoch_end: bool) -> None:
    callback = EarlyStopping("val", patience=1, check_on_train_epoch_end=at_epoch_end)
    trainer = fit(tmp_path, callback, [1.0, 1.0, 1.0], val_check_interval=1)
    assert trainer.global_step == (4 if at_epoch_end else 2)


class Late(Scripted):
    """Logs when the epoch ends, after its validation."""

    def on_train_epoch_end(self) -> None:
        self.log("late", self.script[self.current_epoch])


def test_a_metric_may_be_logged_at_the_end_of_the_epoch(tmp_path: Path) -> None:
    arguments = {"default_root_dir": tmp_path, "max_epochs": 4, "check_val_every_n_epoch": 2}
    trainer = quiet_trainer(callbacks=EarlyStopping("late", patience=2), **arguments)
    trainer.fit(Late([3.0, 3.0, 4.0, 1.0]), loader(), loader())
    assert trainer.current_epoch == 2
    # Also where the metric of a validation is there only after the second epoch.
    trainer = quiet_trainer(callbacks=EarlyStopping("val", patience=2), **arguments)
    trainer.fit(Late([3.0, 3.0, 4.0, 1.0]), loader(), loader())
    assert trainer.current_epoch == 3
    module = Late([1.0] * 4)
    with pytest.raises(ValueError, match="'lat' was not logged; did you mean 'late'"):
        quiet_trainer(callbacks=EarlyStopping("lat"), **arguments).fit(module, loader(), loader())


def test_sanity_check_and_validate_leave_no_trace(tmp_path: Path) -> None:
    callback = EarlyStopping("val", patience=2)
    trainer = fit(tmp_path, callback, [5.0, 5.0], num_sanity_val_steps=2)
    assert (callback.best_score, callback.wait_count) == (5.0, 1), "the sanity check's 0.0 would be better"
    trainer.validate(Scripted([5.0] * 3), loader())
    assert (callback.best_score, callback.wait_count) == (5.0, 1)


def test_wait_goes_on_in_another_callback_that_takes_the_state() -> None:
    first, second = EarlyStopping("val"), EarlyStopping("val")
    first.best_score, first.wait_count, first.stopped_epoch = 0.5, 2, 0
    second.load_state_dict(first.state_dict())
    assert (second.best_score, second.wait_count, second.stopped_epoch) == (0.5, 2, 0)


def test_second_trainer_begins_anew(tmp_path: Path) -> None:
    callback = EarlyStopping("val", patience=1)
    fit(tmp_path, callback, [1.0, 2.0, 3.0])
    assert fit(tmp_path, callback, [9.0, 8.0, 7.0]).global_step == 6


def test_missing_metric_without_strict_is_one_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="'vall' was not logged; did you mean 'val'") as caught:
        trainer = fit(tmp_path, EarlyStopping("vall", strict=False), [1.0, 1.0, 1.0])
    assert trainer.global_step == 6
    assert len([w for w in caught if "was not logged" in str(w.message)]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"patience": -1}, "patience=-1"), ({"min_delta": -0.1}, r"min_delta=-0\.1"), ({"mode": "auto"}, "mode='auto'")],
)
def test_arguments_that_cannot_be(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EarlyStopping("val", **arguments)
