"""The multi-process harness: values come back per rank, failures show their traceback, nothing outlives its limit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.distributed import RankChecks, RanksFailed, read_values, run_command, run_ranks, write_values


def test_values_survive_the_file(tmp_path: Path) -> None:
    matrix = torch.arange(6.0).view(2, 3)
    value = {
        "plain": [None, True, 3, 0.1, float("inf"), "ä"],
        "path": tmp_path,
        "tensors": {"view": matrix.t(), "same memory": matrix, "0-dim": torch.tensor(7), "half": matrix.bfloat16()},
        "tuple": (1, 2),
    }
    write_values(tmp_path / "value.json", value)
    back = read_values(tmp_path / "value.json")
    assert back["plain"] == value["plain"]
    assert back["path"] == tmp_path
    assert back["tuple"] == [1, 2]
    for name, tensor in value["tensors"].items():  # type: ignore[attr-defined]
        assert back["tensors"][name].dtype == tensor.dtype
        assert torch.equal(back["tensors"][name], tensor)


@pytest.mark.parametrize(
    ("value", "place"), [({"a": [1, object()]}, r"value\['a'\]\[1\]"), ({3: 1}, "key 3"), ({"$path": 1}, r"\$path")]
)
def test_other_values_are_refused_with_their_place(tmp_path: Path, value: Any, place: str) -> None:
    with pytest.raises(TypeError, match=place):
        write_values(tmp_path / "value.json", value)
    assert not (tmp_path / "value.json").exists()


def gather(base: int, tensor: torch.Tensor) -> dict[str, Any]:
    mine = torch.tensor([base + dist.get_rank()])
    all_of_them = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(all_of_them, mine)
    entries = [entry for entry in os.listdir() if not entry.startswith(("call-", "rank-"))]
    dist.barrier()  # a rank that is through writes its result here, by way of a file of another name
    return {
        "rank": dist.get_rank(),
        "sum": int(sum(all_of_them)),
        "tensor": tensor + dist.get_rank(),
        "environment": [
            os.environ.get(name) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "EXTRA")
        ],
        "entries": entries,
    }


def test_values_come_back_per_rank() -> None:
    values = run_ranks(gather, (10, torch.ones(2)), world_size=3, backend="gloo", env={"EXTRA": "x"})
    assert [value["rank"] for value in values] == [0, 1, 2]
    assert [value["sum"] for value in values] == [33, 33, 33]  # 10 + 11 + 12
    assert [value["tensor"].tolist() for value in values] == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]
    assert [value["environment"] for value in values] == [[str(rank), "3", "1", "x"] for rank in range(3)]
    assert [value["entries"] for value in values] == [[], [], []]


def join_without_the_harness() -> int:
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    return int(total)


def test_a_function_may_join_the_group_itself() -> None:
    assert run_ranks(join_without_the_harness) == [2, 2]


def raise_on_rank_one() -> None:
    if dist.get_rank() == 1:
        expected = 41
        assert expected == 42
    dist.barrier()


def test_an_exception_in_one_rank_shows_its_traceback() -> None:
    started = time.monotonic()
    with pytest.raises(RanksFailed, match="failed on rank 1") as failure:
        run_ranks(raise_on_rank_one, backend="gloo", timeout=60.0, grace=2.0)
    assert time.monotonic() - started < 40.0
    first, second = failure.value.reports
    assert second.error is not None
    assert "assert expected == 42" in second.error
    assert "expected = 41" in second.error
    assert second.error.rstrip() in str(failure.value)
    # Rank 0 was in the barrier: gloo tells it that rank 1 has gone, or the harness ends it.
    assert first.killed or first.error is not None


def hang_with_a_child(pids: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (pids / f"{os.environ['RANK']}.txt").write_text(f"{os.getpid()} {child.pid}")
    time.sleep(600)


def is_running(pid: int) -> bool:
    """False for a zombie too: all that is left of it is its exit code."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_a_hang_is_ended_within_the_limit_with_its_children(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(RanksFailed, match="ran past its limit of 10 s") as failure:
        run_ranks(hang_with_a_child, (tmp_path,), timeout=10.0)
    assert 10.0 <= time.monotonic() - started < 15.0
    assert [report.killed for report in failure.value.reports] == [True, True]
    # The output says where each rank hung.
    assert all("in hang_with_a_child" in report.output for report in failure.value.reports)
    pids = [int(pid) for file in tmp_path.iterdir() for pid in file.read_text().split()]
    assert len(pids) == 4
    deadline = time.monotonic() + 5.0
    while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_running(pid) for pid in pids)


def die() -> None:
    print("last words", flush=True)
    os._exit(3)


def test_a_rank_that_dies_is_reported() -> None:
    with pytest.raises(RanksFailed, match="a rank died") as failure:
        run_ranks(die)
    assert [report.returncode for report in failure.value.reports] == [3, 3]
    assert "last words" in failure.value.reports[0].output


def return_an_object() -> object:
    return object()


def test_a_value_that_cannot_be_sent_is_an_error() -> None:
    with pytest.raises(RanksFailed, match=r"\] is a object; only plain values"):
        run_ranks(return_an_object, world_size=1)


def test_a_local_function_is_refused() -> None:
    with pytest.raises(ValueError, match="define it at the top"):
        run_ranks(lambda: None)


def test_a_script_runs_on_every_rank(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, time, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.ones(1)\n"
        "dist.all_reduce(total)\n"
        "print(dist.get_rank(), int(total), sys.argv[1])\n"
        "dist.barrier()\n"
        "dist.destroy_process_group()\n"
        # One rank may end later than the grace that a failure would leave it.
        "time.sleep(2 * int(sys.argv[2] == sys.argv[1]))\n"
    )
    assert run_ranks(script, ("3", "3"), grace=0.5) == ["0 2 3\n", "1 2 3\n"]
    script.write_text("import os, sys\nsys.exit(int(os.environ['RANK']))\n")
    with pytest.raises(RanksFailed, match="rank 1 ended with code 1"):
        run_ranks(script)


def test_a_command_is_ended_at_its_limit() -> None:
    done = run_command([sys.executable, "-c", "import os; print(os.environ['A']); raise SystemExit(5)"], env={"A": "b"})
    assert (done.returncode, done.stdout) == (5, "b\n")
    started = time.monotonic()
    with pytest.raises(RanksFailed, match=r"ran past its limit of 1.5 s[\s\S]*before the sleep"):
        run_command(
            [sys.executable, "-uc", "print('before the sleep'); import time; time.sleep(600)"],
            timeout=1.5,
        )
    assert time.monotonic() - started < 6.0


on_two_ranks = RankChecks(backend="gloo")


@on_two_ranks
def test_shared_group_first(tmp_path: Path) -> None:
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    assert int(total) == 3
    (tmp_path / f"{dist.get_rank()}").touch()
    dist.barrier()
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]
    torch.shared_group_was_here = True  # type: ignore[attr-defined]


@on_two_ranks
@pytest.mark.parametrize("value", [2, 3])
def test_shared_group_stays(value: int) -> None:
    total = torch.tensor([value * (dist.get_rank() + 1)])
    dist.all_reduce(total)
    assert int(total) == 3 * value
    assert torch.shared_group_was_here  # type: ignore[attr-defined]  # the same processes


@pytest.mark.slow
def test_shared_groups_report_each_check(tmp_path: Path) -> None:
    """A module of checks, run by a pytest of its own: each has its own outcome, and a failure costs only itself."""
    checks = tmp_path / "test_checks.py"
    checks.write_text(
        "import time\n"
        "import pytest, torch, torch.distributed as dist\n"
        "from tests.distributed import RankChecks\n"
        "on_two_ranks = RankChecks(backend='gloo', timeout=10.0, grace=1.0)\n"
        "@on_two_ranks\n"
        "def test_good(): pass\n"
        "@on_two_ranks\n"
        "def test_bad():\n"
        "    if dist.get_rank() == 1: raise ValueError('from rank 1')\n"
        "    dist.barrier()\n"
        "@on_two_ranks\n"
        "def test_good_after_bad(): dist.barrier()\n"
        "@on_two_ranks\n"
        "def test_hang(): time.sleep(600 * dist.get_rank())\n"
        "@on_two_ranks\n"
        "def test_skip(): pytest.skip('not here')\n"
        "@on_two_ranks\n"
        "def test_good_at_the_end(): dist.barrier()\n"
    )
    root = Path(__file__).resolve().parent.parent
    done = run_command(
        [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", checks],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{root}{os.pathsep}{tmp_path}"},
        timeout=150.0,
    )
    found = re.findall(r"^(PASSED|FAILED) \S*::test_(\w+)", done.stdout, re.MULTILINE)
    outcomes = {name: outcome for outcome, name in found}
    assert outcomes == {
        "good": "PASSED",
        "bad": "FAILED",
        "good_after_bad": "PASSED",
        "hang": "FAILED",
        "good_at_the_end": "PASSED",
    }, done.stdout
    assert "2 failed, 3 passed, 1 skipped" in done.stdout
    assert "ValueError: from rank 1" in done.stdout
    assert "test_hang ran past its limit of 10 s" in done.stdout
