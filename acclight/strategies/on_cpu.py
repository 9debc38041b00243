"""Real FSDP2 on machines without an accelerator device, where Accelerate would choose something else.

`tests/test_strategies_on_cpu.py` checks that this is still needed, and so says when it can go.
"""

from __future__ import annotations

from accelerate.state import PartialState
from accelerate.utils import DistributedType


def claim_fsdp() -> None:
    """Makes the process state one that `Accelerator(fsdp_plugin=...)` accepts, on the CPU with gloo.

    Accelerate 1.15.0 sends `cpu=True` into DDP whatever the plugin, and a process without GPU and without `cpu=True` into no
    distribution at all. Its own code is right on CPU tensors; only the choice is not.
    """
    PartialState(cpu=True, backend="gloo")
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
