"""DeepSpeedStrategy: ZeRO stages 1 to 3 by the DeepSpeed engine, with the loop's own accumulation, hooks and step."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs
from torch import Tensor, nn
from torch.optim import Optimizer

from acclight.strategies import ds_config as settings
from acclight.strategies.loss_scale import LossScale
from acclight.strategies.strategy import Strategy, canonical_name


class DeepSpeedStrategy(Strategy):
    """Trains with DeepSpeed ZeRO.

    Args:
        stage: What is sharded: 1 optimizer state, 2 also gradients, 3 also parameters. Default 2.
        offload_optimizer_device: "none" (default), "cpu" or "nvme".
        offload_param_device: "none" (default), "cpu" or "nvme"; stage 3.
        offload_optimizer_nvme_path: Folder for "nvme".
        offload_param_nvme_path: Folder for "nvme".
        zero3_init_flag: Create the parameters sharded in `configure_model` (stage 3). Default False;
            transformers' own initialization of new weights finds sharded ones empty and leaves them as they are.
        zero3_save_16bit_model: Let DeepSpeed gather 16-bit weights when it saves a model itself. Default False.
        ds_config: A DeepSpeed configuration (dict or path of a JSON file); its keys come on top of the arguments.
        timeout: Seconds that a collective may wait. Default 1800.
    """

    kind = "deepspeed"
    accelerate_type = "DEEPSPEED"

    def __init__(
        self,
        *,
        stage: int = 2,
        offload_optimizer_device: str = "none",
        offload_param_device: str = "none",
        offload_optimizer_nvme_path: str | None = None,
        offload_param_nvme_path: str | None = None,
        zero3_init_flag: bool | None = None,
        zero3_save_16bit_model: bool = False,
        ds_config: Mapping[str, Any] | str | Path | None = None,
        timeout: float = 1800.0,
    ) -> None:
        super().__init__(timeout=timeout)
        self._user_config = settings.read(ds_config)
        self.configured_clip = settings.clip_of(self._user_config)
        self.stage = int(self._user_config.get("zero_optimization", {}).get("stage", stage))
        if self.stage not in (1, 2, 3):
            raise ValueError(f"stage={self.stage!r}: DeepSpeed ZeRO has the stages 1, 2 and 3")
        self.offload_optimizer_device = offload_optimizer_device
        self.offload_param_device = offload_param_device
        self.offload_optimizer_nvme_path = offload_optimizer_nvme_path
        self.offload_param_nvme_path = offload_param_nvme_path
        self.zero3_init_flag = self.stage == 3 and bool(zero3_init_flag)
        self.zero3_save_16bit_model = zero3_save_16bit_model
        self.config: dict[str, Any] = {}
        self._divisor = 1.0
        #: The fp16 loss scale where it is not the engine's own.
        self._loss_scale: LossScale | None = None

    @property
    def name(self) -> str:
        return f"deepspeed_stage_{self.stage}"

    @property
    def collective_forward(self) -> bool:  # type: ignore[override]
        """Stage 3 gathers parameters in every forward."""
        return self.stage == 3

    def environment(self) -> dict[str, str | None]:
        # DeepSpeedPlugin fills whatever it finds in these; the strategy has read the launch already (see resolve.py).
        hidden = (
            "CONFIG_FILE", "ZERO_STAGE", "OFFLOAD_OPTIMIZER_DEVICE", "OFFLOAD_PARAM_DEVICE",
            "OFFLOAD_OPTIMIZER_NVME_PATH", "OFFLOAD_PARAM_NVME_PATH", "ZERO3_INIT", "ZERO3_SAVE_16BIT_MODEL",
        )  # fmt: skip
        return (
            super().environment()
            | {f"ACCELERATE_DEEPSPEED_{name}": None for name in hidden}
            | {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": None, "ACCELERATE_GRADIENT_CLIPPING": None}
            | {"ACCELERATE_CONFIG_DS_FIELDS": None, "ACCELERATE_USE_CPU": None, "ACCELERATE_USE_DEEPSPEED": "true"}
        )

    def check_window(self, *, accumulate: int, batch_size: int | None, world_size: int) -> None:
        settings.check_window(self._user_config, accumulate=accumulate, batch_size=batch_size, world_size=world_size)

    def claim_process_state(self, device_type: str) -> None:
        if device_type == "cpu":
            _skip_shared_memory_operator()

    def configured_precision(self) -> str | None:
        return settings.precision_of(self._user_config)

    def accelerator_arguments(self, *, clip: float, micro_batch_size: int) -> dict[str, Any]:
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        mode = settings.own_mode(self._user_config, self.precision)
        if mode == "fp16" and not _runs_fp16():
            raise ValueError(
                f"precision={self.precision.name!r} needs DeepSpeed's own fp16, which DeepSpeed does not run on this device; "
                "use precision='bf16-mixed', or '16-mixed' without a section 'fp16' in ds_config"
            )
        if self.precision.name == "16-mixed" and mode is None:
            self._loss_scale = LossScale()
        self.config = settings.complete(
            self._user_config, self._zero_section(), mode=mode, clip=clip, micro_batch_size=micro_batch_size
        )
        arguments: dict[str, Any] = {
            "deepspeed_plugin": DeepSpeedPlugin(
                hf_ds_config=copy.deepcopy(self.config), zero3_init_flag=self.zero3_init_flag
            )
        }
        if not torch.cuda.is_available():
            arguments["kwargs_handlers"] = [InitProcessGroupKwargs(backend="gloo", timeout=self.timeout)]
        return arguments

    def _zero_section(self) -> dict[str, Any]:
        zero: dict[str, Any] = {"stage": self.stage}
        for role in ("optimizer", "param"):
            device = getattr(self, f"offload_{role}_device")
            if device != "none":
                zero[f"offload_{role}"] = {"device": device}
                if device == "nvme":
                    zero[f"offload_{role}"]["nvme_path"] = getattr(self, f"offload_{role}_nvme_path")
        if self.stage == 3:
            zero["stage3_gather_16bit_weights_on_model_save"] = self.zero3_save_16bit_model
        return zero

    def init_context(self) -> AbstractContextManager[Any]:
        if self.stage != 3 or not self.zero3_init_flag:
            return nullcontext()
        import deepspeed

        context: AbstractContextManager[Any] = deepspeed.zero.Init(config_dict_or_path=self.config)
        return context

    # -- wrapping -----------------------------------------------------------------------------------------------------

    def prepare(self, accelerator: Any, step_module: nn.Module, optimizers: Sequence[Optimizer]) -> nn.Module:
        if len(optimizers) > 1:
            raise ValueError(
                f"configure_optimizers returned {len(optimizers)} optimizers: a DeepSpeed engine trains with exactly one; "
                "use one optimizer with several parameter groups, or the strategy 'ddp' or 'fsdp2'"
            )
        if not optimizers and self.stage != 3:
            # Nothing is sharded in evaluation below stage 3, and the engine refuses to exist without an optimizer.
            self.step_module = self.wrapped = step_module.to(accelerator.device)
            self._optimizers = []
            return self.wrapped
        module = step_module.get_submodule("module")
        if self.stage == 3 and hasattr(self, "wrapped") and self.step_module.get_submodule("module") is module:
            # The engine of an evaluation: its hooks would gather and free the parameters beside the new one's.
            self.wrapped.destroy()  # type: ignore[operator]
        self.step_module = step_module
        self._scaler = None
        if self.stage == 3:
            self._announce_direct_parameters(step_module)
        # Without its own count of backwards the engine exchanges what it has in its step, whenever that is called.
        accelerator.state.deepspeed_plugin.deepspeed_config["managed_gradient_accumulation"] = not self.manual
        # Noted now: the engine is about to replace the groups' parameters by flat partitions.
        self._group_names = super().param_group_names(step_module.get_submodule("module"), optimizers)
        prepared = accelerator.prepare(step_module, *optimizers)
        self.wrapped = prepared[0] if optimizers else prepared
        self._optimizers = list(optimizers)
        self.check_wrapped()
        if self._loss_scale is not None and optimizers:
            self._zero.override_loss_scale(self._loss_scale.scale)
        return self.wrapped

    def _announce_direct_parameters(self, step_module: nn.Module) -> None:
        # The thin module calls the user's step methods, not the user's forward, so that ZeRO-3's hooks on the user's module
        # never run: parameters that it holds itself must be gathered by the thin module instead.
        import deepspeed

        for parameter in step_module.get_submodule("module").parameters(recurse=False):
            deepspeed.zero.register_external_parameter(step_module, parameter)

    def check_wrapped(self) -> None:
        from deepspeed import DeepSpeedEngine

        if not isinstance(self.wrapped, DeepSpeedEngine):
            raise RuntimeError(
                f"strategy {self.name!r} was asked for, but the model is a {type(self.wrapped).__name__}"
            )
        stage = self.wrapped.zero_optimization_stage()
        if stage != self.stage:
            raise RuntimeError(f"strategy {self.name!r} was asked for, but the engine runs ZeRO stage {stage}")

    @property
    def _engine(self) -> Any:
        return self.wrapped

    @property
    def _zero(self) -> Any:
        return self._engine.optimizer

    # -- one training step --------------------------------------------------------------------------------------------

    def set_gradient_sync(self, sync: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(is_boundary=sync)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        # Accelerate's engine wrapper would divide by the accumulation count and step at once, before the step hooks.
        self._engine.backward(loss, retain_graph=retain_graph, scale_wrt_gas=False)

    def finish_window(self) -> None:
        self.set_gradient_sync(True)
        if self.stage == 1:
            self._engine.allreduce_gradients()
        else:
            self._zero.finalize_gradient_accumulation_boundary()

    def drop_gradients(self) -> None:
        zero = self._zero
        zero.zero_grad()
        if self.stage == 3:
            return
        zero.micro_step_id = -1
        for group in range(len(zero.bit16_groups)):
            zero.averaged_gradients[group] = zero.all_grad_tensors[group] = None
        if zero.cpu_offload:
            zero.reset_cpu_buffers()

    def scale_gradients(self, parameters: Sequence[nn.Parameter], factor: Tensor) -> None:
        # The engine divides the gradients, and their norm, by the loss scale in its step.
        self._divisor = 1.0 / float(factor)

    def manual_backward(self, loss: Tensor, *, sync: bool, retain_graph: bool) -> None:
        # What the engine does at the start of a forward, and when a gradient reaches that forward's output.
        self._zero.clear_backward_seen_flag()
        self._engine._backward_prologue()
        self.backward(loss, retain_graph=retain_graph)

    def after_manual_step(self) -> None:
        # Stage 3 has partitioned all parameters, and gathers each one again when it is used.
        self.reset_clipping()

    def manual_zero_grad(self, index: int) -> None:
        self.drop_gradients()

    def reset_clipping(self) -> None:
        self._zero.clip_grad = 0.0

    def unscale(self, optimizer_index: int) -> None:
        """The engine unscales within its step."""

    def clip_norm(self, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor | None:
        self._zero.clip_grad = max_norm
        return None

    def clip_value(self, parameters: Sequence[nn.Parameter], limit: float) -> None:
        raise ValueError(
            "gradient_clip_algorithm='value' cannot be used with DeepSpeed, which clips by the norm within its step; "
            "use gradient_clip_algorithm='norm', or the strategy 'ddp' or 'fsdp2'"
        )

    def last_norm(self) -> float | None:
        norm = self._engine.get_global_grad_norm()
        return None if norm is None else float(norm)

    def optimizer_step(self, index: int) -> bool:
        with self._divided():
            self._engine.step()
        overflow = bool(getattr(self._zero, "overflow", False))
        if self._loss_scale is not None:
            self._loss_scale.update(overflow)
            self._zero.external_loss_scale = self._loss_scale.scale
        return not overflow

    @contextmanager
    def _divided(self) -> Iterator[None]:
        """Makes the engine's step divide the gradients by `_divisor`, for once."""
        if self._divisor == 1.0:
            yield
            return
        owner, name = (
            (self._zero, "external_loss_scale")
            if self._zero.custom_loss_scaler
            else (self._zero.loss_scaler, "cur_scale")
        )
        setattr(owner, name, getattr(owner, name) * self._divisor)
        try:
            yield
        finally:
            setattr(owner, name, getattr(owner, name) / self._divisor)
            self._divisor = 1.0

    def scaler_state(self) -> dict[str, Any]:
        own = self._loss_scale
        if own is not None:
            return {"scale": own.scale, "good_steps": own.good_steps}
        if not self.config["fp16"]["enabled"] or not self._optimizers:
            return {}
        engines = self._zero.loss_scaler
        good_steps = engines.cur_iter - engines.last_overflow_iter - 1 if engines.dynamic else 0
        return {"scale": float(engines.cur_scale), "good_steps": good_steps}

    def load_scaler_state(self, state: Mapping[str, Any]) -> None:
        if not state or not self._optimizers:
            return
        if self._loss_scale is not None:
            self._loss_scale.scale, self._loss_scale.good_steps = state["scale"], state["good_steps"]
            self._zero.external_loss_scale = self._loss_scale.scale
        elif self.config["fp16"]["enabled"] and self._zero.loss_scaler.dynamic:
            engines = self._zero.loss_scaler
            engines.cur_scale, engines.cur_iter = state["scale"], state["good_steps"]
            engines.last_overflow_iter = -1

    def zero_grad(self, index: int) -> None:
        """The engine clears its gradients within its step."""

    # -- state ----------------------------------------------------------------------------------------------------------

    def model_state(self, module: nn.Module) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param

        state = super().model_state(module)
        gathered: dict[int, Tensor] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            key = canonical_name(name)
            if key not in state:
                continue
            if id(parameter) not in gathered:
                # An evaluation's engine has no optimizer, which is what holds the parameters in float32.
                trained = parameter.requires_grad and bool(self._optimizers)
                full = safe_get_full_fp32_param(parameter) if trained else None
                gathered[id(parameter)] = self._gather(parameter) if full is None else full.detach().cpu()
            state[key] = gathered[id(parameter)]
        return state

    def _gather(self, parameter: nn.Parameter) -> Tensor:
        import deepspeed

        if not hasattr(parameter, "ds_id"):
            return parameter.detach()
        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().cpu().clone()

    def load_model_state(self, module: nn.Module, read: Any) -> None:
        import deepspeed
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

        state = self.model_state(module)
        read(state)
        parameters = {canonical_name(n): p for n, p in module.named_parameters()}
        with torch.no_grad():
            for name, parameter in parameters.items():
                if name not in state:
                    continue
                value = state[name].to(parameter.device)
                if hasattr(parameter, "ds_id"):
                    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                        parameter.data.copy_(value)
                    if parameter.requires_grad and self._optimizers:
                        safe_set_local_fp32_param(parameter, self._shard(parameter, value))
                else:
                    parameter.data.copy_(value)
                    if parameter.requires_grad and self._optimizers:
                        safe_set_full_fp32_param(parameter, value.float())

    def _shard(self, parameter: nn.Parameter, value: Tensor) -> Tensor:
        """This rank's part of a whole tensor as ZeRO-3 cuts it: flat, padded so that all ranks hold equally much."""
        size = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
        world = torch.distributed.get_world_size()
        flat = torch.zeros(size * world, dtype=torch.float32, device=value.device)
        flat[: value.numel()] = value.flatten()
        own: Tensor = flat.narrow(0, size * torch.distributed.get_rank(), size)
        return own

    def _flat_partitions(self) -> dict[int, Tensor]:
        """For each trained parameter (by id) the flat float32 partition that holds its part, which the inner optimizer steps."""
        zero = self._zero
        if self.stage == 3:
            groups = zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True)
        else:
            groups = zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True)
        return {id(parameter): flat for group, flat in groups for parameter in group}

    def optimizer_state(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        from deepspeed.utils import safe_get_full_optimizer_state

        if self.stage != 3:
            # DeepSpeed 0.19.8 links parameters and optimizer state after the step of the first parameter group alone.
            self._zero._hp_optimizer_states_linked = False
            self._zero._lazy_init_hp_params_optimizer_state()
        state: dict[str, Any] = {}
        partitions = self._flat_partitions()
        for name, parameter in module.named_parameters():
            if id(parameter) not in partitions:
                continue
            name, flat = canonical_name(name), partitions[id(parameter)]
            for key, value in self._zero.optimizer.state.get(flat, {}).items():
                if isinstance(value, Tensor) and value.shape == flat.shape:
                    state[f"{name}/{key}"] = safe_get_full_optimizer_state(parameter, key).detach().cpu()
                else:
                    state[f"{name}/{key}"] = value.detach().clone() if isinstance(value, Tensor) else value
        return state

    def load_optimizer_state(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        saved: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        plain: Mapping[str, Any],
        read: Any,
    ) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        into = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in saved.items()}
        read(into)
        partitions = self._flat_partitions()
        trained = {canonical_name(n): p for n, p in module.named_parameters() if id(p) in partitions}
        values = {**plain, **into}
        # A fresh engine has no optimizer state before its first step: make it, so that there is something to fill.
        for name, value in values.items():
            owner, _, key = name.rpartition("/")
            flat = partitions[id(trained[owner])]
            sharded = (
                isinstance(value, Tensor) and value.numel() == math.prod(_shape(trained[owner])) and value.dim() > 0
            )
            if sharded:
                self._zero.optimizer.state[flat].setdefault(key, torch.zeros_like(flat))
            else:
                self._zero.optimizer.state[flat][key] = value
        if self.stage != 3:
            self._zero._hp_optimizer_states_linked = False
            self._zero._lazy_init_hp_params_optimizer_state()
        for name, value in into.items():
            owner, _, key = name.rpartition("/")
            parameter = trained[owner]
            if value.dim() == 0:
                continue
            if self.stage == 3:
                safe_set_local_optimizer_state(parameter, self._shard(parameter, value.to(parameter.device)), key)
            else:
                safe_set_full_optimizer_state(parameter, value.to(parameter.device).float(), key)

    def param_group_names(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> list[list[list[str]]]:
        return self._group_names


def _skip_shared_memory_operator() -> None:
    """Keeps DeepSpeed from compiling a C++ operator when its communication starts.

    DeepSpeed 0.19.8 builds `deepspeed_shm_comm` on the CPU at every first start, for inference only. A process that is killed
    meanwhile leaves a lock file behind, on which every later start waits for ever; gloo does the same work.
    `tests/test_strategies_on_cpu.py` checks that DeepSpeed still does so.
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _runs_fp16() -> bool:
    from deepspeed.accelerator import get_accelerator

    return bool(get_accelerator().is_fp16_supported())


def _shape(parameter: nn.Parameter) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))
