# Everything a user or a contributor runs. `make demo`, `make test`, `make lint`, `make bench`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# torch's CPU build is taken from what pip is configured with, else from PyTorch's index: TORCH_CPU_INDEX names another
# one, TORCH_CPU_INDEX= forbids it.
DEMO ?= work/demo
LIBRARY := kernels/glm5_kernels/libglm5_kernels.so
CPP := $(wildcard kernels/csrc/*.cpp kernels/csrc/*.h kernels/csrc/simd/*.h)

EMULATED ?= work/aarch64
# Three on two cores: a server that starts waits more than it computes.
TEST_PROCESSES ?= 3
NEWEST ?= work/newest
# `make test COVERAGE="--cov=glm5_ascend --cov=glm5_kernels"` prints it: by hand, CI has 90 minutes for all
COVERAGE ?=
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --durations=20 $(COVERAGE)

.PHONY: help kernels install-cpu install-dev constraints demo test test-all test-asan test-tsan test-contract test-aarch64 test-newest lint style bench build wheels clean

help:
	@echo "make demo         install, write the demo model, quantize it to W4A8, verify, serve, chat"
	@echo "make test         install what the tests need, check style and types, run the tests but the long ones"
	@echo "make test-all     the long tests that make test leaves out (tests/README.md names them)"
	@echo "make test-contract  the peers' real code: msModelSlim, vllm-ascend, torch_npu (installs them from PyPI)"
	@echo "make test-asan    the C++ kernels under the address and undefined behaviour sanitizers; make test-tsan: races"
	@echo "make test-newest  tests that need no vLLM, with the newest torch and transformers of PyPI, in $(NEWEST)"
	@echo "make test-aarch64 ops and quantizer as an ARM host runs them, under qemu (1.2 GB from Debian and PyPI)"
	@echo "make lint         ruff, mypy and clang-format"
	@echo "make bench        what each recipe costs in accuracy, as a table (all numbers: benchmarks/README.md)"
	@echo "make kernels      the C++ kernels of this checkout, after a change in kernels/csrc"
	@echo "make wheels       a wheel for x86-64 and one for aarch64 in dist/ (g++ and g++-aarch64-linux-gnu)"
	@echo "make install-cpu  vLLM on this CPU, in the order that works, into $(VENV)"

# One script, so that an installed wheel has it too: checks where torch's CPU build comes from, then installs the rest.
$(VENV)/.cpu: pyproject.toml setup.py deploy/install_cpu.py deploy/constraints.txt
	$(PYTHON) deploy/install_cpu.py $(VENV)
	@touch $@

$(VENV)/.dev: $(VENV)/.cpu
	$(BIN)/python -m pip install --quiet --constraint deploy/constraints.txt -e ".[dev]"
	@touch $@

# The compiled kernels of this checkout, again when a source has changed.
kernels: $(VENV)/.cpu
	@test -z "$$(find kernels/csrc -newer $(LIBRARY) -print -quit 2>&1)" || $(BIN)/python -m pip install --quiet --no-deps -e .

install-cpu: $(VENV)/.cpu

# The tested set: every version in $(VENV), which all tests have passed with; PyPI's CUDA torch wants its own triton.
constraints: $(VENV)/.dev
	@echo "# The versions the tests pass with (make constraints): pip install -c constraints.txt glm5-ascend" > deploy/constraints.txt
	$(BIN)/python -m pip freeze --exclude-editable | sed -e 's/+cpu$$//' -e '/ @ /d' -e '/^triton==/d' >> deploy/constraints.txt

install-dev: $(VENV)/.dev

demo: kernels
	$(BIN)/glm5-ascend demo $(DEMO)

# Levels; none runs what another one runs.
test: kernels lint
	$(PYTEST) -n $(TEST_PROCESSES) --dist loadfile $(PYTEST_ARGS)

test-all: kernels $(VENV)/.dev
	$(PYTEST) -n 2 --dist loadfile -m "long and not contract" $(PYTEST_ARGS)

test-contract: $(VENV)/.dev
	$(PYTEST) -m contract $(PYTEST_ARGS)

test-aarch64: $(VENV)/.dev
	EMULATED=$(EMULATED) $(PYTEST) -m aarch64 -s tests/aarch64 $(PYTEST_ARGS)

# Parts of make test-all.
test-asan: $(VENV)/.dev
	$(PYTEST) -m long -s tests/ops/test_sanitizers.py -k address

test-tsan: $(VENV)/.dev
	$(PYTEST) -m long -s tests/ops/test_sanitizers.py -k thread

# By hand: before a release, and when doctor's row "newest tried" is brought up to date.
test-newest:
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager -e ".[dev]"
	$(NEWEST)/bin/python -m pip list | grep -E "^(torch|transformers|safetensors|numpy) "
	OMP_NUM_THREADS=1 $(NEWEST)/bin/python -m pytest -n $(TEST_PROCESSES) --dist loadfile -m "not (long or contract or server)" $(PYTEST_ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file benchmarks/mypy.ini benchmarks/*.py benchmarks/peers/*.py benchmarks/tools/*.py
	$(BIN)/clang-format --dry-run --Werror $(CPP)

style: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(CPP)

bench: kernels
	OMP_NUM_THREADS=2 $(BIN)/python benchmarks/report_fidelity.py

build: $(VENV)/.dev
	$(BIN)/python -m build

# A wheel holds no Python of its own: one for each architecture.
wheels: $(VENV)/.dev
	$(BIN)/python setup.py --quiet build --build-base=build/x86_64 bdist_wheel --plat-name manylinux_2_28_x86_64
	CMAKE_TOOLCHAIN_FILE=$(CURDIR)/kernels/csrc/aarch64.cmake $(BIN)/python setup.py --quiet \
		build --build-base=build/aarch64 bdist_wheel --plat-name manylinux_2_28_aarch64

clean:
	rm -rf work build dist *.egg-info
