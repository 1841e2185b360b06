# Everything is set up in .venv, on a machine that has Python >= 3.11 and pip; `make` lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The number of processes that run the tests: one more than two cores, because many tests wait for deadlines or for
# ranks. Three processes took 7 min 49 s, two took 8 min 20 s and 8 min 38 s.
WORKERS ?= 3

.DEFAULT_GOAL := help
.PHONY: help setup test test-rest test-all hosts prove durations lint docs demo bench gpu-here gpu-first gpu-compile gpu-tune clean \
	gpu-check-launches gpu-check-environment gpu-check-first gpu-check-kernels gpu-check-nccl-alone gpu-check-speed gpu-check-ncu \
	gpu-check-nccl-processes gpu-check-speed-short gpu-check-speed-all gpu-check-sanitizer gpu-check-tune gpu-check-qkv \
	gpu-check-many gpu-check-many-hops gpu-check-many-overlap gpu-check-many-ring gpu-check-many-life gpu-check-many-faults \
	gpu-check-many-report

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

hosts: $(STAMP) ## run the adapters with every version of their hosts and write docs/host-versions.md, 80 minutes
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
# them and its logs to the folder OUT if it is set; without it, logs are in build.
# The folder of compiled kernels is the same on every machine, because Triton stores absolute paths in it.
GPU_KERNELS := /tmp/ringattn-gpu-kernels
GPU_LOGS = $(or $(OUT),build)
GPU_PYTHON = env PYTHONUNBUFFERED=1 COLUMNS=200 GPU_CHECK_COPY=$(OUT) PYTHONPATH=. TRITON_CACHE_DIR=$(GPU_KERNELS) $(PYTHON)
GPU_FIRST := launches environment first kernels nccl-alone speed ncu nccl-processes speed-short
export GPU_CHECK_COMMIT ?= $(shell git rev-parse --short HEAD 2>/dev/null)

# gpu-start starts a command in the background: log, seconds, command. gpu-tests starts pytest: log, seconds, arguments.
# gpu-share shares tests between processes: log, seconds, processes, arguments. gpu-wait waits for all of them.
gpu-start = timeout -k 10 $(2) $(3) > $(GPU_LOGS)/gpu-$(1).log 2>&1 & started="$$started $$!"; logs="$$logs $(GPU_LOGS)/gpu-$(1).log";
gpu-tests = $(call gpu-start,$(1),$(2),$(GPU_PYTHON) -m tests.gpu.restarts build/gpu-$(1).started -v -m gpu -p no:cacheprovider \
	--tb=short --durations=5 $(3))
gpu-share = for share in $$(seq $(3)); do $(call gpu-tests,$(1)-$$share,$(2),--part=$$share/$(3) $(4)) done;
gpu-wait = failed=0; for process in $$started; do wait $$process || failed=1; done; \
	grep -hE "^(FAILED|ERROR|HUNG)|relative errors|Timeout|^=+ .*(passed|failed|error)" $$logs; [ $$failed = 0 ]
gpu-begin = mkdir -p build $(GPU_LOGS); started=; logs=

# The results are packed again every ten seconds, because the command may be cut off, and OUT may take few files only.
gpu-pack = tar czf build/gpu-first.new -C build gpu-first 2>/dev/null; mv build/gpu-first.new $(GPU_LOGS)/gpu-first.tar.gz;

gpu-first: gpu-here ## run what matters most on a GPU machine lent for minutes; GPU_FIRST="speed ncu" selects parts
	@rm -rf build/gpu-first; mkdir -p build/gpu-first $(OUT); start=$$(date +%s); failed=0; \
	( while sleep 10; do $(gpu-pack) done ) > /dev/null 2>&1 & packer=$$!; \
	for part in $(GPU_FIRST); do \
		echo "[$$(( $$(date +%s) - start )) s] $$part"; \
		$(MAKE) --no-print-directory gpu-check-$$part OUT=build/gpu-first || failed=1; done; \
	kill $$packer; wait $$packer 2>/dev/null; $(gpu-pack) echo "[$$(( $$(date +%s) - start )) s] end"; exit $$failed

gpu-compile: ## compile the kernels of the GPU tests without a GPU, into build/gpu-kernels.tar.xz, which gpu-here unpacks
	@mkdir -p build && rm -rf $(GPU_KERNELS)
	@timeout -k 10 460 $(GPU_PYTHON) -m pytest -q -n 2 -p tests.gpu.compiling -p no:cacheprovider -m gpu -k "not sanitizer and not graphs and not workspace" \
		tests/gpu/test_first_launches.py tests/gpu/test_engines.py tests/gpu/test_kernels.py tests/gpu/test_gluon.py tests/gpu/test_rows.py
	@find $(GPU_KERNELS) -type f ! -name '*.cubin' ! -name '*.json' -delete
	@tar cJf build/gpu-kernels.tar.xz -C $(dir $(GPU_KERNELS)) $(notdir $(GPU_KERNELS))

gpu-here:
	@[ ! -f build/gpu-kernels.tar.xz ] || [ -d $(GPU_KERNELS) ] || tar xJf build/gpu-kernels.tar.xz -C $(dir $(GPU_KERNELS))
	@$(PYTHON) -c 'import sys, torch; torch.cuda.is_available() or sys.exit("the GPU checks need a CUDA device, and torch finds none")'
	@[ -n "$(GPU_CHECK_COMMIT)" ] || echo "no git: set GPU_CHECK_COMMIT=<commit>, or the results do not name their commit"

gpu-check-launches: gpu-here ## part of gpu-first: one launch of each kernel, in a process each
	@$(gpu-begin); $(call gpu-start,launches,45,$(GPU_PYTHON) -m tests.gpu.first_launches) $(gpu-wait)

gpu-check-environment: gpu-here ## part of gpu-first: the doctor, and the plugins of pytest
	@$(gpu-begin); $(call gpu-start,doctor,40,$(GPU_PYTHON) -m ringattn doctor) \
	$(call gpu-start,plugins,40,$(GPU_PYTHON) -m pytest -VV) $(gpu-wait); status=$$?; cat $$logs; exit $$status

gpu-check-first: gpu-here ## part of gpu-first: the speed of three kernels at one size
	@timeout -k 10 100 $(GPU_PYTHON) -m ringattn.bench.kernels only=cudnn,descriptors,gluon tokens=8192 file=kernels_first \
		budget_s=85 limit_s=30

gpu-check-kernels: gpu-here ## part of gpu-first: the compiled kernels, tested by 14 processes, Gluon's by two of them
	@$(gpu-begin); $(call gpu-share,kernels,170,12,-k "not compute_sanitizer" \
		tests/gpu/test_engines.py tests/gpu/test_kernels.py tests/gpu/test_rows.py tests/gpu/test_adapters.py) \
	$(call gpu-share,gluon,170,2,--limit=40 tests/gpu/test_first_launches.py tests/gpu/test_gluon.py) $(gpu-wait)

gpu-check-sanitizer: gpu-here ## not in gpu-first, slow: one scenario of each kernel form under compute-sanitizer
	@$(gpu-begin); $(call gpu-tests,sanitizer,460,--limit=300 -k compute_sanitizer tests/gpu/test_kernels.py) $(gpu-wait)

gpu-check-speed: gpu-here ## part of gpu-first: speed compared with cuDNN and FlashAttention 3 at 32,768 tokens, ring steps, launch costs
	@timeout -k 10 180 $(GPU_PYTHON) -m ringattn.bench.kernels only=cudnn,gluon,fa3,descriptors budget_s=165 limit_s=30

gpu-check-speed-short: gpu-here ## part of gpu-first: the same at 8,192 tokens, one sequence
	@timeout -k 10 120 $(GPU_PYTHON) -m ringattn.bench.kernels only=cudnn,gluon,fa3,descriptors total=8192 tokens=4096,8192 \
		file=kernels_short budget_s=105 limit_s=30

gpu-check-speed-all: gpu-here ## not in gpu-first: the speed of every implementation
	@timeout -k 10 460 $(GPU_PYTHON) -m ringattn.bench.kernels

# One after the other, because two profiled processes would share the GPU.
gpu-check-ncu: gpu-here ## part of gpu-first: hardware counters of two Gluon kernels, 8,192 tokens
	@$(gpu-begin); failed=0; for kernel in forward grad_kv; do \
		$(call gpu-start,ncu-$$kernel,60,ncu --clock-control none --section SpeedOfLight --section ComputeWorkloadAnalysis \
			--section WarpStateStats --section Occupancy --section LaunchStats -k regex:$${kernel}_kernel -c 1 \
			$(GPU_PYTHON) -m tests.gpu.first_launches gluon/$$kernel/128 tokens=8192) \
		wait $$started || failed=1; tail -n 60 $$logs; started=; logs=; done; exit $$failed

gpu-check-tune: gpu-here ## not in gpu-first: the most promising block sizes of forward and of dK, dV; writes no file
	@timeout -k 10 460 $(GPU_PYTHON) -m ringattn.bench.tune dims=128 forms=descriptors kernels=forward,grad_kv limit=25

gpu-check-qkv: gpu-here ## not in gpu-first: the QKV projection
	@timeout -k 10 460 $(GPU_PYTHON) -m ringattn.bench.qkv

# These tests need the GPU alone.
gpu-check-nccl-alone: gpu-here ## part of gpu-first: real NCCL in one process
	@failed=0; for name in lifetimes peer_driver loopback; do \
		( $(gpu-begin); $(call gpu-tests,$$name,100,tests/gpu/test_$$name.py) $(gpu-wait) ) || failed=1; done; exit $$failed

# Tests of lost ranks measure deadlines, so fewer processes share the GPU. Captures are the most likely to hang.
gpu-check-nccl-processes: gpu-here ## part of gpu-first: NCCL and transport=peer between processes that may share a GPU
	@failed=0; \
	( $(gpu-begin); $(call gpu-share,processes,200,3,-k "not lost and not abort and not capture" \
		tests/gpu/test_processes.py tests/gpu/test_peer.py) $(gpu-wait) ) || failed=1; \
	( $(gpu-begin); $(call gpu-share,faults,150,2,-k "lost or abort" \
		tests/gpu/test_processes.py tests/gpu/test_peer.py) $(gpu-wait) ) || failed=1; \
	( $(gpu-begin); $(call gpu-tests,captures,90,-k "capture and not lost and not abort" \
		tests/gpu/test_processes.py tests/gpu/test_peer.py) $(gpu-wait) ) || failed=1; exit $$failed

gpu-check-many: gpu-here ## on 2 to 8 GPUs: the five parts below, and a page of the results
	@failed=0; for part in hops overlap ring life faults report; do \
		$(MAKE) gpu-check-many-$$part || failed=1; done; exit $$failed

gpu-check-many-hops gpu-check-many-overlap gpu-check-many-ring gpu-check-many-life gpu-check-many-report: gpu-here
	@timeout -k 10 460 $(GPU_PYTHON) -m ringattn.bench.many part=$(@:gpu-check-many-%=%)

gpu-check-many-faults: gpu-here
	@$(gpu-begin); $(call gpu-tests,processes,450,tests/gpu/test_processes.py) $(gpu-wait)

gpu-tune: gpu-here ## find the fastest block sizes of this GPU and write kernels/configs.json; run again to continue
	@timeout -k 10 460 $(GPU_PYTHON) -m ringattn.bench.tune write=true

clean: ## remove .venv and every cache
	rm -rf $(VENV) build dist outputs multirun .hypothesis .mypy_cache .pytest_cache .ruff_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
