"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from acclight import Callback, Trainer, TrainModule
from acclight.callbacks import ModelCheckpoint
from acclight.checkpoint import CheckpointError, Reader, files, load_weights, ranks, read_trainer, verify
from acclight.checkpoint.background import BackgroundSave
from acclight.checkpoint.shards import Piece
from tests.distributed import RankChecks
from tests.scenarios import DISTRIBUTED, quiet_trainer

on_two_ranks = RankChecks(world_size=2, timeout=120.0)


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class Heard(Callback):
    """At which step training was when each checkpoint was committed, and which step it holds."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, int]] = []

    def on_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: Path) -> None:
        self.heard.append((trainer.global_step, read_trainer(checkpoint)["global_step"]))


class At(Callback):
    """Does something after some steps."""

    def __init__(self, **actions: Any) -> None:
        self.actions = {int(name.removeprefix("step_")): action for name, action in actions.items()}

    def on_step(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.global_step in self.actions:
            self.actions[trainer.global_step](trainer)


def data(rows: int = 16) -> DataLoader[Any]:
    torch.manual_seed(3)
    return DataLoader(torch.randn(rows, 3), batch_size=2)  # type: ignore[arg-type]


class Held:
    """Keeps every file from being written until it is told to go on."""

    def __init__(self, patched: pytest.MonkeyPatch) -> None:
        self.go_on = threading.Event()
        write = files.NewFile.write

        def held(file: files.NewFile, content: Any) -> None:
            assert self.go_on.wait(60)
            write(file, content)

        patched.setattr(files.NewFile, "write", held)


# --- one process ------------------------------------------------------------------------------------------------------


def test_training_goes_on_and_the_checkpoint_holds_its_own_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, heard, weights = Held(monkeypatch), Heard(), {}

    def save(trainer: Trainer) -> None:
        weights.update({name: value.clone() for name, value in trainer.module.state_dict().items()})
        trainer.save_checkpoint(tmp_path / "c", asynchronous=True)
        assert not (tmp_path / "c").exists()

    def release(trainer: Trainer) -> None:
        held.go_on.set()
        assert trainer.saving is not None
        trainer.saving._thread.join(60)

    trainer = quiet_trainer(strategy="single", max_epochs=1, callbacks=[At(step_2=save, step_5=release), heard])
    trainer.fit(Net(), data())
    # Seen once step 5's own hooks are through.
    assert heard.heard == [(5, 2)]
    assert trainer.saving is None
    for name, value in load_weights(tmp_path / "c").items():
        assert torch.equal(value, weights[name]), name


def test_the_next_save_and_the_end_of_training_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, heard = files.NewFile.write, Heard()

    def slow(file: files.NewFile, content: Any) -> None:
        time.sleep(0.02)
        write(file, content)

    monkeypatch.setattr(files.NewFile, "write", slow)
    callback = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
    trainer = quiet_trainer(strategy="single", max_epochs=1, callbacks=[callback, heard], enable_checkpointing=True)
    trainer.fit(Net(), data())
    assert [step for _, step in heard.heard] == [2, 4, 6, 8]
    assert all(step < now <= step + 2 for now, step in heard.heard[:3])
    assert heard.heard[3] == (8, 8)
    assert callback.last_model_path == str(tmp_path / "step-00000008")


def test_a_save_that_fails_ends_the_training_with_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: files.NewFile, content: Any) -> None:
        raise file._error(OSError(28, "No space left on device"))

    def save(trainer: Trainer) -> None:
        monkeypatch.setattr(files.NewFile, "write", full)
        trainer.save_checkpoint(tmp_path / "bad", asynchronous=True)

    trainer = quiet_trainer(strategy="single", max_epochs=1, callbacks=At(step_2=save))
    with pytest.raises(CheckpointError, match="No space left on device"):
        trainer.fit(Net(), data())
    assert list(tmp_path.iterdir()) == []
    assert trainer.saving is None


def test_a_checkpoint_under_way_survives_an_error_in_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)

    def fail(trainer: Trainer) -> None:
        threading.Timer(0.2, held.go_on.set).start()
        raise ValueError("mine")

    actions = At(step_2=lambda trainer: trainer.save_checkpoint(tmp_path / "c", asynchronous=True), step_3=fail)
    with pytest.raises(ValueError, match="mine"):
        quiet_trainer(strategy="single", max_epochs=1, callbacks=actions).fit(Net(), data())
    assert verify(tmp_path / "c") == []


def test_a_checkpoint_that_takes_too_long_after_an_error_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    monkeypatch.setattr("acclight.loops.session._LAST_SAVE_SECONDS", 0.1)

    def fail(trainer: Trainer) -> None:
        raise ValueError("mine")

    actions = At(step_2=lambda trainer: trainer.save_checkpoint(tmp_path / "c", asynchronous=True), step_3=fail)
    with (
        pytest.warns(
            UserWarning, match=r"c was being written when fit ended, and is lost: .*not written within 0\.1 s"
        ),
        pytest.raises(ValueError, match="mine"),
    ):
        quiet_trainer(strategy="single", max_epochs=1, callbacks=actions).fit(Net(), data())
    held.go_on.set()


def test_copies_are_freed_once_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies, copied = [], Piece.copied

    def noted(piece: Piece) -> Piece:
        made = copied(piece)
        copies.append(weakref.ref(made.values))
        return made

    monkeypatch.setattr(Piece, "copied", noted)
    alive = []

    def look(trainer: Trainer) -> None:
        trainer.finish_saving()
        alive.extend(one() is not None for one in copies)

    actions = At(step_2=lambda trainer: trainer.save_checkpoint(tmp_path / "c", asynchronous=True), step_3=look)
    quiet_trainer(strategy="single", max_epochs=1, callbacks=actions).fit(Net(), data())
    # Weights, buffers and two moments of every weight, and the step counts.
    assert len(alive) >= 20
    assert not any(alive)


# --- two processes ----------------------------------------------------------------------------------------------------


def saved(folder: Path, strategy: str, asynchronous: bool) -> tuple[Path, list[tuple[int, int]]]:
    """Trains 4 steps per rank, saves after the second, and gives the checkpoint and what was heard of it."""
    torch.manual_seed(5)
    heard = Heard()
    path = folder / f"{strategy}-{asynchronous}"
    save = At(step_2=lambda trainer: trainer.save_checkpoint(path, asynchronous=asynchronous))
    quiet_trainer(strategy=strategy, max_epochs=1, callbacks=[save, heard]).fit(Net(), data())
    return path, heard.heard


@on_two_ranks
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_it_is_the_checkpoint_that_a_save_in_place_writes(strategy: str, tmp_path: Path) -> None:
    path, heard = saved(tmp_path, strategy, True)
    plain, _ = saved(tmp_path, strategy, False)
    everywhere: list[Any] = [None, None]
    dist.all_gather_object(everywhere, heard)
    assert everywhere[0] == everywhere[1]
    assert [step for _, step in heard] == [2]
    one, other = Reader(path), Reader(plain)
    for here, there, load in (
        (one.model_tensors, other.model_tensors, "load_model"),
        (one.optimizer_tensors, other.optimizer_tensors, "load_optimizer"),
    ):
        assert here == there
        into, expected = (
            {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in tensors.items()} for tensors in (here, there)
        )
        getattr(one, load)(into)
        getattr(other, load)(expected)
        for name, value in expected.items():
            assert torch.equal(into[name], value), name
    assert one.optimizer_meta == other.optimizer_meta
    assert one.data == other.data


@on_two_ranks
def test_a_disk_that_is_full_on_one_rank_ends_the_training_of_both(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patched:

        def full(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        def save(trainer: Trainer) -> None:
            if trainer.global_rank == 1:
                patched.setattr("os.fsync", full)
            trainer.save_checkpoint(tmp_path / "c", asynchronous=True)

        trainer = quiet_trainer(strategy="ddp", max_epochs=1, callbacks=At(step_2=save))
        with pytest.raises(CheckpointError, match=r"No space left on device") as caught:
            trainer.fit(Net(), data())
    told = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    assert "rank 1" in told
    assert trainer.global_step < 8
    dist.barrier()
    assert list(tmp_path.iterdir()) == []


@on_two_ranks
def test_the_thread_disturbs_no_collective_of_training(tmp_path: Path) -> None:
    before = threading.active_count()
    with pytest.MonkeyPatch.context() as patched:
        named: list[str] = []
        for name in ("all_reduce", "all_gather", "all_gather_object", "broadcast", "barrier", "gather_object"):
            real = getattr(dist, name)

            def noted(*args: Any, _real: Any = real, _name: str = name, **kwargs: Any) -> Any:
                if threading.current_thread() is not threading.main_thread():
                    named.append(_name)
                return _real(*args, **kwargs)

            patched.setattr(dist, name, noted)
        path, _ = saved(tmp_path, "fsdp2", True)
    assert verify(path) == []
    assert named == []
    assert threading.active_count() == before


@on_two_ranks
def test_a_rank_that_has_given_up_is_not_waited_for(tmp_path: Path) -> None:
    store, gone = dist.distributed_c10d._get_default_store(), threading.Event()
    gather = ranks.StoreGather(gone)
    assert gather(dist.get_rank()) == [0, 1]
    assert gather({"a": [dist.get_rank()]}) == [{"a": [0]}, {"a": [1]}]
    if dist.get_rank() == 1:
        gone.set()
        threading.Timer(0.1, gone.set).start()
        with pytest.raises(CheckpointError, match="has ended before all ranks"):
            gather._wait(store, ["never"])
    dist.barrier()


def test_what_a_thread_raises_leaves_by_wait(tmp_path: Path) -> None:
    class Fails:
        path = tmp_path / "c"

        def finish(self, gather: Any) -> None:
            raise CheckpointError("no")

    save = BackgroundSave(Fails())  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="no"):
        save.wait()
    assert save.ended
    assert save.give_up(0.0) == "no"
