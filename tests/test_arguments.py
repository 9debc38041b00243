"""Mistakes in arguments: one sentence that names the argument, its value and the fix, before anything runs."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from acclight import Callback, DataModule, Trainer, TrainModule, checkpoint, seed_everything
from acclight.callbacks import EarlyStopping
from tests.scenarios import Scalar, quiet_trainer, repeated


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"max_epochs": -5}, ValueError, "max_epochs=-5: give a whole number, -1 or more"),
        ({"max_epochs": "3"}, ValueError, "max_epochs='3'"),
        ({"max_epochs": 1.5}, ValueError, r"max_epochs=1\.5"),
        ({"max_epochs": True}, ValueError, "max_epochs=True"),
        ({"min_steps": -3}, ValueError, "min_steps=-3: give a whole number, 0 or more"),
        ({"min_epochs": 3, "max_epochs": 1}, ValueError, "min_epochs=3 contradicts max_epochs=1"),
        ({"max_time": "1:2"}, ValueError, "max_time='1:2'.*00:02:00:00"),
        ({"gradient_clip_val": float("nan")}, ValueError, "gradient_clip_val=nan: give a number, 0"),
        ({"gradient_clip_val": True}, ValueError, "gradient_clip_val=True"),
        ({"gradient_clip_val": "1"}, ValueError, "gradient_clip_val='1'"),
        ({"gradient_clip_algorithm": "l2"}, ValueError, "gradient_clip_algorithm='l2': use 'norm' or 'value'"),
        ({"deterministic": "foo"}, ValueError, "deterministic='foo': use True or False or 'warn'"),
        ({"inference_mode": "no"}, ValueError, "inference_mode='no': use True or False"),
        ({"fast_dev_run": 1.5}, ValueError, r"fast_dev_run=1\.5"),
        ({"fast_dev_run": -1}, ValueError, "fast_dev_run=-1"),
        ({"limit_train_batches": 2.0}, ValueError, r"limit_train_batches=2\.0.*fraction"),
        ({"limit_predict_batches": -1}, ValueError, "limit_predict_batches=-1"),
        ({"val_check_interval": None}, ValueError, "val_check_interval=None: a float is a fraction"),
        ({"val_check_interval": 1.5}, ValueError, r"val_check_interval=1\.5"),
        ({"check_val_every_n_epoch": 0}, ValueError, "check_val_every_n_epoch=0: give a whole number, 1 or more"),
        (
            {"check_val_every_n_epoch": None},
            ValueError,
            r"val_check_interval=1\.0 is a fraction: give it as a number of opt",
        ),
        ({"barebones": True}, TypeError, "no argument 'barebones': give logger=False"),
        ({"callbacks": 3}, TypeError, "callbacks=3: give an acclight.Callback object, or a list"),
        ({"callbacks": Callback}, TypeError, "callbacks=.*give an acclight.Callback object"),
        (
            {"callbacks": [EarlyStopping]},
            TypeError,
            r"the class EarlyStopping: give an object, EarlyStopping\(\.\.\.\)",
        ),
        ({"default_root_dir": 3}, TypeError, "default_root_dir=3: give a path"),
        ({"devices": 2}, TypeError, "no argument 'devices': .*accelerate launch.*torchrun.*notebook_launcher"),
        ({"max_epoch": 2}, TypeError, "no argument 'max_epoch': did you mean 'max_epochs'"),
        ({"frobnicate": 2}, TypeError, "no argument 'frobnicate': it takes strategy, precision"),
    ],
)
def test_values_that_cannot_be_used(arguments: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        Trainer(**arguments)


def test_a_text_is_no_loader() -> None:
    with pytest.raises(TypeError, match=r"fit\(train_dataloaders='data'\): give a loader, such as a DataLoader"):
        quiet_trainer(max_steps=1).fit(Scalar(), "data")


def test_no_epochs_between_validations_as_in_lightning() -> None:
    trainer = quiet_trainer(strategy="single", max_epochs=2, check_val_every_n_epoch=None, val_check_interval=3)
    steps: list[int] = []

    class Seen(Callback):
        def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
            steps.append(trainer.global_step)

    trainer.callbacks.append(Seen())
    trainer.num_sanity_val_steps = 0
    trainer.fit(Scalar(), repeated([1.0] * 4, 1), repeated([1.0], 1))
    assert steps == [3, 6]


def test_a_fast_run_has_a_logger_that_does_nothing(tmp_path: Path) -> None:
    class Draws(Scalar):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            assert self.logger is not None
            self.logger.experiment.add_histogram("w", self.w, 0)
            self.logger.log_image("w", [self.w])  # type: ignore[attr-defined]
            return super().training_step(batch, batch_idx)

    Trainer(fast_dev_run=True, default_root_dir=tmp_path, enable_progress_bar=False).fit(Draws(), repeated([1.0], 1))
    assert list(tmp_path.iterdir()) == []
    trainer = Trainer(fast_dev_run=True, logger=False)
    assert trainer.loggers == []


def test_max_time_in_lightnings_forms() -> None:
    two_hours = timedelta(hours=2)
    for given in (two_hours, {"hours": 2}, "00:02:00:00"):
        assert quiet_trainer(strategy="single", max_time=given).max_time == two_hours


class Data(DataModule):
    def __init__(self, samples: int = 4, name: str = "ids") -> None:
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        return repeated([1.0] * self.hparams.samples, 1)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


def test_a_datamodule_in_the_loaders_place() -> None:
    trainer, module = quiet_trainer(strategy="single", max_epochs=1), Scalar()
    trainer.fit(module, Data(3))  # type: ignore[arg-type]
    assert trainer.global_step == 3
    assert len(trainer.validate(module, Data())) == 1


class Unfinished(TrainModule):
    def __init__(self) -> None:
        pass


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((nn.Linear(1, 1),), "Trainer.fit was given a Linear as its module: give a subclass of acclight.TrainModule"),
        ((DataLoader(torch.ones(2)),), "was given a DataLoader as its module"),
        ((Scalar,), r"the class Scalar: give an object, Scalar\(\.\.\.\)"),
        ((Unfinished(),), r"Unfinished.__init__ has to call super\(\).__init__\(\) first"),
        ((Scalar(), None, None, DataLoader(torch.ones(2))), r"fit\(datamodule=...\) was given a DataLoader"),
        ((Scalar(), DataLoader(torch.ones(2)), None, None, 3), "ckpt_path=3: give a checkpoint's folder"),
        ((Scalar(), torch.ones(2)), r"fit\(train_dataloaders=...\) was given a Tensor: give a loader of it"),
        ((Scalar(), DataLoader(torch.ones(2)), torch.ones(2)), r"fit\(val_dataloaders=...\) was given a Tensor"),
    ],
)
def test_what_cannot_be_fitted(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        quiet_trainer(strategy="single", max_epochs=1).fit(*arguments)


def test_a_tensor_is_no_loader_of_an_evaluation() -> None:
    for method in ("validate", "test", "predict"):
        with pytest.raises(TypeError, match=rf"{method}\(dataloaders=...\) was given a Tensor"):
            getattr(quiet_trainer(strategy="single"), method)(Scalar(), torch.ones(2))


def test_a_prediction_needs_a_step_or_a_forward() -> None:
    with pytest.raises(NotImplementedError, match=r"^Scalar needs a predict_step, or a forward, for Trainer\.predict$"):
        quiet_trainer(strategy="single").predict(Scalar(), repeated([1.0], 1))


def test_what_is_no_checkpoint_to_resume_from(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    (tmp_path / "other").mkdir()
    for name, message in {
        "nowhere": "does not exist: give a checkpoint's folder, 'last', 'best' or 'auto'",
        "hf": "is a Hugging Face folder, which cannot be resumed: give it to TransformersModule",
        "other": "holds no manifest.json, so that it is no checkpoint",
    }.items():
        with pytest.raises(checkpoint.CheckpointError) as caught:
            quiet_trainer(strategy="single", max_epochs=1).fit(Scalar(), repeated([1.0], 1), ckpt_path=tmp_path / name)
        assert str(caught.value).startswith(f"ckpt_path='{tmp_path / name}' {message}")
        assert str(caught.value).count(name) == 1


def test_a_checkpoint_of_another_model_is_said_to_be_one(tmp_path: Path) -> None:
    class Other(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.v = nn.Parameter(torch.zeros(1))

    trainer = quiet_trainer(strategy="single", max_epochs=1)
    trainer.fit(Scalar(), repeated([1.0], 2))
    trainer.save_checkpoint(tmp_path / "saved")
    with pytest.raises(RuntimeError, match=r"saved does not fit Other; not in it: v; only in it: w$"):
        Other.load_from_checkpoint(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"length 2.*length 3.*load_state_dict\(checkpoint\.load_weights\(path\)\)"):
        quiet_trainer(strategy="single", max_epochs=2).fit(Scalar(), repeated([1.0], 3), ckpt_path=tmp_path / "saved")


def test_an_optimizer_over_other_parameters_is_refused() -> None:
    class Replaced(Scalar):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([self.w, *nn.Linear(2, 3).parameters()], lr=0.1)

    with pytest.raises(ValueError, match=r"SGD over 2 parameter\(s\) that the module does not have.*\(3, 2\)"):
        quiet_trainer(strategy="single", max_epochs=1).fit(Replaced(), repeated([1.0], 1))


def test_a_step_that_forgets_its_loss_is_warned_of_once(recwarn: pytest.WarningsRecorder) -> None:
    class Forgets(Scalar):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            self.loss(batch)

    trainer = quiet_trainer(strategy="single", max_epochs=2)
    trainer.fit(Forgets(), repeated([1.0, 2.0], 1))
    said = [str(one.message) for one in recwarn if "training_step returned None" in str(one.message)]
    assert len(said) == 1
    assert "return the loss" in said[0]


def test_hyperparameters_of_a_datamodule_reach_the_loggers(tmp_path: Path) -> None:
    from acclight.loggers import CSVLogger

    data = Data(samples=3)
    assert data.hparams == {"samples": 3, "name": "ids"}
    logger = CSVLogger(tmp_path)
    trainer = quiet_trainer(strategy="single", max_epochs=1, logger=logger)
    trainer.fit(Scalar(), datamodule=data)
    assert trainer.logger is logger
    written = json.loads((Path(str(logger.log_dir)) / "hparams.json").read_text())
    assert written == {"samples": 3, "name": "ids"}


def test_lightnings_questions_to_the_trainer() -> None:
    last: list[bool] = []
    where: list[tuple[bool, bool, bool]] = []

    class Asks(Scalar):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            last.append(self.trainer.is_last_batch)
            where.append((self.trainer.training, self.trainer.validating, self.trainer.testing))
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            where.append((self.trainer.training, self.trainer.validating, self.trainer.testing))

    stopping = EarlyStopping("loss", check_on_train_epoch_end=True)
    trainer = quiet_trainer(strategy="single", max_epochs=1, accumulate_grad_batches=2, callbacks=stopping)
    trainer.fit(Asks(), repeated([1.0, 2.0, 3.0], 1), repeated([1.0], 1))
    assert last == [False, False, True]
    assert where[-1] == (False, True, False)
    assert (True, False, False) in where
    assert trainer.early_stopping_callback is stopping
    assert (trainer.local_rank, trainer.num_nodes, trainer.precision) == (0, 1, "32-true")
    assert trainer.logger is None


def test_seed_everything_takes_lightnings_workers() -> None:
    assert seed_everything(3, workers=True) == 3
    with pytest.raises(ValueError, match="workers=False: worker processes are always seeded"):
        seed_everything(3, workers=False)


def test_an_evaluation_says_its_metrics(caplog: pytest.LogCaptureFixture) -> None:
    trainer, module = quiet_trainer(strategy="single"), Scalar()
    trainer.validate(module, repeated([1.0, 2.0], 1))
    # w is 0: the mean of 1 / 2 and 4 / 2.
    assert [one.getMessage() for one in caplog.records] == ["validate: val_loss 1.25"]
    caplog.clear()
    trainer.validate(module, repeated([1.0, 2.0], 1), verbose=False)
    assert not caplog.records
