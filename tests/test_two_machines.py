"""The launch file for two machines, on two: network namespaces joined by a cable, each with its own launcher."""

from __future__ import annotations

import contextlib
import csv
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.distributed import ROOT, run_command

LAUNCHER = Path(sys.executable).parent / "accelerate"
SCRIPT = ROOT / "examples" / "llama_fsdp.py"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=10.0)


@pytest.fixture
def machines() -> Iterator[list[str]]:
    """Two namespaces that see each other as 10.77.0.1 and 10.77.0.2."""
    if shutil.which("ip") is None:
        pytest.skip("needs the program `ip` (iproute2)")
    names = [f"acc{os.getpid() % 100000}{side}" for side in "ab"]
    made: list[str] = []
    try:
        try:
            for name in names:
                ip("netns", "add", name)
                made.append(name)
            ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1], "netns", names[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"may not make network namespaces here: {error.stderr.strip()}")
        for number, name in enumerate(names, start=1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", name, "up")
        yield names
    finally:
        for name in made:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)


def losses(out: Path) -> dict[int, float]:
    with (out / "metrics" / "metrics.csv").open() as file:
        return {int(row["step"]): float(row["train/loss"]) for row in csv.DictReader(file) if row.get("train/loss")}


@pytest.mark.slow
def test_two_machines_give_the_losses_of_one_process(machines: list[str], tmp_path: Path) -> None:
    text = tmp_path / "text.py"
    text.write_text((ROOT / "examples" / "packed_text.py").read_text(encoding="utf-8") * 4)
    arguments: list[str | Path] = [
        "--text", text, "--cache", tmp_path / "cache", "--seq-len", "32", "--batch-size", "2", "--max-steps", "5",
        "--val-every", "5", "--save-every", "5", "--log-every", "1", "--sample-tokens", "0",
    ]  # fmt: skip
    alone = [sys.executable, SCRIPT, *arguments, "--strategy", "single", "--accumulate", "2", "--out", tmp_path / "one"]
    done = run_command(alone)
    assert done.returncode == 0, done.stdout

    def launch(rank: int) -> subprocess.CompletedProcess[str]:
        place = ["--machine_rank", str(rank), "--main_process_ip", "10.77.0.1", "--main_process_port", "29511"]
        config = ["--config_file", ROOT / "examples" / "configs" / "two_machines.yaml", *place]
        command = ["ip", "netns", "exec", machines[rank], LAUNCHER, "launch", *config, SCRIPT, *arguments]
        return run_command(
            [*command, "--out", tmp_path / "two"], timeout=150.0, env={"GLOO_SOCKET_IFNAME": machines[rank]}
        )

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(launch, (0, 1))
    assert first.returncode == 0, first.stdout
    assert second.returncode == 0, second.stdout
    assert "2 processes on 2 machines" in first.stdout
    assert "fit:" not in second.stdout
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert sorted(two) == sorted(one) == [1, 2, 3, 4, 5]
    for step, value in two.items():
        assert value == pytest.approx(one[step], abs=1e-4)
