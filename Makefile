# `make help` lists the commands.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
BENCH_STAMP := .venv/.bench-installed

.DEFAULT_GOAL := help
.PHONY: help setup up down test test-mine check golden bench chaos image-test lock tools clean

help:  ## List the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(STAMP)  ## Prepare .venv; the other commands run it first if needed

$(STAMP): requirements-dev.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Flotilla needs Python 3.11 or newer, and $(PYTHON) is older: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements-dev.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-index --no-build-isolation -e .
	@touch $(STAMP)

up: setup  ## Start three instances on ports 8000-8002, on the embedded PostgreSQL
	$(BIN)/flotilla up --instances 3

down: setup  ## Stop these instances and the embedded PostgreSQL
	$(BIN)/flotilla down

# More workers than cores, because tests mostly wait: for timers, for leases, and for processes to start.
test: setup tools $(if $(CI),$(BENCH_STAMP))  ## Run all tests
	$(BIN)/python -m pytest --numprocesses 8

test-mine: setup  ## Run the tests of your own code only: tests/mine
	$(BIN)/python -m pytest -q tests/mine

check: setup  ## Format, lint, types, import contract, documentation, model-migration drift
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	cd alembic && ../$(BIN)/mypy --config-file ../pyproject.toml env.py versions/fleet versions/app
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/unit/test_documentation.py tests/integration/test_migrations.py

golden: setup  ## Write the golden files of the SQL statements again, after an intended change
	$(BIN)/python -m app.fleet.sql --write tests/golden

bench: $(BENCH_STAMP)  ## Run all benchmarks, compare with the peers, and print the figures (half an hour)
	$(BIN)/python -m benchmarks

# The peers for the benchmarks; nothing else needs them.
$(BENCH_STAMP): requirements-bench.lock $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements-bench.lock
	@touch $(BENCH_STAMP)

chaos: setup  ## Kill, freeze and disconnect lock holders, break connections (15 minutes), and check the effects
	$(BIN)/python -m tests.chaos exclusion
	$(BIN)/python -m tests.chaos attrition

image-test: setup  ## Build the Dockerfile without a container engine, and serve from the image (needs root)
	scripts/image-test

tools: setup  ## Install the programs that some tests need (HAProxy, PgBouncer, …), where that is possible
	@scripts/tools

lock: setup  ## Resolve the dependencies again, and write the lock files with hashes
	$(BIN)/uv pip compile pyproject.toml --quiet --upgrade --universal --python-version 3.11 --generate-hashes \
	  --no-emit-index-url --no-header --output-file requirements.lock
	$(BIN)/uv pip compile pyproject.toml --quiet --upgrade --universal --python-version 3.11 --generate-hashes \
	  --no-emit-index-url --no-header --group dev --constraint requirements.lock --output-file requirements-dev.lock
	$(BIN)/uv pip compile pyproject.toml --quiet --upgrade --universal --python-version 3.11 --generate-hashes \
	  --no-emit-index-url --no-header --group bench --constraint requirements-dev.lock \
	  --output-file requirements-bench.lock

clean: down  ## Stop everything, and remove all generated files
	rm -rf .venv .flotilla
