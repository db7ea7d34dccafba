# make help lists the targets. The Python to start from, the folder of the environment and the
# demonstration's mesh and flags can be given: make setup PYTHON=python3.12 VENV=/tmp/env

# The first on the path from 3.11 to 3.13.
PYTHON = $(shell for name in python3.11 python3.12 python3.13 python3; do \
  $$name -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2> /dev/null && \
  echo $$name && break; done)
VENV = .venv
PEERS = .peers
NP = 2
DEMO_FLAGS = --model=convnet --dataset=digits --strategy=auto
BENCHMARKS = data_parallel tensor_parallel pipeline_parallel zero recompute checkpoint blockwise_attention fine_tuning experts
TESTS = tests
CROSS = 1

PY = $(VENV)/bin/python
PIP = $(PY) -m pip --disable-pip-version-check
RUNTIME = $(VENV)/.stamp-runtime
INSTALLED = $(VENV)/.stamp-packages
HOROVOD = $(VENV)/.stamp-horovod

help: ## This list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1 \2/p' Makefile | \
	  while read -r name what; do printf '  make %-11s %s\n' "$$name" "$$what"; done

setup: $(INSTALLED) $(HOROVOD) ## Makes .venv, installs the package and builds Horovod; again where needed

# What users run needs no packages for development, so a demonstration does not wait for them.
$(RUNTIME): setup.cfg pyproject.toml
	@test -n "$(PYTHON)" || { echo "No Python from 3.11 to 3.13 was found: \`apt install python3 \
	python3-venv\`, or name yours: make setup PYTHON=..." >&2; exit 2; }
	@command -v $(PYTHON) > /dev/null || \
	  { echo "$(PYTHON) was not found: install it, or name yours: make setup PYTHON=..." >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2> /dev/null || \
	  { echo "$(PYTHON) cannot make environments: \`apt install python3-venv\`." >&2; exit 2; }
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo "Installing tfdist and what it needs into $(VENV)."
	@$(PIP) install --quiet --editable '.[data,horovod-build]'
	@touch $@

$(INSTALLED): $(RUNTIME)
	@echo "Installing what tests and documents need."
	@$(PIP) install --quiet --editable '.[dev,data,docs,horovod-build]'
	@touch $@

# Code 2 says that a compiler, CMake or make is missing, in one line of its own. The package works
# without Horovod, so that is no failure; no stamp is left, so the next set-up tries again.
$(HOROVOD): $(RUNTIME) $(wildcard tfdist/backend/native/*.* tfdist/addons/cpu_kernels/*.*)
	@$(VENV)/bin/tfdist-install-horovod && touch $@ || test $$? -eq 2

demo: $(HOROVOD) ## Trains the ConvNet on the digits, on two ranks
	@$(VENV)/bin/tfdist-run -np $(NP) -- $(VENV)/bin/tfdist-train $(DEMO_FLAGS)

test: setup ## The quick tests, some of each part
	$(PY) -m pytest -q -m "not slow" $(TESTS)

test-all: setup ## All tests; of long ones an eighth, others with CROSS=2 to 8, all with CROSS=full (a day)
	$(PY) -m pytest -q --cross=$(CROSS) $(TESTS)

test-gpu: setup ## Tests on GPUs; two ranks share one where there is no second
	$(PY) -m pytest -q -m gpu tests/gpu_like

matrix: setup ## Quick tests on Pythons, TensorFlows and Kerases, in environments of their own
	$(PY) -m tests.versions.matrix

lint: setup ## Looks for mistakes, for what `make format` would change, and at the floors
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(VENV)/bin/lint-imports --no-logo

format: setup ## Formats the code
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

typecheck: setup ## Checks the types of the package, and of what tests share
	$(PY) -m mypy -p tfdist -p benchmarks -p tests

benchmark: setup ## Runs the benchmarks, half an hour each on 2 cores
	@code=0; for name in $(BENCHMARKS); do \
	  echo "$$name"; $(PY) -m benchmarks.$$name || code=1; \
	done; exit $$code

release: setup ## Builds the packages in dist, checks them, and trains with the wheel in a bare environment
	$(PIP) install --quiet --editable '.[release]'
	$(PY) -m tests.packaging.release

# MkDocs' theme announces its successor to MkDocs on each build.
docs: $(INSTALLED) ## Builds the documentation site in build/site
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet
	@echo "build/site/index.html"

peers: setup ## Environments of the libraries that `python -m benchmarks.training` compares with
	$(PY) -m benchmarks.environments --peers=$(PEERS)

clean: ## Removes what builds and tests leave; the environment stays
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache
	find . \( -path ./$(VENV) -o -path ./$(PEERS) \) -prune -o -type d -name __pycache__ -exec rm -rf {} +

.PHONY: help setup demo test test-all test-gpu matrix lint format typecheck benchmark docs \
  release peers clean
