"""TransformersModule: trains any transformers model that returns a loss."""

from __future__ import annotations

import copy
import difflib
import importlib.util
import inspect
import json
import math
from collections.abc import Collection, Mapping
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchmetrics import Metric
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, SchedulerType, get_scheduler
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.models.auto import modeling_auto
from transformers.training_args import OptimizerNames
from transformers.utils.generic import find_labels

from acclight import TrainModule, checkpoint
from acclight.messages import warn

#: What transformers' loss functions leave out of their mean.
IGNORED = -100

# They step in the backward, or want more than parameters and a learning rate; the names of transformers contain these.
_UNSUITABLE = ("lomo", "layerwise", "galore", "apollo", "schedule_free")
_OPTIMIZERS = [one.value for one in OptimizerNames if not any(part in one.value for part in _UNSUITABLE)]
_SCHEDULES = [one.value for one in SchedulerType]
#: Schedules that go by a metric, and those that never end.
_WATCHING = ("reduce_lr_on_plateau", "greedy")
_ENDLESS = ("constant", "constant_with_warmup", "inverse_sqrt", *_WATCHING)
#: Language models whose loss is the cross-entropy of tokens, as their class is called.
_LANGUAGE_MODELS = {
    *modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(),
    *modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.values(),
    *modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values(),
}


class MeanLoss(Metric):
    """The mean loss over the items of all ranks, from the means of batches.

    torchmetrics 1.9's MeanMetric leaves NaN out, so that a loss that has diverged looks good; told not to
    (`nan_strategy="disable"`), it forgets the weights.
    """

    full_state_update = False
    total: Tensor
    items: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("items", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, loss: Tensor, count: Tensor) -> None:
        """Adds a batch whose loss is the mean of `count` items."""
        # Not in place: under "bf16-true" the state is of that type, too short for a sum.
        self.total = self.total + loss.detach().to(torch.promote_types(loss.dtype, torch.float32)) * count
        self.items += count

    def compute(self) -> Tensor:
        """The mean; NaN without items."""
        return self.total / self.items


class Perplexity(MeanLoss):
    """exp of the mean loss over all tokens; the mean of the batches' perplexities is another number."""

    def compute(self) -> Tensor:
        return super().compute().exp()


class TransformersModule(TrainModule):
    """Trains a transformers model on batches that hold its forward's arguments, `labels` included.

    A micro-batch weighs as many items as its loss is the mean of (labels that are not -100, without the first of each row where
    the model shifts them), so that the gradient is that of the big batch, however the labels are spread. (What a model adds to
    that loss, say to balance its experts, weighs as much.) It logs "train/loss", a mean over samples, and "val/loss" and
    "test/loss", for language models also "val/perplexity" and "test/perplexity", which are exact over all items of all ranks.

    `checkpoint.export` makes of its checkpoints a folder that `from_pretrained` reads. With `peft_config` use
    `TransformersModule.load_from_checkpoint(path).model.save_pretrained(out)`, which writes the adapters alone.

    Args:
        model: A model; or a configuration, for new weights; or the name or folder of a pretrained model. Only a model object is
            there before `configure_model`, where the strategy decides how the others come to be.
        auto_class: A class of transformers that makes the model of a configuration or name, itself or by its name
            ("AutoModelForSequenceClassification"). Default: the one that the configuration's `architectures` names.
        model_kwargs: For the class's `from_pretrained` or `from_config`. "dtype" is torch's default type unless it is given, that
            is float32, or what the Trainer's precision makes of it.
        learning_rate: The highest, after the warm-up.
        weight_decay: Of all parameters but biases and norms, as the Transformers Trainer chooses them. Default 0.
        optim: An optimizer by transformers' name ("adamw_torch", "adafactor", "sgd", ...).
        optim_args: Its further arguments, as TrainingArguments takes them ("momentum=0.9,nesterov=true"), or a dict of them.
        adam_beta1: Of the optimizers that have it. Default 0.9.
        adam_beta2: Likewise. Default 0.999.
        adam_epsilon: Likewise. Default 1e-8.
        lr_scheduler_type: A schedule by transformers' name ("linear", "cosine", "constant_with_warmup", ...), over the optimizer
            steps of the whole training. Those that watch a metric step at the end of an epoch, and watch "val/loss".
        lr_scheduler_kwargs: Its further arguments.
        warmup_steps: Optimizer steps of warm-up, or below 1 a part of the training, as in transformers.
        warmup_ratio: The warm-up as a part of the training; instead of warmup_steps.
        label_smoothing_factor: How much of the target is spread over all classes, in training; evaluations do without. Default 0.
        gradient_checkpointing: Recompute activations in the backward; a dict gives torch.utils.checkpoint's arguments.
        peft_config: A PeftConfig, or a dict of its fields: only these adapters are trained.
        shifts_labels: The model's loss compares position i with label i + 1, so that a row's first label does not count. Default:
            True where the model's forward uses transformers' loss function for causal language models.

    Raises:
        TypeError: `model` is of another kind.
        ValueError: For an unknown name, with the nearest one, or for arguments that contradict each other.
        ImportError: `peft_config` is given, and peft is not installed.
    """

    def __init__(
        self,
        model: PreTrainedModel | PreTrainedConfig | str | Path,
        *,
        auto_class: str | type | None = None,
        model_kwargs: Mapping[str, Any] | None = None,
        learning_rate: float = 5e-5,
        weight_decay: float = 0.0,
        optim: str = "adamw_torch",
        optim_args: str | Mapping[str, Any] | None = None,
        adam_beta1: float = 0.9,
        adam_beta2: float = 0.999,
        adam_epsilon: float = 1e-8,
        lr_scheduler_type: str = "linear",
        lr_scheduler_kwargs: Mapping[str, Any] | None = None,
        warmup_steps: int | float = 0,
        warmup_ratio: float = 0.0,
        label_smoothing_factor: float = 0.0,
        gradient_checkpointing: bool | Mapping[str, Any] = False,
        peft_config: Any = None,
        shifts_labels: bool | None = None,
    ) -> None:
        super().__init__()
        # Names as plain text: TrainingArguments' enumerations are taken too.
        optim, lr_scheduler_type = (getattr(name, "value", name) for name in (optim, lr_scheduler_type))
        _one_of("optim", optim, _OPTIMIZERS)
        _one_of("lr_scheduler_type", lr_scheduler_type, _SCHEDULES)
        if warmup_steps and warmup_ratio:
            raise ValueError(f"warmup_steps={warmup_steps} and warmup_ratio={warmup_ratio}: give one of them")
        if warmup_steps < 0 or not 0.0 <= warmup_ratio <= 1.0:
            raise ValueError(
                f"warmup_steps={warmup_steps}, warmup_ratio={warmup_ratio}: give 0 or more steps, or a ratio in [0, 1]"
            )
        if not 0.0 <= label_smoothing_factor < 1.0:
            raise ValueError(f"label_smoothing_factor={label_smoothing_factor}: give a number in [0, 1)")
        if peft_config is not None and importlib.util.find_spec("peft") is None:
            raise ImportError("peft_config needs peft, which is not installed: pip install 'acclight[peft]'")
        auto_class = auto_class.__name__ if isinstance(auto_class, type) else auto_class
        if auto_class is not None:
            _class_of_transformers(auto_class)
        if isinstance(model, nn.Module) and (auto_class is not None or model_kwargs):
            raise ValueError("auto_class and model_kwargs make a model, but a model object was given: leave them out")
        if not isinstance(model, (nn.Module, PreTrainedConfig, str, Path)):
            raise TypeError(
                f"model is a {type(model).__name__}; give a transformers model, a configuration, a name or a folder"
            )
        self.save_hyperparameters(ignore=["model", "auto_class", "peft_config"])
        self.hparams.update(optim=optim, lr_scheduler_type=lr_scheduler_type, auto_class=auto_class)
        self.hparams["peft_config"] = _plain_adapters(peft_config)
        if isinstance(model, (str, Path)):
            self.hparams["model"] = str(model)
        self.mean_loss = MeanLoss()
        self.perplexity = Perplexity()
        self.model: Any = model if isinstance(model, nn.Module) else None
        self._source = None if isinstance(model, nn.Module) else model
        self._complete = False

    # -- the model ----------------------------------------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Makes the model, if it is not there, and adds what was asked for; once, also for several Trainers."""
        if self._complete:
            return
        if self.model is None:
            self.model = self._create()
        if getattr(transformers, type(self.model).__name__, None) is type(self.model):
            # With the configuration, which every checkpoint holds, enough to make the model again.
            self.hparams["auto_class"] = type(self.model).__name__
        checkpointing = self.hparams["gradient_checkpointing"]
        if checkpointing:
            # Newer versions of transformers warn of the second name, and older ones have no other.
            model = self.model
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable(dict(checkpointing) if isinstance(checkpointing, Mapping) else None)
        if self.hparams["peft_config"] is not None:
            import peft

            self.model = peft.get_peft_model(self.model, peft.get_peft_config(dict(self.hparams["peft_config"])))
        if "ForCTC" in type(self._bare).__name__ and self._bare.config.ctc_loss_reduction != "mean":
            warn(
                "ctc_loss_reduction='sum': batches are averaged as if each loss were a mean; give the configuration 'mean'"
            )
        _ = self._shifts, self._takes_use_cache  # found out now: compiled code could not
        self._complete = True

    def _create(self) -> PreTrainedModel:
        kwargs = {"dtype": torch.get_default_dtype(), **(self.hparams["model_kwargs"] or {})}
        remote = {name: kwargs[name] for name in ("trust_remote_code", "revision", "token") if name in kwargs}
        if isinstance(self._source, PreTrainedConfig):
            config = copy.deepcopy(self._source)  # it remembers the type of the weights
        else:
            config = AutoConfig.from_pretrained(str(self._source), **remote)
        name = self.hparams["auto_class"] or next(iter(config.architectures or ()), None)
        if name is None:
            raise ValueError(
                f"a {type(config).__name__} without `architectures` does not say which model to make of it: give one, as in "
                "auto_class='AutoModelForCausalLM'"
            )
        made_by = _class_of_transformers(name)
        if not isinstance(self._source, PreTrainedConfig):
            return cast(PreTrainedModel, made_by.from_pretrained(str(self._source), **kwargs))
        make = getattr(made_by, "from_config", None) or made_by._from_config  # the former on the Auto classes alone
        return cast(PreTrainedModel, make(config, **kwargs))

    @property
    def _bare(self) -> Any:
        """The transformers model within the adapters, if there are any."""
        return self.model.get_base_model() if self.hparams["peft_config"] is not None else self.model

    @cached_property
    def _shifts(self) -> bool:
        given: bool | None = self.hparams["shifts_labels"]
        if given is not None:
            return given
        # Encoder-decoders shift the decoder's input instead; some decoders taken from one have a loss of their own, and do not.
        model = self._bare
        own_loss = not _uses_loss_function(type(model)) or getattr(model.config, "is_encoder_decoder", False)
        return not own_loss and model.loss_function is ForCausalLMLoss

    @cached_property
    def _takes_use_cache(self) -> bool:
        return "use_cache" in inspect.signature(self._bare.forward).parameters

    @classmethod
    def load_from_checkpoint(
        cls, checkpoint_path: str | Path, map_location: Any = None, *, strict: bool = True, **overrides: Any
    ) -> Any:
        """A module with the hyper-parameters and weights of a checkpoint; nothing is read from where the model came from.

        Args:
            checkpoint_path: A checkpoint folder.
            map_location: The device to put it on. Default: the CPU.
            strict: Names of the checkpoint and of the module must be the same. Default True.
            overrides: Arguments of `__init__` that replace or complete the saved ones.
        """
        if "model" not in overrides:
            document = checkpoint.read_trainer(checkpoint_path)
            config, name = document.get("hf_config"), document.get("hparams", {}).get("auto_class")
            if config is not None and name is not None:
                saved = type(AutoConfig.for_model(config["model_type"])).from_dict(config)
                # The arguments for a pretrained model are in its configuration by now.
                overrides = {"model": saved, "model_kwargs": None, **overrides}
        elif isinstance(overrides["model"], nn.Module):
            overrides = {"auto_class": None, "model_kwargs": None, **overrides}
        return super().load_from_checkpoint(checkpoint_path, map_location, strict=strict, **overrides)

    # -- the steps ----------------------------------------------------------------------------------------------------------

    def forward(self, **inputs: Any) -> Any:
        """The model's own output, without a cache for generation."""
        if self._takes_use_cache:
            inputs.setdefault("use_cache", False)
        return self.model(**inputs)

    def training_step(self, batch: Mapping[str, Any], batch_idx: int) -> Tensor:
        smoothing = self.hparams["label_smoothing_factor"]
        loss = self._smoothed_loss(batch, smoothing) if smoothing else self._loss(batch)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Mapping[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: Mapping[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate(batch, "test")

    def predict_step(self, batch: Mapping[str, Any], batch_idx: int, dataloader_idx: int = 0) -> Any:
        """The logits; of a model without that output, all its outputs but the loss, as a dict."""
        inputs = _inputs(batch)
        if not getattr(self._bare.config, "is_encoder_decoder", False):  # which makes the decoder's input of them
            inputs = {name: value for name, value in inputs.items() if name not in _label_names(self._bare)}
        outputs = self(**inputs)
        if not isinstance(outputs, Mapping):
            return outputs
        logits = outputs.get("logits")
        return {name: value for name, value in outputs.items() if name != "loss"} if logits is None else logits

    def count_items(self, batch: Mapping[str, Any]) -> Tensor:
        """How many items the model's loss is the mean of: labels that count, or else samples. Override it for another loss."""
        inputs = _inputs(batch)
        labels = inputs.get("shift_labels")
        if isinstance(labels, Tensor):
            return (labels != IGNORED).sum()
        labels = inputs.get("labels")
        config = self._bare.config
        if not isinstance(labels, Tensor):
            start = inputs.get("start_positions")
            if isinstance(start, Tensor):
                # Answers outside of the text are ignored; start and end of one are outside together.
                length: int = next(v.shape[1] for k, v in inputs.items() if k in ("input_ids", "inputs_embeds"))
                return (start < length).sum()
            return torch.tensor(_samples(inputs))
        name = type(self._bare).__name__
        if "ForCTC" in name:
            return torch.tensor(len(labels))
        if labels.is_floating_point() or getattr(config, "problem_type", None) == "regression":
            return torch.tensor(labels.numel())  # a mean over all elements
        if "ForSemanticSegmentation" in name:
            return (labels != getattr(config, "semantic_loss_ignore_index", 255)).sum()
        return ((labels[..., 1:] if self._shifts else labels) != IGNORED).sum()

    def _loss(self, batch: Mapping[str, Any]) -> Tensor:
        inputs = _inputs(batch)
        outputs = self(**inputs)
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs[0]
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            wanted = _label_names(self._bare)
            fix = (
                f"a batch needs {' and '.join(repr(name) for name in wanted)}"
                if wanted
                else "its forward takes no labels: use a class with a head, such as 'AutoModelForCausalLM'"
            )
            raise ValueError(
                f"{type(self._bare).__name__} returned no loss for a batch with {', '.join(sorted(inputs))}: {fix}"
            )
        return self._or_zero(loss, batch)

    def _smoothed_loss(self, batch: Mapping[str, Any], factor: float) -> Tensor:
        """What transformers' LabelSmoother computes: cross-entropy with part of the target spread over all classes."""
        inputs = _inputs(batch)
        labels, shifted = inputs.get("labels"), inputs.pop("shift_labels", None)
        if not isinstance(labels, Tensor) or labels.is_floating_point():
            raise ValueError(f"label_smoothing_factor={factor} needs `labels` that are class numbers")
        if not getattr(self._bare.config, "is_encoder_decoder", False):
            del inputs["labels"]  # a second loss would be for nothing
        logits = self(**inputs)["logits"]
        if isinstance(shifted, Tensor):
            labels = shifted
        elif self._shifts:
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        flat, targets = logits.reshape(-1, logits.shape[-1]).float(), labels.reshape(-1)
        total = cross_entropy(flat, targets, ignore_index=IGNORED, label_smoothing=factor, reduction="sum")
        return total / (targets != IGNORED).sum().clamp(min=1)

    def _or_zero(self, loss: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """Zero for a batch without items, whose mean is not a number, and would become the mean of the epoch."""
        return torch.where(self.count_items(batch).to(loss.device) > 0, loss, torch.zeros_like(loss))

    def _evaluate(self, batch: Mapping[str, Any], stage: str) -> None:
        loss = self._loss(batch)
        count = self.count_items(batch).to(loss.device)
        self.mean_loss.update(loss, count)
        self.log(f"{stage}/loss", self.mean_loss, prog_bar=True)
        if type(self._bare).__name__ in _LANGUAGE_MODELS or self._shifts:
            self.perplexity.update(loss, count)
            self.log(f"{stage}/perplexity", self.perplexity)

    # -- optimizer and schedule ---------------------------------------------------------------------------------------------

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = self._optimizer()
        name = self.hparams["lr_scheduler_type"]
        steps = self.trainer.estimated_stepping_batches
        warmup = self._warmup_steps(steps)
        if math.isinf(steps) and name not in _ENDLESS:
            raise ValueError(
                f"lr_scheduler_type={name!r} needs the number of optimizer steps, which is unknown here: give the Trainer "
                f"max_steps, or use one of {', '.join(_ENDLESS)}"
            )
        schedule = get_scheduler(
            name,
            optimizer,
            num_warmup_steps=warmup,
            num_training_steps=None if math.isinf(steps) else int(steps),
            scheduler_specific_kwargs=dict(self.hparams["lr_scheduler_kwargs"] or {}),
        )
        config: dict[str, Any] = {"scheduler": schedule, "interval": "step"}
        if name in _WATCHING:
            config |= {"interval": "epoch", "monitor": "val/loss", "reduce_on_plateau": True}
        return {"optimizer": optimizer, "lr_scheduler": config}

    def _warmup_steps(self, steps: int | float) -> int:
        given = self.hparams["warmup_steps"]
        if given >= 1:
            return int(given)
        ratio = given or self.hparams["warmup_ratio"]
        if ratio and math.isinf(steps):
            raise ValueError(
                f"a warm-up over {ratio} of the training needs the number of optimizer steps: give the Trainer max_steps, or "
                "warmup_steps=1 or more"
            )
        return math.ceil(ratio * steps) if ratio else 0

    def _optimizer(self) -> torch.optim.Optimizer:
        # Slow to import, and only training needs it.
        from transformers import Trainer

        given = self.hparams
        decayed = set(Trainer.get_decay_parameter_names(cast(Any, None), self.model))  # uses nothing of a Trainer
        trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        groups = [
            {"params": [p for name, p in trained if (name in decayed) is decays], "weight_decay": decay}
            for decays, decay in ((True, given["weight_decay"]), (False, 0.0))
        ]
        names = ("learning_rate", "weight_decay", "optim", "adam_beta1", "adam_beta2", "adam_epsilon")
        text = given["optim_args"]
        if isinstance(text, Mapping):
            text = ",".join(f"{name}={value}" for name, value in text.items())
        # TrainingArguments itself would set up devices and process groups.
        arguments = SimpleNamespace(**{name: given[name] for name in names}, optim_args=text)
        factory, kwargs = Trainer.get_optimizer_cls_and_kwargs(cast(Any, arguments), self.model)
        if given["optim"] == "adafactor":
            self._check_adafactor()
        return cast(torch.optim.Optimizer, factory([group for group in groups if group["params"]], **kwargs))

    def _check_adafactor(self) -> None:
        kind = self.trainer.strategy.kind
        if kind == "fsdp2":
            raise ValueError(
                "optim='adafactor' cannot step the shards of 'fsdp2': transformers' Adafactor mixes them with plain tensors; use "
                "'adamw_torch', or the strategy 'ddp'"
            )
        if kind == "deepspeed":
            warn(
                "optim='adafactor': ZeRO hands it flat shards, which it cannot factor, so that its steps differ from others'"
            )


def _one_of(argument: str, name: Any, names: Collection[str]) -> None:
    if name not in names:
        # "adamw" is "adamw_torch" rather than "grokadamw".
        near = [one for one in names if one.startswith(f"{name}_")] or difflib.get_close_matches(str(name), names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"{argument}={name!r} is unknown{hint} There are: {', '.join(names)}")


def _class_of_transformers(name: str) -> Any:
    found = getattr(transformers, name, None)
    if not hasattr(found, "from_pretrained"):
        near = difflib.get_close_matches(name, [one for one in dir(transformers) if one.startswith("AutoModel")], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"auto_class={name!r} is no model class of transformers{hint}")
    return found


def _plain_adapters(config: Any) -> dict[str, Any] | None:
    """A PeftConfig as plain values, which a checkpoint can hold."""
    if config is None:
        return None
    fields = config if isinstance(config, Mapping) else config.to_dict()
    plain: dict[str, Any] = json.loads(
        json.dumps(dict(fields), default=lambda v: sorted(v) if isinstance(v, set) else str(v))
    )
    return plain


def _label_names(model: nn.Module) -> list[str]:
    """The arguments of the model's forward that are labels."""
    names: list[str] = cast(Any, find_labels)(type(model))
    return names


def _uses_loss_function(model: type) -> bool:
    """Whether the forward of this class calls transformers' `self.loss_function`, and not a loss of its own."""
    for one in model.__mro__:
        if "forward" in vars(one):
            names = inspect.unwrap(vars(one)["forward"]).__code__.co_names
            if "loss_function" in names or "super" not in names:
                return "loss_function" in names
    return False


def _inputs(batch: Any) -> dict[str, Any]:
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"a batch is a {type(batch).__name__}; TransformersModule needs a mapping of the model's arguments, as transformers' "
            "data collators make it"
        )
    return dict(batch)


def _samples(inputs: Mapping[str, Any]) -> int:
    labels = inputs.get("labels")
    if labels is not None:
        return len(labels)
    return next((len(value) for value in inputs.values() if isinstance(value, Tensor) and value.dim()), 1)
