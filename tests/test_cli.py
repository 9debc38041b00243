"""The command `acclight`."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest
import torch

from acclight.cli.main import main
from tests.distributed import run_command

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["evn"], "acclight: unknown command 'evn'; did you mean 'env'?"),
        (["zzzzz"], "acclight: unknown command 'zzzzz'; there are: env, checkpoint"),
        ([], "acclight: give a command: env, checkpoint; `acclight --help` says what they do"),
        (["env", "--everything"], "acclight: unrecognized arguments: --everything"),
    ],
)
def test_words_that_cannot_be_read_are_one_line_and_status_2(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    assert capsys.readouterr().err == line + "\n"


def test_an_error_of_a_command_is_one_line_and_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(arguments: object) -> None:
        raise OSError("the disk\nis full")

    monkeypatch.setattr("acclight.cli.env.run", fails)
    assert main(["env"]) == 2
    assert capsys.readouterr().err == "acclight env: the disk is full\n"


def test_the_script_is_declared() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"acclight": "acclight.cli.main:main"}


def test_env_as_a_command(tmp_path: Path) -> None:
    done = run_command(
        [sys.executable, "-m", "acclight", "env"], cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path)}
    )
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    assert f"torch: {torch.__version__}" in lines
    assert f"default launch file: none at {tmp_path}/accelerate/default_config.yaml" in lines
    assert lines[-1] == "strategy: single (plain start), precision 32-true"


def test_env_under_a_launcher_with_a_file_and_secrets(tmp_path: Path) -> None:
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "default_config.yaml").write_text(
        "num_processes: 2\nfsdp_config:\n  fsdp_version: 2\nvault_password: abc123\n"
    )
    env = {
        "PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path), "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2",
        "FSDP_RESHARD_AFTER_FORWARD": "false", "ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_API_TOKEN": "abc123",
        "ACCELERATE_MIRROR": "https://me:abc123@host/x", "HF_TOKEN": "abc123",
    }  # fmt: skip
    done = run_command([sys.executable, "-m", "acclight", "env"], cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stdout
    assert "abc123" not in done.stdout
    for line in (
        "  ACCELERATE_API_TOKEN=(hidden)", "  ACCELERATE_MIRROR=https://(hidden)@host/x", "  FSDP_VERSION=2",
        "  fsdp_config:", "    fsdp_version: 2", "strategy: fsdp2 (from the launcher), precision bf16-mixed",
        "  reshard_after_forward=False [launcher]",
    ):  # fmt: skip
        assert line in done.stdout.splitlines()


def test_env_says_why_where_nothing_can_be_resolved(tmp_path: Path) -> None:
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "default_config.yaml").write_text("a: [1\n")
    env = {"PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path), "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}
    done = run_command([sys.executable, "-m", "acclight", "env"], cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stdout
    assert "  cannot be read: " in done.stdout
    assert done.stdout.splitlines()[-1].startswith("strategy: ValueError: FSDP version 1 cannot be used")


def test_env_speaks_on_rank_0_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["env"]) == 0
    assert capsys.readouterr().out == ""
