"""ZeroState: the weights and optimizer state that a ZeRO engine holds in shards, whole and by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from torch import Tensor, nn

from acclight.strategies.strategy import canonical_name


class ZeroState:
    """Reads and fills one engine's state; every rank has to call each method.

    Args:
        engine: The DeepSpeed engine, or below stage 3 the plain module that is evaluated.
        stage: Its ZeRO stage.
        trains: The engine has an optimizer, which is what holds the parameters in float32.
    """

    def __init__(self, engine: Any, stage: int, *, trains: bool) -> None:
        self._zero = engine.optimizer if trains else None
        self._stage = stage
        self._trains = trains

    # -- weights --------------------------------------------------------------------------------------------------------

    def gather_model(self, module: nn.Module, state: dict[str, Tensor]) -> None:
        """Puts whole parameters into the places of `state`, which is by canonical names."""
        gathered: dict[int, Tensor] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            key = canonical_name(name)
            if key not in state:
                continue
            if id(parameter) not in gathered:
                trained = parameter.requires_grad and self._trains
                full = safe_get_full_fp32_param(parameter) if trained else None
                gathered[id(parameter)] = _whole(parameter) if full is None else full.detach().cpu()
            state[key] = gathered[id(parameter)]

    @torch.no_grad()
    def fill_model(self, module: nn.Module, state: Mapping[str, Tensor]) -> None:
        """Gives the engine the weights of `state`, in 16 bits and in float32, wherever it keeps them."""
        for name, parameter in module.named_parameters():
            key = canonical_name(name)
            if key not in state:
                continue
            value = state[key].to(parameter.device)
            trained = parameter.requires_grad and self._trains
            if hasattr(parameter, "ds_id"):
                with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                    parameter.data.copy_(value)
                if trained:
                    safe_set_local_fp32_param(parameter, _own_shard(parameter, value))
            else:
                parameter.data.copy_(value)
                if trained:
                    safe_set_full_fp32_param(parameter, value.float())

    # -- this rank's part of the weights ----------------------------------------------------------------------------------

    def shards(self, module: nn.Module) -> dict[str, Tensor]:
        """This rank's float32 part of each trained parameter, flat (empty where it has none), sharing its memory."""
        return {name: self._own_part(parameter)[0] for name, parameter in self._trained(module)}

    def gathered(self, module: nn.Module) -> list[Tensor]:
        """The whole parameters that every rank computes with; none at stage 3."""
        return [] if self._stage == 3 else [parameter.data for _, parameter in self._trained(module)]

    @torch.no_grad()
    def spread(self, module: nn.Module, gathered: Sequence[Tensor] | None) -> None:
        """Lets forwards compute with what the shards hold now.

        Args:
            module: The user's module.
            gathered: What `gathered` gives afterwards; with it no rank waits for another.
        """
        for index, (_, parameter) in enumerate(self._trained(module)):
            own, _ = self._own_part(parameter)
            if self._stage == 3:
                parameter.ds_tensor.copy_(own)  # type: ignore[attr-defined]
                if parameter.ds_status is ZeroParamStatus.AVAILABLE:  # type: ignore[attr-defined]
                    # A small one is kept whole: it is gathered anew when it is used.
                    parameter.partition(has_been_updated=False)  # type: ignore[attr-defined]
            else:
                parameter.data.copy_(self._gather(parameter, own) if gathered is None else gathered[index])

    def whole(self, module: nn.Module, shards: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parameters among such tensors as `shards` gives, whole and on the CPU."""
        return {
            name: self._gather(parameter, shards[name]).cpu()
            for name, parameter in self._trained(module)
            if name in shards
        }

    def empty(self, module: nn.Module, shards: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors on the CPU to fill, for the parameters among `shards`."""
        return {
            name: torch.zeros(_shape(parameter), dtype=shards[name].dtype, device="cpu")
            for name, parameter in self._trained(module)
            if name in shards
        }

    def cut(self, module: nn.Module, shards: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> None:
        """Fills such tensors as `shards` gives with this rank's part of whole ones."""
        for name, parameter in self._trained(module):
            if name in whole:
                start, value = self._own_part(parameter)[1], whole[name].flatten()
                part = value[start : start + shards[name].numel()]
                shards[name][: part.numel()].copy_(part)

    def _trained(self, module: nn.Module) -> list[tuple[str, nn.Parameter]]:
        partitions = self._flat_partitions()
        return [(canonical_name(name), p) for name, p in module.named_parameters() if id(p) in partitions]

    def _own_part(self, parameter: Any) -> tuple[Tensor, int]:
        """This rank's float32 part, and where it begins in the flat parameter. Stage 3 pads the parts to equal lengths."""
        if self._stage == 3:
            own: Tensor = parameter._z3_optimizer._get_fp32_opt_state_partition(parameter, release_swap_buffers=False)[
                0
            ]
            return own, own.numel() * torch.distributed.get_rank()
        mapping = parameter._hp_mapping
        if mapping is None:
            return torch.zeros(0, device=parameter.device), 0
        return mapping.get_hp_fragment(), mapping.lp_fragment_address.start

    def _gather(self, parameter: Any, own: Tensor) -> Tensor:
        start, size = self._own_part(parameter)[1], math.prod(_shape(parameter))
        flat = torch.zeros(size, dtype=own.dtype, device=parameter.device)
        part = own.flatten()[: max(size - start, 0)]
        flat[start : start + part.numel()].copy_(part)
        group = parameter.ds_process_group if self._stage == 3 else parameter._dp_group
        torch.distributed.all_reduce(flat, group=group)
        return flat.view(_shape(parameter))

    # -- optimizer ------------------------------------------------------------------------------------------------------

    def gather_optimizer(self, module: nn.Module) -> dict[str, Any]:
        """Optimizer state as "<parameter>/<key>" -> whole tensor or plain number."""
        self._link()
        state: dict[str, Any] = {}
        partitions = self._flat_partitions()
        for name, parameter in module.named_parameters():
            if id(parameter) not in partitions:
                continue
            name, flat = canonical_name(name), partitions[id(parameter)]
            for key, value in self._inner_state.get(flat, {}).items():
                if isinstance(value, Tensor) and value.shape == flat.shape:
                    state[f"{name}/{key}"] = safe_get_full_optimizer_state(parameter, key).detach().cpu()
                else:
                    state[f"{name}/{key}"] = value.detach().clone() if isinstance(value, Tensor) else value
        return state

    def fill_optimizer(self, module: nn.Module, plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Gives the engine's optimizer what `gather_optimizer` gave, of any strategy."""
        partitions = self._flat_partitions()
        trained = {canonical_name(n): p for n, p in module.named_parameters() if id(p) in partitions}
        # A fresh engine has no optimizer state before its first step: make it, so that there is something to fill.
        for name, value in {**plain, **tensors}.items():
            owner, _, key = name.rpartition("/")
            flat = partitions[id(trained[owner])]
            whole = isinstance(value, Tensor) and value.dim() > 0 and value.numel() == math.prod(_shape(trained[owner]))
            if whole:
                self._inner_state[flat].setdefault(key, torch.zeros_like(flat))
            else:
                self._inner_state[flat][key] = value
        self._link()
        for name, value in tensors.items():
            owner, _, key = name.rpartition("/")
            parameter = trained[owner]
            if value.dim() == 0:
                continue
            value = value.to(parameter.device)
            if self._stage == 3:
                safe_set_local_optimizer_state(parameter, _own_shard(parameter, value), key)
            else:
                safe_set_full_optimizer_state(parameter, value.float(), key)

    @property
    def _inner_state(self) -> Any:
        assert self._zero is not None
        return self._zero.optimizer.state

    def _link(self) -> None:
        # DeepSpeed 0.19.8 links parameters and optimizer state after the step of the first parameter group alone.
        if self._stage != 3 and self._zero is not None:
            self._zero._hp_optimizer_states_linked = False
            self._zero._lazy_init_hp_params_optimizer_state()

    def _flat_partitions(self) -> dict[int, Tensor]:
        """For each trained parameter (by id) the flat float32 partition that holds its part, which the inner optimizer steps."""
        zero: Any = self._zero
        if self._stage == 3:
            groups = zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True)
        else:
            groups = zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True)
        return {id(parameter): flat for group, flat in groups for parameter in group}


def _whole(parameter: nn.Parameter) -> Tensor:
    if not hasattr(parameter, "ds_id"):
        return parameter.detach()
    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().cpu().clone()


def _own_shard(parameter: nn.Parameter, value: Tensor) -> Tensor:
    """This rank's part of a whole tensor as ZeRO-3 cuts it: flat, padded so that all ranks hold equally much."""
    size = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
    world = torch.distributed.get_world_size()
    flat = torch.zeros(size * world, dtype=torch.float32, device=value.device)
    flat[: value.numel()] = value.flatten()
    own: Tensor = flat.narrow(0, size * torch.distributed.get_rank(), size)
    return own


def _shape(parameter: nn.Parameter) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))
