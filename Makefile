# mmserve: everything a checkout can do. `make` alone lists it.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# The first interpreter that is new enough; `make PYTHON=/path/to/python …` chooses another.
PYTHON ?= $(shell for each in python3 python3.13 python3.12 python3.11 python3.14 python; do \
	$$each -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$each && break; \
	done)
VENV ?= .venv
BIN := $(VENV)/bin
RUN := $(BIN)/python

# What is installed, as files that are newer than what they were made from.
DEMO := $(VENV)/.ready-demo
DEV := $(VENV)/.ready-dev
ORACLE := .oracle/.ready
LIGHT := .venv-light/.ready

# Tests that look at all children of their own process: it must have no others.
ALONE := tests/models/test_registry.py tests/models/test_registry_sequences.py

# For the targets that take them.
ARGS ?=
COVERAGE_MIN ?= 0
FUZZ_SECONDS ?= 60
PROBES ?= ../shared/probes
RESULTS ?= results

.PHONY: help setup demo test lint conformance probes documented bench soak fuzz oracle clean

help:  ## list what there is
	@echo "mmserve: many PyTorch models behind one HTTP server"
	@echo
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed 's/:[^#]*## /\t/' | expand -t 16 | sed 's/^/  make /'
	@echo
	@echo "  make test ARGS='tests/scheduling -k batch' runs a part; DEMO_ONCE=1 make demo ends by itself."

# ---------------------------------------------------------------------------- what users run

demo: $(DEMO)  ## build two archives, start the server, send real requests, keep serving
	@$(RUN) -m mmserve_handlers.demo

test: $(DEV)  ## run the tests, child processes measured; prints the coverage
	@mkdir -p $(RESULTS)
	@$(BIN)/coverage erase
	@status=0; $(BIN)/coverage run -m pytest -m "not documented and not soak" \
		--ignore tests/conformance $(foreach each,$(ALONE),--ignore $(each)) \
		--junit-xml=$(RESULTS)/test.xml $(if $(CI),--reruns 1 -r R) $(ARGS) || status=$$?; \
	$(if $(ARGS),,$(BIN)/coverage run -m pytest $(ALONE) --junit-xml=$(RESULTS)/test-alone.xml \
		$(if $(CI),--reruns 1 -r R) || status=$$?;) \
	$(BIN)/coverage combine -q 2> $(RESULTS)/coverage.log || cat $(RESULTS)/coverage.log; \
	rm -f .coverage.*; `# what a killed process did not finish writing` \
	$(BIN)/coverage report > $(RESULTS)/coverage.txt || true; \
	echo "coverage: $$($(BIN)/coverage report --format=total) % of lines, by file in $(RESULTS)/coverage.txt"; \
	$(BIN)/coverage report --format=total --fail-under=$(COVERAGE_MIN) > /dev/null \
		|| { echo "coverage is below the $(COVERAGE_MIN) % that CI asks for"; [ $$status -ne 0 ] || status=2; }; \
	exit $$status

setup: $(DEV)  ## make .venv with all that tests and the demo need
	@echo "ready: $(BIN)/mmserve, $(BIN)/multi-model-server, $(BIN)/model-archiver"

# ---------------------------------------------------------------------------- what we run

lint: $(DEV)  ## formatting, lint, types, and the arrows between the rooms
	@$(BIN)/ruff format --check --quiet . || { $(BIN)/ruff format --check . ; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo 2>/dev/null || $(BIN)/lint-imports

conformance: $(DEV) $(ORACLE)  ## compare with Multi Model Server itself, reply by reply (needs Java)
	@mkdir -p $(RESULTS)
	@if ls tests/conformance/test_*.py >/dev/null 2>&1; then \
		MMS_ORACLE=$(CURDIR)/.oracle/bin/multi-model-server $(RUN) -m pytest tests/conformance \
			--junit-xml=$(RESULTS)/conformance.xml --reruns 1 -r R $(ARGS); \
	else echo "no conformance tests in this checkout"; fi

# Without torch: a server that imports it beside each probe would leave the probes half a machine.
probes: $(LIGHT)  ## run the black-box probes against the server, where they are at hand
	@mkdir -p $(RESULTS)
	@if [ -d $(PROBES) ]; then \
		.venv-light/bin/python -m pytest $(PROBES) --server-cmd $(CURDIR)/.venv-light/bin/multi-model-server \
			--outcomes $(RESULTS)/probes.tsv --junit-xml=$(RESULTS)/probes.xml --reruns 1 -r R $(ARGS); \
	else echo "no probes at $(PROBES); PROBES=DIR names another place"; fi

documented: $(DEV)  ## run the commands that the docs show
	@mkdir -p $(RESULTS)
	@$(RUN) -m pytest -m documented --junit-xml=$(RESULTS)/documented.xml $(ARGS)

bench: $(DEV)  ## measure overhead and cold start
	@mkdir -p $(RESULTS)
	@status=0; $(BIN)/mmserve-bench overhead --out $(RESULTS) $(ARGS) || status=$$?; \
	$(BIN)/mmserve-bench coldstart --out $(RESULTS) $(ARGS) || status=$$?; exit $$status

soak: $(DEV)  ## the tests that take long: many idle models, long churn
	@$(RUN) -m pytest tests/e2e -m soak --timeout 3600 $(ARGS)

fuzz: $(DEV)  ## throw bytes at the parsers, FUZZ_SECONDS each
	@$(RUN) tests/fuzz/drive.py --seconds $(FUZZ_SECONDS) $(ARGS)

oracle: $(ORACLE)  ## make .oracle with the Multi Model Server of record (needs Java to run)
	@echo "ready: .oracle/bin/multi-model-server"

clean:  ## remove what make made; .venv and .oracle stay
	@rm -rf build dist results demo-store logs .coverage .coverage.* .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	@find server handlers loadtest tests -name __pycache__ -type d -prune -exec rm -rf {} +

# ---------------------------------------------------------------------------- installing

$(RUN):
	@[ -n "$(PYTHON)" ] || { echo "Python 3.11 or newer is needed; make PYTHON=/path/to/python names one."; exit 1; }
	@$(PYTHON) -m venv $(VENV) 2>/dev/null || { rm -rf $(VENV); \
		echo "$(PYTHON) -m venv failed; on Debian: apt-get install python3-venv"; exit 1; }

$(DEMO): pyproject.toml | $(RUN)
	@$(PYTHON) .ci/progress "Installing mmserve, torch and transformers" --log $(VENV)/install.log -- \
		$(RUN) -m pip install --disable-pip-version-check -e '.[handlers,samples]'
	@touch $@

$(DEV): pyproject.toml | $(RUN)
	@$(PYTHON) .ci/progress "Installing mmserve and what its tests need" --log $(VENV)/install.log -- \
		$(RUN) -m pip install --disable-pip-version-check -e '.[dev,handlers,samples,aws,sagemaker]'
	@touch $@ $(DEMO)

$(LIGHT): pyproject.toml
	@[ -n "$(PYTHON)" ] || { echo "Python 3.11 or newer is needed; make PYTHON=/path/to/python names one."; exit 1; }
	@[ -x .venv-light/bin/python ] || $(PYTHON) -m venv .venv-light
	@$(PYTHON) .ci/progress "Installing mmserve alone" --log .venv-light/install.log -- \
		.venv-light/bin/python -m pip install --disable-pip-version-check -e . pytest pytest-rerunfailures pytest-timeout requests
	@touch $@

$(ORACLE):
	@[ -n "$(PYTHON)" ] || { echo "Python 3.11 or newer is needed; make PYTHON=/path/to/python names one."; exit 1; }
	@$(PYTHON) -m venv .oracle
	@$(PYTHON) .ci/progress "Installing the Multi Model Server of record" --log .oracle/install.log -- \
		.oracle/bin/python -m pip install --disable-pip-version-check 'multi-model-server==1.1.11' model-archiver 'setuptools<80'
	@touch $@
