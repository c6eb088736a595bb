# Everything a newcomer needs: `make demo` and `make test` set up .venv by themselves.
PYTHON ?= python3
BIN := .venv/bin
WORKERS ?= auto

.PHONY: install demo test test-all lint wheel clean

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

# A wheel, installed with all it needs (a download of some gigabytes) into an empty environment, and used there.
wheel: install
	rm -rf dist build
	$(BIN)/python -m hatchling build -t wheel
	$(PYTHON) -m venv build/fresh
	build/fresh/bin/pip install --quiet dist/*.whl
	cd build && PATE_HOME=home fresh/bin/pate demo && fresh/bin/pate verify home/runs/digits/gaussian/* --ledger home/ledger.sqlite

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
