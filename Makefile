# Two commands matter: `make serve` and `make test`. Both set up .venv themselves.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup serve test test-fast test-process test-server fmt check lint bench clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  %-12s %s\n", $$1, $$2}'

setup: $(STAMP) ## create .venv and install everything, pinned by constraints.txt

$(STAMP): pyproject.toml constraints.txt
	@echo "[jitserve] setting up $(VENV): SGLang and its CUDA stack, about 11 GB and 5 minutes"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) 2>/dev/null \
	  || { rm -rf $(VENV); $(PYTHON) -m pip install --quiet --target .venv-tool virtualenv \
	       && PYTHONPATH=.venv-tool $(PYTHON) -m virtualenv --quiet $(VENV); rm -rf .venv-tool; test -x $(BIN)/python; }
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

serve: $(STAMP) ## serve the demo model on port 30000 (ARGS="--port 8000 …" for more flags)
	@exec $(BIN)/python launch.py --model demo $(ARGS)

test: $(STAMP) ## run the whole test suite, the real server included
	@$(MAKE) --no-print-directory lint
	$(BIN)/python -m pytest $(ARGS)

test-fast: $(STAMP) ## the tests that need no server and no other process: two minutes
	$(BIN)/python -m pytest tests/unit tests/property tests/golden $(ARGS)

test-process: $(STAMP) ## the tests with real processes behind real sockets: two minutes
	$(BIN)/python -m pytest tests/process $(ARGS)

test-server: $(STAMP) ## the tests on the real server: minutes
	$(BIN)/python -m pytest tests/server $(ARGS)

fmt: $(STAMP) ## format and fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(STAMP)
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache > .lint-imports.log || { cat .lint-imports.log; exit 1; }
	@rm -f .lint-imports.log

check: lint test-fast ## read-only: format, lint, types, import layers, fast tests

bench: $(STAMP) ## list the benchmarks (then: .venv/bin/python -m bench NAME)
	@$(BIN)/python -m bench --help

clean: ## remove .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info
