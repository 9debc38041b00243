"""What is in force when a fit begins, and where each value came from: for the person who watches, and for the loggers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from acclight import seed
from acclight.hyperparameters import storable
from acclight.loggers import guarded
from acclight.messages import info

if TYPE_CHECKING:
    from acclight.strategies import Strategy
    from acclight.trainer import Trainer


@dataclass(frozen=True)
class Setting:
    """One value that is in force.

    Attributes:
        value: A plain value.
        source: "argument", "launcher", "ds_config", "seed_everything", "checkpoint", the name of a file, or "default".
    """

    value: Any
    source: str = "default"

    def __str__(self) -> str:
        text = f"{self.value:g}" if isinstance(self.value, float) else str(self.value)
        return text if self.source == "default" else f"{text} [{self.source}]"


def announce(trainer: Trainer, *, resumed: bool) -> None:
    """Says in a few lines what is in force, once, and gives it to the loggers with the hyper-parameters.

    Args:
        trainer: In fit, ready to train.
        resumed: The state came from a checkpoint.
    """
    settings = in_force(trainer, resumed=resumed)
    validation = trainer.validation.summary() if trainer.validation is not None else "no validation"
    info("\n".join(lines(settings, validation, _places(trainer))))
    if trainer.is_global_zero:
        hparams: dict[str, Any] = {}
        if trainer.datamodule is not None and trainer.datamodule._log_hparams:
            hparams |= storable(trainer.datamodule.hparams)
        if trainer.module._log_hparams:
            hparams |= trainer.module.storable_hparams
        guarded.begin(trainer.loggers, {name: one.value for name, one in settings.items()}, hparams)


def in_force(trainer: Trainer, *, resumed: bool) -> dict[str, Setting]:
    """Every setting by name, in the order in which it is said; a strategy's fields are "strategy.<field>"."""
    core, sources = trainer.core, trainer.core.sources

    def argument(name: str, value: Any, otherwise: str = "default") -> Setting:
        return Setting(value, "argument" if trainer.given_arguments.get(name) is not None else otherwise)

    named = trainer.given_arguments.get("strategy", "auto") != "auto"
    settings = {"strategy": Setting(core.strategy.name, "argument" if named else sources["strategy"])}
    settings |= {f"strategy.{name}": one for name, one in fields_in_force(core.strategy).items()}
    settings["processes"] = Setting(trainer.world_size, sources["processes"])
    settings["machines"] = Setting(core.num_machines, sources["processes"])
    settings["device"] = Setting(_device(trainer.device), sources["device"])
    settings["precision"] = Setting(core.precision, sources["precision"])
    if core.compilation is not None:
        settings["compile"] = argument("compile", "regional" if core.compilation.regional else True, "launcher")
    accumulation = trainer.accumulate_grad_batches
    settings["accumulate_grad_batches"] = argument(
        "accumulate_grad_batches", accumulation, "default" if accumulation == 1 else "launcher"
    )
    size = trainer.data.batch_size if trainer.data is not None else None
    if size is not None:
        settings["batch_size"] = Setting(size)
        # An epoch that is shorter than a window makes one step over what it holds.
        held = int(min(accumulation, trainer.num_training_batches))
        if held < accumulation:
            settings["effective_accumulation"] = Setting(held)
        settings["effective_batch_size"] = Setting(size * core.data_world_size * held)
    settings["gradient_clip_val"] = argument(
        "gradient_clip_val", core.clip_val, core.strategy.clip_source if core.clip_val else "default"
    )
    settings["gradient_clip_algorithm"] = argument("gradient_clip_algorithm", core.clip_algorithm)
    if trainer.data is not None:
        own = seed.given is not None and trainer.data.seed == seed.given % 2**31
        source = "seed_everything" if own else "checkpoint" if resumed else "default"
        settings["seed"] = Setting(seed.given if own else trainer.data.seed, source)
    return settings


def fields_in_force(strategy: Strategy) -> dict[str, Setting]:
    """A strategy's fields that somebody has set; a launcher sets many to what they are anyway."""
    defaults = {name: one.default for name, one in inspect.signature(type(strategy).__init__).parameters.items()}
    return {
        name: Setting(_short(value), source)
        for name, value in strategy.given_fields.items()
        for source in (strategy.field_sources.get(name, "argument"),)
        # The stage is in the strategy's name.
        if name != "stage" and (source != "launcher" or value != defaults.get(name))
    }


def lines(settings: Mapping[str, Setting], validation: str, places: str) -> list[str]:
    """The settings as a person reads them; what is a default and says nothing is left out.

    Args:
        settings: As `in_force` gave them.
        validation: When there is validation.
        places: Where loggers write.
    """
    processes = _counted(settings["processes"].value, "process", "es")
    machines = Setting(_counted(settings["machines"].value, "machine", "s"), settings["machines"].source)
    first = [f"fit: strategy {settings['strategy']}", f"{processes} on {machines}", str(settings["device"])]
    first.append(f"precision {settings['precision']}")
    if "compile" in settings:
        first.append(f"compile {settings['compile']}")
    accumulation = f"accumulation {settings['accumulate_grad_batches']}"
    if "effective_accumulation" in settings:
        accumulation = f"accumulation {settings['effective_accumulation']} of {settings['accumulate_grad_batches']}"
    second = [accumulation]
    if "batch_size" in settings:
        whole = settings["effective_batch_size"]
        second = [f"effective batch {settings['batch_size']} x {processes} x {accumulation} = {whole}"]
    if settings["gradient_clip_val"].value:
        algorithm = settings["gradient_clip_algorithm"].value
        second.append(f"gradients clipped by {algorithm} at {settings['gradient_clip_val']}")
    if "seed" in settings and settings["seed"].source != "default":
        second.append(f"seed {settings['seed']}")
    fields = [f"{name.partition('.')[2]}={one}" for name, one in settings.items() if name.startswith("strategy.")]
    rows = [first, fields, [*second, validation], [places]]
    return [("  " if number else "") + ", ".join(row) for number, row in enumerate(rows) if any(row)]


def _counted(number: int, noun: str, plural: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{plural}"


def _device(device: torch.device) -> str:
    return f"{device.type} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else device.type


def _places(trainer: Trainer) -> str:
    names = [type(one).__name__ if one.log_dir is not None or not one.name else one.name for one in trainer.loggers]
    folder = next((one.log_dir for one in trainer.loggers if one.log_dir is not None), None)
    return f"logs: {', '.join(names)}" + (f" in {folder}" if folder is not None else "") if names else ""


def _short(value: Any) -> Any:
    """A field's value, or what stands for a long one in a line."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return "{" + ", ".join(map(str, value)) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        text = ",".join(str(one) if isinstance(one, str) else type(one).__name__ for one in value)
    else:
        text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
