PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DOCS_READY := $(VENV)/.docs-ready
OVERRIDES ?=

.DEFAULT_GOAL := help

.PHONY: help train serve study bench test coverage test-slow test-gpu lint pages docs build tensorboard clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort | awk -F'\t' '{printf "  make %-12s %s\n", $$1, $$2}'

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "nmt needs Python 3.11 or newer: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	awk '/^setuptools==/, !/\\$$/' constraints.txt | $(BIN)/pip install --quiet --require-hashes --no-deps -r /dev/stdin
	grep -v '^torch==' constraints.txt | $(BIN)/pip install --quiet --require-hashes --no-deps --no-build-isolation -r /dev/stdin
	$(BIN)/pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	$(BIN)/pip check
	@touch $@

train: $(READY)  ## train, evaluate and draw alignments on the built-in demo corpus (OVERRIDES="attention=luong_dot")
	@$(BIN)/nmt-train $(OVERRIDES)

study: $(READY)  ## compare kinds of attention on the demo corpus: a sweep with two jobs at a time, a table and a page
	@$(BIN)/nmt-train experiment=attention_study hydra/launcher=parallel $(OVERRIDES)

bench: $(READY)  ## time training and decoding on the demo corpus (OVERRIDES="--presets attention=luong_concat")
	@$(BIN)/python scripts/benchmark.py $(OVERRIDES)

test: $(READY)  ## run the tests
	@$(BIN)/pytest -n auto --dist worksteal

coverage: $(READY)  ## run the tests with coverage, which must reach 90 %
	@$(BIN)/pytest -n auto --dist worksteal --cov --cov-report=term --cov-fail-under=90

test-slow: $(READY)  ## run the long tests that `make test` leaves out: kills, full products, every page's commands
	@$(BIN)/pytest -n auto --dist worksteal -m slow

test-gpu: $(READY)  ## run the tests that need a CUDA GPU
	@$(BIN)/pytest -n auto --dist worksteal -m gpu

lint: $(READY)  ## ruff and mypy
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

$(DOCS_READY): $(READY) docs/constraints.txt
	$(BIN)/pip install --quiet --require-hashes --no-deps -r docs/constraints.txt
	@touch $@

pages: $(READY)  ## write the generated tables of the documentation: the configuration reference, the parts of each preset
	@$(BIN)/python scripts/write_pages.py

docs: $(DOCS_READY)  ## build the documentation into build/site; a broken link fails
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html"

build: $(READY)  ## build the wheel and the source archive into dist/
	@$(BIN)/python -m build --no-isolation

serve: $(READY)  ## open the page and the service of the last `make train`, or of the model that comes with nmt (OVERRIDES="port=9000")
	@run=$$(ls -td outputs/train/*/*/ 2>/dev/null | while read -r path; do [ -f "$$path/checkpoints/best.safetensors" ] && echo "$$path" && break; done); \
	exec $(BIN)/nmt-serve run="$${run:-demo}" $(OVERRIDES)

tensorboard: $(READY)  ## open TensorBoard on everything under outputs/ (this machine only)
	@$(BIN)/tensorboard --logdir outputs --host localhost

clean:  ## remove build products and caches (keeps outputs/)
	rm -rf dist build .pytest_cache .mypy_cache .ruff_cache .coverage .coverage.*
	find nmt tests -name __pycache__ -type d -prune -exec rm -rf {} +
