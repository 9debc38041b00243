"""ModelCheckpoint: when it saves, what it keeps, and that a score belongs to the weights that are saved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from acclight import Callback, Trainer, TrainModule, checkpoint
from acclight.callbacks import EarlyStopping, ModelCheckpoint
from acclight.callbacks.model_checkpoint import checkpoint_name
from acclight.checkpoint import read_trainer
from acclight.checkpoint.writer import Writing

# With x = 3 and lr = 0.5 the only weight goes 0, 1.5, 2.25, 2.625, 2.8125, ...: half of the way to 3 in each step.
WEIGHTS = [3.0 * (1.0 - 0.5**step) for step in range(20)]


def distance(step: int) -> float:
    """The validation metric after so many steps, by hand."""
    return (WEIGHTS[step] - 2.0) ** 2


class Scalar(TrainModule):
    """One weight; the loss is the mean of (w - x)^2 / 2, the validation metric (w - 2)^2 or what a script says."""

    def __init__(self, script: Sequence[float] = ()) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.script = list(script)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = ((self.w - batch) ** 2 / 2).mean()
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        value = self.script[self.current_epoch] if self.script else (self.w - 2) ** 2
        self.log("val/distance", value)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Seen(Callback):
    """Notes the step of every committed checkpoint, and which folders there are then."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.folders: list[list[str]] = []

    def on_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: Path) -> None:
        assert (checkpoint / "manifest.json").exists()
        self.steps.append(read_trainer(checkpoint)["global_step"])
        self.folders.append(names(checkpoint.parent))


def names(folder: str | Path | None) -> list[str]:
    assert folder is not None
    return sorted(path.name for path in Path(folder).iterdir()) if Path(folder).exists() else []


def loader(value: float = 3.0, batches: int = 4) -> DataLoader[Any]:
    return DataLoader(torch.full((batches,), value).unbind(), batch_size=1)  # type: ignore[arg-type]


def fit(
    root: Path,
    callback: ModelCheckpoint,
    *more: Callback,
    module: TrainModule | None = None,
    val: bool = True,
    **arguments: Any,
) -> tuple[Trainer, Seen]:
    """Trains for 2 epochs of 4 steps unless told otherwise."""
    seen = Seen()
    ckpt_path = arguments.pop("ckpt_path", None)
    settings: dict[str, Any] = {
        "max_epochs": 2, "logger": False, "default_root_dir": root, "enable_progress_bar": False,
        "enable_model_summary": False, "num_sanity_val_steps": 0,
    }  # fmt: skip
    trainer = Trainer(callbacks=[seen, callback, *more], **(settings | arguments))
    trainer.fit(module or Scalar(), loader(), loader(0.0, 2) if val else None, ckpt_path=ckpt_path)
    return trainer, seen


class Late(Scalar):
    """Logs when the epoch ends, after its validation: 2.0, then 1.0."""

    def on_train_epoch_end(self) -> None:
        self.log("late", 2.0 - self.current_epoch)


def test_a_metric_may_be_logged_at_the_end_of_the_epoch(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path / "by", filename="{late:.1f}", monitor="late")
    fit(tmp_path, callback, module=Late())
    assert callback.best_model_path == str(tmp_path / "by" / "late=1.0")
    assert callback.best_model_score == 1.0
    for wrong in ({"monitor": "lat"}, {"filename": "{lat}"}):
        with pytest.raises(ValueError, match="'lat' was not logged; did you mean 'late'"):
            fit(tmp_path, ModelCheckpoint(tmp_path / "wrong", **wrong), module=Late())


def assert_best_is_what_it_says(trainer: Trainer, callback: ModelCheckpoint) -> None:
    """Loads the best weights and validates them: the metric is the score that was noted."""
    (metrics,) = trainer.validate(Scalar(), loader(0.0, 2), ckpt_path=callback.best_model_path)
    assert metrics["val/distance"] == pytest.approx(callback.best_model_score, abs=1e-6)


# --- when -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "trainer_arguments", "expected"),
    [
        ({}, {}, [4, 8]),
        ({}, {"max_steps": 6}, [4, 6]),
        ({}, {"max_steps": 3, "max_epochs": -1}, [3]),
        ({}, {"accumulate_grad_batches": 3}, [2, 4]),
        ({"every_n_train_steps": 3}, {}, [3, 6]),
        ({"every_n_train_steps": 6}, {}, [6]),
        ({"every_n_train_steps": 4}, {}, [4, 8]),
        ({"every_n_train_steps": 3, "save_last": True}, {}, [3, 6, 8]),
        ({"every_n_epochs": 2}, {"max_epochs": 3}, [8, 12]),
        ({"every_n_epochs": 2}, {"max_epochs": 4}, [8, 16]),
        ({"every_n_epochs": 0}, {}, []),
        ({"save_top_k": 0}, {}, []),
        ({"save_top_k": 0, "save_last": True}, {}, [4, 8]),
        ({"save_on_train_epoch_end": False}, {"val_check_interval": 3}, [3, 6, 8]),
        ({"save_on_train_epoch_end": True}, {"val_check_interval": 3}, [4, 8]),
        ({}, {"val_check_interval": 3}, [4, 8]),
        ({}, {"check_val_every_n_epoch": 2}, [4, 8]),
    ],
)  # fmt: skip
def test_steps_that_are_saved_without_a_monitor(
    tmp_path: Path, arguments: dict[str, Any], trainer_arguments: dict[str, Any], expected: list[int]
) -> None:
    callback = ModelCheckpoint(tmp_path / "ckpt", **arguments)
    _, seen = fit(tmp_path, callback, **trainer_arguments)
    assert seen.steps == expected
    assert names(tmp_path / "ckpt") == [f"step-{step:08d}" for step in expected[-1:]]
    assert (
        callback.best_model_path
        == callback.last_model_path
        == (str(tmp_path / "ckpt" / f"step-{expected[-1]:08d}") if expected else "")
    )
    assert callback.best_k_models == {}
    assert callback.best_model_score is None


@pytest.mark.parametrize(
    ("arguments", "trainer_arguments", "saved", "kept"),
    [
        # Epochs: validation at 4 and 8; the second is worse and not saved.
        ({}, {}, [4], {4}),
        # The last step was never looked at, so it is saved; it has no score and is kept beside the best.
        ({}, {"max_steps": 6}, [4, 6], {4, 6}),
        # A validation at every step that is saved.
        ({"every_n_train_steps": 2}, {"val_check_interval": 2}, [2], {2}),
        ({"every_n_train_steps": 2, "save_last": True}, {"val_check_interval": 2}, [2, 4, 6, 8], {2, 8}),
        ({"every_n_train_steps": 2, "save_top_k": -1}, {"val_check_interval": 2}, [2, 4, 6, 8], {2, 4, 6, 8}),
        # Saves between validations have no score: the newest is kept until the next save.
        ({"every_n_train_steps": 2}, {"val_check_interval": 4}, [2, 4, 6], {4, 6}),
        ({"every_n_train_steps": 3, "save_top_k": -1}, {"val_check_interval": 4}, [3, 6], {3, 6}),
        ({"every_n_train_steps": 3}, {"val_check_interval": 4}, [3, 6], {6}),
        # Epochs with several validations: after each of them.
        ({}, {"val_check_interval": 2}, [2], {2}),
        ({"mode": "max", "save_top_k": 2}, {"val_check_interval": 2}, [2, 4, 6, 8], {6, 8}),
        # No validation at the end of the first epoch: nothing to judge it by.
        ({}, {"check_val_every_n_epoch": 2}, [8], {8}),
        ({"save_on_train_epoch_end": True}, {"check_val_every_n_epoch": 2}, [4, 8], {8}),
    ],
)  # fmt: skip
def test_steps_that_are_saved_with_a_monitor(
    tmp_path: Path, arguments: dict[str, Any], trainer_arguments: dict[str, Any], saved: list[int], kept: set[int]
) -> None:
    callback = ModelCheckpoint(tmp_path / "ckpt", monitor="val/distance", **arguments)
    trainer, seen = fit(tmp_path, callback, **trainer_arguments)
    assert seen.steps == saved
    assert names(tmp_path / "ckpt") == [f"step-{step:08d}" for step in sorted(kept)]
    every = trainer_arguments.get("val_check_interval", 4 * trainer_arguments.get("check_val_every_n_epoch", 1))
    scores = {str(tmp_path / "ckpt" / f"step-{step:08d}"): distance(step) for step in kept if step % every == 0}
    if arguments.get("save_last"):
        del scores[callback.last_model_path]
    assert callback.best_k_models == pytest.approx(scores)
    if scores:
        pick = max if arguments.get("mode") == "max" else min
        assert callback.best_model_path == pick(scores, key=lambda path: scores[path])
        assert callback.best_model_score == pytest.approx(pick(scores.values()))
        assert_best_is_what_it_says(trainer, callback)
    else:
        assert callback.best_model_path == ""
        assert callback.best_model_score is None


def test_end_of_epoch_validation_scores_what_the_last_step_has_saved(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path / "ckpt", monitor="val/distance", every_n_train_steps=2)
    trainer, _ = fit(tmp_path, callback)
    assert callback.best_k_models == pytest.approx({str(tmp_path / "ckpt" / "step-00000004"): distance(4)})
    # Step 6 had no validation and so no score: it stays as the newest, as step 8 is no better than step 4 and is not saved.
    assert names(tmp_path / "ckpt") == ["step-00000004", "step-00000006"]
    assert_best_is_what_it_says(trainer, callback)


def test_training_metric_of_the_epoch_is_a_monitor(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path / "ckpt", monitor="train_loss_epoch")
    fit(tmp_path, callback, val_check_interval=2)
    # The losses of the second epoch are those of w = 2.8125 ... 2.9766.
    expected = sum((WEIGHTS[step] - 3.0) ** 2 / 2 for step in range(4, 8)) / 4
    assert callback.best_k_models == pytest.approx({str(tmp_path / "ckpt" / "step-00000008"): expected})


def test_time_interval_is_measured_from_save_to_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("acclight.callbacks.model_checkpoint.time.monotonic", lambda: now[0])

    class Tick(Callback):
        def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> None:
            now[0] += 1.0

    callback = ModelCheckpoint(tmp_path / "ckpt", train_time_interval=timedelta(seconds=3))
    _, seen = fit(tmp_path, callback, Tick())
    assert seen.steps == [3, 6, 8]


def test_validate_and_the_sanity_check_save_nothing(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path / "ckpt", monitor="val/distance", save_on_train_epoch_end=False, save_top_k=-1)
    trainer, seen = fit(tmp_path, callback, num_sanity_val_steps=2)
    before = dict(callback.best_k_models)
    trainer.validate(Scalar(), loader(0.0, 2))
    assert seen.steps == [4, 8]
    assert callback.best_k_models == before
    assert callback.best_model_score == pytest.approx(distance(4)), (
        "the sanity check's 4.0 would not be the best anyway"
    )


# --- what is kept -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "script", "top_k", "best", "kept"),
    [
        ("min", [0.5, 0.4, 0.3, 0.2], 1, 4, [4]),
        ("min", [0.2, 0.3, 0.4, 0.5], 1, 1, [1]),
        ("min", [0.5, 0.2, 0.4, 0.3], 2, 2, [2, 4]),
        ("max", [1.0, 3.0, 2.0, 5.0], 2, 4, [2, 4]),
        ("max", [-3.0, -1.0, -2.0, -4.0], 1, 2, [2]),
        ("min", [0.5, 0.5, 0.5, 0.5], 1, 1, [1]),
        ("min", [0.5, math.nan, 0.4, 0.6], 1, 3, [3]),
        ("max", [math.nan, 0.1, 0.2, 0.1], 3, 3, [2, 3, 4]),
        ("min", [0.5, math.nan, math.nan, math.nan], 2, 1, [1, 4]),
        ("max", [0.0, -math.inf, 0.1, math.inf], 1, 4, [4]),
    ],
)
def test_best_ones_are_kept(
    tmp_path: Path, mode: str, script: list[float], top_k: int, best: int, kept: list[int]
) -> None:
    callback = ModelCheckpoint(tmp_path / "ckpt", monitor="val/distance", mode=mode, save_top_k=top_k)
    _, seen = fit(tmp_path, callback, module=Scalar(script), max_epochs=4)
    assert names(tmp_path / "ckpt") == [f"step-{4 * epoch:08d}" for epoch in kept]
    assert callback.best_model_path.endswith(f"step-{4 * best:08d}")
    assert callback.best_model_score == pytest.approx(script[best - 1])
    scores = [script[epoch - 1] for epoch in kept if not math.isnan(script[epoch - 1])]
    assert sorted(callback.best_k_models.values()) == pytest.approx(sorted(scores))
    # Every time something was committed, what was the best before was still there.
    assert all(f"step-{step:08d}" in folders for step, folders in zip(seen.steps, seen.folders, strict=True))


def test_all_values_nan_never_give_a_best(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path / "ckpt", monitor="val/distance")
    fit(tmp_path, callback, module=Scalar([math.nan] * 2))
    assert callback.best_model_path == ""
    assert callback.best_model_score is None
    assert names(tmp_path / "ckpt") == ["step-00000008"], "but there is something to resume from"


def test_newest_k_without_a_monitor(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path / "ckpt", every_n_train_steps=1, save_top_k=3)
    fit(tmp_path, callback)
    assert names(tmp_path / "ckpt") == ["step-00000006", "step-00000007", "step-00000008"]


def test_verbose_says_what_is_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "acclight")
    fit(tmp_path, ModelCheckpoint(tmp_path / "ckpt", monitor="val/distance", verbose=True))
    assert f"saving {tmp_path}/ckpt/step-00000004 with val/distance = {distance(4):g}" in caplog.messages


def test_older_one_is_deleted_only_after_the_newer_is_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remove, order = checkpoint.remove, []

    def watched(path: Any) -> None:
        folder = Path(path)
        order.append(
            (folder.name, [p.name for p in folder.parent.iterdir() if p != folder and not checkpoint.verify(p)])
        )
        remove(path)

    monkeypatch.setattr(checkpoint, "remove", watched)
    fit(tmp_path, ModelCheckpoint(tmp_path / "ckpt", every_n_train_steps=3))
    assert order == [("step-00000003", ["step-00000006"])]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_save_that_fails_leaves_the_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    finish = Writing.finish

    def full(self: Writing, *arguments: Any) -> Path:
        if self.path.name == "step-00000006":
            self.discard()
            raise OSError(28, "No space left on device", str(self.path))
        return finish(self, *arguments)

    monkeypatch.setattr(Writing, "finish", full)
    callback = ModelCheckpoint(tmp_path / "ckpt", every_n_train_steps=3, asynchronous=asynchronous)
    with pytest.raises(OSError, match="No space left on device"):
        fit(tmp_path, callback)
    assert names(tmp_path / "ckpt") == ["step-00000003"]
    assert callback.last_model_path == str(tmp_path / "ckpt" / "step-00000003")
    assert checkpoint.verify(callback.last_model_path) == []


def test_disk_that_refuses_to_delete_is_reported_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(checkpoint, "remove", refuse)
    callback = ModelCheckpoint(tmp_path / "ckpt", every_n_train_steps=3)
    with pytest.warns(UserWarning, match=r"step-00000003 could not be deleted: .*Permission denied"):
        trainer, _ = fit(tmp_path, callback)
    assert trainer.global_step == 8


def test_weights_only(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path / "ckpt", save_weights_only=True)
    fit(tmp_path, callback)
    assert not list(Path(callback.last_model_path).glob("optimizer/*"))
    assert float(checkpoint.load_weights(callback.last_model_path)["w"]) == pytest.approx(WEIGHTS[8])


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "insert", "expected"),
    [
        ("{epoch}-{val/loss:.3f}", True, "epoch=3-val_loss=0.123"),
        ("{epoch}-{val/loss:.3f}", False, "3-0.123"),
        ("{epoch:02d}-{step}", True, "epoch=03-step=120"),
        ("best", True, "best"),
        ("{missing:.2f}", True, "missing=nan"),
        ("{missing:d}", True, "missing=nan"),
        ("a{{b}}-{acc.top1:.1%}", True, "a{b}-acc.top1=50.0%"),
    ],
)
def test_names_from_templates(template: str, insert: bool, expected: str) -> None:
    values = {"epoch": 3, "step": 120, "val/loss": 0.12345, "acc.top1": 0.5}
    assert checkpoint_name(template, values, insert_names=insert) == expected


def test_name_with_a_format_that_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"filename='\{a:d\}': the value 0\.5 of 'a' has no format 'd'"):
        checkpoint_name("{a:d}", {"a": 0.5})


def test_name_with_metrics_in_a_run(tmp_path: Path) -> None:
    callback = ModelCheckpoint(filename="{epoch}-{val/distance:.3f}", monitor="val/distance", save_top_k=-1)
    trainer, _ = fit(tmp_path, callback)
    assert callback.dirpath == str(tmp_path / "checkpoints")
    assert names(callback.dirpath) == [
        f"epoch=0-val_distance={distance(4):.3f}",
        f"epoch=1-val_distance={distance(8):.3f}",
    ]
    assert_best_is_what_it_says(trainer, callback)


def test_name_never_shows_an_old_value_of_the_monitor(tmp_path: Path) -> None:
    callback = ModelCheckpoint(
        tmp_path / "ckpt", "{step}-{val/distance:.3f}", "val/distance", every_n_train_steps=3, save_top_k=-1
    )
    fit(tmp_path, callback, val_check_interval=2)
    assert names(tmp_path / "ckpt") == ["step=3-val_distance=nan", f"step=6-val_distance={distance(6):.3f}"]


def test_name_that_is_taken_gets_a_number(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path / "ckpt", "best", every_n_train_steps=2, save_top_k=2)
    fit(tmp_path, callback)
    # 2: best, 4: best-v1, 6: best-v2 (then best goes), 8: best again.
    assert names(tmp_path / "ckpt") == ["best", "best-v2"]
    assert Path(callback.last_model_path).name == "best"


def test_damaged_folder_under_the_same_name_is_replaced(tmp_path: Path) -> None:
    damaged = tmp_path / "ckpt" / "step-00000003"
    damaged.mkdir(parents=True)
    (damaged / "trainer.json").write_text("{")
    fit(tmp_path, ModelCheckpoint(tmp_path / "ckpt", every_n_train_steps=3, save_top_k=-1))
    assert names(tmp_path / "ckpt") == ["step-00000003", "step-00000006"]
    assert checkpoint.verify(damaged) == []


# --- resume -----------------------------------------------------------------------------------------------------------


def test_resumed_run_goes_on_with_the_best_and_saves_no_step_twice(tmp_path: Path) -> None:
    script = [0.5, 0.3, 0.4, 0.2]
    first = ModelCheckpoint(tmp_path / "ckpt", monitor="val/distance")
    fit(tmp_path, first, module=Scalar(script), max_epochs=2)
    assert first.best_model_score == pytest.approx(0.3)
    second = ModelCheckpoint(tmp_path / "ckpt", monitor="val/distance")
    _, seen = fit(tmp_path, second, module=Scalar(script), max_epochs=3, ckpt_path=first.best_model_path)
    assert seen.steps == [], "0.4 is no better, and step 8 is there"
    assert second.best_k_models == pytest.approx({first.best_model_path: 0.3})
    third = ModelCheckpoint(tmp_path / "ckpt", monitor="val/distance")
    _, seen = fit(tmp_path, third, module=Scalar(script), max_epochs=4, ckpt_path=first.best_model_path)
    assert seen.steps == [16]
    assert names(tmp_path / "ckpt") == ["step-00000016"]


def test_checkpoint_knows_itself_and_its_score(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path / "ckpt", monitor="val/distance", every_n_train_steps=2)
    fit(tmp_path, callback, val_check_interval=2)
    state = checkpoint.Reader(callback.best_model_path).trainer["callbacks"][callback.state_key]
    again = ModelCheckpoint(tmp_path / "ckpt", monitor="val/distance", every_n_train_steps=2)
    again.load_state_dict(state)
    assert again.best_model_path == callback.best_model_path
    assert again.best_model_score == pytest.approx(distance(2))


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("interval", ["every_n_train_steps", "every_n_epochs"])
def test_what_a_run_that_died_left_is_deleted_also_where_the_resumed_one_saves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interval: str, asynchronous: bool
) -> None:
    class Died(BaseException):
        pass

    def die(path: Any) -> None:
        raise Died

    arguments: dict[str, Any] = {interval: 4 if interval == "every_n_train_steps" else 1, "asynchronous": asynchronous}
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "remove", die)
        with pytest.raises(Died):
            fit(tmp_path, ModelCheckpoint(tmp_path / "ckpt", **arguments))
    assert names(tmp_path / "ckpt") == ["step-00000004", "step-00000008"]
    _, seen = fit(tmp_path, ModelCheckpoint(tmp_path / "ckpt", **arguments), ckpt_path="auto")
    assert seen.steps == []
    assert names(tmp_path / "ckpt") == ["step-00000008"]


def test_resume_into_another_folder_deletes_nothing_in_the_old_one(tmp_path: Path) -> None:
    script = [0.2, 0.5, 0.4, 0.1]
    old = ModelCheckpoint(tmp_path / "old", monitor="val/distance")
    fit(tmp_path, old, module=Scalar(script), max_epochs=1)
    new = ModelCheckpoint(tmp_path / "new", monitor="val/distance")
    fit(tmp_path, new, module=Scalar(script), max_epochs=3, ckpt_path=old.best_model_path)
    assert names(tmp_path / "old") == ["step-00000004"]
    assert names(tmp_path / "new") == ["step-00000012"], "the best of this folder"
    assert new.best_model_path == old.best_model_path
    assert new.best_model_score == pytest.approx(0.2)
    newer = ModelCheckpoint(tmp_path / "new", monitor="val/distance")
    fit(tmp_path, newer, module=Scalar(script), max_epochs=4, ckpt_path=tmp_path / "new" / "step-00000012")
    assert names(tmp_path / "old") == ["step-00000004"]
    assert newer.best_model_path == str(tmp_path / "new" / "step-00000016")


def test_callback_in_a_second_trainer_starts_clean(tmp_path: Path) -> None:
    callback = ModelCheckpoint(monitor="val/distance")
    fit(tmp_path / "a", callback, module=Scalar([0.1, 0.2]))
    _, seen = fit(tmp_path / "b", callback, module=Scalar([0.9, 0.8]))
    assert seen.steps == [4, 8]
    assert callback.best_model_path == str(tmp_path / "b" / "checkpoints" / "step-00000008")
    assert names(tmp_path / "a" / "checkpoints") == ["step-00000004"]


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda name: ModelCheckpoint(monitor=name), lambda name: EarlyStopping(name)])
@pytest.mark.parametrize(("validation", "step"), [({}, 4), ({"val_check_interval": 2}, 2)])
def test_misspelt_monitor_is_found_at_the_first_validation(
    tmp_path: Path, make: Any, validation: dict[str, Any], step: int
) -> None:
    trainer = Trainer(
        max_epochs=2, callbacks=[make("val/distanec")], logger=False, default_root_dir=tmp_path, num_sanity_val_steps=0,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, **validation,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"'val/distanec' was not logged; did you mean 'val/distance'\?.*train_loss"):
        trainer.fit(Scalar(), loader(), loader(0.0, 2))
    assert trainer.global_step == step


def test_misspelt_metric_in_a_name_is_found_too(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path / "ckpt", "{epoch}-{val_distance:.2f}")
    with pytest.raises(ValueError, match=r"filename=.*'val_distance' was not logged; did you mean 'val/distance'"):
        fit(tmp_path, callback)


def test_misspelt_monitor_without_validation_is_found_at_the_end_of_the_epoch(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'loss' was not logged; did you mean 'train_loss'"):
        fit(tmp_path, ModelCheckpoint(tmp_path / "ckpt", monitor="loss"), val=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "auto"}, "mode='auto'"),
        ({"save_top_k": -2}, "save_top_k=-2"),
        ({"every_n_train_steps": -1}, "every_n_train_steps=-1"),
        ({"every_n_train_steps": 2.5}, "every_n_train_steps=2.5"),
        ({"every_n_epochs": -1}, "every_n_epochs=-1"),
        ({"every_n_train_steps": 2, "every_n_epochs": 1}, "every_n_train_steps, every_n_epochs"),
        ({"every_n_train_steps": 2, "train_time_interval": timedelta(1)}, "every_n_train_steps, train_time_interval"),
        ({"save_last": "link"}, "save_last='link'"),
        ({"filename": "runs/{epoch}"}, "names a folder"),
    ],
)
def test_arguments_that_cannot_be(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelCheckpoint(**arguments)


def test_interval_that_is_no_timedelta() -> None:
    with pytest.raises(TypeError, match="must be a datetime"):
        ModelCheckpoint(train_time_interval=60)  # type: ignore[arg-type]
