"""The README's promises: its example runs as printed, and its first screen shows what matters."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.distributed import run_command

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()
FIRST_SCREEN = README.splitlines()[:50]


def first_python_block() -> str:
    match = re.search(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert match is not None
    return match.group(1)


def test_the_example_runs_as_printed(tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(first_python_block())
    done = run_command([sys.executable, "example.py"], cwd=tmp_path, timeout=120.0, env={"HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stdout
    last = re.search(r"loss after training: (\d+\.\d+)\s*$", done.stdout)
    assert last is not None, done.stdout
    # Two classes cost ln 2 = 0.693 before anything is learned.
    assert float(last.group(1)) < 0.3


def test_the_first_screen_shows_the_example_and_the_two_commands() -> None:
    assert first_python_block().count("\n") <= 25
    shown = "\n".join(FIRST_SCREEN)
    assert first_python_block() in shown
    assert re.search(r"^make demo\b", shown, re.MULTILINE)
    assert re.search(r"^make test\b", shown, re.MULTILINE)


def test_what_the_readme_names_is_there() -> None:
    root = Path(__file__).resolve().parent.parent
    targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^make ([a-z-]+)", README, re.MULTILINE)) <= targets
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", README)
    assert [link for link in links if not (root / link).exists()] == []
