# Everything runs in .venv, which the first command makes.  PYTHON chooses the interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := torch>=2.11,<2.14
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
SOURCES := src tests benchmarks examples docs
# Two workers on two cores: one thread each, or they fight.  Each begins with one half, so that a
# file's tests share what they build, and takes from the other's when its own is done.
WORKERS := -n 2 --dist worksteal
# What torch alone runs is tried on the parts that ask most of it.
FEW := tests/aot/test_alias.py tests/aot/test_mutation.py tests/aot/test_random.py
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
# On a machine with a GPU nothing is installed: what it has is used as it is, ours from the source.
GPU_PYTHON ?= $(firstword $(wildcard $(BIN)/python) $(PYTHON))
ON_GPU := PYTHONPATH=src:.:$$PYTHONPATH $(GPU_PYTHON)
# Several processes share the device, where pytest can: compiling is most of the time.
GPU_WORKERS = $(shell $(GPU_PYTHON) -c 'import xdist' 2>&1 || echo no)

.PHONY: help demo test check types style sweep bench faults gpu-test gpu-sweep gpu-bench docs \
  format clean

help:
	@echo 'make demo    compile a small transformer, compare with eager'
	@echo 'make test    every check and every test'
	@echo 'make check   the quick part: format, lint, types, style'
	@echo 'make sweep   every operator of torch'"'"'s database; writes docs/coverage.md'
	@echo 'make bench   measure; writes benchmarks/RESULTS.md'
	@echo 'make faults  put 60 bugs into the compiler, minimise and bisect each; writes results'
	@echo 'make gpu-test   on a machine with an NVIDIA GPU: the tests of tests/gpu; writes nothing'
	@echo 'make gpu-sweep  there: a sample of 150 operators; writes .sweep/gpu.jsonl'
	@echo 'make gpu-bench  there: measure; writes benchmarks/gpu.json and RESULTS.md'
	@echo 'make docs    write docs/tour.md from the dumps of a compilation'
	@echo 'make format  format and fix what ruff can'
	@echo 'make clean   remove .venv and every cache'

demo: $(STAMP)
	$(BIN)/python examples/demo.py

test: check
	$(ONE_THREAD) $(BIN)/python -m pytest -q $(WORKERS) --ignore=tests/style
	$(ONE_THREAD) STATOR_GPU_TESTS_ON=interpreter $(BIN)/python -m pytest -q $(WORKERS) tests/gpu
	$(ONE_THREAD) $(BIN)/python -m pytest -q $(WORKERS) $(FEW) --no-kernels

check: $(STAMP)
	$(BIN)/ruff format --quiet --check $(SOURCES)
	$(BIN)/ruff check --quiet $(SOURCES)
	$(MAKE) --no-print-directory -j 2 types style
	$(BIN)/python -m tests.style.line_budget

types: $(STAMP)
	$(BIN)/mypy --no-error-summary $(SOURCES)

style: $(STAMP)
	$(BIN)/python -m pytest -q tests/style

sweep: $(STAMP)
	$(ONE_THREAD) $(BIN)/python -m tests.sweep

bench: $(STAMP)
	$(BIN)/python -m benchmarks.call_cost
	$(BIN)/python -m benchmarks.run
	$(BIN)/python -m benchmarks.symbolic
	$(BIN)/python -m benchmarks.host_cost
	$(BIN)/python -m benchmarks.memory_chain
	$(BIN)/python -m benchmarks.passes
	$(BIN)/python -m benchmarks.partition
	$(BIN)/python -m benchmarks.training_memory
	$(BIN)/python -m benchmarks.budgets --times
	$(BIN)/python -m benchmarks.pad_mm
	$(BIN)/python -m benchmarks.numerics
	$(BIN)/python -m benchmarks.packages
	$(BIN)/python -m benchmarks.warm_start

faults: $(STAMP)
	$(BIN)/python -m benchmarks.faults

gpu-test:
	PYTHONDONTWRITEBYTECODE=1 $(ON_GPU) -m pytest -q -p no:cacheprovider -p no:benchmark tests/gpu \
	  $(if $(GPU_WORKERS),,-n 4 --dist worksteal)

gpu-sweep:
	$(ON_GPU) -m tests.gpu.sweep --count 150 --seed 0

# A row that fails does not keep the others from being written down.
gpu-bench:
	-$(ON_GPU) -m benchmarks.gpu --out .bench/gpu.json
	$(ON_GPU) -m benchmarks.gpu_report .bench/gpu.json

docs: $(STAMP)
	$(BIN)/python -m docs.tour
	$(BIN)/python -m docs.passes

format: $(STAMP)
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

clean:
	rm -rf $(VENV) build dist src/*.egg-info .sweep .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find $(SOURCES) -type d -name __pycache__ -prune -exec rm -rf {} +

# A torch that the machine already has is used as it is, seen through --system-site-packages: it may
# be a CPU build, and fetching another would bring gigabytes of CUDA.  For the same reason torch
# goes in first, alone: the second install then finds its requirement met.
$(STAMP): pyproject.toml
	@echo 'setting up $(VENV)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) $$($(PYTHON) -c \
	  'import importlib.util as u; print("--system-site-packages" * bool(u.find_spec("torch")))')
	@$(PIP) "$(TORCH)"
	@$(PIP) -e ".[dev,bench]"
	@touch $@
