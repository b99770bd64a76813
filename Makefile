# `make help` lists the commands.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
BENCH_STAMP := .venv/.bench-installed

# The parts of `make check`. The hooks of `.pre-commit-config.yaml` are the same.
CHECKS := format lint types imports locks documentation

.DEFAULT_GOAL := help
.PHONY: help setup up down test test-mine check $(CHECKS:%=check-%) hooks golden bench chaos image-test lock upgrade \
  tools clean

help:  ## List the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(STAMP)  ## Prepare .venv; the other commands run it first if needed

define create_venv
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Flotilla needs Python 3.11 or newer, and $(PYTHON) is older: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
endef

define install
	@test -x $(BIN)/pytest || echo "Installing the packages of requirements-dev.lock into .venv (700 MB): this takes a minute or more"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements-dev.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-index --no-build-isolation -e .
endef

$(STAMP): requirements-dev.lock pyproject.toml
	$(create_venv)
	@$(BIN)/python scripts/locks check
	$(install)
	@touch $(STAMP)

up: setup  ## Start three instances on ports 8000-8002, on the embedded PostgreSQL
	$(BIN)/flotilla up --instances 3

down: setup  ## Stop these instances and the embedded PostgreSQL
	$(BIN)/flotilla down

# More workers than cores, because tests also wait: for timers, for leases, and for processes to start. With more than
# these, all of them take longer, and those that poll use more of the processors.
test: setup tools $(if $(CI),$(BENCH_STAMP))  ## Run all tests
	$(BIN)/python -m pytest --numprocesses 5

test-mine: setup  ## Run the tests of your own code only: tests/mine
	$(BIN)/python -m pytest -q tests/mine

check: $(CHECKS:%=check-%)  ## Format, lint, types, import contract, lock files, documentation, model-migration drift

check-format: setup
	$(BIN)/ruff format --check .

check-lint: setup
	$(BIN)/ruff check .

check-types: setup
	$(BIN)/mypy
	cd alembic && ../$(BIN)/mypy --config-file ../pyproject.toml env.py versions/fleet versions/app

check-imports: setup
	$(BIN)/lint-imports

check-locks: setup
	$(BIN)/python scripts/locks check

check-documentation: setup
	$(BIN)/python -m pytest -q $(wildcard tests/unit/test_documentation.py) tests/integration/test_migrations.py

hooks: setup  ## Run these checks before each commit of this clone
	$(BIN)/prek install

golden: setup  ## Write the golden files of the SQL statements again, after an intended change
	$(BIN)/python -m app.fleet.sql --write tests/golden

bench: $(BENCH_STAMP)  ## Run all benchmarks, compare with the peers, and print the figures (half an hour)
	$(BIN)/python -m benchmarks

# The peers for the benchmarks; nothing else needs them.
$(BENCH_STAMP): requirements-bench.lock $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements-bench.lock
	@touch $(BENCH_STAMP)

chaos: setup tools  ## Kill, freeze and disconnect, more often than the tests (20 minutes), and check the effects
	ALL_ROUNDS=1 $(BIN)/python -m pytest -m rounds
	$(BIN)/python -m tests.chaos exclusion
	$(BIN)/python -m tests.chaos attrition

image-test: setup  ## Build the Dockerfile without a container engine, and serve from the image (needs root)
	scripts/image-test

tools: setup  ## Install the programs that some tests need (HAProxy, PgBouncer, …), where that is possible
	@scripts/tools

# The lock files are written by the uv that they contain, even if they lack a package that pyproject.toml declares.
$(BIN)/uv:
	$(create_venv)
	$(install)

lock: $(BIN)/uv  ## Add to the lock files what pyproject.toml declares; all other versions stay
	$(BIN)/python scripts/locks write

upgrade: $(BIN)/uv  ## Upgrade the lock files to versions that have been public for a week
	$(BIN)/python scripts/locks upgrade

clean: down  ## Stop everything, and remove all generated files
	rm -rf .venv .flotilla
