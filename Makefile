# The two commands of the README, and what developers run.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# torch is taken first and pinned, so that pip picks the small CPU build where one is offered.
TORCH ?= torch>=2.6,<2.14

.PHONY: quickstart test lint types layers docs wheel clean

quickstart: $(VENV)/.installed ## install, then the whole story on this machine
	$(BIN)/perilune quickstart

test: $(VENV)/.installed-dev lint types layers ## install what is needed and run every check
	$(BIN)/python -m pytest -n 2 --dist loadgroup --cov --cov-report=term:skip-covered

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

layers: $(VENV)/.installed-dev
	$(BIN)/lint-imports

docs: $(VENV)/.installed-dev ## build the documentation, warnings are errors
	$(BIN)/mkdocs build --strict

wheel: $(VENV)/.installed-dev ## build the wheel and prove that it works outside the checkout
	bash .ci/wheel

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[dev,docs]"
	touch $@

clean:
	rm -rf $(VENV) build dist site .coverage .mypy_cache .ruff_cache .pytest_cache .hypothesis
