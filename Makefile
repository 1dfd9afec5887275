# `make demo` and `make test` set everything up, then run. uv does it where it is installed, else venv and pip;
# `make test INSTALLER=pip` chooses. PYTHON names the interpreter for pip: `make test PYTHON=python3.12`.

PYTHON ?= python3
INSTALLER ?= $(if $(shell command -v uv 2>/dev/null),uv,pip)
# One more than two cores: some tests wait for processes that they started.
JOBS ?= 3
# Each process takes tests that stand together, so that what a file prepares is prepared once, and then from the others.
SHARED := -n $(JOBS) --dist worksteal

BIN := .venv/bin
READY := .venv/.ready

# Tests of the software GPU that pass on a new processor and may fail on an old one.
LEVEL ?= x86-64-v2
LEVEL_TESTS := tests/software_gpu tests/metal tests/language/test_generator.py \
	--ignore=tests/software_gpu/test_levels.py --ignore=tests/software_gpu/test_emulated.py

.PHONY: demo test test-levels test-pythons lint types bench docs clean

demo: $(READY)
	$(BIN)/npu demo

test: $(READY)
	$(BIN)/python -m pytest tests $(SHARED)

test-pythons: $(READY)
	$(BIN)/python -m tests.packaging.pythons

# Once more with the instructions of an older processor: `make test-levels LEVEL=x86-64-v3`. Other machines have none.
test-levels: $(READY)
ifeq ($(shell uname -m),x86_64)
	NPU_SOFTWARE_GPU_CPU=$(LEVEL) $(BIN)/python -m pytest $(LEVEL_TESTS) $(SHARED)
endif

lint: $(READY)
	$(BIN)/ruff check

types: $(READY)
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python -m benchmarks.resnet

docs: $(READY)
ifeq ($(INSTALLER),uv)
	uv sync --extra dev --extra docs
else
	$(BIN)/python -m pip install --quiet -e '.[docs]'
endif
	$(BIN)/mkdocs build --strict

clean:
	rm -rf .venv site

$(READY): pyproject.toml
ifeq ($(INSTALLER),uv)
	uv sync --extra dev
else
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "given Python %d.%d, expected 3.11 or newer: make PYTHON=python3.12" % sys.version_info[:2])'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -e '.[dev]'
endif
	@touch $(READY)
