# Every command of the project; `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
OUT ?= out
DEMO := $(OUT)/demo-cpu

.PHONY: help setup check test demo bless budgets bless-budgets size bench docs clean

help: ## list the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMP) ## make .venv with everything that compiling and testing need

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info[:2] == (3, 11) else "k3c needs Python 3.11, found %d.%d; set PYTHON=python3.11" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[cpu,gpu,dev]'
	@touch $@

check: setup ## format, lint, types, import contracts, spelling
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/pyright
	$(BIN)/codespell

test: setup ## the default test suite, on two processes
	$(BIN)/python -m pytest -n 2 --dist loadfile

demo: setup ## compile models/k3-demo for this CPU and stream a completion
	@mkdir -p $(OUT)
	@test -d $(DEMO) || $(BIN)/k3c compile models/k3-demo --target cpu -o $(DEMO)
	$(BIN)/k3c generate $(DEMO) --prompt 'def add(a, b):' --max-tokens 64

bless: setup ## rewrite the expected part of one pass case: make bless CASE=tests/passes/...k3t
	K3C_BLESS=$(CASE) $(BIN)/python -m pytest tests/passes -k cases

budgets: setup ## compare the numbers of every plan with what was agreed (perf/budgets)
	$(BIN)/python perf/budgets.py

bless-budgets: setup ## agree to moved numbers of plans: make bless-budgets WHY="one launch less a layer"
	$(BIN)/python perf/budgets.py --bless "$(WHY)"

size: setup ## files and lines by folder, largest file and function
	$(BIN)/python tests/support/size_table.py

bench: setup ## compile the mini configuration and measure it against the floor and the reference
	$(BIN)/python perf/bench_mini.py

docs: ## the reading path
	@cat docs/tour.md

clean: ## remove build products, not the environment
	rm -rf $(OUT) build dist *.egg-info
