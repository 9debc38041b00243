"""Weights of files that others have written: Lightning's, torch's and safetensors'.

Nothing in them is imported or called: torch files are read with `weights_only=True`, which makes tensors and plain values alone.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from acclight.checkpoint.errors import CheckpointError
from acclight.checkpoint.ranks import agree
from acclight.checkpoint.reader import Source
from acclight.checkpoint.stored import SUFFIX, StoredTensor, read_file

if TYPE_CHECKING:
    from acclight.module import TrainModule

_SAVE_ALONE = (
    "load it where that is known (a .ckpt with Lightning), and save the state_dict alone, by torch.save or safetensors"
)
#: What Lightning itself puts into its files; the rest comes from `on_save_checkpoint`.
_LIGHTNINGS_OWN = {
    "epoch", "global_step", "pytorch-lightning_version", "state_dict", "loops", "callbacks", "optimizer_states",
    "lr_schedulers", "hparams_name", "hyper_parameters", "hparams_type", "datamodule_hparams_name",
    "datamodule_hyper_parameters", "datamodule_hparams_type",
}  # fmt: skip
#: What DistributedDataParallel puts before the names of the module inside.
_WRAPPED = "module."


class WeightsFile(Source):
    """A file with a module's weights, opened on all ranks; holds no state of a training. Making one is collective.

    Args:
        path: A file of Lightning's, a state_dict saved by torch, or a safetensors file.
        module: Whose weights they are.

    Raises:
        CheckpointError: On every rank, naming the file and what is wrong with it.
    """

    def __init__(self, path: Path, module: TrainModule) -> None:
        state, extra = agree(f"reading {path}", lambda: read_weights(path, mapped=True))
        self._take_weights(path, module, state)
        self.trainer = {"weights_only": True, "extra": extra, "extra_state": self._extra_state}

    def _take_weights(self, path: Path, module: TrainModule, state: Mapping[str, Any]) -> None:
        """Begins as what holds a state_dict alone."""
        self.path, self._module = path, module
        state = _as_in(module, state)
        self._extra_state = {name: value for name, value in state.items() if is_extra_state(name)}
        weights = {name: value for name, value in state.items() if name not in self._extra_state}
        #: The tensors by name of each part that can be loaded.
        self._contents = {path: weights}
        self.model_tensors = described(weights)
        self.optimizer_meta, self.schedulers, self.data = {}, [], {}
        self.optimizer_tensors, self.averaged_tensors, self._tied = {}, {}, {}

    def load_model(self, into: Mapping[str, torch.Tensor]) -> None:
        from acclight.strategies.strategy import tied_names

        # Not before: `configure_model` may have made the parameters only now.
        for names in tied_names(self._module):
            kept = next((name for name in names if name in self.model_tensors), None)
            if kept is not None:
                self._tied |= {name: kept for name in names if name != kept}
        self._load(self.path, into, self.model_tensors, self._tied)

    def _fill(self, path: Path, into: Mapping[str, torch.Tensor]) -> None:
        contents = self._contents[path]

        def fill() -> None:
            for name, tensor in into.items():
                _put(tensor, contents[name])

        agree(f"loading {path}", fill)


def read_weights(path: Path, *, mapped: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state_dict in a file, and what else `on_save_checkpoint` has put there.

    Args:
        path: The file.
        mapped: Leave the values in the file where that can be: they are read when they are used.

    Returns:
        By canonical name the tensors, and the plain values of a `get_extra_state`; the other entries.

    Raises:
        CheckpointError: The file cannot be read or holds no state_dict; the message names it.
    """
    from acclight.strategies.strategy import canonical_name

    extra: dict[str, Any] = {}
    if path.suffix == SUFFIX:
        state: Any = read_file(path, mapped=mapped)
    else:
        state = read_torch(path, _SAVE_ALONE, mapped=mapped)
        if isinstance(state, Mapping) and isinstance(state.get("state_dict"), Mapping):
            extra = {name: value for name, value in state.items() if name not in _LIGHTNINGS_OWN}
            state = state["state_dict"]
    _check_state_dict(path, state)
    return {canonical_name(name): value for name, value in state.items()}, extra


def read_torch(file: Path, way_out: str, *, mapped: bool = False) -> Any:
    """What a file of `torch.save` holds, made of tensors on the CPU and plain values alone.

    Args:
        file: The file.
        way_out: What to do about a file that holds something else.
        mapped: Leave the values in the file where that can be.

    Raises:
        CheckpointError: It holds something else, which is named, or cannot be read.
    """
    try:
        # torch maps the zip files alone that it has written since version 1.6.
        mapped = mapped and zipfile.is_zipfile(file)
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as exc:  # whatever a damaged or a hostile file makes of the unpickler
        # torch's own text is of a page, and recommends to load all of it.
        text = str(exc)
        refused = re.search(r"GLOBAL (\S+)|got <class '(\S+)'>", text)
        if refused is not None:
            raise CheckpointError(
                f"cannot load {file}: it holds {refused[1] or refused[2]}, and nothing from a checkpoint is imported or called: "
                f"{way_out}"
            ) from None
        reason = text.partition("WeightsUnpickler error:")[2].strip() or text
        raise CheckpointError(
            f"cannot load {file}, which is no sound file of torch.save: {_first_line(reason)}"
        ) from None


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _check_state_dict(path: Path, state: Any) -> None:
    if not isinstance(state, Mapping) or not state:
        raise CheckpointError(f"cannot load {path}: it holds a {type(state).__name__} where a state_dict belongs")
    odd = [name for name, value in state.items() if not isinstance(name, str) or not _is_weight(name, value)]
    if not odd:
        return
    if any(isinstance(value, Mapping) for value in state.values()):
        raise CheckpointError(
            f"cannot load {path}: it holds {', '.join(map(str, list(state)[:8]))}, and no 'state_dict': save the state_dict "
            "alone, by torch.save or safetensors"
        )
    raise CheckpointError(f"cannot load {path}: {odd[0]!r} is a {type(state[odd[0]]).__name__} where a tensor belongs")


def _is_weight(name: str, value: Any) -> bool:
    return type(value) in (torch.Tensor, torch.nn.Parameter) or is_extra_state(name)


def is_extra_state(name: str) -> bool:
    """Whether an entry of a state_dict is what a module's own `get_extra_state` gives: any value, not a tensor to fill."""
    return name.rpartition(".")[2] == _EXTRA_STATE_KEY_SUFFIX


def _as_in(module: torch.nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The entries by the module's own names, also of the state_dict of a DistributedDataParallel around it."""
    inside = _WRAPPED.removesuffix(".") in dict(module.named_children())
    if inside or not all(name.startswith(_WRAPPED) for name in state):
        return state
    return {name.removeprefix(_WRAPPED): value for name, value in state.items()}


def described(tensors: Mapping[str, torch.Tensor]) -> dict[str, StoredTensor]:
    """Shape and dtype of each."""
    return {name: StoredTensor(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


@torch.no_grad()
def _put(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Fills a tensor, of a DTensor this rank's shard, with a whole value that every rank has."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if isinstance(tensor, DTensor):
        # Cut here: without a source rank nothing travels.
        own = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
        tensor.to_local().copy_(own.to_local())
    else:
        tensor.copy_(value)
