"""When a device, or the CPU, has run out of memory."""

from __future__ import annotations

import gc
import traceback

from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size


def memory_ran_out(error: BaseException) -> bool:
    """Whether an exception, or what caused it, says that there was not enough memory."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError) or (isinstance(cause, Exception) and should_reduce_batch_size(cause)):
            return True
        cause = cause.__cause__
    return False


def free_memory(error: BaseException | None = None) -> None:
    """Gives back what nobody holds any more.

    Args:
        error: An exception that was caught: the frames that it has gone through hold their tensors as long as it lives.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    gc.collect()
    clear_device_cache()
