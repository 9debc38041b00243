"""Reads the order of the hooks out of Callback's docstring and plays it for one scenario, into the lines of recorded_fit.py."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field

from acclight import Callback, TrainModule
from acclight.callback import HOOKS
from tests.recorded_fit import SAMPLES


@dataclass
class Line:
    text: str
    inside: list[Line] = field(default_factory=list)


def written_order() -> dict[str, Line]:
    """The sections of the code block in Callback's docstring, by name."""
    block = inspect.getdoc(Callback) or ""
    match = re.search(r"\.\. code-block:: text\n\n((?: {4}.*\n|\n)+)", block)
    assert match is not None
    top = Line("")
    stack = [(-1, top)]
    for raw in match.group(1).splitlines():
        if not raw.strip():
            continue
        depth = len(raw) - len(raw.lstrip())
        while stack[-1][0] >= depth:
            stack.pop()
        line = Line(raw.strip())
        stack[-1][1].inside.append(line)
        stack.append((depth, line))
    return {section.text.rstrip(":"): section for section in top.inside}


@dataclass
class Scenario:
    """One fit of `Recorded`, or a validate, test or predict.

    Attributes:
        manual: Manual optimization.
        accumulate: accumulate_grad_batches.
        epochs: How many.
        inside: Optimizer steps between validations inside the epoch; None for validations at its end.
        saves_at: The step in whose window a checkpoint is asked for.
        optimizers: Learning rates.
        rank: Whose batches.
        world: Number of ranks.
    """

    manual: bool = False
    accumulate: int = 2
    epochs: int = 2
    inside: int | None = None
    saves_at: int | None = None
    optimizers: tuple[float, ...] = (0.5,)
    rank: int = 0
    world: int = 1


class Player:
    """Plays the written order for one scenario into the lines that a record must hold."""

    def __init__(self, scenario: Scenario) -> None:
        self.order = written_order()
        self.scenario = scenario
        self.lines: list[str] = []
        self.stage = "fit"
        #: The arguments of hooks by their names in the signature.
        self.now: dict[str, str] = {"stage": "fit", "dataloader_idx": "0", "device": "cpu"}
        self.step = 0
        self.sanity = False

    def play(self, section: str) -> list[str]:
        self.block(self.order[section])
        return self.lines

    def block(self, parent: Line) -> None:
        for line in parent.inside:
            if line.inside:
                self.loop(line)
                continue
            text, _, remark = line.text.partition(" (")
            for name in text.split(", "):
                self.leaf(name, remark)

    def loop(self, line: Line) -> None:
        s = self.scenario
        head = line.text.rstrip(":")
        if head == "sanity check":
            self.sanity = True
            self.block(line)
            self.sanity = False
        elif head == "each epoch":
            for _ in range(s.epochs):
                self.block(line)
        elif head.startswith("each window"):
            for start in range(0, SAMPLES["train"], s.accumulate):
                self.window = range(start, min(start + s.accumulate, SAMPLES["train"]))
                self.step += 1
                self.block(line)
        elif head == "each batch":
            batches = self.window if self.stage == "fit" else range(1 if self.sanity else SAMPLES[self.stage])
            for index in batches:
                self.batch(index)
                self.block(self.order["each batch with manual optimization"] if self.manually() else line)
        elif head.startswith("each optimizer"):
            for rate in s.optimizers:
                self.now["optimizer"] = f"optimizer lr {rate}"
                self.block(line)
        elif head == "first batch":
            if self.index == self.window[0]:
                self.block(line)
        elif head == "last batch":
            if self.index == self.window[-1]:
                self.block(line)
        elif head == "when due inside the epoch":
            if s.inside is not None and self.step % s.inside == 0:
                self.block(line)
        elif head == "when due at the end of the epoch":
            if s.inside is None:
                self.block(line)
        else:
            raise AssertionError(f"Callback's docstring has {head!r}, which this test does not know")

    def manually(self) -> bool:
        return self.scenario.manual and self.stage == "fit"

    def batch(self, index: int) -> None:
        s = self.scenario
        self.index = index
        self.now |= {
            "batch": f"batch [{float(index * s.world + s.rank)}]",
            "batch_idx": str(index),
            "loss": "loss",
            "optimizer": f"optimizer lr {s.optimizers[0]}",
            "outputs": "{seen}" if self.stage != "fit" else "{}" if s.manual else "{loss}",
        }

    def leaf(self, name: str, remark: str) -> None:
        if name in self.order:
            if name == "save" and self.step != self.scenario.saves_at:
                return
            outer, self.stage = self.stage, self.stage if name == "save" else name
            self.block(self.order[name])
            self.stage = outer
            return
        if (name == "prepare_data" and self.scenario.rank) or (name == "lr_scheduler_step" and self.scenario.manual):
            return
        owners = ["module"]
        if name in HOOKS:
            apart = name in ("on_step", "on_train_epoch_end")
            owners = ["first", "module"] if apart else ["first", "module", "last"]
            if "runs_last" in remark:
                owners = ["last"]
            elif name in ("setup", "teardown", "on_save_checkpoint"):
                owners = ["first", "last", "module"]
        for owner in owners:
            self.lines.append(f"{owner}.{name}({', '.join(self.arguments(owner, name, remark))})")

    def arguments(self, owner: str, name: str, remark: str) -> list[str]:
        """In the order of the method's signature."""
        if name == "lr_scheduler_step":
            return [f"scheduler gamma {0.25 if 'steps' in remark else 0.75}", "None"]
        if name == "configure_gradient_clipping":
            return [self.now["optimizer"], "1.0", "norm"]
        if name == "on_save_checkpoint":
            return ["{}"]
        if name == "on_checkpoint":
            return ["saved"]
        method = getattr(Callback if owner != "module" else TrainModule, name, None)
        names = [] if method is None else list(inspect.signature(method).parameters)[1:]
        if owner != "module":
            names = names[2:]
        if not name.endswith("transfer") and name != "transfer_batch_to_device":
            # Only said where there are several loaders.
            names = [one for one in names if one != "dataloader_idx"]
        return [self.now[one] for one in names]
