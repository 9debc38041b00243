"""Real FSDP2 and DeepSpeed on machines without an accelerator device, where the libraries would choose something else.

`tests/test_strategies_on_cpu.py` checks that each of the two is still needed, and so says when it can go.
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


def skip_shared_memory_operator() -> None:
    """Keeps DeepSpeed from compiling a C++ operator when its communication starts.

    DeepSpeed 0.19.8 builds `deepspeed_shm_comm` on the CPU at every first start, for inference only. A process that is killed
    meanwhile leaves a lock file behind, on which every later start waits for ever; gloo does the same work.
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
