"""FSDP2Strategy: parameters, gradients and optimizer state are sharded over the ranks as DTensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from acclight.strategies import on_cpu
from acclight.strategies.strategy import Strategy

_WRAP_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")


class FSDP2Strategy(Strategy):
    """Shards the model with `torch.distributed.fsdp.fully_shard`.

    Args:
        reshard_after_forward: Free the gathered parameters after the forward and gather them again in the backward. Default True.
        cpu_offload: Keep shards and optimizer state on the CPU. Default False.
        auto_wrap_policy: "TRANSFORMER_BASED_WRAP" (default; one unit per transformer layer), "SIZE_BASED_WRAP" or "NO_WRAP".
        transformer_cls_names_to_wrap: Class names of the layers. Default: `_no_split_modules` of the transformers models inside.
        min_num_params: Smallest unit of "SIZE_BASED_WRAP", in parameters.
        activation_checkpointing: Recompute each unit's activations in the backward. Default False.
        ignored_modules: Modules, or a regular expression for their names, that stay whole on every rank.
        state_dict_type: "FULL_STATE_DICT" or "SHARDED_STATE_DICT" (default): the form of exported weights.
        cpu_ram_efficient_loading: Only rank 0 holds real weights before they are sharded. Default False.
        timeout: Seconds that a collective may wait. Default 1800.
    """

    kind = "fsdp2"
    collective_forward = True

    def __init__(
        self,
        *,
        reshard_after_forward: bool = True,
        cpu_offload: bool = False,
        auto_wrap_policy: str = "TRANSFORMER_BASED_WRAP",
        transformer_cls_names_to_wrap: Sequence[str] | None = None,
        min_num_params: int | None = None,
        activation_checkpointing: bool = False,
        ignored_modules: Iterable[nn.Module] | str | None = None,
        state_dict_type: str = "SHARDED_STATE_DICT",
        cpu_ram_efficient_loading: bool = False,
        timeout: float = 1800.0,
    ) -> None:
        super().__init__(timeout=timeout)
        if auto_wrap_policy.upper() not in _WRAP_POLICIES:
            raise ValueError(f"auto_wrap_policy={auto_wrap_policy!r}: choose one of {', '.join(_WRAP_POLICIES)}")
        if auto_wrap_policy.upper() == "SIZE_BASED_WRAP" and not min_num_params:
            raise ValueError("auto_wrap_policy='SIZE_BASED_WRAP' needs min_num_params, the smallest unit in parameters")
        self.reshard_after_forward = reshard_after_forward
        self.cpu_offload = cpu_offload
        self.auto_wrap_policy = auto_wrap_policy.upper()
        self.transformer_cls_names_to_wrap = (
            list(transformer_cls_names_to_wrap) if transformer_cls_names_to_wrap else None
        )
        self.min_num_params = min_num_params
        self.activation_checkpointing = activation_checkpointing
        self.ignored_modules = ignored_modules
        self.state_dict_type = state_dict_type
        self.cpu_ram_efficient_loading = cpu_ram_efficient_loading

    def environment(self) -> dict[str, str | None]:
        # Accelerate reads its own plugin from these where an argument is None; the strategy has read them already.
        return super().environment() | {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_USE_CPU": None, "FSDP_VERSION": "2"}

    def claim_process_state(self, device_type: str) -> None:
        if device_type == "cpu":
            on_cpu.claim_fsdp()

    def accelerator_arguments(self, *, precision: str, clip: float, micro_batch_size: int) -> dict[str, Any]:
        return {
            "fsdp_plugin": FullyShardedDataParallelPlugin(
                fsdp_version=2,
                reshard_after_forward=self.reshard_after_forward,
                cpu_offload=self.cpu_offload,
                auto_wrap_policy=self.auto_wrap_policy.lower(),
                transformer_cls_names_to_wrap=self.transformer_cls_names_to_wrap,
                min_num_params=self.min_num_params,
                activation_checkpointing=self.activation_checkpointing,
                ignored_modules=self.ignored_modules,
                state_dict_type=self.state_dict_type,
                cpu_ram_efficient_loading=self.cpu_ram_efficient_loading,
                mixed_precision_policy=_policy(precision),
            )
        }

    def prepare(self, accelerator: Any, step_module: nn.Module, optimizers: Sequence[Optimizer]) -> nn.Module:
        # The plugin reads the layer classes from the module that it is given: the thin one around the user's.
        layers = {name for m in step_module.modules() for name in (getattr(m, "_no_split_modules", None) or ())}
        present = {type(m).__name__ for m in step_module.modules()}
        step_module._no_split_modules = sorted(layers & present)  # type: ignore[assignment]
        # Evaluation has no optimizer, and Accelerate shards only a pair: one that never steps makes the pair.
        if not self.cpu_ram_efficient_loading:
            _copy_from_first_rank(step_module)
        stand_in = [] if optimizers else [torch.optim.SGD(step_module.parameters(), lr=0.0)]
        super().prepare(accelerator, step_module, [*optimizers, *stand_in])
        if stand_in:
            self._optimizers = []
        return self.wrapped

    def check_wrapped(self) -> None:
        whole = [n for n, p in self.step_module.named_parameters() if not isinstance(p, DTensor)]
        if whole and self.ignored_modules is None:
            raise RuntimeError(
                f"strategy 'fsdp2' was asked for, but {len(whole)} parameters are not sharded (the first is {whole[0]!r})"
            )

    def set_gradient_sync(self, sync: bool) -> None:
        self.wrapped.set_requires_gradient_sync(sync)  # type: ignore[operator]

    def total_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        norm = super().total_norm(gradients)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def clip_value(self, parameters: Sequence[nn.Parameter], limit: float) -> None:
        # torch.nn.utils.clip_grad_value_ has no sharding rule for its foreach clamp; element by element shards are exact.
        for p in parameters:
            if p.grad is not None:
                self.local(p.grad).clamp_(-limit, limit)

    def local(self, tensor: Tensor) -> Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def settle(self) -> None:
        # The root is still gathered after a forward without a backward, and the user's module is not the root: no hook helps.
        for module in self.wrapped.modules():
            reshard = getattr(module, "reshard", None)
            if reshard is not None and hasattr(module, "set_requires_gradient_sync"):
                reshard()

    def summary(self) -> str:
        return f"fsdp2 ({self.auto_wrap_policy.lower()}, reshard_after_forward={self.reshard_after_forward})"


def _copy_from_first_rank(module: nn.Module) -> None:
    """Gives every rank rank 0's weights: `fully_shard` cuts what it finds, and ranks that were not seeded alike differ."""
    if dist.get_world_size() == 1:
        return
    for tensor in (*module.parameters(), *module.buffers()):
        if not isinstance(tensor, DTensor) and not tensor.is_meta:
            dist.broadcast(tensor.detach(), src=0)


def _policy(precision: str) -> Any:
    """FSDP2's own casting: parameters travel in the low precision, gradients are summed in float32, outputs stay as they are."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32) if dtype else None
