# Everything a developer types; `make` alone lists it. Needs Python 3.11+ and make, nothing else.
SHELL := /bin/bash
.DEFAULT_GOAL := help

# Extra arguments of the wrapped command: make run ARGS="--port 0", make test ARGS="-k wire".
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
STAMP := $(VENV)/.installed

# The first interpreter that is new enough.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3 python; do \
	"$$p" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; break; }; done)

$(STAMP): requirements.lock pyproject.toml
	@if [ -z "$(PYTHON)" ]; then echo "kvcm needs Python 3.11 or newer with its venv module"; exit 1; fi
	@if [ ! -x $(PY) ] || [ ! -x $(BIN)/pip ]; then $(PYTHON) -m venv --clear $(VENV); fi
	@echo "installing the locked dependencies into $(VENV) ..."
	@$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.lock
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: install
install: $(STAMP) ## make .venv with the locked dependencies and the kvcm command

.PHONY: run
run: install ## start a manager, replay a sample workload against it, print what came of it
	@$(BIN)/kvcm demo $(ARGS)

.PHONY: serve
serve: install ## keep a manager running (ARGS="--help" lists its flags)
	@exec $(BIN)/kvcm serve $(ARGS)

.PHONY: test
test: install ## run every test (but soak)
	@$(BIN)/pytest -n 2 --dist worksteal -q $(ARGS)

.PHONY: lint
lint: install ## ruff: rules and formatting
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

.PHONY: format
format: install ## let ruff repair what it can
	@$(BIN)/ruff check --fix --quiet . ; $(BIN)/ruff format .

.PHONY: types
types: install ## mypy, strict
	@$(BIN)/mypy

.PHONY: layers
layers: install ## import-linter: the layers of the design
	@$(BIN)/lint-imports

.PHONY: gen
gen: install ## generate kvcm/_pb from api/proto
	@$(PY) tools/gen_pb.py

.PHONY: check-gen
check-gen: install ## is the generated code what api/proto says?
	@$(PY) tools/gen_pb.py --check

.PHONY: drift
drift: check-gen ## is everything derived (code, OpenAPI, reference pages) up to date?
	@for script in tools/check_*.py; do [ ! -e "$$script" ] || $(PY) "$$script" || exit 1; done

.PHONY: lock
lock: install ## pin the dependencies of pyproject.toml anew (UPGRADE=1: the newest versions)
	@$(PY) -m pip install --quiet --disable-pip-version-check pip-tools
	@$(BIN)/pip-compile --quiet --extra server --extra dev --strip-extras --allow-unsafe --no-header --no-annotate \
		--no-emit-options --no-emit-index-url --no-emit-find-links --no-emit-trusted-host \
		$(if $(UPGRADE),--upgrade) --output-file requirements.lock pyproject.toml

.PHONY: bench
bench: install ## measure (see benchmarks/)
	@$(PY) -m benchmarks $(ARGS)

.PHONY: soak
soak: install ## the tests that take minutes
	@$(BIN)/pytest -q -m soak --timeout 3600 $(ARGS)

.PHONY: clean
clean: ## remove the environment, caches and builds
	@rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
