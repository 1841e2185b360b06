# Everything is set up in .venv, on a machine that has Python >= 3.11 and pip; `make` lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Processes that share the test files. One more than two cores, for many tests wait for deadlines or for each other's
# ranks, each of which has one thread: 7 min 49 s, where two processes take 8 min 20 s and 8 min 38 s.
WORKERS ?= 3

.DEFAULT_GOAL := help
.PHONY: help setup test test-rest test-all prove durations lint docs demo bench gpu-here gpu-compile gpu-check gpu-check-first gpu-check-kernels gpu-check-sanitizer \
	gpu-check-speed gpu-check-speed-short gpu-check-tune gpu-check-qkv gpu-check-nccl gpu-check-nccl-alone gpu-check-nccl-processes gpu-check-many \
	gpu-check-many-hops gpu-check-many-overlap gpu-check-many-ring gpu-check-many-life gpu-check-many-faults \
	gpu-check-many-report gpu-tune clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup: $(STAMP) ## make .venv with everything the tests need

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("ringattn needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[test]'
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt --no-deps torchtitan megatron-core
	@touch $@

# Hundreds of processes import the same modules: they are compiled once, also where the environment forbids it.
test test-rest test-all prove: export PYTHONDONTWRITEBYTECODE :=

# The tests that a marker expression takes: first those that share the machine, then one after another those that do not.
# For these only the files are imported that name the marker. Status 5 says that there is none.
tests = failed=0; \
	$(BIN)/python -m pytest -q -m "not alone $(1)" -n $(WORKERS) --dist worksteal --durations=10 \
		--junitxml=build/tests-$(2).xml || failed=1; \
	$(BIN)/python -m pytest -q -m "alone $(1)" $$(grep -rl mark.alone tests --include='test_*.py') --durations=5 \
		--junitxml=build/tests-$(2)-alone.xml || [ $$? = 5 ] || failed=1; \
	exit $$failed

RUFF = $(BIN)/ruff check . && $(BIN)/ruff format --check .

# mypy runs beside the tests, much of whose time is waiting.
test: $(STAMP) ## ruff, mypy and the tests on CPU that are not marked slow: minutes on two cores
	@$(RUFF)
	@mkdir -p build; $(BIN)/mypy . > build/mypy.log 2>&1 & types=$$!; \
	( $(call tests,and not slow,quick) ) || failed=1; \
	wait $$types || failed=1; cat build/mypy.log; exit $${failed:-0}

# Slow tests start processes of their own, which fill the cores.
test-rest test-all: WORKERS = 2

# Of kernels whose proof is recorded none runs again: `make test` runs them where something that they read has changed.
test-rest: $(STAMP) ## the tests that `make test` leaves out, but for kernels that are proven as they are
	@$(call tests,and slow and not unchanged,slow)

test-all: lint ## every test on CPU
	@$(call tests,,all)

prove: $(STAMP) ## run the compile gates and interpreted kernels where what they read has changed, and record what passes
	$(BIN)/python -m tests.unchanged

durations: $(STAMP) ## write what the tests took, of the last `make test` and `make test-rest`, into tests/durations.json
	$(BIN)/python -m tests.durations

lint: $(STAMP) ## ruff and mypy
	$(RUFF)
	$(BIN)/mypy .

docs: $(STAMP) ## the documentation site, in build/docs/index.html; a warning fails it
	$(BIN)/python -m sphinx -q -W --keep-going -c docs -d build/doctrees . build/docs

demo: $(STAMP) ## the tour: several ranks on this machine, exact against one dense attention
	$(BIN)/python -m ringattn.launch.train.demo

bench: $(STAMP) ## the benchmarks, each behind its correctness gate
	$(BIN)/python -m ringattn.bench

# On a GPU machine: its own Python, torch and driver, no .venv and no network. GPU_CHECK_COMMIT names the commit where
# there is no git. Each part ends within eight minutes by its own limits, keeps its results as they come in
# bench/results/gpu, and copies them to the folder OUT where that is set. gpu-check is the parts in this order, by what
# decides most; a part that fails does not stop the next.
# The folder of compiled kernels is the same on every machine, because Triton stores absolute paths in it.
GPU_KERNELS := /tmp/ringattn-gpu-kernels
GPU_PYTHON = env PYTHONUNBUFFERED=1 GPU_CHECK_COPY=$(OUT) PYTHONPATH=. TRITON_CACHE_DIR=$(GPU_KERNELS) $(PYTHON)
GPU_TESTS = $(GPU_PYTHON) -m pytest -v -m gpu -p no:cacheprovider --durations=5 --timeout=200 --timeout-method=thread
GPU_CHECKS := first kernels speed speed-short tune qkv nccl
export GPU_CHECK_COMMIT ?= $(shell git rev-parse --short HEAD 2>/dev/null)
PARTS := 1 2 3 4 5 6 7 8 9 10 11 12 13 14

gpu-check: gpu-here ## the checks that need a CUDA device, with the system's Python and torch
	@failed=0; for part in $(GPU_CHECKS); do $(MAKE) gpu-check-$$part || failed=1; done; exit $$failed

gpu-compile: ## compile the kernels of the GPU tests without a GPU, into build/gpu-kernels.tar.xz, which gpu-here unpacks
	@mkdir -p build && rm -rf $(GPU_KERNELS)
	@timeout -k 10 460 $(GPU_PYTHON) -m pytest -q -n 2 -p tests.gpu.compiling -p no:cacheprovider -m gpu -k "not sanitizer and not graphs and not workspace" \
		tests/gpu/test_engines.py tests/gpu/test_kernels.py tests/gpu/test_gluon.py tests/gpu/test_rows.py
	@find $(GPU_KERNELS) -type f ! -name '*.cubin' ! -name '*.json' -delete
	@tar cJf build/gpu-kernels.tar.xz -C $(dir $(GPU_KERNELS)) $(notdir $(GPU_KERNELS))

gpu-here:
	@[ ! -f build/gpu-kernels.tar.xz ] || [ -d $(GPU_KERNELS) ] || tar xJf build/gpu-kernels.tar.xz -C $(dir $(GPU_KERNELS))
	@$(PYTHON) -c 'import sys, torch; torch.cuda.is_available() or sys.exit("gpu-check needs a CUDA device and finds none")'
	@[ -n "$(GPU_CHECK_COMMIT)" ] || echo "no git here: set GPU_CHECK_COMMIT=<commit>, or the results will not say what they are of"

gpu-check-first: gpu-here ## of them: speed of three kernels at one size, in two minutes
	@timeout -k 10 240 $(GPU_PYTHON) -m ringattn.bench.kernels only=cudnn,descriptors,gluon tokens=8192 file=kernels_first budget_s=200

gpu-check-kernels: gpu-here ## of them: the kernels un-interpreted, by several processes, which share the compiling
	@mkdir -p build; rm -f build/gpu-part-*.log; for part in $(PARTS); do \
		timeout -k 10 460 $(GPU_TESTS) --part=$$part/$(words $(PARTS)) --session-timeout=430 -k "not compute_sanitizer" \
			tests/gpu/test_engines.py tests/gpu/test_kernels.py tests/gpu/test_gluon.py tests/gpu/test_rows.py tests/gpu/test_adapters.py \
			> build/gpu-part-$$part.log 2>&1 & started="$$started $$!"; done; \
	failed=0; for one in $$started; do wait $$one || failed=1; done; \
	cat build/gpu-part-*.log > build/gpu-kernels.log; $(call gpu-copy,build/gpu-kernels.log) \
	grep -hE "^(FAILED|ERROR)|Timeout|^=+ .*(passed|failed|error)" build/gpu-part-*.log; exit $$failed

gpu-check-sanitizer: gpu-here ## not of them, slow: one scenario of each form under compute-sanitizer
	@timeout -k 10 460 $(GPU_TESTS) --timeout=300 -k compute_sanitizer tests/gpu/test_kernels.py

gpu-check-speed: gpu-here ## of them: speed beside cuDNN and FlashAttention at 32,768 tokens, ring steps, launch costs
	@timeout -k 10 460 $(GPU_PYTHON) -m ringattn.bench.kernels

gpu-check-speed-short: gpu-here ## of them: the same at 8,192 tokens, one sequence
	@timeout -k 10 460 $(GPU_PYTHON) -m ringattn.bench.kernels total=8192 tokens=4096,8192 file=kernels_short

gpu-check-tune: gpu-here ## of them: the most promising block sizes of out and of dK and dV; nothing is written back
	@timeout -k 10 460 $(GPU_PYTHON) -m ringattn.bench.tune dims=128 forms=descriptors kernels=forward,grad_kv limit=25

gpu-check-qkv: gpu-here ## of them: the projection
	@timeout -k 10 460 $(GPU_PYTHON) -m ringattn.bench.qkv

gpu-check-nccl: gpu-here ## the two parts below: the transports, by what is cheapest first
	@failed=0; for part in alone processes; do $(MAKE) gpu-check-nccl-$$part || failed=1; done; exit $$failed

gpu-check-nccl-alone: gpu-here ## of them: the transport over real NCCL in one process
	@$(call gpu-tests,lifetimes:120 peer_driver:120 loopback:190)

gpu-check-nccl-processes: gpu-here ## of them: between processes, which may share a GPU: real NCCL, then transport=peer
	@$(call gpu-tests,processes:280 peer:180)

gpu-check-many: gpu-here ## on 2 to 8 GPUs: the five parts below, and one page of what they found
	@failed=0; for part in hops overlap ring life faults report; do \
		$(MAKE) gpu-check-many-$$part || failed=1; done; exit $$failed

gpu-check-many-hops gpu-check-many-overlap gpu-check-many-ring gpu-check-many-life gpu-check-many-report: gpu-here
	@timeout -k 10 460 $(GPU_PYTHON) -m ringattn.bench.many part=$(@:gpu-check-many-%=%)

gpu-check-many-faults: gpu-here
	@$(call gpu-tests,processes:450)

# File and seconds of each: the tests of a file end by their own limit, and do not keep those of the next from running.
gpu-tests = mkdir -p build; failed=0; for part in $(1); do name=$${part%:*}; \
		timeout -k 10 $${part\#*:} $(GPU_TESTS) tests/gpu/test_$$name.py > build/gpu-$$name.log 2>&1 || failed=1; \
		tail -n 25 build/gpu-$$name.log; $(call gpu-copy,build/gpu-$$name.log) done; exit $$failed
gpu-copy = $(if $(OUT),mkdir -p $(OUT) && cp $(1) $(OUT);)

gpu-tune: gpu-here ## find the fastest block sizes of this GPU and write them into kernels/configs.json; run it again to go on
	@timeout -k 10 460 $(GPU_PYTHON) -m ringattn.bench.tune write=true

clean: ## remove .venv and every cache
	rm -rf $(VENV) build dist outputs multirun .hypothesis .mypy_cache .pytest_cache .ruff_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
