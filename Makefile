# Everything runs in .venv, which is made with the first Python >= 3.12 found here:
# on PATH, or among pyenv's versions. Another one: make PYTHON=/path/to/python test
PYTHON ?= $(shell for p in python3.12 python3 python3.13 \
	$$(ls -d "$$(pyenv root 2>/dev/null)"/versions/3.1[2-9]*/bin/python3 2>/dev/null); do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && echo "$$p" && break; done)
BIN := .venv/bin
.DELETE_ON_ERROR:

.PHONY: demo test bench lint format clean

demo: .venv/.installed  ## answer a question with DFlash, and compare with plain decoding
	@$(BIN)/python examples/generate.py --compare

test: .venv/.installed-dev  ## all tests, real components only
	@$(BIN)/python -m pytest

bench: .venv/.installed-dev  ## the figures of the README, on this machine
	@$(BIN)/python scripts/benchmark.py

lint: .venv/.installed-dev  ## everything CI checks besides the tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	PYTHONPATH=. $(BIN)/lint-imports

format: .venv/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "Python 3.12 or newer is needed; none was found."; \
		echo "Install one, or name it: make PYTHON=/path/to/python3.12 demo"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip

.venv/.installed: .venv/bin/python pyproject.toml
	@echo "Installing into .venv (the first time: several minutes, about 6 GB, mostly torch)"
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

.venv/.installed-dev: .venv/.installed pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@
