# One entry point for people and CI alike. `make help` explains every target.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)

.DEFAULT_GOAL := help
.PHONY: help venv lint prerequisites unit docs lab lab-status lab-down molecule kernel e2e frame bench test test-full clean

help: ## Show every target with what it does
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(VENV)/.complete ## Make .venv with the library, the command line and the test tools (safe to repeat)

# The stamp is written last, so an interrupted install is taken up again.
$(VENV)/.complete: pyproject.toml requirements.txt
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Python %d.%d found, 3.11 or newer needed: set PYTHON=python3.x" % sys.version_info[:2])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint requirements.txt --editable '.[ansible,dev]'
	touch $@

lint: venv ## Run ruff, mypy --strict, yamllint and ansible-lint (production)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/yamllint --strict .
	$(BIN)/ansible-lint --offline --strict

prerequisites: venv ## Install what the lab and its tests need from Debian, or name it
	$(BIN)/python -m lab prerequisites

unit: venv ## Run the unit tests (minutes, no containers)
	$(BIN)/python -m pytest -n 3 --dist loadfile tests/unit

docs: venv ## Write the roles' README files from their argument specs
	$(BIN)/python docs/role_readmes.py

lab: venv ## Bring up the lab and run site.yml on it: hosts audited, upgraded, served, accepted
	$(BIN)/python -m lab up

lab-status: venv ## Show what the lab made and whether it answers
	$(BIN)/python -m lab status

lab-down: venv ## Remove exactly what the lab made; downloads stay cached
	$(BIN)/python -m lab down

molecule: venv ## Run `molecule test -s site`: the same playbooks from bare lab hosts to accepted, twice
	$(BIN)/molecule test -s site

kernel: venv ## Run `molecule test -s kernel`: driver reload, reboot and RDMA on virtual machines (needs QEMU)
	$(BIN)/molecule test -s kernel

e2e: venv ## Run playbooks on the lab through ansible-runner: drift restored, faults stopped
	$(BIN)/python -m pytest tests/e2e

frame: venv ## Run the frame of provision on fake hosts, killed after each task in turn (FRAME_KILL=::4 for every fourth)
	$(BIN)/python -m pytest tests/frame

bench: venv ## Measure the client against a server that does nothing (about a minute; docs/performance.md)
	$(BIN)/python -m tests.bench.client_lag

test: lint prerequisites unit ## What CI runs: lint, unit tests, the site scenario, end-to-end tests (under 40 minutes)
	$(MAKE) molecule
	$(BIN)/python -m pytest tests/e2e -m "not full"

test-full: lint prerequisites unit ## Everything, slow cases included
	$(BIN)/python -m pytest tests/frame
	$(MAKE) molecule
	$(BIN)/python -m pytest tests/e2e

clean: ## Remove caches of the test tools; neither the venv nor the lab
	rm -rf .mypy_cache .ruff_cache .pytest_cache .ansible build
