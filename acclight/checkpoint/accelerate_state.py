"""AccelerateFolder: the state of a training that `accelerate.Accelerator.save_state` has written, to go on from.

The folder holds no names of parameters beside the weights: optimizer state goes by its order there and that of the parameter
groups here. Its torch files are read with `weights_only=True`; those that end in .pkl are not opened.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from acclight.checkpoint.errors import CheckpointError
from acclight.checkpoint.export import INDEX, WEIGHTS
from acclight.checkpoint.files import read_json
from acclight.checkpoint.foreign import WeightsFile, described, read_torch, read_weights
from acclight.checkpoint.ranks import agree

if TYPE_CHECKING:
    from acclight.trainer import Trainer

OPTIMIZER = "optimizer.bin"
_SCHEDULER = "scheduler.bin"
_SCALER = "scaler.pt"
_TORCH_WEIGHTS = "pytorch_model.bin"
_WEIGHTS = (WEIGHTS, INDEX, _TORCH_WEIGHTS, f"{_TORCH_WEIGHTS}.index.json")
_RANDOM_STATES = "random_states_*.pkl"
#: What a DeepSpeed engine writes, at once or in a folder below.
_DEEPSPEED = ("zero_to_fp32.py", "mp_rank_*", "*/mp_rank_*", "*zero_pp_rank_*", "*/*zero_pp_rank_*")
_SAME_ORDER = "give the optimizer its parameters in the order of the script that saved it"
_START_FROM_WEIGHTS = "start from the weights alone, by giving their file as ckpt_path"
#: What optimizers hold in the parameter's own shape, by which another order is found out.
_OF_ONE_SHAPE = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "exp_inf", "grad_avg"}


class AccelerateFolder(WeightsFile):
    """A folder of `Accelerator.save_state`, of one process or of DDP, opened on all ranks. Making one is collective.

    Without an optimizer in it, it holds weights only.

    Args:
        path: The folder.
        trainer: In fit or an evaluation.

    Raises:
        CheckpointError: On every rank, naming the file and what is wrong with it.
    """

    def __init__(self, path: Path, trainer: Trainer) -> None:
        agree(f"reading {path}", lambda: self._open(path, trainer))

    def _open(self, path: Path, trainer: Trainer) -> None:
        self._take_weights(path, trainer.module, _weights(path))
        self._optimizers = [_optimizer(file) for file in _numbered(path, OPTIMIZER)]
        self._schedulers = [(file, _mapping(file)) for file in _numbered(path, _SCHEDULER)]
        #: Each process has written one, and stepped every scheduler as often as there were processes.
        self._processes = len(list(path.glob(_RANDOM_STATES)))
        scaler = _mapping(path / _SCALER) if (path / _SCALER).exists() else {}
        step = _steps(self._optimizers)
        self.trainer = {
            "weights_only": not self._optimizers,
            "extra_state": self._extra_state,
            "callbacks": {},
            # Nothing that belongs after this step is owed, and the data begin anew.
            "progress": {
                "global_step": step, "epoch": 0, "epoch_done": False, "skipped_steps": 0, "empty_steps": 0,
                "validated_at": step, "ended_at": step,
            },
            "scaler": {"scale": scaler["scale"], "good_steps": scaler["_growth_tracker"]} if scaler else {},
        }  # fmt: skip
        self.left_out: list[str] = [
            f"{path} was written by Accelerate: random states and the place in its data are not taken over"
        ]
        if not step:
            self.left_out.append(f"no optimizer in {path} counts its steps: trainer.global_step starts at 0")

    def name_state(self, trainer: Trainer) -> None:
        """Gives the optimizers' state the names of this run's parameters, and the schedulers' the form of this run's."""
        agree(f"reading {self.path}", lambda: self._name_state(trainer))

    def _name_state(self, trainer: Trainer) -> None:
        names = trainer.core.strategy.param_group_names(trainer.module, trainer.optimizers)
        if len(names) != len(self._optimizers):
            raise CheckpointError(
                f"{self.path} holds {len(self._optimizers)} optimizers, but configure_optimizers gave {len(names)}"
            )
        groups: list[list[dict[str, Any]]] = []
        state: dict[str, Any] = {}
        for (file, saved), own in zip(self._optimizers, names, strict=True):
            name_of = _names_by_number(file, saved["param_groups"], own)
            groups.append([_options(group, params) for group, params in zip(saved["param_groups"], own, strict=True)])
            for number, values in saved["state"].items():
                name = name_of[number]
                self._check_shapes(file, name, values)
                state |= {f"{name}/{key}": value for key, value in values.items()}
        tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        self.optimizer_tensors = described(tensors)
        self._contents[self.path / OPTIMIZER] = tensors
        plain = {name: value for name, value in state.items() if name not in tensors}
        self.optimizer_meta = {"groups": groups, "plain": plain}
        self._match_schedulers([config.scheduler for config in trainer.lr_scheduler_configs])

    def load_optimizer(self, into: Mapping[str, torch.Tensor]) -> None:
        self._load(self.path / OPTIMIZER, into, self.optimizer_tensors, {})

    def _check_shapes(self, file: Path, name: str, values: Mapping[str, Any]) -> None:
        weight = self.model_tensors[self._tied.get(name, name)]
        for key in _OF_ONE_SHAPE & values.keys():
            if isinstance(values[key], torch.Tensor) and tuple(values[key].shape) != weight.shape:
                raise CheckpointError(
                    f"{file} does not fit: by the order of the parameters {key!r} of {name!r} has the shape "
                    f"{tuple(values[key].shape)}, and the parameter {weight.shape}; {_SAME_ORDER}"
                )

    def _match_schedulers(self, own: Sequence[Any]) -> None:
        if own and not self._schedulers:
            self.left_out.append(f"{self.path} holds no scheduler: those of configure_optimizers begin anew")
            self.schedulers = [scheduler.state_dict() for scheduler in own]
            for group in itertools.chain(*self.optimizer_meta["groups"]):
                # Those with which the schedulers begin.
                for rate in ("lr", "initial_lr"):
                    group.pop(rate, None)
            return
        self.schedulers = [state for _, state in self._schedulers]
        for index, ((file, state), scheduler) in enumerate(zip(self._schedulers, own, strict=False)):
            count, step = _count(state), self.trainer["progress"]["global_step"]
            if self._processes < 2 or count == step:
                continue
            if step and count == step * self._processes:
                self.schedulers[index] = _counting_steps(scheduler.state_dict(), state, self._processes)
                continue
            self.left_out.append(
                f"{file} counts {count}, which at step {step} is neither steps nor {self._processes} processes x steps: it is "
                "taken as it is, and goes on by one per step or epoch"
            )


def holds_weights(path: Path) -> bool:
    """Whether a folder holds weights under the names that Accelerate gives, and is no model's of transformers."""
    if not any((path / name).exists() for name in _WEIGHTS):
        return False
    return not (path / "config.json").exists() or any(path.glob(_RANDOM_STATES)) or (path / OPTIMIZER).exists()


def refuse_shards(path: Path) -> None:
    """Raises CheckpointError for a folder in which FSDP or DeepSpeed has written each rank's part in a form of its own."""
    if any(path.glob("pytorch_model_fsdp*")):
        raise CheckpointError(
            f"{path} was written by Accelerate under FSDP, and cannot be resumed: start from the weights alone, by giving as "
            "ckpt_path its pytorch_model_fsdp.bin, or, where that is a folder, what `accelerate merge-weights` makes of it"
        )
    if any(any(path.glob(pattern)) for pattern in _DEEPSPEED):
        raise CheckpointError(
            f"{path} was written by DeepSpeed, and cannot be resumed: start from the weights alone, by giving as ckpt_path what "
            "DeepSpeed's zero_to_fp32.py makes of it"
        )


def _weights(path: Path) -> dict[str, Any]:
    name = next(name for name in _WEIGHTS if (path / name).exists())
    others = [*path.glob("model_[0-9]*.safetensors"), *path.glob("pytorch_model_[0-9]*.bin")]
    if others:
        raise CheckpointError(
            f"{path} holds the weights of several models, and a fit has one: give each its own before the fit, by "
            f"model.load_state_dict(checkpoint.load_weights({others[0].name!r}))"
        )
    names = [name]
    if name.endswith(".json"):
        index = read_json(path / name)
        placed = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(placed, dict) or not all(isinstance(n, str) and Path(n).name == n for n in placed.values()):
            raise CheckpointError(f"cannot load {path / name}: its 'weight_map' does not map to names of files")
        names = sorted(set(placed.values()))
    state: dict[str, Any] = {}
    for one in names:
        state |= read_weights(path / one, mapped=True)[0]
    return state


def _numbered(path: Path, name: str) -> list[Path]:
    """The files as Accelerate counts them: optimizer.bin, optimizer_1.bin and so on."""
    first = path / name
    files = itertools.chain([first], (first.with_stem(f"{first.stem}_{i}") for i in itertools.count(1)))
    return list(itertools.takewhile(Path.exists, files))


def _mapping(file: Path) -> Mapping[str, Any]:
    content = read_torch(file, _START_FROM_WEIGHTS, mapped=True)
    if not isinstance(content, Mapping):
        raise CheckpointError(f"cannot load {file}: it holds a {type(content).__name__} where a state_dict belongs")
    return content


def _optimizer(file: Path) -> tuple[Path, Mapping[str, Any]]:
    content = _mapping(file)
    groups, state = content.get("param_groups"), content.get("state")
    try:
        numbers = {number for group in groups or () for number in group["params"]}
        sound = state is not None and state.keys() <= numbers and all(isinstance(v, Mapping) for v in state.values())
    except (AttributeError, KeyError, TypeError):
        sound = False
    if not sound:
        raise CheckpointError(f"cannot load {file}: it does not have the form of an optimizer's state_dict")
    return file, content


def _steps(optimizers: Sequence[tuple[Path, Mapping[str, Any]]]) -> int:
    """The steps that the optimizers have counted; 0 where none does."""
    return max(
        (int(values["step"]) for _, one in optimizers for values in one["state"].values() if "step" in values),
        default=0,
    )


def _names_by_number(file: Path, groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]]) -> dict[Any, str]:
    """This run's name of each parameter that the file numbers."""
    numbers = [group["params"] for group in groups]
    if [len(group) for group in numbers] != [len(group) for group in names]:
        raise CheckpointError(
            f"{file} does not fit: its parameter groups have {[len(group) for group in numbers]} parameters, and those of "
            f"configure_optimizers {[len(group) for group in names]}; {_SAME_ORDER}"
        )
    return dict(zip(itertools.chain(*numbers), itertools.chain(*names), strict=True))


def _options(group: Mapping[str, Any], params: Sequence[str]) -> dict[str, Any]:
    """A parameter group as a checkpoint of acclight's holds it."""
    # Names that the optimizer was given are those of the other module.
    plain = {
        key: value.item() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "param_names"
    }
    return plain | {"params": list(params)}


def _count(scheduler: Mapping[str, Any]) -> Any:
    """How often a scheduler has stepped; a ChainedScheduler leaves that to those in it."""
    inside = scheduler.get("_schedulers")
    return scheduler.get("last_epoch", _count(inside[0]) if inside else None)


def _counting_steps(own: Mapping[str, Any], saved: Mapping[str, Any], processes: int) -> dict[str, Any]:
    """The state of a scheduler that Accelerate has stepped once per process, as one that is stepped once per optimizer step.

    How long it takes, its milestones and the like are this run's own: the saved ones count processes, too.
    """
    state = {**own} | {key: saved[key] for key in ("base_lrs", "_last_lr") if key in saved}
    if "last_epoch" in saved:
        state["last_epoch"] = saved["last_epoch"] // processes
        state["_step_count"] = state["last_epoch"] + 1
    if "_schedulers" in own:
        pairs = zip(own["_schedulers"], saved.get("_schedulers", ()), strict=False)
        state["_schedulers"] = [_counting_steps(one, other, processes) for one, other in pairs]
    return state
