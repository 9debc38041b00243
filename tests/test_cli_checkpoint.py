"""`acclight checkpoint`: what it says of checkpoints that are good, damaged and different."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from acclight import TrainModule, checkpoint
from acclight.checkpoint import CheckpointError
from acclight.checkpoint.comparison import compare
from acclight.cli.main import main
from tests.scenarios import quiet_trainer


class Tied(TrainModule):
    """Two layers of 3 x 3 that share their weight, and a frozen bias in 16 bits."""

    def __init__(self, lr: float = 0.5) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.bias = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16), requires_grad=False)
        nn.init.eye_(self.first.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) + self.bias  # type: ignore[no-any-return]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).sum()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints of the steps 1 and 2."""
    folder = tmp_path_factory.mktemp("saved")
    trainer = quiet_trainer(strategy="single", max_steps=1)
    module, data = Tied(), DataLoader(torch.ones(4, 3), batch_size=1)  # type: ignore[arg-type]
    for step in (1, 2):
        trainer.max_steps = step
        trainer.fit(module, data)
        trainer.save_checkpoint(folder / f"at-{step}")
    return folder


def test_inspect(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "inspect", str(saved / "at-2"), "--tensors"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"checkpoint: {saved / 'at-2'}"
    assert lines[1].startswith("committed: 20")
    assert lines[2:4] == ["step 2, epoch 0", "written by: single, 1 process, 32-true"]
    assert f"torch {torch.__version__}" in lines[4]
    # 9 numbers of 4 bytes and 3 of 2; the momentum has the 9.
    assert lines[5:8] == [
        "model: 2 tensors (1 x bfloat16, 1 x float32), 12 numbers, 42 bytes",
        "  bias [3] bfloat16",
        "  first.weight [3, 3] float32",
    ]
    assert lines[8:10] == [
        "optimizer: 1 tensor (1 x float32), 9 numbers, 36 bytes",
        "  first.weight/momentum_buffer [3, 3] float32",
    ]
    assert "tied: second.weight is first.weight" in lines
    assert "hparams: lr = 0.5" in lines
    names = [file for file in (saved / "at-2").rglob("*") if file.is_file() and file.name != "manifest.json"]
    assert lines[-1].startswith(f"files: {len(names)}, ")


def test_verify_names_what_is_wrong(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = quiet_trainer(strategy="single", max_steps=1)
    trainer.fit(Tied(), DataLoader(torch.ones(1, 3)))  # type: ignore[arg-type]
    trainer.save_checkpoint(tmp_path / "bad")
    (file,) = (tmp_path / "bad" / "model").iterdir()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert main(["checkpoint", "verify", str(saved / "at-1")]) == 0
    assert capsys.readouterr().out == f"{saved / 'at-1'} is good\n"
    assert main(["checkpoint", "verify", str(tmp_path / "bad"), str(saved / "at-1")]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said == [
        f"{file} does not have the SHA-256 of the manifest: its content has changed.",
        f"{saved / 'at-1'} is good",
    ]
    assert main(["checkpoint", "verify", str(tmp_path / "none")]) == 1
    assert capsys.readouterr().out == f"{tmp_path / 'none'} does not exist.\n"


def test_export_of_one_file_loads_into_the_plain_module(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "weights" / "all.safetensors"
    assert main(["checkpoint", "export", str(saved / "at-2"), str(out)]) == 0
    assert capsys.readouterr().out == f"exported to {out}\n"
    module = Tied()
    module.load_state_dict(safetensors.torch.load_file(out), strict=True)
    # d sum(W W 1) / dW = (1 1^T) W^T + W^T (1 1^T): 2 everywhere at the start, so W = I - 0.5 * 2 after the first step.
    first = torch.eye(3) - 1.0
    gradient = torch.ones(3, 3) @ first.T + first.T @ torch.ones(3, 3)
    assert torch.equal(module.first.weight, first - 0.5 * (0.9 * torch.full((3, 3), 2.0) + gradient))
    assert module.first.weight is module.second.weight
    assert [file.name for file in out.parent.iterdir()] == ["all.safetensors"]

    assert main(["checkpoint", "export", str(saved / "at-2"), str(out)]) == 2
    assert capsys.readouterr().err == (
        f"acclight checkpoint: {out} exists, and is not written over: give another path or remove it.\n"
    )
    with pytest.raises(CheckpointError, match="is one file: give a folder for several"):
        checkpoint.export(saved / "at-2", tmp_path / "two.safetensors", files=2)


def test_export_of_a_folder(saved: Path, tmp_path: Path) -> None:
    words = [str(saved / "at-2"), str(tmp_path / "out"), "--prefix", "first.", "--files", "1"]
    assert main(["checkpoint", "export", *words]) == 0
    assert list(safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")) == ["weight"]
    assert main(["checkpoint", "export", str(saved / "at-2"), str(tmp_path / "tied"), "--keep-tied"]) == 0
    names = safetensors.torch.load_file(tmp_path / "tied" / "model.safetensors")
    assert sorted(names) == ["bias", "first.weight", "second.weight"]


def test_diff(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "diff", str(saved / "at-1"), str(saved / "at-1")]) == 0
    assert capsys.readouterr().out == "no difference\n"
    assert main(["checkpoint", "diff", str(saved / "at-1"), str(saved / "at-2")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "trainer.global_step: 1 and 2" in lines
    # The rows and columns of I - 1 have the sum -2, so that the gradient is -4: the step is 0.5 * (0.9 * 2 - 4) = -1.1.
    assert "model: first.weight differs in 9 of 9 values, at most by 1.1" in lines
    assert any(line.startswith("optimizer: first.weight/momentum_buffer differs in 9 of 9 values") for line in lines)
    assert not any("bias" in line for line in lines)
    assert main(["checkpoint", "diff", str(saved / "at-1"), str(saved / "at-2"), "--atol", "100"]) == 1
    assert not any("weight" in line for line in capsys.readouterr().out.splitlines())


def test_every_kind_of_difference(tmp_path: Path) -> None:
    nan = math.nan
    one = {"same": [1.0, nan], "near": [1.0, 2.0], "nan": [nan, 0.0], "inf": [math.inf, 0.0], "gone": [0.0]}
    other = {"same": [1.0, nan], "near": [1.0, 2.5], "nan": [1.0, 0.0], "inf": [0.0, 0.0], "new": [0.0]}
    for folder, values in (("a", one), ("b", other)):
        (tmp_path / folder).mkdir()
        tensors = {name: torch.tensor(value) for name, value in values.items()}
        tensors |= {"shape": torch.zeros(2 if folder == "a" else 3), "empty": torch.zeros(0)}
        tensors |= {"type": torch.zeros(2, dtype=torch.int32 if folder == "a" else torch.float16)}
        safetensors.torch.save_file(tensors, tmp_path / folder / "all.safetensors")
    found = {one.name: (one.what, one.largest) for one in compare(tmp_path / "a", tmp_path / "b")}
    assert found == {
        "gone": ("is only in the first", math.inf),
        "new": ("is only in the second", math.inf),
        "shape": ("is float32 [2] and float32 [3]", math.inf),
        "type": ("is int32 [2] and float16 [2]", math.inf),
        "near": ("differs in 1 of 2 values, at most by 0.5", 0.5),
        "nan": ("differs in 1 of 2 values, at most by inf", math.inf),
        "inf": ("differs in 1 of 2 values, at most by inf", math.inf),
    }
    assert {one.name for one in compare(tmp_path / "a", tmp_path / "b", atol=0.5)} == found.keys() - {"near"}


def test_a_damaged_checkpoint_is_one_line(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "manifest.json").write_text(json.dumps({"format": "other"}))
    for words in (["inspect", str(tmp_path / "bad")], ["diff", str(saved / "at-1"), str(tmp_path / "bad")]):
        assert main(["checkpoint", *words]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.count("\n") == 1
        assert "is not the manifest of an acclight checkpoint" in said.err
    with pytest.raises(SystemExit) as stopped:
        main(["checkpoint"])
    assert stopped.value.code == 2
    assert "required: action" in capsys.readouterr().err
