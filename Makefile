# Two commands matter: `make demo` and `make test`. `make help` lists the rest.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help install demo test check format lint types soak clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(STAMP)  ## create .venv and install everything in it

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("streammega needs Python 3.10 or newer; set PYTHON=python3.11 or so" if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP)  ## train from s3:// on two ranks, kill it twice, resume, and prove that no token differs
	$(BIN)/python tools/demo.py $(DEMO)

test: $(STAMP)  ## the tests
	$(PYTEST) -n 2 --dist worksteal -m "not soak"

check: $(STAMP) format lint types test  ## what CI runs: format, lint, types, tests

format: $(STAMP)  ## fail if a file is not formatted (mend: .venv/bin/ruff format)
	$(BIN)/ruff format --check .

lint: $(STAMP)  ## ruff
	$(BIN)/ruff check .

types: $(STAMP)  ## mypy
	$(BIN)/mypy

soak: $(STAMP)  ## long runs: 20,000 configurations against megatron-core (about ten minutes)
	$(PYTEST) -n 2 -m soak --timeout 1800

clean:  ## remove .venv, caches and the demo's folder
	rm -rf $(VENV) demo-run build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
