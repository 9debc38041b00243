"""FSDP2Strategy: parameters, gradients and optimizer state are sharded over the ranks as DTensors."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed import _composable_state
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from acclight.messages import warn
from acclight.strategies import on_cpu
from acclight.strategies.fields import Config, reads_config
from acclight.strategies.first_rank import copy_from_first_rank, loaded_by_first_rank
from acclight.strategies.on_meta import EmptyCreation
from acclight.strategies.strategy import Strategy, canonical_name, put_whole
from acclight.strategies.wrapping import POLICIES, choose_units, only_units
from acclight.strategies.xla import check_xla, shard

#: What launch files and guides call a field.
_ALIASES = {
    "offload_params": "cpu_offload",
    "transformer_layer_cls_to_wrap": "transformer_cls_names_to_wrap",
    "transformer_cls_to_wrap": "transformer_cls_names_to_wrap",
}
_OBSOLETE = dict.fromkeys(
    ("sharding_strategy", "backward_prefetch", "forward_prefetch", "use_orig_params", "sync_module_states",
     "limit_all_gathers", "param_init_fn", "state_dict_config", "optim_state_dict_config"),
    "it belongs to FSDP version 1",
)  # fmt: skip


class FSDP2Strategy(Strategy):
    """Shards the model with `torch.distributed.fsdp.fully_shard`.

    Args:
        config: The fields below as a dict, or the path of a JSON or YAML file with them, a launch file of Accelerate's included;
            arguments win. A leading "fsdp_" is accepted, and so are the names of launch files.
        version: 2, the only one.
        reshard_after_forward: Free the gathered parameters after the forward and gather them again in the backward. Default True.
        cpu_offload: Keep shards and optimizer state on the CPU. Default False.
        mixed_precision_policy: torch's MixedPrecisionPolicy, a dict of its fields, or one type's name ("bf16") for parameters and
            reduction. Default: from the Trainer's precision, with gradients summed in float32 and outputs left as they are.
        auto_wrap_policy: "TRANSFORMER_BASED_WRAP" (default; one unit per transformer layer), "SIZE_BASED_WRAP" or "NO_WRAP".
        transformer_cls_names_to_wrap: Class names of the layers, a list or text with commas. Default: `_no_split_modules` of the
            transformers models inside.
        min_num_params: Smallest unit of "SIZE_BASED_WRAP", in parameters that are in no smaller unit.
        activation_checkpointing: Recompute each unit's activations in the backward. Default False.
        activation_checkpointing_offload: Keep each unit's input on the CPU until then. Default False.
        ignored_modules: Frozen modules, or a regular expression for their names, that stay whole on every rank.
        state_dict_type: What `checkpoint.export` makes of the weights: "FULL_STATE_DICT" one file (the default),
            "SHARDED_STATE_DICT" one per rank. Checkpoints are sharded in both.
        cpu_ram_efficient_loading: Only rank 0 holds real weights before they are sharded. Default False.
        xla: Shard with torch_xla's XlaFullyShardedDataParallel, on TPUs. Default False.
        xla_fsdp_settings: Its arguments.
        xla_fsdp_grad_ckpt: Recompute each unit's activations there. Default False.
        create_sharded: `configure_model` creates parameters without memory, and each rank fills its shards, one module at a time
            with its `reset_parameters`: no rank ever holds the whole model. Default False.
        timeout: Seconds that a collective may wait. Default 1800.
    """

    kind = "fsdp2"
    accelerate_type = "FSDP"
    collective_forward = True

    @reads_config(prefix="fsdp_", section="fsdp_config", aliases=_ALIASES, obsolete=_OBSOLETE)
    def __init__(
        self,
        config: Config | None = None,
        *,
        version: int = 2,
        reshard_after_forward: bool = True,
        cpu_offload: bool = False,
        mixed_precision_policy: MixedPrecisionPolicy | Mapping[str, Any] | str | None = None,
        auto_wrap_policy: str = "TRANSFORMER_BASED_WRAP",
        transformer_cls_names_to_wrap: Sequence[str] | str | None = None,
        min_num_params: int | None = None,
        activation_checkpointing: bool = False,
        activation_checkpointing_offload: bool = False,
        ignored_modules: Iterable[nn.Module] | str | None = None,
        state_dict_type: str | None = None,
        cpu_ram_efficient_loading: bool = False,
        xla: bool = False,
        xla_fsdp_settings: Mapping[str, Any] | None = None,
        xla_fsdp_grad_ckpt: bool = False,
        create_sharded: bool = False,
        timeout: float = 1800.0,
    ) -> None:
        super().__init__(timeout=timeout)
        if str(version) not in ("1", "2"):
            raise ValueError(f"version={version!r}: acclight runs FSDP version 2")
        if int(version) != 2:
            raise ValueError(
                f"FSDP version {version} cannot be used: acclight runs FSDP2 alone (version 1's flat parameters cannot be saved "
                "by name); set version=2, or convert a launch file with `accelerate to-fsdp2`"
            )
        if activation_checkpointing_offload and not activation_checkpointing:
            raise ValueError("activation_checkpointing_offload=True needs activation_checkpointing=True")
        state_dict_type = state_dict_type and state_dict_type.upper()
        if state_dict_type not in (None, "FULL_STATE_DICT", "SHARDED_STATE_DICT"):
            raise ValueError(f"state_dict_type={state_dict_type!r}: choose FULL_STATE_DICT or SHARDED_STATE_DICT")
        if isinstance(transformer_cls_names_to_wrap, str):
            transformer_cls_names_to_wrap = transformer_cls_names_to_wrap.split(",")
        names = [n.__name__ if isinstance(n, type) else n.strip() for n in transformer_cls_names_to_wrap or ()]
        if not isinstance(auto_wrap_policy, str) or auto_wrap_policy.upper() not in POLICIES:
            raise ValueError(f"auto_wrap_policy={auto_wrap_policy!r}: choose one of {', '.join(POLICIES)}")
        if min_num_params is not None and min_num_params < 0:
            raise ValueError(f"min_num_params={min_num_params!r}: give a number of parameters")
        if auto_wrap_policy.upper() == "SIZE_BASED_WRAP" and not min_num_params:
            raise ValueError("auto_wrap_policy='SIZE_BASED_WRAP' needs min_num_params, the smallest unit in parameters")
        self.reshard_after_forward = reshard_after_forward
        self.cpu_offload = cpu_offload
        self.mixed_precision_policy = _read_policy(mixed_precision_policy)
        self.auto_wrap_policy = auto_wrap_policy.upper()
        self.transformer_cls_names_to_wrap = [name for name in names if name] or None
        self.min_num_params = min_num_params
        self.activation_checkpointing = activation_checkpointing
        self.activation_checkpointing_offload = activation_checkpointing_offload
        if isinstance(ignored_modules, str):
            try:
                re.compile(ignored_modules)
            except re.error as error:
                raise ValueError(f"ignored_modules={ignored_modules!r} is no regular expression: {error}") from None
        elif ignored_modules is not None:
            ignored_modules = list(ignored_modules)
            if odd := [one for one in ignored_modules if not isinstance(one, nn.Module)]:
                raise ValueError(f"ignored_modules={odd[0]!r}: give modules, or one regular expression for their names")
        self.ignored_modules = ignored_modules
        self.state_dict_type = state_dict_type
        self.exports_by_rank = state_dict_type == "SHARDED_STATE_DICT"
        if xla_fsdp_grad_ckpt and not xla:
            warn(
                "FSDP2Strategy: xla_fsdp_grad_ckpt=True has no effect without xla=True; on a GPU use activation_checkpointing"
            )
        if xla:
            check_xla()
        self.xla = xla
        self.xla_fsdp_settings = dict(xla_fsdp_settings or {})
        self.xla_fsdp_grad_ckpt = xla_fsdp_grad_ckpt
        if create_sharded and cpu_ram_efficient_loading:
            raise ValueError(
                "create_sharded=True leaves no weights for rank 0 to load, as cpu_ram_efficient_loading=True asks for: give one"
            )
        self.cpu_ram_efficient_loading = cpu_ram_efficient_loading
        self.create_sharded = create_sharded
        #: What `configure_model` has created without memory.
        self._creation: EmptyCreation | None = None
        self._on_cpu = False
        #: What the units gather and exchange together.
        self._groups: list[Any] = []

    def environment(self) -> dict[str, str | None]:
        # Accelerate reads its own plugin from these where an argument is None; the strategy has read them already.
        return super().environment() | {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_USE_CPU": None, "FSDP_VERSION": "2"}

    def claim_process_state(self, device_type: str) -> None:
        self._on_cpu = device_type == "cpu"
        if self._on_cpu:
            on_cpu.claim_fsdp()

    def accelerator_arguments(self, *, clip: float, micro_batch_size: int) -> dict[str, Any]:
        return {
            "fsdp_plugin": FullyShardedDataParallelPlugin(
                fsdp_version=2,
                reshard_after_forward=self.reshard_after_forward,
                # Without a GPU the shards are on the CPU already, and torch's policy wants a device to move them to.
                cpu_offload=self.cpu_offload and not self._on_cpu,
                auto_wrap_policy=self.auto_wrap_policy.lower(),
                transformer_cls_names_to_wrap=self.transformer_cls_names_to_wrap,
                min_num_params=self.min_num_params,
                activation_checkpointing=self.activation_checkpointing,
                activation_checkpointing_offload=self.activation_checkpointing_offload,
                ignored_modules=self.ignored_modules,
                state_dict_type=self.state_dict_type or "SHARDED_STATE_DICT",
                cpu_ram_efficient_loading=self.cpu_ram_efficient_loading,
                # A given one keeps Accelerate from making its own, which rounds outputs; `prepare` gives the model's.
                mixed_precision_policy=self.mixed_precision_policy or MixedPrecisionPolicy(),
            )
        }

    def init_context(self) -> AbstractContextManager[Any]:
        self._creation = None
        if self.create_sharded:
            self._creation = EmptyCreation(everything=False)
            return self._creation.active()
        if self.cpu_ram_efficient_loading and dist.get_rank() > 0:
            # Rank 0's weights come when they are sharded.
            return EmptyCreation(everything=True).active()
        return nullcontext()

    def prepare(self, accelerator: Any, step_module: nn.Module, optimizers: Sequence[Optimizer]) -> Callable[..., Any]:
        module = step_module.get_submodule("module")
        if hasattr(self, "wrapped") and self.step_module.get_submodule("module") is module:
            # An evaluation has sharded it, so that the optimizers were made from the shards already.
            self._optimizers = [accelerator.prepare_optimizer(optimizer) for optimizer in optimizers]
            return self._forward
        if next(module.parameters(), None) is None:
            # An evaluation, with nothing to shard.
            self.step_module, self._optimizers = step_module, []
            self.wrapped = step_module.to(accelerator.device)
            return self._forward
        self._refuse_scalars(module)
        self._refuse_meta(module)
        self._check_checkpointing(module)
        ignored = self._ignored(module)
        units = choose_units(
            module, self.auto_wrap_policy, self.transformer_cls_names_to_wrap, self.min_num_params or 0
        )
        if self.xla:
            return self._prepare_xla(step_module, units, optimizers)
        # Accelerate looks for a last norm to wrap among the children, and would take a user's module named so for one.
        step_module.base_model_prefix = "none"  # type: ignore[assignment]
        plugin = accelerator.state.fsdp_plugin
        plugin.mixed_precision_policy = self._policy(module)
        plugin.ignored_modules = ignored or None
        if not self.cpu_ram_efficient_loading:
            copy_from_first_rank(step_module)
        group_names = super().param_group_names(module, optimizers)
        places = self._creation.places(module) if self._creation is not None else {}
        # Evaluation has no optimizer, and Accelerate shards only a pair: one that never steps makes the pair.
        stand_in = [] if optimizers else [torch.optim.SGD(step_module.parameters(), lr=0.0)]
        loading = loaded_by_first_rank(step_module) if self.cpu_ram_efficient_loading else nullcontext()
        with only_units(units), loading, _tensor_parallel_errors(accelerator):
            super().prepare(accelerator, step_module, [*optimizers, *stand_in])
        if stand_in:
            self._optimizers = []
        if self._creation is not None:
            device = torch.device("cpu") if self.cpu_offload else accelerator.device
            self._creation.fill(self.wrapped, places, device)
            self._creation = None
        # Accelerate finds an optimizer's parameters again by their addresses, and those on the meta device have none.
        sharded = {canonical_name(name): p for name, p in module.named_parameters()}
        for optimizer, groups in zip(optimizers, group_names, strict=True):
            for group, names in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = [sharded[name] for name in names]
        # torch 2.13 has no public name for them.
        states: Any = [unit._get_fsdp_state() for unit in self.wrapped.modules() if isinstance(unit, FSDPModule)]
        self._groups = [group for state in states for group in state._fsdp_param_groups]
        return self._forward

    def _forward(self, *args: Any) -> Any:
        # torch reads the types of a unit's gradients from what is trained in its first forward: None where all is frozen.
        for group in self._groups if torch.is_grad_enabled() else ():
            if getattr(group, "_orig_dtype", "not seen yet") is None and _any_trained(group):
                group._init_mp_dtypes()
        return self.wrapped(*args)

    def _prepare_xla(
        self, step_module: nn.Module, units: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> nn.Module:
        before = list(step_module.parameters())
        self.wrapped = shard(step_module, units, self.xla_fsdp_settings, grad_ckpt=self.xla_fsdp_grad_ckpt)
        self.step_module, self._optimizers = step_module, list(optimizers)
        if optimizers and [id(p) for p in before] != [id(p) for p in self.wrapped.parameters()]:
            raise RuntimeError(
                "torch_xla has replaced the parameters that configure_optimizers gave to the optimizer, which would train "
                "nothing: xla=True can be used for evaluation and prediction only"
            )
        return self.wrapped

    def _refuse_scalars(self, module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            if parameter.dim() == 0:
                raise ValueError(
                    f"FSDP2 cannot shard the scalar parameter {canonical_name(name)!r}: make it nn.Parameter(torch.zeros(1)), "
                    "of shape (1,), or use the strategy 'ddp'"
                )

    def _refuse_meta(self, module: nn.Module) -> None:
        if self._creation is not None or self.cpu_ram_efficient_loading:
            return
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if tensor.is_meta:
                raise ValueError(
                    f"{canonical_name(name)!r} is on the meta device, and nothing fills it: create the model on the CPU in "
                    "configure_model, and give FSDP2Strategy(create_sharded=True) to do that without its memory"
                )

    def _check_checkpointing(self, module: nn.Module) -> None:
        own = next((n for n, part in module.named_modules() if getattr(part, "gradient_checkpointing", False)), None)
        if own is None:
            return
        if self.activation_checkpointing:
            raise ValueError(
                "activation checkpointing is asked for twice: by FSDP2Strategy(activation_checkpointing=True), and by the model "
                f"({own!r} has gradient_checkpointing on); keep the strategy's"
            )
        warn(
            f"FSDP2: {own!r} recomputes its activations by itself (gradient_checkpointing), so that each unit is gathered once "
            "more in the backward; FSDP2Strategy(activation_checkpointing=True) instead avoids that"
        )

    def _ignored(self, module: nn.Module) -> list[nn.Module]:
        """The modules that stay whole; their parameters must be frozen, because nobody averages their gradients."""
        if self.ignored_modules is None:
            return []
        if isinstance(self.ignored_modules, str):
            pattern = re.compile(self.ignored_modules)
            ignored = [part for name, part in module.named_modules() if pattern.fullmatch(canonical_name(name))]
        else:
            ignored = list(self.ignored_modules)
        if not ignored:
            raise ValueError(f"ignored_modules={self.ignored_modules!r} matches no module of the model")
        inside = {id(p) for part in ignored for p in part.parameters()}
        for name, parameter in module.named_parameters():
            if id(parameter) in inside and parameter.requires_grad:
                raise ValueError(
                    f"ignored_modules: {canonical_name(name)!r} is trained, but FSDP2 does not average the gradients of ignored "
                    "modules, so that the ranks would drift apart: freeze it, or do not ignore it"
                )
        return ignored

    def _policy(self, module: nn.Module) -> MixedPrecisionPolicy:
        """What FSDP2 casts by itself: under "-mixed" the parameters that it gathers, on a GPU.

        Not on a CPU, whose normalization layers refuse weights of another type than their input's, nor around a BatchNorm,
        whose buffers stay float32. Inputs are autocast's affair: targets keep their digits.
        """
        if self.mixed_precision_policy is not None:
            return self.mixed_precision_policy
        if self.precision.autocast is None:
            return MixedPrecisionPolicy()
        in_float32 = self._on_cpu or any(isinstance(part, _BatchNorm) for part in module.modules())
        return MixedPrecisionPolicy(
            param_dtype=None if in_float32 else self.precision.autocast,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )

    def check_wrapped(self) -> None:
        whole = [n for n, p in self.step_module.named_parameters() if not isinstance(p, DTensor)]
        if whole and self.ignored_modules is None:
            raise RuntimeError(
                f"strategy 'fsdp2' was asked for, but {len(whole)} parameters are not sharded (the first is {whole[0]!r})"
            )

    def way_back(self, module: nn.Module) -> Callable[[], None]:
        wrapped, checkpointing = self.wrapped, self.activation_checkpointing
        # The module would keep the optimizers alive otherwise.
        this = weakref.ref(self)

        def make_whole() -> None:
            _shard_again(wrapped)
            shards = dict(module.named_parameters(remove_duplicate=False))
            whole: dict[int, Tensor] = {}
            for parameter in shards.values():
                if isinstance(parameter, DTensor) and id(parameter) not in whole:
                    # On the CPU: the whole model need not fit on every device.
                    local: Any = parameter.detach().to(parameter.device_mesh.device_type)
                    whole[id(parameter)] = local.full_tensor().cpu()
            for part in list(wrapped.modules()):
                _forget_sharding(part)
            put_whole(module, {canonical_name(name): whole[id(p)] for name, p in shards.items() if id(p) in whole})
            if checkpointing:
                for part in list(module.modules()):
                    for name, child in list(part.named_children()):
                        if isinstance(child, CheckpointWrapper):
                            part.register_module(name, child._checkpoint_wrapped_module)
            strategy = this()
            if strategy is not None and getattr(strategy, "wrapped", None) is wrapped:
                del strategy.wrapped
                strategy._groups = []

        return make_whole

    def set_gradient_sync(self, sync: bool) -> None:
        self.wrapped.set_requires_gradient_sync(sync)  # type: ignore[operator]

    def leaves(self) -> Iterable[Tensor]:
        # Backward works on the gathered parameters, whatever the module shows; `tests/test_losses.py` fails without.
        for group in self._groups:
            # A unit that has not run yet has none, and no part in the graph.
            yield from (p._unsharded_param for p in group.fsdp_params if hasattr(p, "_unsharded_param"))

    def finish_window(self) -> None:
        self.wrapped.set_requires_gradient_sync(True)  # type: ignore[operator]
        self._end_backward()

    def drop_gradients(self) -> None:
        # What micro-batches have gathered lies beside the parameters until it is exchanged.
        self.finish_window()
        super().drop_gradients()

    def forget_window(self) -> None:
        # Before it is exchanged: the ranks may have come to different places.
        for group in self._groups:
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None
        self.finish_window()

    def _end_backward(self) -> None:
        """What the root does after a backward that has met its hooks: exchange its gradients, and shard its parameters again.

        torch 2.13 has no public name for it; `tests/test_manual_optimization.py` fails without.
        """
        state = self.wrapped._get_fsdp_state()  # type: ignore[operator]
        if state._is_root:  # it has run forward
            state._root_post_backward_final_callback()

    def manual_forward(self, *args: Any) -> Any:
        outputs = self._forward(*args)
        self.settle()
        return outputs

    def manual_backward(self, loss: Tensor, *, sync: bool, retain_graph: bool) -> None:
        self.wrapped.set_requires_gradient_sync(sync)  # type: ignore[operator]
        super().manual_backward(loss, sync=sync, retain_graph=retain_graph)
        # The step runs within the root's forward, so that this backward has met no hook of the root.
        self._end_backward()
        self.wrapped.unshard()  # type: ignore[operator]

    def after_manual_step(self) -> None:
        # The root's whole parameters are those from before the step.
        self.wrapped.reshard()  # type: ignore[operator]
        self.wrapped.unshard()  # type: ignore[operator]

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
        _shard_again(self.wrapped)

    def whole_weights(self, module: nn.Module, shards: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.settle()
        sharded = {canonical_name(n): p for n, p in module.named_parameters() if isinstance(p, DTensor)}
        whole: dict[str, Tensor] = dict(shards)
        for name in shards.keys() & sharded.keys():
            like = sharded[name]
            whole[name] = DTensor.from_local(
                shards[name].to(like.device), like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
            )
        return whole


def _any_trained(group: Any) -> bool:
    return any(parameter.sharded_param.requires_grad for parameter in group.fsdp_params)


@contextmanager
def _tensor_parallel_errors(accelerator: Any) -> Iterator[None]:
    """Says what is missing where Accelerate 1.15 cannot prepare a tensor-parallel model with the transformers that is there."""
    try:
        yield
    except ImportError as error:
        if error.name != "transformers.integrations.tensor_parallel":
            raise
        raise ImportError(
            f"parallelism: tp_size={accelerator.parallelism_config.tp_size} cannot be prepared by accelerate "
            f"{version('accelerate')} with transformers {version('transformers')} ({error.msg}): use versions "
            "that fit together, or dp_shard_size and dp_replicate_size alone"
        ) from error


def _shard_again(wrapped: nn.Module) -> None:
    # The root is still gathered after a forward without a backward, and the user's module is not the root: no hook helps.
    for module in wrapped.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
            state: Any = module._get_fsdp_state()
            for group in state._fsdp_param_groups:
                # Where an exception has left a forward, `reshard` takes it for one that still runs. torch 2.13 has no public
                # name for this; `tests/test_callbacks_weight_averaging.py` fails without.
                group._to_sharded()


def _forget_sharding(part: nn.Module) -> None:
    """Takes off one module what `fully_shard` has put on it; torch 2.13 cannot. `tests/test_next_trainer.py` tries it."""
    for mark in ("_is_fsdp_managed_module", "_fsdp_use_orig_params"):
        vars(part).pop(mark, None)
    if not isinstance(part, FSDPModule):
        return
    state: Any = part._get_fsdp_state()
    handles = [state._pre_forward_hook_handle, state._post_forward_hook_handle]
    for group in state._fsdp_param_groups:
        handles += group._module_to_pre_save_state_dict_hook_handle.values()
        handles += group._module_to_pre_load_state_dict_hook_handle.values()
        handles += [parameter._post_load_hook_handle for parameter in group.fsdp_params]
    for handle in handles:
        handle.remove()
    _composable_state._module_state_mapping.pop(part, None)
    for key in (STATE_KEY, REGISTRY_KEY):
        vars(part).pop(key, None)
    # fully_shard has made a class of two bases: FSDPModule and the module's own.
    part.__class__ = type(part).__mro__[2]


def _read_policy(given: MixedPrecisionPolicy | Mapping[str, Any] | str | None) -> MixedPrecisionPolicy | None:
    if given is None or isinstance(given, MixedPrecisionPolicy):
        return given
    fields = {"param_dtype": given, "reduce_dtype": given} if isinstance(given, str) else dict(given)
    known = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
    unknown = [key for key in fields if key not in known]
    if unknown:
        raise ValueError(f"mixed_precision_policy has no field {unknown[0]!r}; it takes {', '.join(known)}")
    return MixedPrecisionPolicy(**{key: _dtype(key, value) for key, value in fields.items()})


def _dtype(field: str, value: Any) -> Any:
    names = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    if field == "cast_forward_inputs" or value is None or isinstance(value, torch.dtype):
        return value
    if not isinstance(value, str):
        raise ValueError(f"mixed_precision_policy {field}={value!r} is no type; use {', '.join(names)}")
    name = value.removeprefix("torch.")
    dtype = names.get(name, getattr(torch, name, None))
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"mixed_precision_policy {field}={value!r} is no type; use {', '.join(names)}")
    return dtype
