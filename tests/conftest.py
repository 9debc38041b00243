"""What holds for every test: no network, no display, one thread, and nothing of a launcher in the environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

# What the Makefile does: torch.compile finds ninja.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.prefix) / "bin"), os.environ["PATH"]])
# Before torch, transformers and matplotlib are imported; child processes inherit it.
os.environ.update(HF_HUB_OFFLINE="1", MPLBACKEND="Agg", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
for _name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(_name, None)
for _name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
    del os.environ[_name]


@pytest.fixture(autouse=True)
def _one_thread_and_a_seed() -> None:
    """Makes a test's numbers independent of the tests before it."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
