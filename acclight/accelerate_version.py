"""Tells at the import of acclight when Accelerate is missing or too old, before anything fails in another way."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

#: The oldest Accelerate that works; `tests/test_promises.py` compares it with pyproject.toml.
NEEDED = "1.15"


def check_accelerate() -> None:
    """Raises ImportError, with the version needed, when Accelerate is missing or older."""
    try:
        found = version("accelerate")
    except PackageNotFoundError:
        raise ImportError(
            f"acclight needs accelerate {NEEDED} or newer, and none is installed: `pip install 'accelerate>={NEEDED}'`"
        ) from None
    if _numbers(found) < _numbers(NEEDED):
        raise ImportError(
            f"acclight needs accelerate {NEEDED} or newer, and {found} is installed: `pip install 'accelerate>={NEEDED}'`"
        )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])
