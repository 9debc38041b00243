"""Hyper-parameters: the arguments of `__init__`, kept for loggers and checkpoints, and given back to it on loading."""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import FrameType
from typing import Any


class Hyperparameters(dict[str, Any]):
    """A dict whose entries can be read and set as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"there is no hyper-parameter {name!r}; there are {sorted(self)}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


def init_arguments(owner: object, frame: FrameType | None) -> dict[str, Any]:
    """The arguments of every `__init__` of `owner` that is running, from the frame outwards; the outermost class wins.

    Args:
        owner: The object that is being made.
        frame: Where to begin: the caller of `save_hyperparameters`.

    Raises:
        RuntimeError: None of its `__init__` is running.
    """
    if is_dataclass(owner) and not isinstance(owner, type):
        return {one.name: getattr(owner, one.name) for one in fields(owner) if one.init}
    arguments: dict[str, Any] = {}
    found = False
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__init__" and code.co_argcount and frame.f_locals.get(code.co_varnames[0]) is owner:
            found = True
            arguments |= _arguments_of(frame)
        elif found:
            break
        frame = frame.f_back
    if not found:
        raise RuntimeError(f"save_hyperparameters() must be called inside {type(owner).__name__}.__init__")
    return arguments


def _arguments_of(frame: FrameType) -> dict[str, Any]:
    shown = inspect.getargvalues(frame)
    named = {name: shown.locals[name] for name in shown.args[1:] if name in shown.locals}
    keyword_only = frame.f_code.co_varnames[frame.f_code.co_argcount :][: frame.f_code.co_kwonlyargcount]
    named |= {name: shown.locals[name] for name in keyword_only if name in shown.locals}
    return named | (shown.locals.get(shown.keywords, {}) if shown.keywords else {})


def choose(
    given: Mapping[str, Any], wanted: tuple[Any, ...], ignore: tuple[str, ...]
) -> tuple[dict[str, Any], str | None]:
    """The hyper-parameters that are asked for, and the argument that holds all of them, if they came in one.

    Args:
        given: The arguments of `__init__`.
        wanted: Names of arguments, or one mapping or Namespace that holds the hyper-parameters; empty for all arguments.
        ignore: Names that are left out.

    Raises:
        ValueError: For a name that is no argument.
        TypeError: For an object of another kind.
    """
    holder = None
    if not wanted:
        chosen = dict(given)
    elif len(wanted) == 1 and not isinstance(wanted[0], str):
        chosen = _as_dict(wanted[0])
        holder = next((name for name, value in given.items() if value is wanted[0]), None)
    else:
        unknown = [name for name in wanted if name not in given]
        if unknown:
            raise ValueError(
                f"save_hyperparameters: {unknown[0]!r} is no argument of __init__; there are {sorted(given)}"
            )
        chosen = {name: given[name] for name in wanted}
    return {name: value for name, value in chosen.items() if name not in ignore}, holder


def storable(hparams: Mapping[str, Any]) -> dict[str, Any]:
    """Those that checkpoints and loggers can hold: plain values, paths, and lists and mappings of them."""
    from acclight.checkpoint.values import encode

    kept = {}
    for name, value in hparams.items():
        try:
            encode(value, name, {})
        except TypeError:
            continue
        kept[name] = value
    return kept


def _as_dict(value: Any) -> dict[str, Any]:
    if isinstance(value, Namespace):
        return dict(vars(value))
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(
        f"save_hyperparameters got a {type(value).__name__}; give names of arguments, or one mapping or Namespace"
    )


def saved_arguments(
    cls: type, saved: Mapping[str, Any], holder: str | None, given: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments with which `cls` is made again.

    Args:
        cls: The class.
        saved: The hyper-parameters of a checkpoint.
        holder: The argument that held them all, when they came in one.
        given: Arguments that replace or complete them.

    Raises:
        TypeError: An argument without a default is neither saved nor given.
    """
    parameters = inspect.signature(cls).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if holder in parameters:
        assert holder is not None
        inside = {name: value for name, value in given.items() if name not in parameters}
        whole = _with_attributes({**saved, **inside})
        arguments = {holder: whole} | {name: value for name, value in given.items() if name in parameters}
    else:
        merged = {**{name: _with_attributes(value) for name, value in saved.items()}, **given}
        arguments = {name: value for name, value in merged.items() if takes_all or name in parameters}
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    missing = [
        name
        for name, p in parameters.items()
        if p.kind in named and p.default is inspect.Parameter.empty and name not in arguments
    ]
    if missing:
        raise TypeError(
            f"{cls.__name__}.load_from_checkpoint: the checkpoint does not hold the argument {missing[0]!r} of __init__; give "
            f"it, as in load_from_checkpoint(path, {missing[0]}=...), or call save_hyperparameters() before saving"
        )
    return arguments


def _with_attributes(value: Any) -> Any:
    """A Namespace is saved as a plain dict: what comes back can be read like either."""
    if isinstance(value, dict):
        return Hyperparameters({name: _with_attributes(item) for name, item in value.items()})
    return [_with_attributes(item) for item in value] if isinstance(value, list) else value
