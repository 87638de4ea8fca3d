# The two commands: `make train` and `make test`. Each sets up .venv first.
PYTHON ?= python3
VENV := .venv
CONFIG ?= digits.yaml
ARGS ?=

.PHONY: train test lint
.DELETE_ON_ERROR:

train: $(VENV)/.ready
	$(VENV)/bin/python scripts/train.py --config $(CONFIG) $(ARGS)

test: $(VENV)/.ready
	$(VENV)/bin/python -m pytest --numprocesses auto --dist worksteal $(ARGS)

lint: $(VENV)/.ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/python -m mypy

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[dev,export,notebooks,page]"
	touch $@
