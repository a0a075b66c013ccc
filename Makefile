# The front door: `make demo` and `make test` work from a bare Debian-like machine; `make help` lists the rest.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
BUILD := build/release
BUILD_FLAGS := -DFRETWORK_TESTS=ON -DFRETWORK_TORCH=ON -DFRETWORK_JAX=ON -DPython_EXECUTABLE=$(CURDIR)/$(PY)
# The same compiler under the same name, and paths as seen from the build folder: ccache gives the wheel what was built.
export CXX
export CCACHE_BASEDIR := $(CURDIR)
# Every test process imports torch, which takes three times as long without compiled files.
unexport PYTHONDONTWRITEBYTECODE
# The package runs from the source tree, on the libraries just built.
export PYTHONPATH := $(CURDIR)/python
export FRETWORK_LIB_DIR := $(CURDIR)/$(BUILD)/lib
# The program knows no Python environment: tell it where NVRTC lies (a folder).
export FRETWORK_NVRTC = $(shell ls -d $(CURDIR)/$(VENV)/lib/python3*/site-packages/nvidia/cu13/lib 2>/dev/null | head -1)
ACCEPT := $(wildcard ../shared/accept/test_block.py ../shared/accept/test_kronecker.py \
  ../shared/accept/test_attention.py ../shared/accept/test_two_four.py ../shared/accept/test_daily.py \
  ../shared/accept/test_device_attention.py ../shared/accept/test_models.py)
# Cases have names of their own in each process, so that two cannot share them; or they start processes themselves.
ACCEPT_ALONE := $(wildcard ../shared/accept/test_modules.py ../shared/accept/test_distributed.py)
CXX_FILES = $(shell find include src bindings tools tests examples -name '*.h' -o -name '*.cpp' -o -name '*.cuh')

.PHONY: help setup configure build demo docs wheel test lint test-cpp test-python test-sanitizers test-wheel gpu-test bench \
  format clean

help:  ## list the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

setup: $(VENV)/.installed  ## install missing Debian packages and the Python environment

$(VENV)/.installed: requirements-dev.txt scripts/bootstrap
	scripts/bootstrap $(PYTHON) $(VENV)
	@touch $@

build: configure  ## build the library, the program, the bindings and the C++ tests
	@cmake --build $(BUILD)

configure: setup
	@[ -f $(BUILD)/build.ninja ] && grep -qs FRETWORK_TESTS:BOOL=ON $(BUILD)/CMakeCache.txt \
	  || cmake --preset release $(BUILD_FLAGS)

demo: configure  ## show what Fretwork does on this machine
	@cmake --build $(BUILD) --target fretwork_program fretwork_torch fretwork_jax  # all that is installed
	@$(BUILD)/bin/fretwork info
	@$(BUILD)/bin/fretwork show 'random_blocks((1,32,32),64,0.15,7)'
	@$(BUILD)/bin/fretwork show 'strided(1024,64)'
	@$(PY) examples/demo.py

# What uses one core runs beside what uses all.
test: setup  ## everything a machine without a GPU can check
	@$(MAKE) --no-print-directory -j2 lint build
	@$(MAKE) --no-print-directory test-cpp test-python
	@$(MAKE) --no-print-directory -j2 test-sanitizers test-wheel
	@echo "all checks passed"

lint: setup
	@$(VENV)/bin/clang-format --dry-run --Werror $(CXX_FILES)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(PY) scripts/check_includes.py

# Compiled kernels of the tests stay in the build folder, so that a second run compiles none.
test-%: export FRETWORK_CACHE_DIR := $(CURDIR)/build/kernels
# What the user has tuned is not what is tested.
test-%: export FRETWORK_TUNE_DIR := $(CURDIR)/build/no-tables

test-cpp: export FRETWORK_NEEDS_NVRTC := 1
test-cpp: build  # compiles a kernel in six of each family, for sm_80 or sm_90a; with FRETWORK_ALL_KERNELS all, for both
	ctest --preset release -j2

test-python: export OMP_NUM_THREADS := 1
# Code that XLA compiles around the library's need not be fast here, and is kept: compiling it is half of these tests' time.
test-python: export XLA_FLAGS := --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true
test-python: export JAX_COMPILATION_CACHE_DIR := $(CURDIR)/build/jax
test-python: export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS := 0
test-python: export JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES := -1
test-python: build
	$(PY) -m pytest -q -n 2 tests
	$(if $(ACCEPT),$(PY) -m pytest -q -n 2 -p no:cacheprovider $(ACCEPT))
	@printf '%s\n' $(ACCEPT_ALONE) | xargs -r -P 2 -n 1 $(PY) -m pytest -q -p no:cacheprovider

test-sanitizers: setup
	@for kind in asan tsan; do \
	  [ -f build/$$kind/build.ninja ] || cmake --preset $$kind -DFRETWORK_TOOLS=OFF || exit 1; \
	done
	@cmake --build build/asan
	@cmake --build build/tsan --target runtime_cache_test runtime_plan_cache_test runtime_tuner_test
	ctest --preset asan -j2
	ctest --preset tsan -j2

test-wheel: build
	$(PY) scripts/check_wheel.py

gpu-test: build  ## the op tests on an NVIDIA GPU, with sanitizers, graphs and repeated launches
	scripts/gpu_test $(BUILD) $(PY)

# With --quiet, --strict counts no warnings.
docs: setup  ## build the documentation site into build/site; a link that leads nowhere fails
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
	@echo "open build/site/index.html, or run: python3 -m http.server -d build/site"

wheel: setup  ## build a wheel for this platform, with a manylinux tag, into dist/
	$(PY) scripts/make_wheel.py

bench: build  ## compare with torch on this machine; results go to bench/results
	$(PY) bench/compare_block.py
	$(PY) bench/compare_attention.py --quick

format: setup  ## format C++ and Python
	$(VENV)/bin/clang-format -i $(CXX_FILES)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:  ## remove what was built (keeps .venv)
	rm -rf build dist
