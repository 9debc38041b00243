"""MetricStore: takes what `self.log` is given, wherever it is called, and reads and reduces it only when it is shown."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from acclight.logging.exchange import Flags, Key, Names, Ranks, Reduced
from acclight.logging.meter import REDUCTIONS, Meter
from acclight.logging.places import Place, logging_places, refusing
from acclight.logging.reducer import Reducer
from acclight.logging.samples import count_samples
from acclight.logging.shown import Shown
from acclight.logging.torchmetric import compute, exact_over_ranks, is_metric, path_of
from acclight.messages import warn

_OUTSIDE = refusing("")
_FUNCTIONS: dict[Any, str] = {torch.mean: "mean", torch.sum: "sum", torch.min: "min", torch.max: "max", "avg": "mean"}


class MetricStore:
    """All meters of a Trainer, by the hook in which something was logged.

    Args:
        ranks: The way to the other ranks.
        device: Where tensors are.
    """

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._ranks = ranks
        self._reducer = Reducer(ranks)
        self._device = device
        self._on_cpu = device.type == "cpu"
        self._module: nn.Module | None = None
        self._places = logging_places()
        #: Of each stage's meters; made anew where some were dropped.
        self._names: dict[str, Names] = {}
        #: Evaluation batches shown so far, by stage and loader: the x axis of single batches' values.
        self._batches_shown: dict[str, int] = {}
        self._window = 0
        self._reset()

    def _reset(self) -> None:
        self._here: Place = _OUTSIDE
        self._warned: set[str] = set()
        #: Throw-away forwards of ranks without data: nothing is kept.
        self.muted = False
        #: The optimizer step that runs is one whose values are shown, or may be.
        self._step_kept = False
        #: The names that steps and validations of this run have shown, the same on every rank; None before the first step has.
        self.step_names: set[str] | None = None
        self._validated_names: set[str] = set()
        #: Values of torchmetrics objects that were computed when an evaluation loader had ended.
        self._computed: dict[Key, float] = {}
        #: What was reduced of an epoch before its last hooks, and the torchmetrics objects that begin anew after them.
        self._early: list[tuple[Reduced, float]] = []
        self._counted: list[Any] = []
        #: Batches of the evaluation that runs, by loader, as far as this rank knows.
        self._lengths: dict[str, int] = {}
        self._loader: int | None = None
        self._leave_loader()

    # -- where we are -----------------------------------------------------------------------------------------------------

    def begin_run(self, module: nn.Module) -> None:
        """A fit, validation, test or prediction run begins; values of a training epoch that is not over are kept."""
        for place in self._places.values():
            goes_on = place.stage == "train" and module is self._module
            place.meters = {key: meter for key, meter in place.meters.items() if goes_on and meter.used}
        self._names = {}
        self._module = module
        self._reducer.forget_keys()
        self._reset()

    def forget_training(self) -> None:
        """Drops the values of a training epoch that is not over, before another one is resumed."""
        for place in self._places.values():
            if place.stage == "train":
                place.meters.clear()
        self._names = {}

    def within(self, hook: str, call: Callable[..., Any], *, too_late: bool = False) -> Callable[..., Any]:
        """The hook's call, during which `self.log` knows where it is.

        Args:
            hook: The hook's name.
            call: One of the functions that somebody has written for it.
            too_late: It runs when the hook's values are shown already.
        """
        place = self._places.get(hook) or refusing(hook)
        if too_late:
            place = refusing(hook, "callbacks with runs_last come when its values are shown: log in another callback")

        def called(*args: Any) -> Any:
            before, self._here = self._here, place
            try:
                return call(*args)
            finally:
                self._here = before

        return called

    def begin_window(self, *, kept: bool) -> None:
        """The micro-batches of one optimizer step begin.

        Args:
            kept: `show_step` follows, or may follow; else single values need not be kept.
        """
        self._window += 1
        self._step_kept = kept
        self._here = self._places["training_step"]

    def end_window(self) -> None:
        """The optimizer step and its hooks are over."""
        self._here = _OUTSIDE
        self._leave_batch()

    def begin_batch(self, batch: Any, samples: int | None, number: int = 0) -> None:
        """A batch begins.

        Args:
            batch: Its number of samples is guessed, where it is needed, if the loader does not say.
            samples: What the loader says.
            number: In an evaluation, its place in the dataset's order, over all ranks.
        """
        self._batch = batch
        self._samples = None if samples is None else float(samples)
        self._number = number

    def _leave_batch(self) -> None:
        # Outside of batches every value counts the same.
        self.begin_batch(None, 1)

    @contextmanager
    def evaluation(self, stage: str) -> Iterator[None]:
        """An evaluation over all its loaders.

        Args:
            stage: "validation" or "test".
        """
        for meter in self._meters(stage):
            meter.begin_epoch()
        self._lengths = {}
        self._here = self._places[f"{stage}_step"]
        try:
            yield
        finally:
            self._here, self.muted, self._computed = _OUTSIDE, False, {}
            self._early, self._counted = [], []
            self._leave_loader()

    def begin_loader(self, name: str, position: int) -> None:
        """One of the evaluation's loaders begins; its name, if it has one, becomes part of the keys."""
        self._suffix = f"/{name}" if name else ""
        self._loader = position

    def _leave_loader(self) -> None:
        self._suffix = ""
        self._loader = None
        self._leave_batch()

    def begin_evaluation_batch(self, batch: Any, samples: int | None, number: int) -> None:
        """A batch of an evaluation begins; see `begin_batch`."""
        self._window += 1
        self.begin_batch(batch, samples, number)
        self._lengths[self._suffix] = number + 1

    def end_loader(self, stage: str, *, several: bool) -> None:
        """The loader's last batch is done.

        Args:
            stage: "validation" or "test".
            several: Other loaders come before or after it. Then this is a collective: torchmetrics objects are computed and
                begin anew, so that one object gives each loader its own value.
        """
        suffix = self._suffix
        self._leave_loader()
        if several and suffix and "torchmetrics" in sys.modules:
            own = [key for key, _, meter in self._entries(stage) if meter.metric is not None and key.suffix == suffix]
            self._computed |= self._compute(self._reducer.keys(own))
            self._begin_counted_anew()

    # -- self.log ---------------------------------------------------------------------------------------------------------

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool,
        logger: bool,
        on_step: bool | None,
        on_epoch: bool | None,
        reduce_fx: Any,
        batch_size: int | None,
        add_dataloader_idx: bool,
    ) -> None:
        """See TrainModule.log. Nothing is read or reduced here."""
        if self.muted:
            return
        here = self._here
        if here.refusal is not None:
            raise RuntimeError(f"self.log({name!r}) is not possible in {here.hook or _calling_hook()}: {here.refusal}")
        suffix = self._suffix if add_dataloader_idx else ""
        flags = (prog_bar, logger, on_step, on_epoch, reduce_fx)
        meter = here.meters.get(name + suffix if suffix else name)
        if meter is None:
            meter = self._new_meter(here, name, suffix, flags)
        elif meter.flags != flags:
            raise _changed(name, here.hook, meter.flags, flags)
        if not meter.used:
            meter.used, meter.loader = True, self._loader
        elif meter.loader != self._loader:
            meter.loader = None
        if isinstance(value, Tensor):
            if value.numel() != 1 or value.is_complex():
                raise _no_number(name, value)
        elif not isinstance(value, (int, float)):
            value = self._metric_value(meter, value) if is_metric(value) else _number(name, value)
        in_step = meter.on_step and (self._step_kept or meter.keeps_series or meter.prog_bar)
        in_epoch = meter.on_epoch and meter.metric is None
        if value is None or not (in_step or in_epoch):
            return
        if isinstance(value, Tensor):
            value = self._own(value)
        if meter.reduce_fx != "mean":
            weight = 1.0
        elif batch_size is not None:
            weight = _weight(name, batch_size)
        else:
            weight = self._guess() if self._samples is None else self._samples
        if in_step:
            meter.add_step(value, weight, self._window, self._number)
        if in_epoch:
            meter.epoch.add(value, weight)

    def _new_meter(self, here: Place, name: str, suffix: str, flags: tuple[Any, ...]) -> Meter:
        prog_bar, logger, on_step, on_epoch, reduce_fx = flags
        if not isinstance(name, str):
            raise TypeError(f"self.log({name!r}, ...): the name must be a string")
        fx = reduce_fx if reduce_fx in REDUCTIONS else _FUNCTIONS.get(reduce_fx)
        if fx is None:
            raise ValueError(
                f"self.log({name!r}, reduce_fx={reduce_fx!r}): use one of {', '.join(REDUCTIONS)}, or log a torchmetrics object"
            )
        step = here.step_by_default if on_step is None else on_step
        epoch = not here.step_by_default if on_epoch is None else on_epoch
        if step and not here.by_batch:
            raise ValueError(
                f"self.log({name!r}, on_step=True) in {here.hook}, which belongs to no step: leave on_step out"
            )
        if not step and not epoch:
            raise ValueError(
                f"self.log({name!r}, on_step={on_step}, on_epoch={on_epoch}) in {here.hook} would never be shown: set one True"
            )
        meter = Meter(
            name,
            suffix,
            flags,
            on_step=step,
            on_epoch=epoch,
            prog_bar=prog_bar,
            logger=logger,
            reduce_fx=fx,
            keeps_series=step and here.stage != "train",
        )
        self._names_of(here.stage).add(_key(here, meter))
        here.meters[name + suffix] = meter
        return meter

    def _names_of(self, stage: str) -> Names:
        if stage not in self._names:
            self._names[stage] = names = Names()
            for key, _, _ in self._entries(stage):
                names.add(key)
        return self._names[stage]

    def _own(self, value: Tensor) -> Tensor:
        """A copy without a graph: the user may change the tensor in place, or it may be a view of a big one."""
        if type(value) is not Tensor and hasattr(value, "full_tensor"):
            # A DTensor; like every operation on it this may be a collective.
            value = value.full_tensor()
        value = value.detach()
        if value.dim():
            value = value.reshape(())
        if value.is_cpu and self._on_cpu:
            return value.clone()
        return value.to(self._device, copy=True, non_blocking=True)

    def _metric_value(self, meter: Meter, metric: Any) -> Any:
        """Notes a torchmetrics object; its value for this batch, or None where that is not shown or not there."""
        if meter.metric is not metric:
            meter.metric = metric
            meter.path = "" if self._module is None else path_of(metric, self._module) or ""
        if not meter.on_step:
            return None
        value, updates = metric._forward_cache, metric._update_count
        if value is not None and value is meter.batch_value and updates != meter.updates:
            # Updated since: it is an earlier batch's value.
            value = None
        else:
            meter.batch_value, meter.updates = value, updates
        if value is None:
            remedy = (
                "pass on_step=False" if meter.on_epoch else "pass on_step=False, on_epoch=True for the epoch's value"
            )
            self._warn_once(
                f"self.log({meter.name!r}), which shows values of single steps (on_step=True), got a {type(metric).__name__} "
                f"without one for the batch, as it was updated with update(), and shows none: call it, metric(...), or {remedy}"
            )
        elif not isinstance(value, Tensor) or value.numel() != 1:
            raise ValueError(
                f"self.log({meter.name!r}) got a {type(metric).__name__} whose value is not one number: log single numbers of it"
            )
        return value

    def _guess(self) -> float:
        samples, doubt = count_samples(self._batch)
        if doubt is not None:
            # Once, whatever the numbers are.
            self._warn_once(f"{doubt}: pass batch_size= to self.log", about="batch_size")
        self._samples = samples
        return samples

    def _warn_once(self, text: str, about: str = "") -> None:
        if (about or text) not in self._warned:
            self._warned.add(about or text)
            warn(text)

    # -- reading ------------------------------------------------------------------------------------------------------------

    def show_step(self) -> Shown:
        """The values of the optimizer step that has just ended, over its micro-batches and all ranks. A collective."""
        own = {
            key: (flags, meter.step)
            for key, flags, meter in self._entries("train")
            if meter.on_step and meter.window == self._window
        }
        shown = Shown()
        for entry in self._reducer.values("step", own):
            if entry.value is not None:
                shown.put(entry, entry.value, "step")
        self.step_names = (self.step_names or set()) | set(shown.callback)
        return shown

    def show_epoch_so_far(self, stage: str = "train") -> Shown:
        """The values of the epoch, or of the evaluation, before its last hooks, which may log more. A collective."""
        self._early = self._reduce_epoch(stage, {})
        return self._shown(stage, self._early)

    def show_epoch(self, stage: str = "train", *, rehearsal: bool = False, goes_on: bool = False) -> Shown:
        """The values of the epoch, or of the evaluation, over all ranks; afterwards they begin anew. A collective.

        Args:
            stage: "train", "validation" or "test".
            rehearsal: The batches of this evaluation are not counted.
            goes_on: The epoch was cut short, and a later fit trains the rest of it: what its batches logged does not begin
                anew.
        """
        known = {entry.key: value for entry, value in self._early}
        reduced = [*self._early, *self._reduce_epoch(stage, known)]
        shown = self._shown(stage, reduced)
        meters = {key: meter for key, _, meter in self._entries(stage) if meter.used}
        entries = [entry for entry, _ in reduced]
        if stage != "train" and any(entry.key.on_step for entry in entries):
            self._show_series(stage, shown, meters, entries, rehearsal)
        if goes_on:
            self._counted = []
        self._begin_counted_anew()
        for key, meter in meters.items():
            if goes_on and key in known:
                continue
            if meter.metric is not None:
                _begin_anew(meter.metric)
            meter.begin_epoch()
        self._early = []
        return shown

    def _reduce_epoch(self, stage: str, known: dict[Key, float]) -> list[tuple[Reduced, float]]:
        """What was logged, on any rank, but for what is known already."""
        own = {
            key: (flags, meter.epoch)
            for key, flags, meter in self._entries(stage)
            if meter.used and key not in known and (key.on_epoch or stage != "train")
        }
        entries = [entry for entry in self._reducer.values(stage, own) if entry.value is not None]
        metrics = {e.key: e.everywhere for e in entries if e.key.metric is not None and e.key.on_epoch}
        computed = self._computed | self._compute(
            {k: all_ranks for k, all_ranks in metrics.items() if k not in self._computed}
        )
        return [(entry, computed.get(entry.key, entry.value)) for entry in entries if entry.value is not None]

    def _shown(self, stage: str, reduced: list[tuple[Reduced, float]]) -> Shown:
        shown = Shown()
        for entry, value in reduced:
            if entry.key.on_epoch:
                shown.put(entry, value, "epoch")
        if stage == "validation":
            self._validated_names |= set(shown.callback)
        return shown

    def _show_series(
        self, stage: str, shown: Shown, meters: dict[Key, Meter], entries: list[Reduced], rehearsal: bool
    ) -> None:
        own = {key: meter.series for key, meter in meters.items() if key.on_step}
        values, lengths = self._reducer.series(own, self._lengths)
        rows: dict[int, dict[str, float]] = {}
        for entry in entries:
            before = self._batches_shown.get(stage + entry.key.suffix, 0)
            if entry.flags.logger:
                for number, value in values.get(entry.key, {}).items():
                    rows.setdefault(before + number, {})[entry.key.shown_as("step")] = value
        shown.series = sorted(rows.items())
        if not rehearsal:
            for suffix, length in lengths.items():
                self._batches_shown[stage + suffix] = self._batches_shown.get(stage + suffix, 0) + length

    def _compute(self, keys: dict[Key, bool]) -> dict[Key, float]:
        """The values of torchmetrics objects over all ranks, for the same keys on each; the objects are due to begin anew.

        Args:
            keys: And whether every rank has logged them: one that had no data has not.
        """
        for key, everywhere in keys.items():
            if not everywhere and not key.metric:
                raise ValueError(
                    f"self.log({key.name!r}) got a torchmetrics object on some ranks only: make it an attribute of the module, "
                    "so that all ranks find it"
                )
        own = {key: meter.metric for stage in ("train", "validation", "test") for key, _, meter in self._entries(stage)}
        module: Any = self._module
        objects = {key: own[key] if key in own else module.get_submodule(key.metric) for key in keys}
        with exact_over_ranks(list(objects.values()), self._ranks.gather_objects):
            values = {key: compute(key.name, metric) for key, metric in objects.items()}
        self._counted += objects.values()
        return values

    def _begin_counted_anew(self) -> None:
        for metric in self._counted:
            _begin_anew(metric)
        self._counted = []

    def live(self) -> dict[str, float]:
        """This process's newest values of the keys in the progress display. Reading them waits for the device."""
        shown = [(key, meter) for key, _, meter in self._entries("train") if meter.prog_bar and meter.on_step]
        return {key.shown_as("step"): float(m.step.newest) for key, m in shown if m.step.newest is not None}

    def pending_names(self) -> list[str]:
        """The names of what training logs on its steps, and of what it has logged for the epoch that runs."""
        names: list[str] = []
        for key, _, meter in self._entries("train"):
            names += [key.plain_name, key.shown_as("step")] if meter.on_step else []
            names += [key.plain_name, key.shown_as("epoch")] if meter.on_epoch and meter.used else []
        return list(dict.fromkeys(names))

    def training_names(self) -> set[str]:
        """The names under which training logs something; of its steps alone only what validation does not log too."""
        keys = [key for key, _, _ in self._entries("train") if key.on_epoch]
        epochs = {name for key in keys for name in (key.plain_name, key.shown_as("epoch"))}
        return epochs | (self.names_of_steps() - self._validated_names)

    def validation_names(self) -> set[str]:
        """The names that the validations of this run have shown, the same on every rank."""
        return self._validated_names

    def names_of_steps(self) -> set[str]:
        """The names under which training logs something on its steps, here or, once it was shown, on another rank."""
        keys = [key for key, _, _ in self._entries("train") if key.on_step]
        return {name for key in keys for name in (key.plain_name, key.shown_as("step"))} | (self.step_names or set())

    def _meters(self, stage: str) -> list[Meter]:
        return [m for place in self._places.values() if place.stage == stage for m in place.meters.values()]

    def _entries(self, stage: str) -> Iterator[tuple[Key, Flags, Meter]]:
        for place in self._places.values():
            if place.stage == stage:
                for meter in place.meters.values():
                    yield _key(place, meter), Flags(meter.prog_bar, meter.logger, meter.loader), meter


def _key(place: Place, meter: Meter) -> Key:
    path = None if meter.metric is None else meter.path
    return Key(place.hook, meter.name, meter.suffix, meter.on_step, meter.on_epoch, meter.reduce_fx, path)


def _begin_anew(metric: Any) -> None:
    # Outside of inference mode, so that training can go on with the same object.
    with torch.inference_mode(False):
        metric.reset()


def _no_number(name: str, value: Tensor) -> Exception:
    if value.numel() != 1:
        return ValueError(
            f"self.log({name!r}) got a tensor of shape {tuple(value.shape)}: log one number, such as its mean()"
        )
    return TypeError(f"self.log({name!r}) got a complex tensor: log its abs() or its parts")


def _number(name: str, value: Any) -> float:
    if (
        type(value).__module__ == "numpy"
        and getattr(value, "size", 0) == 1
        and getattr(value.dtype, "kind", "") in "biuf"
    ):
        return float(value.item())
    raise TypeError(
        f"self.log({name!r}) got a {type(value).__name__}: log a number, a tensor of one, or a torchmetrics object"
    )


def _weight(name: str, batch_size: Any) -> float:
    weight = float(batch_size)
    if not weight >= 0.0:
        raise ValueError(f"self.log({name!r}, batch_size={batch_size}): give a number of samples, 0 or more")
    return weight


def _changed(name: str, hook: str, before: Iterable[Any], now: Iterable[Any]) -> ValueError:
    arguments = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx")
    changes = [f"{a}={x!r} and then {a}={y!r}" for a, x, y in zip(arguments, before, now, strict=True) if x != y]
    return ValueError(
        f"self.log({name!r}) in {hook} was called with {', '.join(changes)}: use the same arguments each time"
    )


def _calling_hook() -> str:
    """The nearest caller that looks like a hook, for an error; where nothing can be logged, nobody keeps count."""
    frame = sys._getframe(2)
    names = ("setup", "teardown", "prepare_data", "state_dict", "load_state_dict")
    while frame.f_back is not None:
        frame = frame.f_back
        name = frame.f_code.co_name
        if name in names or name.startswith(("on_", "configure_")) or name.endswith("_dataloader"):
            return name
    return "code outside of the training and evaluation steps"
