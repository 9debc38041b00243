# `make demo` and `make test` need Python >= 3.11, make and a C compiler (DeepSpeed's tests: C++), and nothing else: they make
# .venv, install into it what is missing, and run.

PYTHON ?= python3
VENV ?= .venv
DEMO_ARGS ?=
# Two test files at a time, each of which starts up to four processes; most of their time they load torch or wait for each other.
PYTEST_ARGS ?= -n 2 --dist loadfile

BIN := $(abspath $(VENV))/bin
# DeepSpeed and torch.compile look for ninja, and the launchers for python, on the path.
export PATH := $(BIN):$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
INSTALL := $(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint types imports format bench wheel clean

help: ## Say what there is
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' Makefile | expand -t 16

# Threads that wait without spinning: where other programs use the cores too, spinning ones slow the demo down tenfold.
demo: $(VENV)/.stamp-demo ## Install, then train a small Llama on this machine
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python examples/llama_fsdp.py $(DEMO_ARGS)

test: lint types imports ## Install, then lint, check types and imports, and run the tests
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-all: lint types imports ## As test, with the slow sweeps
	$(BIN)/python -m pytest -m "slow or not slow" $(PYTEST_ARGS)

lint: $(VENV)/.stamp-test
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/.stamp-test
	$(BIN)/mypy

imports: $(VENV)/.stamp-test
	$(BIN)/lint-imports --no-logo --no-cache

format: $(VENV)/.stamp-test ## Put the code in ruff's form
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

bench: $(VENV)/.stamp-demo ## Measure what importing acclight costs
	$(BIN)/python benchmarks/startup.py --check

wheel: $(VENV)/.stamp-test ## Build the source archive and the wheel into dist/
	rm -rf build
	$(BIN)/python -m build --no-isolation

clean: ## Remove what these commands made
	rm -rf $(VENV) .venv-ci build dist acclight.egg-info .import_linter_cache .mypy_cache .pytest_cache .ruff_cache

$(VENV)/.stamp-venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than Python 3.11; name another one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.stamp-demo: $(VENV)/.stamp-venv pyproject.toml constraints.txt
	@echo "Installing acclight and what it needs into $(VENV); the first time takes minutes."
	$(INSTALL) setuptools wheel
	$(INSTALL) -e .
	@touch $@

$(VENV)/.stamp-test: $(VENV)/.stamp-demo
	$(INSTALL) ninja
	DS_BUILD_OPS=0 $(INSTALL) -e '.[deepspeed,dev,peft]'
	@touch $@
