# Two commands do everything on a fresh machine with python3, make and apt: `make demo`, `make test`.

PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip --disable-pip-version-check
READY  := $(VENV)/.ready
MOTO   := $(VENV)/moto/pinned
RAY    := $(VENV)/ray/pinned
TRACK  := $(VENV)/trackers/pinned
TORCHAO := $(VENV)/torchao/pinned
TORCHFT := $(VENV)/torchft/pinned
HOSTS  := $(VENV)/.hosts
OLDEST := .venv-oldest

# Tests of captures that rely most on torch's internals.
OLDEST_CORE := $(addprefix tests/capture/test_,patches.py operation_cache.py chain.py corners.py branches.py hugging_face.py)

# Processes that run tests side by side. Tests wait for other processes much of the time.
TEST_WORKERS ?= 3

# Workers share the machine: one thread each, so that timings and results do not depend on its cores.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-oldest test-oldest-core bench docs lint format types setup clean

demo: $(READY)
	$(PY) -m varuna demo

test: lint types $(MOTO) $(RAY) $(TRACK) $(TORCHAO) $(TORCHFT) $(HOSTS)
	@# Tests start thousands of processes: where these write no bytecode, each would compile all modules.
	@$(PY) -m compileall -q varuna pyrannc tests benchmarks
	$(PY) -m pytest -n $(TEST_WORKERS) $(PYTEST_ARGS)

# The captures rely most on torch's internals: they run with the oldest version that pyproject.toml allows, too.
test-oldest: $(OLDEST)/.ready
	$(OLDEST)/bin/python -m pytest -p no:cacheprovider -n $(TEST_WORKERS) tests/capture $(PYTEST_ARGS)

# The part of them that .ci/run runs: about a minute.
test-oldest-core: $(OLDEST)/.ready
	$(OLDEST)/bin/python -m pytest -p no:cacheprovider -n $(TEST_WORKERS) $(OLDEST_CORE) $(PYTEST_ARGS)

bench: $(READY) $(TORCHFT) $(HOSTS)
	$(PY) -m benchmarks

# The documentation site, in build/docs/index.html. A warning is an error.
docs: $(READY)
	$(PY) -m sphinx -q -W --keep-going -n -b html docs build/docs

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(READY)
	$(PY) -m mypy --strict varuna pyrannc

format: $(READY)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

setup: $(READY) $(MOTO) $(RAY) $(TRACK) $(HOSTS)

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

# All other packages are those of $(VENV): its folder comes after the own one, which has only torch.
$(OLDEST)/.ready: pyproject.toml constraints.txt | $(READY)
	$(PYTHON) -m venv --clear $(OLDEST)
	grep -vE '^(torch|setuptools)==' constraints.txt > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip --disable-pip-version-check install -q -c $(OLDEST)/constraints.txt torch==2.11.0
	$(PY) -c 'import site; print(site.getsitepackages()[0])' \
	    > "$$($(OLDEST)/bin/python -c 'import site; print(site.getsitepackages()[0])')/packages.pth"
	$(OLDEST)/bin/python -c 'import torch; assert torch.__version__.startswith("2.11."), torch.__version__'
	@touch $@

# The S3 server, the Ray and the trackers of the tests: their packages do not go with ours, so each has its own environment.
$(MOTO): tests/checkpoint/moto-constraints.txt | $(READY)
	$(PY) tests/environments.py moto $<

$(RAY): tests/morph/hosts/ray-constraints.txt | $(READY)
	$(PY) tests/environments.py ray $<

$(TORCHAO): tests/hf/torchao-constraints.txt | $(READY)
	$(PY) tests/environments.py torchao $<

$(TORCHFT): benchmarks/torchft-constraints.txt | $(READY)
	$(PY) tests/environments.py torchft $<

$(TRACK): tests/observe/trackers-constraints.txt | $(READY)
	$(PY) tests/environments.py trackers $<

# The hosts of the tests are network namespaces with an sshd each, and one of the clusters is a Slurm. The page
# is tested in Chromium, metrics with Prometheus. Where they cannot be installed, the tests that need them say so.
$(HOSTS): Makefile | $(READY)
	@touch $@; PATH="$$PATH:/usr/sbin:/sbin"; for tool in ip tc ssh sshd slurmctld slurmd sbatch munged \
	    chromium prometheus; do \
	    command -v $$tool >/dev/null || missing="$$missing $$tool"; done; \
	if [ -n "$$missing" ]; then \
	    echo "installing what the tests need:$$missing"; \
	    sudo=; [ "$$(id -u)" = 0 ] || sudo=sudo; \
	    { $$sudo apt-get update -qq && DEBIAN_FRONTEND=noninteractive $$sudo apt-get install -y -qq \
	        --no-install-recommends iproute2 openssh-client openssh-server slurm-wlm munge chromium fonts-dejavu-core \
	        prometheus; } \
	        >$(VENV)/hosts.log 2>&1 || \
	        { rm -f $@; echo "could not install them; see $(VENV)/hosts.log"; }; \
	fi

clean:
	rm -rf $(VENV) $(OLDEST) .pytest_cache .mypy_cache .ruff_cache
