"""Strategy: what the core asks of one way to spread a model over processes, with the answers of plain, whole tensors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from acclight.strategies.precision import Precision

# What activation checkpointing and torch.compile put into parameter names.
_WRAPPER_PARTS = ("_checkpoint_wrapped_module.", "_orig_mod.")


def canonical_name(name: str) -> str:
    """The name as the user's module gives it, without the parts that wrappers insert."""
    for part in _WRAPPER_PARTS:
        name = name.replace(part, "")
    return name


def tied_names(module: nn.Module) -> list[list[str]]:
    """The canonical names of each parameter or buffer that has several, in the module's order."""
    names: dict[int, list[str]] = {}
    for named in (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)):
        for name, tensor in named:
            names.setdefault(id(tensor), []).append(canonical_name(name))
    return [several for several in names.values() if len(several) > 1]


def put_whole(module: nn.Module, whole: Mapping[str, Tensor]) -> None:
    """Puts new, plain parameters into the places of a module's own; ties stay.

    Args:
        module: The user's module.
        whole: Values by canonical name; what is missing stays as it is.
    """
    fresh: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        value = whole.get(canonical_name(name))
        if value is None:
            continue
        if id(parameter) not in fresh:
            # With the old one, so that its id stays its own.
            new = nn.Parameter(value.detach().to(parameter.dtype), requires_grad=parameter.requires_grad)
            fresh[id(parameter)] = parameter, new
        owner, _, attribute = name.rpartition(".")
        module.get_submodule(owner)._parameters[attribute] = fresh[id(parameter)][1]


def _persistent_floats(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that a state_dict holds, but for those that count."""
    return {
        f"{name}.{key}" if name else key: buffer
        for name, part in module.named_modules()
        for key, buffer in part.named_buffers(recurse=False)
        if key not in part._non_persistent_buffers_set and buffer.dtype.is_floating_point
    }


class Strategy:
    """Base class of all strategies; its methods are right wherever parameters are whole, plain tensors.

    What a precision means, under every strategy (T is the 16-bit type of its name):

    ====================  =======  ==================  ==================  =======
    .                     32-true  bf16/16-mixed       bf16/16-true        64-true
    ====================  =======  ==================  ==================  =======
    parameters            as made  float32 (trained)   T                   float64
    gradients, hooks      as made  float32             T                   float64
    optimizer state       as made  float32             T                   float64
    batch in a step       as is    as is               floats become T     float64
    matmul, `self(x)`     as made  T                   T                   float64
    cross_entropy, loss   as made  float32             T                   float64
    step's outputs        as made  as the step made    as the step made    float64
    fp16 loss scaling     no       16-mixed            no                  no
    ====================  =======  ==================  ==================  =======

    Where strategies have to differ:

    - FSDP2 on a GPU gathers float32 parameters as T under "-mixed", so that inside a step a weight is of type T (float32 where
      the model has a BatchNorm, whose buffers refuse other types). Its sharded parameters, and all the rest, are as above.
    - DeepSpeed under "-true": DeepSpeed's own 16-bit mode, which steps float32 master weights with float32 optimizer state, and
      under fp16 scales the loss. A ds_config with a section "bf16" or "fp16" chooses this mode for "-mixed" too, for its memory.
      Gradients are in the engine's hands when hooks look. "64-true" is refused.

    Args:
        timeout: Seconds (or a timedelta) that a collective may wait for the slowest process. Default 1800.
    """

    kind: ClassVar[str]
    #: Every rank has to join every forward, in evaluation too.
    collective_forward: ClassVar[bool] = False
    #: Needs a process group, if only a group of one.
    distributed: ClassVar[bool] = True

    #: A rank without a loss can join the others' exchange of gradients with zeros; else all ranks need a loss, or none.
    joins_with_nothing: ClassVar[bool] = False

    #: The module runs backward and steps its optimizers itself; the core sets it before `prepare`.
    manual: bool = False
    #: Weights are exported in one file per rank.
    exports_by_rank: bool = False
    #: Accelerate's DistributedType under which this strategy runs; None for several.
    accelerate_type: ClassVar[str | None] = None

    #: The fields that the script gave, by name; the others have their defaults.
    given_fields: Mapping[str, Any] = MappingProxyType({})
    #: Where each of them came from: "argument", "launcher", or the name of a file.
    field_sources: Mapping[str, str] = MappingProxyType({})

    #: The backend of torch.distributed that was asked for; None for the device's own.
    backend: str | None = None

    #: Gradient clipping that a launch file, or the configuration of the strategy, asks for where the Trainer says nothing.
    configured_clip: float | None = None
    #: Which of the two it is: "launcher" or "ds_config".
    clip_source: str = "ds_config"
    #: The precision in force; the core sets it.
    precision: Precision

    def __init__(self, *, timeout: float | timedelta = 1800.0) -> None:
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
            raise ValueError(f"timeout={timeout!r}: give seconds, more than 0, or a timedelta")
        self.timeout = timedelta(seconds=seconds)
        self.step_module: nn.Module
        self.wrapped: nn.Module
        self._optimizers: list[Any] = []
        self._scaler: torch.amp.GradScaler | None = None
        #: Optimizers whose gradients are free of the fp16 loss scale, and those of them whose step has come.
        self._unscaled: set[int] = set()
        self._stepped: set[int] = set()

    @property
    def name(self) -> str:
        """The name under which `Trainer(strategy=...)` knows this strategy."""
        return self.kind

    # -- before the model exists --------------------------------------------------------------------------------------

    def environment(self) -> dict[str, str | None]:
        """Variables that Accelerate must see (a string) or must not see (None) while it works for this strategy."""
        return {"ACCELERATE_USE_FSDP": None, "ACCELERATE_USE_DEEPSPEED": None, "ACCELERATE_USE_MEGATRON_LM": None}

    def claim_process_state(self, device_type: str) -> None:
        """Creates Accelerate's PartialState where its own choice would be another than what was asked for."""

    def configured_precision(self) -> str | None:
        """The precision that the strategy's own configuration asks for, by the Trainer's name; None where it does not say."""
        return None

    def accelerator_arguments(self, *, clip: float, micro_batch_size: int) -> dict[str, Any]:
        """Keyword arguments for `accelerate.Accelerator`."""
        return {}

    def check_window(self, *, accumulate: int, batch_size: int | None, world_size: int) -> None:
        """Raises ValueError where the strategy's own configuration contradicts what makes up an optimizer step."""

    def check_accelerator(self, accelerator: Any) -> None:
        """Raises RuntimeError when Accelerate has set up another kind of training than this strategy's."""
        found = str(accelerator.distributed_type.value)
        if self.accelerate_type not in (None, found):
            raise RuntimeError(f"strategy {self.name!r} was asked for, but Accelerate set up {found!r}")

    def init_context(self) -> AbstractContextManager[Any]:
        """The context in which `configure_model` creates parameters."""
        return nullcontext()

    # -- wrapping -----------------------------------------------------------------------------------------------------

    def prepare(self, accelerator: Any, step_module: nn.Module, optimizers: Sequence[Optimizer]) -> Callable[..., Any]:
        """Wraps the model and binds the optimizers to what it holds afterwards; returns what the loop calls."""
        self.step_module = step_module
        self._scaler = accelerator.scaler
        if self.precision.name == "16-mixed" and self._scaler is None:
            # Accelerate 1.15 has no loss scaling on the CPU.
            self._scaler = torch.amp.GradScaler(accelerator.device.type)
        if optimizers:
            self.wrapped, *self._optimizers = accelerator.prepare(step_module, *optimizers)
        else:
            self.wrapped = accelerator.prepare_model(step_module, evaluation_mode=True)
            self._optimizers = []
        self.check_wrapped()
        return self.wrapped

    def check_wrapped(self) -> None:
        """Raises RuntimeError when the model is not wrapped as this strategy promises."""

    def way_back(self, module: nn.Module) -> Callable[[], None] | None:
        """What makes the prepared module plain and whole again, once another Trainer wants it; None where it is so still."""
        return None

    # -- one training step --------------------------------------------------------------------------------------------

    def set_gradient_sync(self, sync: bool) -> None:
        """Whether the next forward and backward end a window, so that its gradients are averaged over the ranks."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Adds the gradient of `loss` (a scalar; already weighted) to what the window holds."""
        if self._scaler is not None:
            self._update_scale()
            loss = self._scaler.scale(loss)
        torch.autograd.backward(loss, retain_graph=retain_graph)

    @contextmanager
    def gradients_where(self, keep: bool | Tensor) -> Iterator[None]:
        """While it lasts, backward gives every parameter a gradient of zeros unless `keep`, whatever it meets in the graph.

        Args:
            keep: False, or a scalar tensor on the device.
        """

        def kept(gradient: Tensor) -> Tensor:
            zeros = torch.zeros_like(gradient)
            return torch.where(keep, gradient, zeros) if isinstance(keep, Tensor) else zeros

        # Of leaves, these run before anything is made of the gradient: accumulation, DDP's buckets, ZeRO's partitions.
        leaves: list[Any] = [leaf for leaf in self.leaves() if leaf.requires_grad]
        handles = [leaf.register_hook(kept) for leaf in leaves]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def leaves(self) -> Iterable[Tensor]:
        """The tensors that a backward gives gradients to."""
        return self.step_module.parameters()

    def finish_window(self) -> None:
        """Averages the window's gradients over the ranks when its last micro-batch had no backward, on any rank."""

    def drop_gradients(self) -> None:
        """Forgets the gradients that a window has gathered so far; on every rank."""
        for index in range(len(self._optimizers)):
            self.zero_grad(index)

    def forget_window(self) -> None:
        """Forgets what lies beside the gradients of a window that an exception has ended; every rank calls it."""

    def scale_gradients(self, parameters: Sequence[nn.Parameter], factor: Tensor) -> None:
        """Multiplies the window's gradients by a factor that is the same on every rank."""
        for parameter in parameters:
            if parameter.grad is not None:
                self.local(parameter.grad).mul_(factor)

    def unscale(self, optimizer_index: int) -> None:
        """Takes the fp16 loss scale out of the gradients of one optimizer; once per window, however often it is called."""
        if self._scaler is not None and optimizer_index not in self._unscaled:
            self._scaler.unscale_(self._optimizers[optimizer_index].optimizer)
            self._unscaled.add(optimizer_index)

    def reset_clipping(self) -> None:
        """The coming step clips only what is asked for from now on."""

    def clip_norm(self, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor | None:
        """Scales the gradients so that their global 2-norm is at most `max_norm`.

        Returns:
            The norm before clipping, a scalar tensor on the device; None where the strategy clips within its own step.
        """
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = self.total_norm(gradients)
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    def clip_value(self, parameters: Sequence[nn.Parameter], limit: float) -> None:
        """Clamps every element of the gradients to [-limit, limit]."""
        torch.nn.utils.clip_grad_value_(parameters, limit)

    def local(self, tensor: Tensor) -> Tensor:
        """What this rank holds of a parameter or gradient, sharing its memory."""
        return tensor

    def total_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """The 2-norm over all gradients of the whole model, a scalar tensor that is equal on every rank."""
        return torch.nn.utils.get_total_norm(gradients)

    def last_norm(self) -> float | None:
        """The norm that the strategy's own step has computed, where it does; else None."""
        return None

    def optimizer_step(self, index: int) -> bool:
        """Applies one optimizer's step; returns False when fp16 loss scaling skipped it."""
        # AcceleratedOptimizer.step spends 45 us in package look-ups and would do just this.
        optimizer = self._optimizers[index].optimizer
        if self._scaler is not None:
            self.unscale(index)
            self._stepped.add(index)
            found = self._scaler._found_inf_per_device(optimizer)  # on every rank the same: gradients were averaged
            if any(flag.item() for flag in found.values()):
                return False
        optimizer.step()
        return True

    def _update_scale(self) -> None:
        """Changes the loss scale by what the steps since the last backward have found; the gradients that are left follow it."""
        # Before the next backward, not after a step: all optimizers of one window have gradients of one scale.
        scaler = self._scaler
        if scaler is None or not self._unscaled:
            return
        raw = [one.optimizer for one in self._optimizers]
        # Clipped, say, but not stepped yet: torch's scaler would forget what it has found in them.
        waiting = {i for i in self._unscaled - self._stepped if any(p.grad is not None for p in _parameters(raw[i]))}
        done = self._unscaled - waiting
        if not done:
            return
        states = scaler._per_optimizer_states
        kept = {id(raw[i]): states.pop(id(raw[i])) for i in waiting}
        if any(scaler._found_inf_per_device(raw[i]) for i in done):
            # What other optimizers have gathered must fit what is coming.
            scaled = self._scaled_gradients() if len(self._unscaled) < len(raw) else []
            before = scaler.get_scale() if scaled else 1.0
            scaler.update()
            factor = scaler.get_scale() / before if scaled else 1.0
            for gradient in scaled if factor != 1.0 else ():
                self.local(gradient).mul_(factor)
        for i in done:
            scaler._per_optimizer_states.pop(id(raw[i]), None)
        scaler._per_optimizer_states.update(kept)
        self._unscaled, self._stepped = waiting, set()

    def _scaled_gradients(self) -> list[Tensor]:
        """The gradients that hold the fp16 loss scale, those that have not travelled yet included."""
        parameters = [_parameters(one.optimizer) for one in self._optimizers]
        free = {id(p) for i in self._unscaled for p in parameters[i]}
        tensors = {id(tensor): tensor for tensor in (*itertools.chain(*parameters), *self.leaves())}
        return [t.grad for key, t in tensors.items() if key not in free and t.grad is not None]

    def scaler_state(self) -> dict[str, Any]:
        """The fp16 loss scale and how many steps it has been good for; empty where losses are not scaled."""
        if self._scaler is None:
            return {}
        self._update_scale()
        return {"scale": self._scaler.get_scale(), "good_steps": self._scaler._get_growth_tracker()}

    def load_scaler_state(self, state: Mapping[str, Any]) -> None:
        """Takes back what `scaler_state` gave, of any strategy; an empty one changes nothing."""
        if self._scaler is not None and state:
            own = self._scaler.state_dict()
            self._scaler.load_state_dict(own | {"scale": state["scale"], "_growth_tracker": state["good_steps"]})

    def zero_grad(self, index: int) -> None:
        """Clears the gradients of one optimizer's parameters."""
        self._optimizers[index].optimizer.zero_grad(set_to_none=True)

    # -- a training step that runs backward itself ----------------------------------------------------------------------

    def manual_forward(self, *args: Any) -> Any:
        """Runs a step that calls `manual_backward`, and steps optimizers, as often as it likes."""
        return self.wrapped(*args)

    def manual_backward(self, loss: Tensor, *, sync: bool, retain_graph: bool) -> None:
        """Adds the gradient of `loss`; with `sync` what gradients hold is averaged over the ranks."""
        self.backward(loss, retain_graph=retain_graph)

    def after_manual_step(self) -> None:
        """Lets the rest of the step see the parameters that an optimizer has changed."""

    def manual_zero_grad(self, index: int) -> None:
        """Clears the gradients of one optimizer's parameters, also those that the strategy has taken away already."""
        self.zero_grad(index)

    # -- state, by the names that the user's module gives -----------------------------------------------------------------

    def settle(self) -> None:
        """Puts the parameters into the form in which their state can be read (sharded again, for one)."""

    def model_state(self, module: nn.Module) -> dict[str, Tensor]:
        """Parameters and persistent buffers by canonical name, tied ones under each of their names."""
        self.settle()
        return {canonical_name(name): value for name, value in module.state_dict().items()}

    def load_model_state(self, module: nn.Module, read: Any) -> None:
        """Fills the model's own tensors; `read(into)` fills a mapping of tensors in place."""
        state = self.model_state(module)
        with torch.no_grad():
            read(state)

    def weight_shards(self, module: nn.Module, *, buffers: bool, trained_only: bool = True) -> dict[str, Tensor]:
        """What this rank steps of the model's weights: by canonical name its part of each parameter, sharing its memory.

        Args:
            module: The user's module.
            buffers: Also persistent buffers of floats, whole.
            trained_only: Without the parameters that are frozen now.
        """
        self.settle()
        chosen: dict[str, Tensor] = {
            name: p for name, p in module.named_parameters() if p.requires_grad or not trained_only
        }
        if buffers:
            chosen |= _persistent_floats(module)
        return {canonical_name(name): self.local(tensor.detach()) for name, tensor in chosen.items()}

    def gathered_weights(self, module: nn.Module) -> list[Tensor]:
        """What this rank computes with and cannot make of its own shards; sharing memory."""
        return []

    def write_weight_shards(
        self, module: nn.Module, values: Mapping[str, Tensor], gathered: Sequence[Tensor] | None = None
    ) -> None:
        """Gives this rank's shards, and what forwards compute with, other values.

        Args:
            module: The user's module.
            values: As `weight_shards` gives them, or some of them; of any type and on any device.
            gathered: What belongs into `gathered_weights`; with it no rank waits for another.
        """
        shards = self.weight_shards(module, buffers=True, trained_only=False)
        for name, value in values.items():
            shards[name].copy_(value)

    def whole_weights(self, module: nn.Module, shards: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors such as `weight_shards` gives as a checkpoint takes them: whole, or DTensors. Every rank has to ask."""
        return dict(shards)

    def load_weight_shards(
        self, module: nn.Module, shards: Mapping[str, Tensor], read: Callable[[dict[str, Tensor]], set[str]]
    ) -> set[str]:
        """Fills tensors such as `weight_shards` gives; `read(into)` fills a mapping of tensors in place and says which."""
        whole = self.whole_weights(module, shards)
        filled = read(whole)
        for name in filled:
            own = self.local(whole[name])
            if own.data_ptr() != shards[name].data_ptr():
                shards[name].copy_(own)
        return filled

    def optimizer_state(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        """Optimizer state as "<parameter>/<key>" -> tensor or plain number."""
        names = {id(p): canonical_name(name) for name, p in module.named_parameters()}
        return {
            f"{names[id(p)]}/{key}": value
            for optimizer in optimizers
            for p, values in optimizer.state.items()
            for key, value in values.items()
        }

    def load_optimizer_state(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        saved: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        plain: Mapping[str, Any],
        read: Any,
    ) -> None:
        """Gives the optimizers the saved state.

        Args:
            module: The user's module.
            optimizers: The torch optimizers in the order in which they were saved.
            saved: Shape (global) and dtype of every saved tensor by "<parameter>/<key>".
            plain: Saved values that are no tensors, by the same names.
            read: `read(into)` fills a mapping of tensors in place.
        """
        parameters = {canonical_name(name): p for name, p in module.named_parameters()}
        into: dict[str, Tensor] = {}
        for name, (shape, dtype) in saved.items():
            parameter = parameters[name.rpartition("/")[0]]
            if tuple(parameter.shape) == tuple(shape):
                # As torch.optim's own loading does, so that a checkpoint of another precision fits.
                dtype = parameter.dtype if dtype.is_floating_point else dtype
                into[name] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            else:
                # Adam's "step" stays on the CPU, where the unfused implementations of torch.optim keep it.
                into[name] = torch.zeros(shape, dtype=dtype, device="cpu" if not shape else parameter.device)
        read(into)
        for optimizer in optimizers:
            owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
            for name, value in {**plain, **into}.items():
                owner, _, key = name.rpartition("/")
                if id(parameters[owner]) in owned:
                    optimizer.state[parameters[owner]][key] = value

    def param_group_names(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> list[list[list[str]]]:
        """The parameter names of every group of every optimizer."""
        names = {id(p): canonical_name(name) for name, p in module.named_parameters()}
        return [
            [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups] for optimizer in optimizers
        ]


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]
