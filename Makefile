# Everything a clone needs: plain python3 (3.11 or newer) and make. The first target run creates .venv.
#
#   make demo                              programs on the embedded model
#   make test                              lint, types, the whole CPU suite
#   make test TORCH_INDEX=URL              also look for torch in that package index (PyTorch's CPU wheels, say)
#   make demo PYTHON=python3.12            another interpreter for .venv

.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help demo test lint docs test-slow test-long test-gpu clean

PYTHON ?= python3
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PYTEST := $(BIN)/python -m pytest --import-mode=importlib
# Processes that share the suite, a file at a time and in the order of the folders: long files come first, as `e2e` and
# `faults` do, and short ones (`unit`, docstrings) fill up the end.
WORKERS ?= 2
SPREAD = --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

help:
	@echo "make demo | test | lint | docs | test-slow | test-long | test-gpu | clean   (see README.md)"

# One stamp for the whole set-up: it is rewritten only after every step went well, so a broken-off install starts again.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "sgl needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12 <target>" >&2; \
	  exit 1; }
	@echo "Setting up $(VENV), once (2.2 GB, and more with PyPI's CUDA build of torch)." >&2
	@$(PYTHON) -m venv --clear $(VENV) || { \
	  echo "'$(PYTHON) -m venv' failed. On Debian and Ubuntu install the package python3-venv, then run make again." >&2; \
	  exit 1; }
	@# Modules are compiled when they are imported: most of torch and transformers never is.
	@echo "Installing sgl with the pinned versions of constraints.txt: some minutes." >&2
	@$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
	  --editable '.[dev]'
	@# instructor, which tests talk to the server with, bounds jiter and rich below what openai wants, and works with these.
	@echo "Installing instructor, for tests." >&2
	@$(BIN)/python -m pip install --quiet --no-compile --no-deps instructor==1.17.0
	@touch $@

demo: $(READY)
	@echo "Compiling the native CPU kernels, unless they are there." >&2
	@$(BIN)/sgl doctor --build >/dev/null
	@echo "Running tutorials/00_tour.py; the first time, it fetches the embedded model (98 MB)." >&2
	@$(BIN)/sgl run tutorials/00_tour.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p sgl

test: lint
	$(PYTEST) --doctest-modules $(SPREAD) -m "not gpu and not slow" tests sgl

# README, rooms, tutorials and the API reference as HTML in build/docs; needs no network.
docs: $(READY)
	$(BIN)/python .ci/docs.py build/docs

# What the suite leaves out: 10,000 operations of each state machine, and the long forms of the equality and oracle tests.
test-slow: $(READY)
	SGL_LONG=1 $(PYTEST) tests/property
	$(PYTEST) -m "slow and not gpu" tests

# A server under 100,000 fuzzed requests, then for ten minutes at a full pool with clients that leave (tests/faults/README.md).
test-long: $(READY)
	SGL_FUZZ_REQUESTS=100000 SGL_SOAK_S=600 $(PYTEST) -s tests/faults/test_endurance.py

test-gpu: $(READY)
	$(PYTEST) -m gpu tests

clean:
	rm -rf $(VENV) build dist sgl.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
