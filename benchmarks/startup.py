"""Measures what `import acclight` costs over `import accelerate`.

Each measurement is a whole `python -c '...'` process, timed from outside. The arms take turns within one run, in an
order that is drawn anew each round, so that a machine that slows down slows all of them. The cost is the median of the
differences within a round.

    python benchmarks/startup.py --check
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

ARMS = {
    "nothing": "pass",
    "accelerate": "import accelerate",
    "acclight": "import acclight",
    "acclight, names used": "from acclight import Trainer, TrainModule",
}
ALLOWED_SECONDS = 0.1


def seconds(statement: str, folder: str) -> float:
    """Wall time of one interpreter that runs `statement`, in seconds."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], cwd=folder, check=True, stdin=subprocess.DEVNULL)
    return time.perf_counter() - start


def measure(rounds: int) -> dict[str, list[float]]:
    """Times every arm once per round; a first round, which fills the caches, is left out.

    Returns:
        Per arm one time per round, in seconds.
    """
    order = list(ARMS)
    generator = random.Random(0)
    times: dict[str, list[float]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds + 1):
            generator.shuffle(order)
            for arm in order:
                taken = seconds(ARMS[arm], folder)
                if number > 0:
                    times[arm].append(taken)
    return times


def summary(times: dict[str, list[float]]) -> dict[str, Any]:
    """Median, quartiles and range per arm, and each arm's cost over `import accelerate`, in seconds."""
    base = times["accelerate"]
    arms = {}
    for arm, values in times.items():
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        over = [value - reference for value, reference in zip(values, base, strict=True)]
        arms[arm] = {
            "statement": ARMS[arm],
            "median": statistics.median(values),
            "quartiles": [low, high],
            "range": [min(values), max(values)],
            "over_accelerate": statistics.median(over),
            "ratio": statistics.median(values) / statistics.median(base),
        }
    packages = {name: version(name) for name in ("acclight", "accelerate", "torch")}
    return {
        "rounds": len(base),
        "allowed_over_accelerate": ALLOWED_SECONDS,
        "machine": {"python": platform.python_version(), "cores": os.cpu_count(), "system": platform.platform()},
        "packages": packages,
        "arms": arms,
    }


def table(result: dict[str, Any]) -> str:
    """The result as a Markdown table."""
    lines = [
        "| process | median s | quartiles s | range s | over accelerate s | ratio |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for arm in result["arms"].values():
        quartiles = "{:.3f} to {:.3f}".format(*arm["quartiles"])
        span = "{:.3f} to {:.3f}".format(*arm["range"])
        lines.append(
            f"| `{arm['statement']}` | {arm['median']:.3f} | {quartiles} | {span} "
            f"| {arm['over_accelerate']:+.3f} | {arm['ratio']:.3f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Reads the arguments, measures, prints, writes, checks."""
    parser = argparse.ArgumentParser(description="Measure what `import acclight` costs over `import accelerate`.")
    parser.add_argument("--rounds", type=int, default=11, help="measurements per arm (default 11, at least 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to this file too")
    parser.add_argument("--check", action="store_true", help=f"exit with 1 when it costs over {ALLOWED_SECONDS} s more")
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error(f"--rounds is {arguments.rounds}; quartiles need at least 2")
    times = measure(arguments.rounds)
    result = summary(times)
    print(table(result))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({**result, "seconds": times}, indent=2) + "\n")
    cost = result["arms"]["acclight"]["over_accelerate"]
    if arguments.check and cost > ALLOWED_SECONDS:
        sys.exit(f"`import acclight` costs {cost:.3f} s more than `import accelerate`; {ALLOWED_SECONDS} s are allowed")


if __name__ == "__main__":
    main()
