# Start here: `make demo` and `make test` also set up .venv.
PYTHON ?= python3
BIN := .venv/bin
WORKERS ?= auto

.PHONY: install demo test test-all lint wheel notebooks docs clean

install: .venv/.installed

.venv/.installed: pyproject.toml verify/pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet uv || true
	if [ -x $(BIN)/uv ]; then $(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python -e ./verify -e '.[dev]' -c constraints.txt; \
	else $(BIN)/python -m pip install --quiet -e ./verify -e '.[dev]' -c constraints.txt; fi
	touch $@

demo: install
	$(BIN)/python train.py

test: install
	$(BIN)/python -m pytest -n $(WORKERS)

test-all: install
	$(BIN)/python -m pytest -n $(WORKERS) -m 'slow or not slow'

lint: install
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports

# Runs every notebook and writes its outputs, which takes some minutes.
notebooks: install
	$(BIN)/python notebooks/render.py

# Builds a site of the documents, the notebooks and the docstrings. To read it: python -m http.server -d build/site
docs: install
	$(BIN)/python -m pip install --quiet 'mkdocs-material>=9.5,<10' 'mkdocstrings[python]>=0.27'
	$(BIN)/python docs/pages.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Builds a wheel, installs it with its dependencies (some gigabytes) in an empty environment, and runs it there.
wheel: install
	rm -rf dist build/fresh build/home
	$(BIN)/python -m hatchling build -t wheel
	$(PYTHON) -m venv build/fresh
	build/fresh/bin/pip install --quiet dist/*.whl
	cd build && export PATE_HOME="$$PWD/home" && fresh/bin/pate demo && fresh/bin/pate verify home/runs/digits/gaussian/* --ledger home/ledger.sqlite

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
