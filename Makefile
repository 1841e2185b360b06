# Everything is set up in .venv, on a machine that has Python >= 3.11 and pip; `make` lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The number of processes that run the tests: one more than two cores, because many tests wait for deadlines or for
# ranks. Three processes took 7 min 49 s, two took 8 min 20 s and 8 min 38 s.
WORKERS ?= 3

.DEFAULT_GOAL := help
.PHONY: help setup test test-rest test-all hosts prove durations lint docs demo bench gpu-here gpu-compile gpu-check gpu-check-first gpu-check-kernels gpu-check-sanitizer \
	gpu-check-speed gpu-check-speed-short gpu-check-tune gpu-check-qkv gpu-check-nccl gpu-check-nccl-alone gpu-check-nccl-processes gpu-check-many \
	gpu-check-many-hops gpu-check-many-overlap gpu-check-many-ring gpu-check-many-life gpu-check-many-faults \
	gpu-check-many-report gpu-tune clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 28

setup: $(STAMP) ## make .venv with everything the tests need

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("ringattn needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[test]'
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt --no-deps torchtitan megatron-core
	@touch $@

# Hundreds of processes import the same modules, so Python must keep compiled modules even if the environment says no.
test test-rest test-all hosts prove: export PYTHONDONTWRITEBYTECODE :=

# The tests that a marker expression selects: first those that may share the machine, then the others one by one, for
# which only files with the marker are imported. Status 5 means that there are none.
tests = failed=0; \
	$(BIN)/python -m pytest -q -m "not alone $(1)" -n $(WORKERS) --dist worksteal --durations=10 \
		--junitxml=build/tests-$(2).xml || failed=1; \
	$(BIN)/python -m pytest -q -m "alone $(1)" $$(grep -rl mark.alone tests --include='test_*.py') --durations=5 \
		--junitxml=build/tests-$(2)-alone.xml || [ $$? = 5 ] || failed=1; \
	exit $$failed

RUFF = $(BIN)/ruff check . && $(BIN)/ruff format --check .

# mypy runs at the same time as the tests, which spend much of their time waiting.
test: $(STAMP) ## ruff, mypy and the tests on CPU that are not marked slow: minutes on two cores
	@$(RUFF)
	@mkdir -p build; $(BIN)/mypy . > build/mypy.log 2>&1 & types=$$!; \
	( $(call tests,and not slow,quick) ) || failed=1; \
	wait $$types || failed=1; cat build/mypy.log; exit $${failed:-0}

# Slow tests start processes of their own, which fill the cores.
test-rest test-all: WORKERS = 2

# Kernels whose proof is recorded are left out: `make test` runs them if something that they read has changed.
test-rest: $(STAMP) ## the tests that `make test` leaves out, except kernels whose proof is recorded
	@$(call tests,and slow and not unchanged,slow)

test-all: lint ## every test on CPU
	@$(call tests,,all)

hosts: $(STAMP) ## run the adapters with every version of their hosts and write docs/host-versions.md, half an hour
	$(BIN)/python -m tests.adapters.host_table

prove: $(STAMP) ## run the compile gates and interpreted kernels whose inputs have changed, and record those that pass
	$(BIN)/python -m tests.unchanged

durations: $(STAMP) ## write how long the tests of the last `make test` and `make test-rest` took to tests/durations.json
	$(BIN)/python -m tests.durations

lint: $(STAMP) ## ruff and mypy
	$(RUFF)
	$(BIN)/mypy .

docs: $(STAMP) ## build the documentation site in build/docs/index.html; a warning is an error
	$(BIN)/python -m sphinx -q -W --keep-going -c docs -d build/doctrees . build/docs

demo: $(STAMP) ## a tour: several ranks on this machine, compared with dense attention
	$(BIN)/python -m ringattn.launch.train.demo

bench: $(STAMP) ## run the benchmarks, each after its check of the results
	$(BIN)/python -m ringattn.bench

# For a GPU machine with its own Python, torch and driver, without .venv and network. GPU_CHECK_COMMIT names the commit if
# there is no git. Each part ends within eight minutes, writes results to bench/results/gpu as they arrive, and copies
# them to the folder OUT if it is set. gpu-check runs the parts below, the most decisive first; a part that fails does not
# stop the next.
# The folder of compiled kernels is the same on every machine, because Triton stores absolute paths in it.
GPU_KERNELS := /tmp/ringattn-gpu-kernels
GPU_PYTHON = env PYTHONUNBUFFERED=1 GPU_CHECK_COPY=$(OUT) PYTHONPATH=. TRITON_CACHE_DIR=$(GPU_KERNELS) $(PYTHON)
GPU_TESTS = $(GPU_PYTHON) -m pytest -v -m gpu -p no:cacheprovider --durations=5 --timeout=200 --timeout-method=thread
GPU_CHECKS := first kernels speed speed-short tune qkv nccl
export GPU_CHECK_COMMIT ?= $(shell git rev-parse --short HEAD 2>/dev/null)
PARTS := 1 2 3 4 5 6 7 8 9 10 11 12 13 14

gpu-check: gpu-here ## run the checks that need a CUDA device, with the system's Python and torch
	@failed=0; for part in $(GPU_CHECKS); do $(MAKE) gpu-check-$$part || failed=1; done; exit $$failed

gpu-compile: ## compile the kernels of the GPU tests without a GPU, into build/gpu-kernels.tar.xz, which gpu-here unpacks
	@mkdir -p build && rm -rf $(GPU_KERNELS)
	@timeout -k 10 460 $(GPU_PYTHON) -m pytest -q -n 2 -p tests.gpu.compiling -p no:cacheprovider -m gpu -k "not sanitizer and not graphs and not workspace" \
		tests/gpu/test_engines.py tests/gpu/test_kernels.py tests/gpu/test_gluon.py tests/gpu/test_rows.py
	@find $(GPU_KERNELS) -type f ! -name '*.cubin' ! -name '*.json' -delete
	@tar cJf build/gpu-kernels.tar.xz -C $(dir $(GPU_KERNELS)) $(notdir $(GPU_KERNELS))

gpu-here:
	@[ ! -f build/gpu-kernels.tar.xz ] || [ -d $(GPU_KERNELS) ] || tar xJf build/gpu-kernels.tar.xz -C $(dir $(GPU_KERNELS))
	@$(PYTHON) -c 'import sys, torch; torch.cuda.is_available() or sys.exit("gpu-check needs a CUDA device, and torch finds none")'
	@[ -n "$(GPU_CHECK_COMMIT)" ] || echo "no git: set GPU_CHECK_COMMIT=<commit>, or the results do not name their commit"

gpu-check-first: gpu-here ## part of gpu-check: the speed of three kernels at one size, in two minutes
	@timeout -k 10 240 $(GPU_PYTHON) -m ringattn.bench.kernels only=cudnn,descriptors,gluon tokens=8192 file=kernels_first budget_s=200

gpu-check-kernels: gpu-here ## part of gpu-check: the compiled kernels, tested by several processes
	@mkdir -p build; rm -f build/gpu-part-*.log; for part in $(PARTS); do \
		timeout -k 10 460 $(GPU_TESTS) --part=$$part/$(words $(PARTS)) --session-timeout=430 -k "not compute_sanitizer" \
			tests/gpu/test_engines.py tests/gpu/test_kernels.py tests/gpu/test_gluon.py tests/gpu/test_rows.py tests/gpu/test_adapters.py \
			> build/gpu-part-$$part.log 2>&1 & started="$$started $$!"; done; \
	failed=0; for process in $$started; do wait $$process || failed=1; done; \
	cat build/gpu-part-*.log > build/gpu-kernels.log; $(call gpu-copy,build/gpu-kernels.log) \
	grep -hE "^(FAILED|ERROR)|Timeout|^=+ .*(passed|failed|error)" build/gpu-part-*.log; exit $$failed

gpu-check-sanitizer: gpu-here ## not in gpu-check, slow: one scenario of each kernel form under compute-sanitizer
	@timeout -k 10 460 $(GPU_TESTS) --timeout=300 -k compute_sanitizer tests/gpu/test_kernels.py

gpu-check-speed: gpu-here ## part of gpu-check: speed compared with cuDNN at 32,768 tokens, ring steps, launch costs
	@timeout -k 10 460 $(GPU_PYTHON) -m ringattn.bench.kernels

gpu-check-speed-short: gpu-here ## part of gpu-check: the same at 8,192 tokens, one sequence
	@timeout -k 10 460 $(GPU_PYTHON) -m ringattn.bench.kernels total=8192 tokens=4096,8192 file=kernels_short

gpu-check-tune: gpu-here ## part of gpu-check: the most promising block sizes of forward and of dK, dV; writes no file
	@timeout -k 10 460 $(GPU_PYTHON) -m ringattn.bench.tune dims=128 forms=descriptors kernels=forward,grad_kv limit=25

gpu-check-qkv: gpu-here ## part of gpu-check: the QKV projection
	@timeout -k 10 460 $(GPU_PYTHON) -m ringattn.bench.qkv

gpu-check-nccl: gpu-here ## part of gpu-check: the transports, by the two targets below
	@failed=0; for part in alone processes; do $(MAKE) gpu-check-nccl-$$part || failed=1; done; exit $$failed

gpu-check-nccl-alone: gpu-here ## real NCCL in one process
	@$(call gpu-tests,lifetimes:120 peer_driver:120 loopback:190)

gpu-check-nccl-processes: gpu-here ## real NCCL, then transport=peer, between processes that may share a GPU
	@$(call gpu-tests,processes:280 peer:180)

gpu-check-many: gpu-here ## on 2 to 8 GPUs: the five parts below, and a page of the results
	@failed=0; for part in hops overlap ring life faults report; do \
		$(MAKE) gpu-check-many-$$part || failed=1; done; exit $$failed

gpu-check-many-hops gpu-check-many-overlap gpu-check-many-ring gpu-check-many-life gpu-check-many-report: gpu-here
	@timeout -k 10 460 $(GPU_PYTHON) -m ringattn.bench.many part=$(@:gpu-check-many-%=%)

gpu-check-many-faults: gpu-here
	@$(call gpu-tests,processes:450)

# Each entry is a test file and its limit in seconds. A file that reaches its limit does not stop the next.
gpu-tests = mkdir -p build; failed=0; for part in $(1); do name=$${part%:*}; \
		timeout -k 10 $${part\#*:} $(GPU_TESTS) tests/gpu/test_$$name.py > build/gpu-$$name.log 2>&1 || failed=1; \
		tail -n 25 build/gpu-$$name.log; $(call gpu-copy,build/gpu-$$name.log) done; exit $$failed
gpu-copy = $(if $(OUT),mkdir -p $(OUT) && cp $(1) $(OUT);)

gpu-tune: gpu-here ## find the fastest block sizes of this GPU and write kernels/configs.json; run again to continue
	@timeout -k 10 460 $(GPU_PYTHON) -m ringattn.bench.tune write=true

clean: ## remove .venv and every cache
	rm -rf $(VENV) build dist outputs multirun .hypothesis .mypy_cache .pytest_cache .ruff_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
