# Two commands do everything on a fresh machine: `make demo` and `make test`.
# Each makes .venv and installs what it needs on its first call; nothing else is touched.

PYTHON ?= python3
# A release of megatron-core, as '0.19.*', in an environment of its own; else the newest that goes
# with the interpreter: from 0.17 on it needs Python 3.12.
MCORE ?=
VENV := .venv$(if $(MCORE),-megatron-core-$(patsubst %.*,%,$(MCORE)))
BIN := $(VENV)/bin
# The newest whose triton is that of the extra `test`, which pyproject.toml says more about.
# Named like this, pip takes its build for CPUs, 2.13.0+cpu, where any index offers one.
TORCH := torch==2.13.0

# Tests and demo start many processes, each of which would otherwise compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

# One more than the cores, since tests that start processes wait for them; at most four.
WORKERS = $(shell $(PYTHON) -c "import os; print(min(4, 1 + (os.cpu_count() or 1)))")

.PHONY: demo test lint docs bench-gpu rehearse-gpu clean

demo: $(VENV)/.ready
	@echo "==> demo: three short training runs, about four minutes on 2 CPU cores; see runs/demo"
	@$(BIN)/python -m megatron_ext demo

test: $(VENV)/.ready
	@echo "==> test: the whole suite, on all cores"
	@$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

# The GPU's machine may have torch and triton of its own and no network: .venv is used if it is there.
bench-gpu:
	@echo "==> bench-gpu: the kernels' tests and what they cost, within ten minutes"
	@$(if $(wildcard $(VENV)/.ready),$(BIN)/python,$(PYTHON)) benchmarks/gpu.py

# No GPU is needed: triton compiles for those that it is told of, and tests pretend that there is one.
rehearse-gpu: $(VENV)/.ready
	@echo "==> rehearse-gpu: every kernel compiled for sm_80, sm_90a and sm_100a, within its bounds"
	@$(BIN)/python benchmarks/kernel_code.py --output benchmarks/results/kernel_code.json
	@echo "==> rehearse-gpu: the kernels' tests on what is compiled, by a machine for PTX"
	@for arch in 80 90 100; do MEGATRON_EXT_PTX=$$arch $(BIN)/python -m pytest tests/ops \
	  tests/losses/checks tests/distributed/test_*shard*.py -k "not (cpu or compile)" || exit 1; done
	@echo "==> rehearse-gpu: every objective and every kind of run on a GPU that is not there"
	@MEGATRON_EXT_ALL_TEXT=1 $(BIN)/python -m pytest tests/rehearsal

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@$(MAKE) --no-print-directory $(VENV)/.resolves

docs: $(VENV)/.dev
	@echo "==> docs: the site of the documentation; see build/site/index.html, or mkdocs serve"
	@$(BIN)/python -m mkdocs build --strict --quiet

# The machine's pip brings the first one into the environment: Debian's Python has no ensurepip until
# python3-venv is there, and the pip of Ubuntu 22.04 cannot install for another interpreter.
$(VENV)/.ready: pyproject.toml
	@echo "==> installing into $(VENV)"
	@$(PYTHON) -m venv --without-pip $(VENV)
	@$(PYTHON) -m pip install --quiet --upgrade pip \
	  --target "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	@echo "==> downloading $(TORCH): with CUDA, as PyPI has it for Linux, 2.7 GB; for CPUs alone,"
	@echo "    where pip is offered that (see CONTRIBUTING.md), 0.2 GB; then 0.4 GB of other packages"
	@$(BIN)/python -m pip install "$(TORCH)"
	@$(BIN)/python -m pip install --quiet --editable ".[test]" $(if $(MCORE),"megatron-core==$(MCORE)")
	@touch $@

$(VENV)/.dev: $(VENV)/.ready
	@$(BIN)/python -m pip install --quiet --editable ".[dev]"
	@touch $@

# Minutes of questions to the index, so asked again only where something else is installed.
$(VENV)/.resolves: pyproject.toml Makefile .ci/check_install.py
	@echo "==> asking the public index for every extra, and for what make installs"
	@$(BIN)/python .ci/check_install.py "$(TORCH) .[test]" "$(TORCH) .[dev]"
	@touch $@

clean:
	rm -rf .venv .venv-* runs
