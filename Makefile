# Two commands do everything on a fresh machine: `make demo` and `make test`.
# Each makes .venv and installs what it needs on its first call; nothing else is touched.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0
TRITON := triton==3.6.0

.PHONY: demo test lint bench-gpu clean

demo: $(VENV)/.ready
	@echo "==> demo: three short training runs, about nine minutes on 2 CPU cores; see runs/demo"
	@$(BIN)/python examples/demo/run.py

test: $(VENV)/.ready
	@echo "==> test: the whole suite, on all cores"
	@$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

# The GPU's machine may have torch and triton of its own and no network: .venv is used if it is there.
bench-gpu:
	@echo "==> bench-gpu: the kernels' tests and what they cost, within ten minutes"
	@$(if $(wildcard $(VENV)/.ready),$(BIN)/python,$(PYTHON)) benchmarks/gpu.py

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The machine's pip fills the environment: Debian's Python has no ensurepip until python3-venv is
# there. torch comes first and pinned, so that no other package chooses a larger build of it.
$(VENV)/.ready: pyproject.toml
	@echo "==> installing into $(VENV)"
	@$(PYTHON) -m venv --without-pip $(VENV)
	@$(PYTHON) -m pip --python $(BIN)/python install --quiet --upgrade pip
	@$(BIN)/python -m pip install --quiet "$(TORCH)" "$(TRITON)"
	@$(BIN)/python -m pip install --quiet --editable ".[test]"
	@touch $@

$(VENV)/.dev: $(VENV)/.ready
	@$(BIN)/python -m pip install --quiet --editable ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) runs
