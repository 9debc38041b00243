"""Measures saving and resuming against Accelerate's `save_state` and `load_state`, for one model on two processes under DDP.

Each measurement is a launch of its own: one step of AdamW, so that the optimizer has its state, a save while training goes on,
and a resume in new processes. The arms take turns within one run. Sizes are those of every rank's process; the slower and the
larger rank counts.

    python benchmarks/checkpoint.py --json checkpoint.json --check

Figures, per arm:

- blocked: seconds from the request to the next step.
- total: seconds from the request until the checkpoint can be read.
- resume: seconds to read it back, verification included. Accelerate verifies nothing.
- peak: how far the resident memory rises above what it was before the save, at its highest (VmHWM of /proc/self/status).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

ARMS = ("acclight", "acclight, synchronous", "accelerate")
FIGURES = ("blocked", "total", "resume", "peak")
#: How much of Accelerate's figure acclight's may be.
ALLOWED = {"blocked": 0.1, "total": 1.5, "resume": 1.2, "peak": 1.0}
WIDTH = 1000


# --- in a launched process --------------------------------------------------------------------------------------------


def resident(name: str) -> float:
    """VmRSS or VmHWM of this process, in MiB."""
    (line,) = (one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith(name))
    return int(line.split()[1]) / 1024


class Peak:
    """How far the resident memory has risen since it was made."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self.before = resident("VmRSS")

    def risen(self) -> float:
        """In MiB, at the highest."""
        return max(resident("VmHWM") - self.before, 0.0)


def model(layers: int) -> Any:
    """`layers` million parameters."""
    from torch import nn

    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))


def run_acclight(layers: int, folder: Path, *, resumes: bool, asynchronous: bool) -> dict[str, float]:
    """One arm's save, or its resume, on this rank."""
    import torch
    from torch.utils.data import DataLoader

    from acclight import Callback, Trainer, TrainModule
    from acclight.checkpoint import snapshot

    found: dict[str, float] = {}

    class Big(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model(layers)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layers[0](batch).square().mean() + 0.0 * sum(p.sum() for p in self.parameters())

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    class Saves(Callback):
        def on_step(self, trainer: Trainer, module: TrainModule) -> None:
            if trainer.global_step == 1:
                self.peak, self.asked = Peak(), time.perf_counter()
                trainer.save_checkpoint(folder / "saved", asynchronous=asynchronous)

        def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 1:
                found["blocked"] = time.perf_counter() - self.asked
                # The steps that follow take memory of their own, but no step is done before it is measured.
                trainer.finish_saving()

        def on_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: Path) -> None:
            found["total"] = time.perf_counter() - self.asked
            found["peak"] = self.peak.risen()

    arguments: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = Trainer(strategy="ddp", max_steps=2, callbacks=[] if resumes else Saves(), **arguments)
    rows: Any = DataLoader(torch.ones(8, WIDTH), batch_size=1)  # type: ignore[arg-type]
    if resumes:
        whole, started = snapshot.find, snapshot.restore

        def find(*given: Any) -> Any:
            begun = time.perf_counter()
            reader = whole(*given)
            found["resume"] = time.perf_counter() - begun
            return reader

        def restore(*given: Any) -> None:
            begun = time.perf_counter()
            started(*given)
            found["resume"] += time.perf_counter() - begun

        vars(snapshot).update(find=find, restore=restore)
    trainer.fit(Big(), rows, ckpt_path=folder / "saved" if resumes else None)
    return found


def run_accelerate(layers: int, folder: Path, *, resumes: bool) -> dict[str, float]:
    """Likewise with a loop written by hand."""
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    net = model(layers)
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-3))
    if resumes:
        begun = time.perf_counter()
        accelerator.load_state(str(folder / "saved"))
        accelerator.wait_for_everyone()
        return {"resume": time.perf_counter() - begun}
    loss = net.module[0](torch.ones(1, WIDTH)).square().mean() + 0.0 * sum(p.sum() for p in net.parameters())
    accelerator.backward(loss)
    optimizer.step()
    peak, begun = Peak(), time.perf_counter()
    accelerator.save_state(str(folder / "saved"))
    accelerator.wait_for_everyone()
    taken = time.perf_counter() - begun
    return {"blocked": taken, "total": taken, "peak": peak.risen()}


def ranks_part(arguments: argparse.Namespace) -> None:
    """What every launched process does: measures, and leaves its figures in the folder."""
    import torch

    torch.set_num_threads(1)
    resumes = arguments.part == "resume"
    if arguments.arm == "accelerate":
        found = run_accelerate(arguments.layers, arguments.folder, resumes=resumes)
    else:
        asynchronous = arguments.arm == "acclight"
        found = run_acclight(arguments.layers, arguments.folder, resumes=resumes, asynchronous=asynchronous)
    (arguments.folder / f"{arguments.part}-{os.environ['RANK']}.json").write_text(json.dumps(found))


# --- the launching process --------------------------------------------------------------------------------------------


def launch(arm: str, layers: int, folder: Path) -> dict[str, float]:
    """One save and one resume of an arm; of each figure the worst of the two ranks."""
    found: dict[str, float] = {}
    for part in ("save", "resume"):
        rendezvous = ["--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
        own = ["--arm", arm, "--part", part, "--layers", str(layers), "--folder", str(folder)]
        command = [sys.executable, "-m", "torch.distributed.run", *rendezvous, __file__, *own]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"{arm}, {part}: failed\n{done.stdout}{done.stderr}")
        ranks = [json.loads((folder / f"{part}-{rank}.json").read_text()) for rank in (0, 1)]
        found |= {name: max(rank[name] for rank in ranks) for name in ranks[0]}
    return found


def measure(rounds: int, layers: int, folder: Path) -> dict[str, list[dict[str, float]]]:
    """Every arm once per round, in turn; a first round, which fills the caches, is left out."""
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    for number in range(rounds + 1):
        for arm in ARMS:
            place = folder / f"{number}-{arm.replace(', ', '-')}"
            place.mkdir()
            one = launch(arm, layers, place)
            shutil.rmtree(place)
            if number:
                found[arm].append(one)
    return found


def summary(found: dict[str, list[dict[str, float]]], layers: int) -> dict[str, Any]:
    """Medians and ranges per arm and figure, and their ratios to Accelerate's within a round."""
    arms: dict[str, Any] = {}
    for arm, rounds in found.items():
        arms[arm] = {}
        for name in FIGURES:
            values = [one[name] for one in rounds]
            ratios = [one[name] / other[name] for one, other in zip(rounds, found["accelerate"], strict=True)]
            arms[arm][name] = {
                "median": statistics.median(values),
                "range": [min(values), max(values)],
                "ratio": statistics.median(ratios),
            }
    return {
        "parameters": layers * WIDTH * WIDTH,
        "rounds": len(found["accelerate"]),
        "allowed": ALLOWED,
        "machine": {"python": platform.python_version(), "cores": os.cpu_count(), "system": platform.platform()},
        "packages": {name: version(name) for name in ("acclight", "accelerate", "torch")},
        "arms": arms,
    }


def table(result: dict[str, Any]) -> str:
    """The result as a Markdown table: medians, and in brackets the ratios to Accelerate."""
    lines = ["| arm | blocked s | total s | resume s | peak MiB |", "|---|---:|---:|---:|---:|"]
    for arm, figures in result["arms"].items():
        cells = [f"{figures[name]['median']:.2f} ({figures[name]['ratio']:.2f})" for name in FIGURES]
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Reads the arguments, measures, prints, writes, checks."""
    parser = argparse.ArgumentParser(description="Measure saving and resuming against Accelerate's save_state.")
    parser.add_argument("--rounds", type=int, default=3, help="measurements per arm (default 3)")
    parser.add_argument("--layers", type=int, default=100, help="millions of parameters (default 100)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to this file too")
    parser.add_argument("--check", action="store_true", help=f"exit with 1 when a ratio is above {ALLOWED}")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--part", choices=("save", "resume"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part is not None:
        ranks_part(arguments)
        return
    if arguments.rounds < 1:
        parser.error(f"--rounds is {arguments.rounds}; give 1 or more")
    with tempfile.TemporaryDirectory(prefix="checkpoints-") as folder:
        found = measure(arguments.rounds, arguments.layers, Path(folder))
    result = summary(found, arguments.layers)
    print(table(result))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({**result, "measurements": found}, indent=2) + "\n")
    over = [
        f"{name} {ratio:.2f}"
        for name in FIGURES
        if (ratio := result["arms"]["acclight"][name]["ratio"]) > ALLOWED[name]
    ]
    if arguments.check and over:
        sys.exit(f"above what is allowed of Accelerate's ({ALLOWED}): {', '.join(over)}")


if __name__ == "__main__":
    main()
