# `make quickstart` and `make test` of the README, and further commands for developers.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# torch is installed first and has an upper bound, so that pip chooses the small CPU build if there is one.
TORCH ?= torch>=2.6,<2.14
# The number of test processes: two more than there are cores, because tests wait for processes, and at most six.
JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); [ $$n -gt 4 ] && n=4; echo $$((n + 2)))
# pip compiles no bytecode, because most modules are never imported. Python compiles the others at their first import.
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --no-input --retries 5 --timeout 60

# Tests start hundreds of processes that import torch. Without stored bytecode each process would compile torch again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help quickstart test thorough coverage gpu lint types layers docs results wheel clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1: /p' $(MAKEFILE_LIST) | column -t -s: 2>/dev/null || true

quickstart: $(VENV)/.installed ## install Perilune, then train and evaluate a tiny model
	$(BIN)/perilune quickstart

RUN_TESTS := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

test: $(VENV)/.installed-dev lint types layers ## install the test dependencies, then run lint, types, layers and tests
	$(RUN_TESTS) -m "not thorough" $(PYTEST)

thorough: $(VENV)/.installed-dev ## run the costly tests that make test skips, before a release
	$(RUN_TESTS) -m thorough

coverage: ## run make test and list the lines that no test reaches; takes 50% longer
	$(MAKE) test PYTEST="--cov --cov-report=term:skip-covered"

gpu: $(VENV)/.installed-dev ## run the GPU tests, then the benchmarks, on a CUDA machine
	$(BIN)/python -m pytest -m gpu
	$(BIN)/python benchmarks/passes_cuda.py
	$(BIN)/python benchmarks/grpo_cuda.py
	$(BIN)/python benchmarks/rollout_cuda.py
	$(BIN)/python benchmarks/report.py

lint: $(VENV)/.installed-dev ## check formatting and lint rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.installed-dev ## check types, strictly
	$(BIN)/mypy

layers: $(VENV)/.installed-dev ## check the imports between packages
	$(BIN)/lint-imports

docs: $(VENV)/.installed-docs ## build the documentation as a site; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

results: $(VENV)/.installed-dev ## generate docs/results from benchmarks/results
	$(BIN)/python benchmarks/report.py

wheel: $(VENV)/.installed-dev ## build the wheel into dist/ and test it outside the checkout
	VENV=$(VENV) bash .ci/wheel

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than 3.11: make PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(PIP) "$(TORCH)"
	$(PIP) -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) -e ".[dev,docs]"
	$(PIP) --no-deps --upgrade --target $(VENV)/skypilot -r tests/execution/skypilot.txt
	@touch $@

# Building the documentation needs neither torch nor Perilune, because mkdocs reads the source without running it.
$(VENV)/.installed-docs: pyproject.toml | $(VENV)/bin/python
	$(PIP) $$($(BIN)/python -c "import tomllib; \
	  print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'])")
	@touch $@

clean: ## remove the environment and everything that was built
	rm -rf $(VENV) build dist site .coverage .coverage.* .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
