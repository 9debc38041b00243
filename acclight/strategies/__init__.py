"""How one model is spread over processes: one device, DDP, FSDP2 or DeepSpeed ZeRO."""

from acclight.strategies.ddp import DDPStrategy
from acclight.strategies.deepspeed import DeepSpeedStrategy
from acclight.strategies.fsdp2 import FSDP2Strategy
from acclight.strategies.single import SingleDeviceStrategy
from acclight.strategies.strategy import Strategy

__all__ = ["DDPStrategy", "DeepSpeedStrategy", "FSDP2Strategy", "SingleDeviceStrategy", "Strategy"]
