# Everything runs in .venv, which is made with the first Python >= 3.12 found here:
# on PATH, or among pyenv's versions. Another one: make PYTHON=/path/to/python test
PYTHON ?= $(shell for p in python3.12 python3 python3.13 \
	$$(ls -d "$$(pyenv root 2>/dev/null)"/versions/3.1[2-9]*/bin/python3 2>/dev/null); do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && echo "$$p" && break; done)
BIN := .venv/bin
# vLLM wants other versions (of torch, among others), so it has an environment of its own.
SERVING := .venv-serving/bin
# Compiling keeps one core busy, so two files are tested at a time.
TWICE := -n 2 --dist loadfile
.DELETE_ON_ERROR:

.PHONY: demo test test-slow test-all test-serving serve train bench picture docs lint format clean help

demo: .venv/.installed-demo  ## answer a question with DFlash, and compare with plain decoding
	@$(BIN)/torchax-dflash generate --compare

test: .venv/.installed-dev  ## the tests of everything but serving, without the slow ones
	@$(BIN)/python -m pytest -m 'not vllm and not slow' $(TWICE)

test-slow: .venv/.installed-dev  ## those that `make test` leaves out because they take long
	@$(BIN)/python -m pytest -m 'not vllm and slow' $(TWICE)

test-all: test test-slow  ## both

test-serving: .venv-serving/.installed  ## the tests of serving, on the real vLLM
	@$(SERVING)/python -m pytest -m vllm $(TWICE) tests/serving

serve: .venv-serving/.installed  ## an OpenAI-compatible server with the demo pair, on this CPU
	@target=$$($(SERVING)/python -c 'import torchax_dflash as t; print(t.demo_target())') && \
	JAX_PLATFORMS=cpu MODEL_IMPL_TYPE=vllm \
	SKIP_JAX_PRECOMPILE=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 \
	$(SERVING)/vllm serve "$$target" --served-model-name smollm2 --dtype float32 \
		--host 127.0.0.1 --port 8000 --max-model-len 1024 --max-num-seqs 4 \
		--max-num-batched-tokens 128 --speculative-config \
		'{"method": "dflash", "model": "examples/smollm2-135m-dflash", "num_speculative_tokens": 3}'

TRAIN := $(BIN)/torchax-dflash train
RUN := runs/SmolLM2-135M-Instruct/run
train: .venv/.installed-demo,train  ## train the demo draft further, for hours; after Ctrl-C, again to go on
	$(TRAIN) generate --store-features
	$(TRAIN) run
	$(TRAIN) evaluate --draft $(RUN)/draft --run $(RUN)

bench: .venv/.installed-dev  ## the figures of the README, on this machine
	@$(BIN)/python scripts/benchmark.py

picture: .venv/.installed-demo  ## docs/demo.svg: what `make demo` shows
	$(BIN)/python scripts/demo_picture.py

docs: .venv/.installed-docs  ## the documentation, into build/site
	$(BIN)/mkdocs build --strict

lint: .venv/.installed-dev  ## everything CI checks besides tests and documentation
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	PYTHONPATH=. $(BIN)/lint-imports

format: .venv/.installed-dev  ## what ruff can put right
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove both environments and what was built
	rm -rf .venv .venv-serving build dist

help:  ## these lines
	@awk -F ':.*  ## ' '/^[a-z-]+:.*  ## / { printf "make %-14s%s\n", $$1, $$2 }' Makefile

.venv/bin/python .venv-serving/bin/python:
	@test -n "$(PYTHON)" || { echo "Python 3.12 or newer is needed; none was found."; \
		echo "Install one, or name it: make PYTHON=/path/to/python3.12 demo"; exit 1; }
	$(PYTHON) -m venv $(@D)/..
	$@ -m pip install --quiet --upgrade pip

.venv/.installed-%: .venv/bin/python pyproject.toml
	@echo "Installing into .venv (the first time: several minutes, about 6 GB, mostly torch)"
	$(BIN)/python -m pip install --quiet --editable '.[$*]'
	@touch $@

.venv-serving/.installed: .venv-serving/bin/python pyproject.toml
	@echo "Installing vLLM into .venv-serving (the first time: several minutes, about 11 GB)"
	$(SERVING)/python -m pip install --quiet --editable '.[vllm,demo]' pytest pytest-timeout pytest-xdist
	@touch $@
