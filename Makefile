# One command for everything. `make help` lists them.
#
# What is installed is remembered in stamp files inside the virtual environment, so a second call is quick; a change of
# pyproject.toml or of an environment's pyproject.toml installs again.

PYTHON ?= python3
VENV ?= .venv
# The CPU build of torch is a tenth of the size of the one with CUDA. Where pip finds no such build it takes the one
# that pyproject.toml allows. Give another with `make install TORCH=torch==2.12.1`, or none with `TORCH=`.
TORCH ?= torch==2.13.0+cpu
# The versions that the tests last passed with (`make lock` writes them anew). `CONSTRAINTS=` takes the newest that
# pyproject.toml allows.
CONSTRAINTS ?= constraints.txt
ARGS ?=
# How many processes the tests are spread over, a file at a time, those with slow tests first (`conftest.py`): one more
# than there are processors, since many wait for what they have started, and at most eight (1.3 GB each). With 0 all run
# in one process, which is what a debugger wants.
WORKERS ?= $(shell n=$$(( $$(env -u OMP_NUM_THREADS nproc 2>/dev/null || echo 2) + 1 )); echo $$(( n > 8 ? 8 : n )))

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# pip, with a line now and then: the first install takes minutes.
INSTALL := $(PIP) install $(if $(CONSTRAINTS),-c $(CONSTRAINTS))
TOLD := | awk '/^Collecting/ {n++; if (n % 20 == 0) {print "  " n " packages found"; fflush()}} \
	/^Downloading/ && /[0-9][0-9][0-9]\.[0-9] MB/ {print "  " $$0; fflush()} \
	/^Installing collected/ {print "  unpacking"; fflush()}'
ENVIRONMENTS := $(sort $(patsubst %/pyproject.toml,%,$(wildcard environments/*/pyproject.toml)))
# Adapters bring other libraries, so users install those that they want; in a checkout they are found without.
ADAPTERS := $(sort $(patsubst %/pyproject.toml,%,$(wildcard adapters/*/pyproject.toml)))
MANIFESTS := pyproject.toml $(addsuffix /pyproject.toml,$(ENVIRONMENTS) $(ADAPTERS))
EDITABLE := $(addprefix -e ./,$(ENVIRONMENTS))
EDITABLE_ADAPTERS := $(addprefix -e ./,$(ADAPTERS))
# One thread a process: several processes share the cores, and more threads only wait for each other.
export OMP_NUM_THREADS ?= 1
# Images of containers set it: each of the thousands of processes that the tests start would compile all it imports.
unexport PYTHONDONTWRITEBYTECODE

SHELL := bash
.SHELLFLAGS := -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help quickstart install install-dev test tests test-fast test-all check lint types format docs lock dist release clean

help: ## List the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

quickstart: install ## Install what is needed and watch a small model learn (ARGS="--seed 1 --hard")
	$(BIN)/mettle quickstart $(ARGS)

install: $(VENV)/.installed ## Create .venv with Mettle and its environments

install-dev: $(VENV)/.installed-dev ## The same with what is needed to work on Mettle

test: install-dev lint ## All checks and tests
	@$(MAKE) --no-print-directory -j2 types tests

# Types are one process's work for half a minute: the tests begin beside it.
tests:
	$(BIN)/python -m pytest -q -m "not gpu and not nightly" -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-all: install-dev check ## The same and what is too long for every change: soaks, full matrices, container engines
	$(BIN)/python -m pytest -q -m "not gpu" -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-fast: install-dev ## Only the tests that are quick and start no other processes
	$(BIN)/python -m pytest -q -m "not slow and not gpu and not e2e and not nightly" -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

check: install-dev lint types ## Format, lint, types, import directions

lint: install-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports

types: install-dev
	$(BIN)/mypy

format: install-dev ## Format and fix what can be fixed
	$(BIN)/ruff check --fix --exit-zero .
	$(BIN)/ruff format .

docs: install-dev ## Write the generated reference pages
	$(BIN)/python docs/generate.py

lock: ## Write constraints.txt from what is installed
	$(BIN)/python .ci/release.py lock

dist: install-dev ## Build sdist and wheel into dist/
	$(BIN)/python -m hatchling build -d dist

release: install-dev ## Check, date the changelog, build and tag (VERSION=0.2.0)
	$(BIN)/python .ci/release.py make $(VERSION)

clean: ## Remove what the commands above made
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Mettle wants Python 3.11 or newer; name one with PYTHON=..."; exit 2; }
	@echo "making a virtual environment in $(VENV)"; $(PYTHON) -m venv $(VENV) \
		|| { rm -rf $(VENV); echo "$(PYTHON) cannot make a virtual environment; on Debian: apt install python3-venv"; exit 2; }

$(VENV)/.torch: | $(BIN)/python
	@$(BIN)/python -c 'import torch' 2>/dev/null || test -z "$(TORCH)" || { \
		echo "installing $(TORCH), about 200 MB"; $(INSTALL) "$(TORCH)" 2>$(VENV)/torch.log $(TOLD); } \
		|| echo "pip gives no $(TORCH) (why: $(VENV)/torch.log); taking the build of torch that it does give"
	@touch $@

$(VENV)/.installed: $(MANIFESTS) $(CONSTRAINTS) $(VENV)/.torch
	@echo "installing Mettle and its environments; a few minutes the first time"
	@$(INSTALL) hatchling editables $(TOLD)
	@$(INSTALL) --no-build-isolation -e '.[train,hub,service,grammar]' $(EDITABLE) $(TOLD)
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing what is needed to work on Mettle"
	@$(INSTALL) --no-build-isolation -e '.[train,hub,service,grammar,math,data,docker,kubernetes,gepa,tui,dev]' $(EDITABLE) $(EDITABLE_ADAPTERS) $(TOLD)
	@touch $@
