# Two commands do everything on a fresh machine with python3, make and apt: `make demo`, `make test`.

PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip --disable-pip-version-check
READY  := $(VENV)/.ready

# Workers share the machine: one thread each, so that timings and results do not depend on its cores.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test bench lint format types setup clean

demo: $(READY)
	$(PY) examples/demo.py

test: lint types
	$(PY) -m pytest $(PYTEST_ARGS)

bench: $(READY)
	$(PY) -m benchmarks

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(READY)
	$(PY) -m mypy --strict varuna pyrannc

format: $(READY)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

setup: $(READY)

# torch comes first and pinned: left to the resolver, it would bring gigabytes of CUDA libraries.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "varuna needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) --version) (make PYTHON=python3.12 ...)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "this python3 cannot make virtual environments: installing python3-venv with apt-get"; \
	    if [ "$$(id -u)" = 0 ]; then apt-get update -qq && apt-get install -y -qq python3-venv; \
	    else sudo apt-get update -qq && sudo apt-get install -y -qq python3-venv; fi; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q -c constraints.txt torch==2.13.0
	$(PIP) install -q -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
