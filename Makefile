# make demo and make test are all a new user needs; `make help` lists the rest.
PYTHON ?= python3
VENV ?= .venv
PY = $(VENV)/bin/python
PYTEST = $(PY) -m pytest
# Tests at once: each worker takes a core and up to 3 GB.
WORKERS ?= 3
PARALLEL = -n $(WORKERS)
# Tests start hundreds of processes; without bytecode on disk each of them compiles flexkv's modules again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo demo-blend test preflight preflight-test env env-test env-sglang env-vllm33 build build-test lint format check test-unit \
        test-native test-sanitizers test-engines test-sglang test-vllm33 sglang-if-it-can-be-had \
        vllm33-if-it-can-be-had steady soak bench docs clean distclean

help:  ## this list
	@awk -F ':.*##' '/^[a-z-]+:.*##/ { printf "make %-16s%s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: build  ## the real vLLM engine with flexkv: a table, a PNG, and a check of every token
	$(PY) -m demo

demo-blend: build  ## four documents in another order, blended inside vLLM: time and agreement beside the full computation
	$(PY) -m demo.blend

# The core is compiled beside pip, which takes one core of the machine.
test:  ## all tests but those marked `long`; the last line is pytest's summary
	@$(MAKE) --no-print-directory -j 2 build-test sglang-if-it-can-be-had vllm33-if-it-can-be-had
	@$(PYTEST) $(PARALLEL)

# Without SGLang's wheels its tests fail and say why, without vLLM 0.33's they are skipped; the others are run all the same.
sglang-if-it-can-be-had: preflight-test
	@$(PYTHON) -m build_support.sglang_environment || true

vllm33-if-it-can-be-had: env-test
	@$(PY) -m build_support.vllm33_environment || true

preflight:
	@$(PYTHON) -m build_support.preflight build

preflight-test:
	@$(PYTHON) -m build_support.preflight test

env: preflight  ## the virtual environment (again quick when nothing changed)
	@$(PYTHON) -m build_support.environment $(VENV)

env-test: preflight-test  ## the same, with what tests and lints
	@$(PYTHON) -m build_support.environment $(VENV) --tests

env-sglang: preflight  ## the second environment, for the tests with the real SGLang
	@$(PYTHON) -m build_support.sglang_environment

env-vllm33: env-test  ## the Python of vLLM 0.33, for the tests that run it on a mocked CUDA
	@$(PY) -m build_support.vllm33_environment

BUILD = $(PY) setup.py --quiet build_ext --inplace
build: env  ## the native core, in place
	@$(BUILD)

build-test: env-test
	@$(BUILD)

lint: env-test  ## ruff, mypy, clang-format
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m build_support.cxx_format --check

format: env-test  ## formats Python and C++
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(PY) -m build_support.cxx_format

# Files that run in seconds and touch every part: layouts, settings, keys, lookups, tiers, lanes, import rules, docs.
QUICK = $(addprefix tests/unit/,layout observe config/test_load_config.py build/test_import_rules.py build/test_readme.py \
        build/test_generated_docs.py \
        $(addprefix cache/test_,keys.py lookup.py manager.py host_loads.py host_stores.py tier_seam.py) \
        $(addprefix transfer/test_engine_,submit.py waits.py))
check: build-test lint  ## lint and the quick unit tests, in less than a minute once all is built
	@$(PYTEST) -q -m "not soak and not long" $(QUICK)

test-unit: build-test  ## Python unit tests
	@$(PYTEST) tests/unit

test-native: build-test  ## C++ tests; some of them: make test-native CASE='*staging*'
ifdef CASE
	@$(PY) -m tests.native.run --case '$(CASE)'
else
	@$(PYTEST) -m long tests/native
endif

test-sanitizers: build-test  ## C++ and Python tests under ASan+UBSan and TSan
	@$(PYTEST) -m "" tests/sanitizers

test-engines: build-test  ## tests with the real vLLM engine
	@$(PYTEST) tests/engines

test-sglang: build-test env-sglang  ## tests with the real SGLang engine
	@$(PYTEST) tests/engines_sglang

test-vllm33: build-test env-vllm33  ## tests with the Python of vLLM 0.33 on a mocked CUDA, long ones too
	@$(PYTEST) -m "" tests/engines_vllm33

steady: build-test  ## repeats test files under load, an hour a call: make steady FILES="tests/unit/storage"
	@$(PY) -m tests.steady $(FILES)

soak: build-test env-sglang vllm33-if-it-can-be-had  ## simulation, stress, fuzz, flipped bits, engine pressure, kills, power cuts, 5 times as long (or FLEXKV_SOAK); long tests
	@FLEXKV_SOAK=$${FLEXKV_SOAK:-5} $(PYTEST) $(PARALLEL) -m "soak or long" --timeout 14400

# Every program in benchmarks/ takes --json, but for gpu_results, which writes a page and wants a GPU, those that want a
# trace, vllm_beside_engine, which another program starts, and live_peers, peer_ttft and blend_disk, which print few figures.
BENCHMARKS = $(filter-out gpu_results eviction window_eviction vllm_beside_engine live_peers peer_ttft blend_disk,$(basename $(notdir $(shell grep -l __main__ benchmarks/*.py))))
bench: build env-sglang  ## all benchmarks: tables, and JSON in out/
	@mkdir -p out
	@set -e; for name in $(BENCHMARKS); do echo "== $$name"; $(PY) -m benchmarks.$$name --json out/$$name.json; done

docs: build-test  ## the tables in docs/ that come from the code: settings, metrics, identity, requests, names of vLLM
	@$(PY) -m build_support.doc_tables

clean:  ## what the build made
	rm -rf build dist out *.egg-info flexkv/*.so tests/*.so

distclean: clean  ## and the environment
	rm -rf $(VENV) .venv-sglang .venv-vllm33
