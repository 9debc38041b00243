"""How one model is spread over processes: one device, DDP, FSDP2 or DeepSpeed ZeRO."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from acclight.strategies.ddp import DDPStrategy
    from acclight.strategies.deepspeed import DeepSpeedStrategy
    from acclight.strategies.fsdp2 import FSDP2Strategy
    from acclight.strategies.single import SingleDeviceStrategy
    from acclight.strategies.strategy import Strategy

__all__ = ["DDPStrategy", "DeepSpeedStrategy", "FSDP2Strategy", "SingleDeviceStrategy", "Strategy"]

# Imported when first used: what FSDP2 needs of torch takes more than a second.
_PLACES = {
    "DDPStrategy": "ddp",
    "DeepSpeedStrategy": "deepspeed",
    "FSDP2Strategy": "fsdp2",
    "SingleDeviceStrategy": "single",
    "Strategy": "strategy",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'acclight.strategies' has no attribute {name!r}")
    return getattr(import_module(f"acclight.strategies.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
