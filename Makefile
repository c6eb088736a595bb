# Everything a newcomer needs: `make demo` and `make test` set up .venv by themselves.
PYTHON ?= python3
BIN := .venv/bin
WORKERS ?= auto

.PHONY: install demo test test-all lint clean

install: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet uv || true
	if [ -x $(BIN)/uv ]; then $(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python -e '.[dev]' -c constraints.txt; \
	else $(BIN)/python -m pip install --quiet -e '.[dev]' -c constraints.txt; fi
	touch $@

demo: install
	$(BIN)/python train.py

test: install
	$(BIN)/python -m pytest -n $(WORKERS)

test-all: install
	$(BIN)/python -m pytest -n $(WORKERS) -m 'slow or not slow'

lint: install
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
