"""What a user installs: the wheel, the source archive, the names in them, and how cheap the import stays."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Loaded when first used, never by `import acclight`.
SLOW_TO_IMPORT = ("transformers", "torchmetrics", "tensorboard", "rich", "matplotlib", "deepspeed", "datasets")


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source archive and the wheel built from it, from a copy of the tree."""
    copy = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("acclight", "callbacks"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    run([sys.executable, "-m", "build", "--no-isolation", str(copy)], cwd=copy)
    return copy / "dist"


@pytest.fixture(scope="module")
def fresh_python(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment that holds acclight's wheel alone and borrows the packages it needs."""
    folder = tmp_path_factory.mktemp("fresh") / "venv"
    run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
    python = folder / "bin" / "python"
    (wheel,) = built.glob("*.whl")
    run([sys.executable, "-m", "pip", "--python", str(python), "install", "--no-index", "--no-deps", str(wheel)])
    # A plain path line: the .pth files over there, an editable acclight among them, do not count here.
    site = run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip()
    (Path(site) / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def run(command: list[str], cwd: Path | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def modules_of_the_tree() -> set[str]:
    """The tree's Python files as paths in the installed package."""
    files = {path.relative_to(ROOT) for path in (ROOT / "acclight").rglob("*.py")}
    files |= {Path("acclight") / path.relative_to(ROOT) for path in (ROOT / "callbacks").rglob("*.py")}
    return {path.as_posix() for path in files}


def test_every_package_of_the_tree_is_listed(pyproject: dict[str, Any]) -> None:
    listed = pyproject["tool"]["setuptools"]["packages"]
    found = {Path(name).parent.as_posix().replace("/", ".") for name in modules_of_the_tree()}
    assert sorted(listed) == sorted(found)


def test_callbacks_are_a_relative_link_in_the_tree() -> None:
    assert (ROOT / "acclight" / "callbacks").is_symlink()
    assert os.readlink(ROOT / "acclight" / "callbacks") == os.path.join("..", "callbacks")


def test_wheel_holds_each_module_once_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert len(names) == len(set(names))
    content = {name for name in names if ".dist-info/" not in name}
    assert content == modules_of_the_tree() | {"acclight/py.typed"}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_source_archive_builds_without_the_link(built: Path) -> None:
    """The wheel above was built from this archive, which holds the callbacks once, as a folder."""
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = [name.partition("/")[2] for name in opened.getnames()]
    assert {"callbacks/__init__.py", "acclight/__init__.py", "README.md", "LICENSE", "pyproject.toml"} <= set(names)
    assert not [name for name in names if name.startswith("acclight/callbacks/")]


def test_wheel_works_in_a_fresh_environment(fresh_python: Path, tmp_path: Path) -> None:
    code = (
        "import acclight, importlib.util\n"
        "from acclight.callbacks import EarlyStopping, ModelCheckpoint\n"
        "from acclight import Callback, DataModule, LossSum, Trainer, TrainModule, checkpoint, seed_everything\n"
        "assert issubclass(ModelCheckpoint, Callback)\n"
        "assert importlib.util.find_spec('callbacks') is None\n"
        "print(acclight.__file__, ModelCheckpoint.__module__, acclight.callbacks.__file__, sep='\\n')\n"
    )
    package, module, callbacks = run([str(fresh_python), "-c", code], cwd=tmp_path).split()
    assert Path(package).is_relative_to(fresh_python.parent.parent)
    assert Path(callbacks).parent == Path(package).parent / "callbacks"
    assert module.startswith("acclight.callbacks.")


def test_this_environment_holds_acclight(tmp_path: Path) -> None:
    """The editable install resolves the callbacks too, away from the checkout."""
    code = (
        "import importlib.util\n"
        "from acclight.callbacks import ModelCheckpoint\n"
        "assert importlib.util.find_spec('callbacks') is None\n"
    )
    run([sys.executable, "-c", code], cwd=tmp_path)


def test_import_loads_nothing_slow(tmp_path: Path) -> None:
    code = "import sys, {name}; print(*sorted(module for module in sys.modules if '.' not in module))"
    ours = set(run([sys.executable, "-c", code.format(name="acclight")], cwd=ROOT).split())
    theirs = set(run([sys.executable, "-c", code.format(name="accelerate")], cwd=ROOT).split())
    assert not (ours - theirs) & set(SLOW_TO_IMPORT)


def test_the_trainer_does_not_load_what_fsdp2_needs(tmp_path: Path) -> None:
    slow = "torch.distributed.tensor"
    code = f"import sys; from acclight import Trainer; before = {slow!r} in sys.modules; "
    code += f"from acclight.strategies import FSDP2Strategy; print(before, {slow!r} in sys.modules)"
    assert run([sys.executable, "-c", code], cwd=ROOT).split() == ["False", "True"]


def imported_distributions() -> dict[str, str]:
    """The distributions that acclight's files import, by name in the normal form, with one file that does."""
    owners = packages_distributions()
    found: dict[str, str] = {}
    for folder in ("acclight", "callbacks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                    names = [node.module]
                else:
                    continue
                for top in {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names) - {"acclight"}:
                    for owner in owners.get(top, [top]):
                        found[normal(owner)] = str(path.relative_to(ROOT))
    return found


def normal(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None, requirement
    return re.sub(r"[-_.]+", "-", match.group()).lower()


def test_every_import_is_a_declared_dependency(pyproject: dict[str, Any]) -> None:
    project = pyproject["project"]
    declared = {normal(name) for name in project["dependencies"]}
    declared |= {
        normal(name) for extra in ("deepspeed", "cli", "peft") for name in project["optional-dependencies"][extra]
    }
    undeclared = {owner: path for owner, path in imported_distributions().items() if owner not in declared}
    assert not undeclared


def test_constraints_pin_what_is_needed(pyproject: dict[str, Any]) -> None:
    pins = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")
    )
    pinned = {normal(name) for name in pins}
    project = pyproject["project"]
    needed = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    assert not {normal(name) for name in needed} - pinned
    assert pins["torch"] == "2.13.0"
