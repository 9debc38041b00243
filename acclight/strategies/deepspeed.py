"""DeepSpeedStrategy: ZeRO stages 1 to 3 by the DeepSpeed engine, with the loop's own accumulation, hooks and step."""

from __future__ import annotations

import copy
import importlib.util
import logging
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs
from torch import Tensor, nn
from torch.optim import Optimizer

from acclight.messages import info
from acclight.strategies import ds_config as settings
from acclight.strategies.fields import Config, reads_config
from acclight.strategies.loss_scale import LossScale, divided, engine_state, fill_engine
from acclight.strategies.strategy import Strategy, canonical_name, put_whole
from acclight.strategies.zero_gradients import ZeroGradients

if TYPE_CHECKING:
    from acclight.strategies.zero_state import ZeroState

#: What launch files and Accelerate's plugin call a field.
_ALIASES = {
    "zero_stage": "stage",
    "hf_ds_config": "ds_config",
    "config_file": "ds_config",
    "moe_layer_cls_names": "transformer_moe_cls_names",
}
_OBSOLETE = {
    "is_train_batch_min": "the loop reads its own batches",
    "enable_msamp": "use precision='fp8'",
    "msamp_opt_level": "use precision='fp8'",
} | dict.fromkeys(("hostfile", "multinode_launcher", "inclusion_filter", "exclusion_filter"), "it is the launcher's")


class DeepSpeedStrategy(Strategy):
    """Trains with DeepSpeed ZeRO.

    Args:
        config: The fields below as a dict, or the path of a JSON or YAML file with them, a launch file of Accelerate's included;
            arguments win. A whole DeepSpeed configuration (with "zero_optimization") is taken as `ds_config`.
        stage: What is sharded: 1 optimizer state, 2 also gradients, 3 also parameters. Default 2.
        offload_optimizer_device: "none" (default), "cpu" or "nvme".
        offload_param_device: "none" (default), "cpu" or "nvme"; stage 3.
        offload_optimizer_nvme_path: Folder for "nvme".
        offload_param_nvme_path: Folder for "nvme".
        zero3_init_flag: Create the parameters sharded in `configure_model` (stage 3). Default False;
            transformers' own initialization of new weights finds sharded ones empty and leaves them as they are.
        zero3_save_16bit_model: Let DeepSpeed gather 16-bit weights when it saves a model itself. Default False.
        gradient_clipping: Largest gradient norm where the Trainer gives none. Default None.
        gradient_accumulation_steps: Must be the Trainer's accumulate_grad_batches. Default None.
        transformer_moe_cls_names: Classes of mixture-of-experts layers that stage 3 gathers whole, a text with commas.
        ds_config: A DeepSpeed configuration (dict or path of a JSON file); its keys come on top of the arguments.
        timeout: Seconds that a collective may wait. Default 1800.
    """

    kind = "deepspeed"
    accelerate_type = "DEEPSPEED"

    @reads_config(
        prefix="deepspeed_", section="deepspeed_config", aliases=_ALIASES, obsolete=_OBSOLETE,
        whole=("zero_optimization", "ds_config"),
    )  # fmt: skip
    def __init__(
        self,
        config: Config | None = None,
        *,
        stage: int = 2,
        offload_optimizer_device: str = "none",
        offload_param_device: str = "none",
        offload_optimizer_nvme_path: str | None = None,
        offload_param_nvme_path: str | None = None,
        zero3_init_flag: bool | None = None,
        zero3_save_16bit_model: bool = False,
        gradient_clipping: float | str | None = None,
        gradient_accumulation_steps: int | str | None = None,
        transformer_moe_cls_names: str | None = None,
        ds_config: Mapping[str, Any] | str | Path | None = None,
        timeout: float = 1800.0,
    ) -> None:
        super().__init__(timeout=timeout)
        if importlib.util.find_spec("deepspeed") is None:
            raise ImportError(
                f"the strategy {type(self).__name__} needs the package deepspeed, which is not installed: pip install setuptools "
                "wheel ninja, then DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed"
            )
        given = settings.read(ds_config)
        settings.check(given)
        if "stage" in self.given_fields:
            settings.with_fields(given.get("zero_optimization", {}), stage=stage)
        self._user_config = settings.with_fields(
            given,
            gradient_clipping=gradient_clipping,
            gradient_accumulation_steps=gradient_accumulation_steps,
        )
        self.stage: int = self._user_config.get("zero_optimization", {}).get("stage", stage)
        if isinstance(self.stage, bool) or self.stage not in (1, 2, 3):
            raise ValueError(f"stage={self.stage!r}: DeepSpeed ZeRO has the stages 1, 2 and 3")
        self._zero_section = settings.zero_section(
            self.stage,
            {
                "optimizer": (offload_optimizer_device, offload_optimizer_nvme_path),
                "param": (offload_param_device, offload_param_nvme_path),
            },
            save_16bit=zero3_save_16bit_model,
        )
        self.zero3_init_flag = self.stage == 3 and bool(zero3_init_flag)
        self.transformer_moe_cls_names = transformer_moe_cls_names
        self.configured_clip = settings.clip_of(self._user_config)
        self.config: dict[str, Any] = {}
        self._divisor = 1.0
        #: Takes the engine's hooks away: at the latest when the strategy is gone.
        self._release: weakref.finalize[..., Any] | None = None
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
        hidden = dict.fromkeys(settings.LAUNCHER_VARIABLES)
        return super().environment() | hidden | {"ACCELERATE_USE_DEEPSPEED": "true"}

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
            self._user_config, self._zero_section, mode=mode, clip=clip, micro_batch_size=micro_batch_size
        )
        if self.configured_clip not in (None, clip):
            info(
                f"gradient_clip_val={clip} of the script wins over gradient_clipping={self.configured_clip} of the launcher"
            )
        arguments: dict[str, Any] = {
            "deepspeed_plugin": DeepSpeedPlugin(
                hf_ds_config=copy.deepcopy(self.config),
                zero3_init_flag=self.zero3_init_flag,
                transformer_moe_cls_names=self.transformer_moe_cls_names,
            )
        }
        if not torch.cuda.is_available():
            arguments["kwargs_handlers"] = [InitProcessGroupKwargs(backend="gloo", timeout=self.timeout)]
        return arguments

    def check_window(self, *, accumulate: int, batch_size: int | None, world_size: int) -> None:
        settings.check_window(self._user_config, accumulate=accumulate, batch_size=batch_size, world_size=world_size)

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
        same = hasattr(self, "wrapped") and self.step_module.get_submodule("module") is step_module.get_submodule(
            "module"
        )
        if self._release is not None and same:
            # The engine of an evaluation: its hooks would work on the parameters beside the new one's.
            self._release()
        self.step_module = step_module
        self._scaler = None
        # What an earlier training has left there the engine would add to its first gradients: it clears only its own.
        step_module.zero_grad()
        if self.stage == 3:
            self._announce_direct_parameters(step_module)
            step_module.register_forward_hook(_box_output, prepend=True)
        # Without its own count of backwards the engine exchanges what it has in its step, whenever that is called.
        accelerator.state.deepspeed_plugin.deepspeed_config["managed_gradient_accumulation"] = not self.manual
        # Noted now: the engine is about to replace the groups' parameters by flat partitions.
        self._group_names = super().param_group_names(step_module.get_submodule("module"), optimizers)
        named = step_module.get_submodule("module").named_parameters()
        self._frozen = [(canonical_name(name), parameter) for name, parameter in named if not parameter.requires_grad]
        zero = accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
        zero.update(settings.by_width(self._user_config.get("zero_optimization", {}), _width(step_module)))
        prepared = accelerator.prepare(step_module, *optimizers)
        self.wrapped = prepared[0] if optimizers else prepared
        if self.stage == 3:
            step_module.register_forward_hook(_unbox_output)
        self._optimizers = list(optimizers)
        self.check_wrapped()
        # Its hooks hold the engine, and the engine holds them, where Python's garbage collector does not see it.
        _quieten_deprecations()
        _import_for_destroy()
        self._release = weakref.finalize(self, self._engine.destroy)
        self._release.atexit = False
        if optimizers:
            self._gradients = ZeroGradients(self._zero, self.stage)
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

    def way_back(self, module: nn.Module) -> Callable[[], None] | None:
        engine: Any = self.wrapped
        if engine is self.step_module:
            return None
        state, stage, this, release = self._state, self.stage, weakref.ref(self), self._release
        assert release is not None

        def make_whole() -> None:
            # Where the engine went with its Trainer, the weights that it computed with are left.
            source = state if release.alive else type(state)(engine, stage, trains=False)
            whole: dict[str, Any] = dict.fromkeys(
                canonical_name(name) for name, _ in module.named_parameters(remove_duplicate=False)
            )
            source.gather_model(module, whole)
            release()
            for part in module.modules():
                # Stage 3 has put dictionaries that gather in the place of torch's, and notes of others' parameters.
                vars(part)["_parameters"] = dict(vars(part)["_parameters"].items())
                for left in ("_original_parameters", "_external_params", "ds_id"):
                    vars(part).pop(left, None)
            put_whole(module, whole)
            strategy = this()
            if strategy is not None and getattr(strategy, "wrapped", None) is engine:
                del strategy.wrapped

        return make_whole

    @property
    def _engine(self) -> Any:
        return self.wrapped

    @property
    def _zero(self) -> Any:
        return self._engine.optimizer

    def _check_parameters(self) -> None:
        """Raises RuntimeError when the module or the optimizer has parameters to train that the engine does not know.

        Looked at before every backward: only what was frozen is, 30 ns for each tensor.
        """
        found = next((name for name, parameter in self._frozen if parameter.requires_grad), None)
        for optimizer, groups in zip(self._optimizers, self._group_names, strict=True):
            if len(optimizer.param_groups) > len(groups):
                found = found or f"what add_param_group was given (group {len(groups)})"
        if found is not None:
            raise RuntimeError(
                f"{found} is to be trained since fit has begun, but a DeepSpeed engine takes no new parameters: leave it "
                "trainable from the start, in a parameter group of configure_optimizers with lr=0 until it is to be trained"
            )

    # -- one training step --------------------------------------------------------------------------------------------

    def set_gradient_sync(self, sync: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(is_boundary=sync)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self._check_parameters()
        # Accelerate's engine wrapper would divide by the accumulation count and step at once, before the step hooks.
        self._engine.backward(loss, retain_graph=retain_graph, scale_wrt_gas=False)
        self._gradients.after_backward()

    def finish_window(self) -> None:
        self.set_gradient_sync(True)
        if self.stage == 1:
            self._engine.allreduce_gradients()
        else:
            self._zero.finalize_gradient_accumulation_boundary()

    def drop_gradients(self) -> None:
        self._gradients.drop()

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
        with divided(self._zero, self._divisor):
            self._engine.step()
        self._divisor = 1.0
        overflow = bool(getattr(self._zero, "overflow", False))
        if self._loss_scale is not None:
            self._loss_scale.update(overflow)
            self._zero.external_loss_scale = self._loss_scale.scale
        return not overflow

    def scaler_state(self) -> dict[str, Any]:
        if self._loss_scale is not None:
            return self._loss_scale.state_dict()
        if not self.config["fp16"]["enabled"] or not self._optimizers:
            return {}
        return engine_state(self._zero.loss_scaler)

    def load_scaler_state(self, state: Mapping[str, Any]) -> None:
        if not state or not self._optimizers:
            return
        if self._loss_scale is not None:
            self._loss_scale.scale, self._loss_scale.good_steps = state["scale"], state["good_steps"]
            self._zero.external_loss_scale = self._loss_scale.scale
        elif self.config["fp16"]["enabled"]:
            fill_engine(self._zero.loss_scaler, state)

    def zero_grad(self, index: int) -> None:
        """The engine clears its gradients within its step."""

    # -- state ----------------------------------------------------------------------------------------------------------

    @property
    def _state(self) -> ZeroState:
        # Imported late: it imports DeepSpeed.
        from acclight.strategies.zero_state import ZeroState

        return ZeroState(self.wrapped, self.stage, trains=bool(self._optimizers))

    def model_state(self, module: nn.Module) -> dict[str, Tensor]:
        state = super().model_state(module)
        self._state.gather_model(module, state)
        return state

    def load_model_state(self, module: nn.Module, read: Any) -> None:
        state = self.model_state(module)
        read(state)
        self._state.fill_model(module, state)

    def weight_shards(self, module: nn.Module, *, buffers: bool, trained_only: bool = True) -> dict[str, Tensor]:
        parts = self.config["zero_optimization"].values()
        if any(isinstance(part, Mapping) and part.get("device") == "nvme" for part in parts):
            raise ValueError(
                "weights cannot be averaged while DeepSpeed keeps them on NVMe: offload to 'cpu', or leave the callback out"
            )
        # Frozen parameters are in no optimizer, and stay as they are.
        shards = super().weight_shards(module, buffers=buffers, trained_only=trained_only)
        own = self._state.shards(module)
        parameters = {canonical_name(name) for name, _ in module.named_parameters()}
        return {name: own.get(name, value) for name, value in shards.items() if name in own or name not in parameters}

    def gathered_weights(self, module: nn.Module) -> list[Tensor]:
        return self._state.gathered(module)

    def write_weight_shards(
        self, module: nn.Module, values: Mapping[str, Tensor], gathered: Sequence[Tensor] | None = None
    ) -> None:
        super().write_weight_shards(module, values)
        self._state.spread(module, gathered)

    def whole_weights(self, module: nn.Module, shards: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(shards) | self._state.whole(module, shards)

    def load_weight_shards(
        self, module: nn.Module, shards: Mapping[str, Tensor], read: Callable[[dict[str, Tensor]], set[str]]
    ) -> set[str]:
        into = dict(shards) | self._state.empty(module, shards)
        filled = read(into)
        self._state.cut(module, shards, {name: into[name] for name in filled})
        return filled

    def optimizer_state(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        self._check_parameters()
        return self._state.gather_optimizer(module)

    def load_optimizer_state(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        saved: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        plain: Mapping[str, Any],
        read: Any,
    ) -> None:
        into = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in saved.items()}
        read(into)
        self._state.fill_optimizer(module, plain, into)

    def param_group_names(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> list[list[list[str]]]:
        return self._group_names


def _width(module: nn.Module) -> int | None:
    """The hidden size of the first transformers model inside."""
    configs = (getattr(part, "config", None) for part in module.modules())
    sizes = (getattr(config, "hidden_size", None) for config in configs if hasattr(config, "model_type"))
    return next((size for size in sizes if isinstance(size, int)), None)


def _import_for_destroy() -> None:
    """Imports what DeepSpeed 0.19 would import when it destroys a ZeRO-3 engine.

    That may happen in a garbage collection in the middle of another import, where Python 3.11's import locks cannot be taken
    once more. tests/test_strategies.py tells when DeepSpeed no longer imports there.
    """
    import deepspeed.utils.pin_memory  # noqa: F401


def _quieten_deprecations() -> None:
    """Hides what torch says of two functions that DeepSpeed 0.19.8 calls, again and again: a user can do nothing about it.

    `tests/test_strategies_on_cpu.py` checks that DeepSpeed still calls them.
    """
    names = "all_gather_into_tensor|reduce_scatter_tensor"
    warnings.filterwarnings("ignore", rf"`torch\.distributed\.({names})` is deprecated", FutureWarning)


def _skip_shared_memory_operator() -> None:
    """Keeps DeepSpeed from compiling a C++ operator when its communication starts.

    DeepSpeed 0.19.8 builds `deepspeed_shm_comm` on the CPU at every first start, for inference only. A process that is killed
    meanwhile leaves a lock file behind, on which every later start waits for ever; gloo does the same work.
    `tests/test_strategies_on_cpu.py` checks that DeepSpeed still does so.
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


class _Opaque(NamedTuple):
    """An output in which ZeRO-3 cannot look for parameters.

    DeepSpeed 0.19.8 calls `vars` on what is neither a tensor nor a list, tuple or dict, and takes a dict's keys for text: a step
    that returns a number, a text or an array, or a dict with a number as a key, would end in an error that does not speak of it.
    `tests/test_strategies_on_cpu.py` checks that it still does so.
    """

    value: Any


def _box_output(module: nn.Module, arguments: Any, output: Any) -> Any:
    """Runs before ZeRO-3's own hooks of the thin module."""
    if isinstance(output, dict):
        seen = all(isinstance(key, str) for key in output)
    else:
        seen = output is None or isinstance(output, (torch.Tensor, list, tuple)) or hasattr(output, "__dict__")
    return output if seen else _Opaque(output)


def _unbox_output(module: nn.Module, arguments: Any, output: Any) -> Any:
    """Runs after them."""
    return output.value if isinstance(output, _Opaque) else output


def _runs_fp16() -> bool:
    from deepspeed.accelerator import get_accelerator

    return bool(get_accelerator().is_fp16_supported())
