"""SingleDeviceStrategy: one process, one device, no collective."""

from __future__ import annotations

from acclight.strategies.process_group import launched
from acclight.strategies.strategy import Strategy


class SingleDeviceStrategy(Strategy):
    """Trains on one device in one process."""

    kind = "single"
    accelerate_type = "NO"
    distributed = False

    def environment(self) -> dict[str, str | None]:
        variables = super().environment()
        if launched():
            # torchrun with one process: Accelerate would start a process group that nothing here needs.
            variables |= {"LOCAL_RANK": None, "RANK": None, "WORLD_SIZE": None}
        return variables
