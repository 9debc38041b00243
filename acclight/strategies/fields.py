"""A strategy's fields from arguments, a dict, or a JSON or YAML file, under this project's names or Accelerate's."""

from __future__ import annotations

import difflib
import functools
import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from acclight.messages import warn

#: What a launch file says of the training as a whole -> the Trainer's argument for it.
_TRAINERS = {"mixed_precision": "precision", "gradient_accumulation_steps": "accumulate_grad_batches"}
Config = Mapping[str, Any] | str | Path
_Init = TypeVar("_Init", bound=Callable[..., None])


def as_flag(value: Any) -> bool | None:
    """What a text or a number of a file says as yes or no; None where it says neither."""
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in ("1", "true", "yes", "on"):
        return True
    return False if text in ("0", "false", "no", "off", "") else None


def reads_config(
    prefix: str,
    section: str,
    aliases: Mapping[str, str] | None = None,
    obsolete: Mapping[str, str] | None = None,
    whole: tuple[str, str] | None = None,
) -> Callable[[_Init], _Init]:
    """Makes an `__init__` whose first parameter is `config` take its other arguments from there, too.

    Args:
        prefix: Is taken away from names that have it.
        section: In a launch file of Accelerate's, the part that holds the fields.
        aliases: Other names of fields -> the name of the argument.
        obsolete: Names that are accepted and have no effect -> why, which is said.
        whole: A key by which `config` is known to be something else, and the argument that takes that as it is.
    """

    def decorate(init: _Init) -> _Init:
        known = list(inspect.signature(init).parameters)[2:]
        flags = {
            name for name, one in inspect.signature(init).parameters.items() if str(one.annotation).startswith("bool")
        }

        def rename(owner: str, values: Mapping[str, Any]) -> dict[str, Any]:
            renamed: dict[str, Any] = {}
            for given, value in values.items():
                name = given.removeprefix(prefix)
                name = (aliases or {}).get(name, name)
                if name in (obsolete or {}):
                    if value not in (None, False):
                        warn(f"{owner}: {given}={value!r} has no effect: {(obsolete or {})[name]}")
                    continue
                if name not in known:
                    near = difflib.get_close_matches(name, [*known, *(aliases or {})], n=1)
                    hint = f"; did you mean {near[0]!r}?" if near else f"; it takes {', '.join(known)}"
                    raise ValueError(f"{owner} has no field {given!r}{hint}")
                if name in renamed and renamed[name] != value:
                    raise ValueError(
                        f"{owner} was given {name}={renamed[name]!r} and {given}={value!r}, which is the same field"
                    )
                if name in flags and value is not None and not isinstance(value, bool):
                    flag = as_flag(value)
                    if flag is None:
                        raise ValueError(f"{owner}: {given}={value!r}: give True or False")
                    value = flag
                renamed[name] = value
            return renamed

        @functools.wraps(init)
        def read(self: Any, config: Config | None = None, **fields: Any) -> None:
            owner = type(self).__name__
            loaded = _load(owner, config, section)
            if whole is not None and whole[0] in loaded:
                loaded = {whole[1]: loaded}
            of_config, arguments = rename(owner, loaded), rename(owner, fields)
            place = Path(config).name if isinstance(config, str | Path) else "argument"
            self.given_fields = {**of_config, **arguments}
            self.field_sources = {**dict.fromkeys(of_config, place), **dict.fromkeys(arguments, "argument")}
            init(self, **self.given_fields)

        return read  # type: ignore[return-value]

    return decorate


def _load(owner: str, config: Config | None, section: str) -> Mapping[str, Any]:
    if config is None:
        return {}
    if not isinstance(config, Mapping):
        path = Path(config)
        if not path.is_file():
            raise ValueError(f"{owner}({str(config)!r}): there is no such file; give a dict, or a JSON or YAML file")
        text = path.read_text(encoding="utf-8")
        import yaml

        try:
            config = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
        except (json.JSONDecodeError, yaml.YAMLError) as error:
            raise ValueError(f"{owner}({str(path)!r}) cannot be read: {' '.join(str(error).split())}") from None
        if not isinstance(config, Mapping):
            raise ValueError(f"{owner}({str(path)!r}): the file holds a {type(config).__name__}, not names with values")
    if section not in config:
        return config
    for name, instead in _TRAINERS.items():
        if config.get(name) not in (None, "no", 1):
            warn(
                f"{owner}({str(path)!r}): {name}={config[name]!r} of the file has no effect here: give Trainer({instead}=...)"
            )
    return config[section] or {}
