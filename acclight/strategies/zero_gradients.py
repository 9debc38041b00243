"""ZeroGradients: the gradients of a window that a ZeRO engine holds, outside the parameters."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch


class ZeroGradients:
    """Keeps a window's gradients apart from those of the window before.

    DeepSpeed 0.19.8 with stage 3 keeps the averaged gradient of every parameter in a buffer for good. Only a gradient that
    comes in the first backward after a step replaces what is there, so that a parameter which that backward does not reach
    is stepped with the gradient of an earlier window, or has it added. `tests/test_zero_gradients.py` checks that DeepSpeed
    still does so.

    Args:
        zero: The engine's optimizer.
        stage: Its ZeRO stage.
    """

    def __init__(self, zero: Any, stage: int) -> None:
        self._zero = zero
        self._stage = stage
        #: DeepSpeed's own set of the parameters (by id) whose buffers it has filled since a step; it makes a new one in each.
        self._filled: set[int] = set()

    def after_backward(self) -> None:
        """Empties what the last window has left, once the first backward of a window has replaced all that it reaches."""
        if self._stage != 3:
            return
        filled: set[int] = self._zero._offload_boundary_param_ids
        if filled is not self._filled:
            self._empty(self._filled - filled)
            self._filled = filled

    def drop(self) -> None:
        """Forgets the gradients that the window has gathered so far, also those of a backward that has failed."""
        zero = self._zero
        if self._stage == 3:
            # What a failed backward has left DeepSpeed's zero_grad cannot clear on the CPU.
            for parameter in chain.from_iterable(zero.fp16_groups):
                parameter.grad = None
        zero.zero_grad()
        zero._backward_hook_state.backward_active_depth = 0
        if self._stage == 3:
            for bucket in zero.ipg_buckets.values():
                bucket.clear_params()
            zero.parameter_offload.release_backward_leftovers()
            filled: set[int] = zero._offload_boundary_param_ids
            self._empty(filled)
            filled.clear()
            return
        for bucket in zero.ipg_buckets.values():
            bucket.clear()
        zero.extra_large_param_to_reduce.clear()
        zero.params_already_reduced = [False] * len(zero.params_already_reduced)
        zero.micro_step_id = -1
        for group in range(len(zero.bit16_groups)):
            zero.averaged_gradients[group] = zero.all_grad_tensors[group] = None
        if zero.cpu_offload:
            zero.reset_cpu_buffers()

    @torch.no_grad()
    def _empty(self, parameters: set[int]) -> None:
        buffers = self._zero._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
        for parameter in parameters:
            buffers[parameter].zero_()
