"""A little fit whose every hook leaves a line, for acclight and, from a command line, for Lightning.

`python tests/recorded_fit.py`, where lightning is installed, writes `tests/lightning_order.txt`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

#: What of a module is recorded beside the hooks.
METHODS = (
    "configure_callbacks", "prepare_data", "configure_model", "configure_optimizers", "lr_scheduler_step",
    "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer",
    "train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader",
    "training_step", "validation_step", "test_step", "predict_step",
)  # fmt: skip
MODULE_HOOKS = (
    "configure_gradient_clipping", "on_validation_model_zero_grad",
    *(f"on_{stage}_model_{mode}" for stage in ("validation", "test", "predict") for mode in ("eval", "train")),
)  # fmt: skip
SAMPLES = {"train": 5, "validation": 2, "test": 2, "predict": 2}


def describe(value: Any) -> str:
    """An argument in a word; which optimizer, scheduler or batch it is."""
    if isinstance(value, Tensor):
        return f"batch {value.tolist()}" if value.dim() else "loss"
    if isinstance(value, torch.optim.Optimizer):
        return f"optimizer lr {value.defaults['lr']}"
    if isinstance(value, torch.optim.lr_scheduler.StepLR):
        return f"scheduler gamma {value.gamma}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(sorted(map(str, value))) + "}"
    if isinstance(value, Path):
        return value.name
    return str(getattr(value, "value", value))


def noting(cls: type, names: Iterable[str], owner: str, skip: int, lines: list[str]) -> type:
    """A subclass whose named methods leave lines such as "module.on_train_batch_start(batch [3.0], 1)".

    Args:
        cls: The class.
        names: Its methods; those that it does not have are left out.
        owner: Who is named in the lines.
        skip: So many first arguments are left out.
        lines: Where they go.
    """

    def noted(name: str) -> Any:
        method = getattr(cls, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            shown = ", ".join(describe(arg) for arg in (*args[skip:], *kwargs.values()))
            lines.append(f"{owner}.{name}({shown})")
            return method(self, *args, **kwargs)

        # Not functools.wraps: Lightning would look through it and find that nobody has written the hook.
        return call

    return type(cls.__name__, (cls,), {name: noted(name) for name in names if hasattr(cls, name)})


def hook_names(callback: type) -> list[str]:
    """The hooks of a callback class."""
    own = [name for name, value in vars(callback).items() if inspect.isfunction(value) and not name.startswith("_")]
    return [name for name in own if name not in ("state_dict", "load_state_dict")]


def recorded(
    module_base: type, callback_base: type, manual: bool, saves_at: int | None = None, folder: Path | None = None
) -> tuple[list[str], Any, list[Any]]:
    """The lines that will be left, and a module and two callbacks whose hooks leave them.

    Args:
        module_base: TrainModule, or LightningModule.
        callback_base: Callback, of the same library.
        manual: Manual optimization, with an optimizer for each of the two weights where the strategy can.
        saves_at: In the middle of the window whose step has this number, a checkpoint is asked for.
        folder: Where it goes.
    """

    class Recorded(module_base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = not manual
            self.w = nn.Parameter(torch.zeros(1))
            self.v = nn.Parameter(torch.zeros(1))

        def loss(self, batch: Tensor) -> Tensor:
            return ((self.w + self.v - batch) ** 2 / 2).mean()

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            if self.automatic_optimization:
                return self.loss(batch)
            optimizers = self.optimizers()
            for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
                optimizer.step()
            return None

        def validation_step(self, batch: Tensor, batch_idx: int) -> dict[str, float]:
            return {"seen": 1.0}

        def test_step(self, batch: Tensor, batch_idx: int) -> dict[str, float]:
            return {"seen": 1.0}

        def predict_step(self, batch: Tensor, batch_idx: int) -> dict[str, float]:
            return {"seen": 1.0}

        def configure_optimizers(self) -> Any:
            if self.automatic_optimization:
                optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
                schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 100, gamma=gamma) for gamma in (0.25, 0.75)]
                return [optimizer], [{"scheduler": schedulers[0], "interval": "step"}, schedulers[1]]
            if getattr(self.trainer.strategy, "kind", "") == "deepspeed":
                return torch.optim.SGD(self.parameters(), lr=0.5)
            return torch.optim.SGD([self.w], lr=0.5), torch.optim.SGD([self.v], lr=0.25)

        def configure_model(self) -> None:
            pass

        def loader(self, stage: str) -> DataLoader[Any]:
            return DataLoader(torch.arange(float(SAMPLES[stage] * self.trainer.world_size)), batch_size=1)

        def train_dataloader(self) -> Any:
            return self.loader("train")

        def val_dataloader(self) -> Any:
            return self.loader("validation")

        def test_dataloader(self) -> Any:
            return self.loader("test")

        def predict_dataloader(self) -> Any:
            return self.loader("predict")

    class First(callback_base):  # type: ignore[misc]
        asked = False

        def on_after_backward(self, trainer: Any, module: Any) -> None:
            if folder is not None and trainer.global_step + 1 == saves_at and not self.asked:
                self.asked = True
                trainer.save_checkpoint(folder / "saved")

    class Last(callback_base):  # type: ignore[misc]
        runs_last = True

    lines: list[str] = []
    hooks = hook_names(callback_base)
    module = noting(Recorded, dict.fromkeys([*hooks, *MODULE_HOOKS, *METHODS]), "module", 0, lines)()
    first = noting(First, hooks, "first", 2, lines)()
    last = noting(Last, hooks, "last", 2, lines)()
    return lines, module, [first, last]


#: The scenarios that are compared with Lightning: (manual, arguments of both Trainers, of Lightning's, of acclight's).
COMPARED: dict[str, tuple[bool, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "validation at the end": (False, {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0}, {}, {}),
    # Lightning counts batches here.
    "validation inside": (
        False, {"accumulate_grad_batches": 2, "max_epochs": 1}, {"val_check_interval": 4}, {"val_check_interval": 2},
    ),
    "manual": (True, {}, {}, {}),
}  # fmt: skip


def main() -> None:
    """Writes what Lightning runs."""
    from lightning.pytorch import Callback, LightningModule, Trainer, __version__

    text = [f"# What Lightning {__version__} runs in the fits of recorded_fit.py, which writes this file."]
    for name, (manual, both, theirs, _) in COMPARED.items():
        lines, module, callbacks = recorded(LightningModule, Callback, manual)
        switches = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        common = {"max_epochs": 2, "num_sanity_val_steps": 1, "callbacks": callbacks, **dict.fromkeys(switches, False)}
        Trainer(accelerator="cpu", **(common | both | theirs)).fit(module)
        text += [f"## {name}", *lines]
    Path(__file__).with_name("lightning_order.txt").write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
