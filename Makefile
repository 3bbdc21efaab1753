# Every target sets up what it needs in .venv; a second run installs nothing unless pyproject.toml
# changed. Needed beforehand: make and Python 3.11 or newer.

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
# Programs that a target starts find the ones of the environment first.
RUN    := PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PY)
# More arguments for the command behind a target, as in: make test ARGS="-k scheduler -x"
ARGS   ?=
# Pytest in parallel; tests that fail run again alone. With STRICT=1 such a run is red, too.
PARALLEL := --numprocesses logical --maxprocesses 4 --dist loadfile --durations 50 --durations-min 2
TESTS   = -m tests.rerun $(if $(STRICT),--strict) $(PARALLEL)

LABEXTENSION := gpunb/labextension
NODE_20 := process.exit(Number(process.versions.node.split(".")[0] < 20))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo docs test test-oldest test-newest test-portable steady stress chaos conformance test-ray test-ray-short lint bench gpu \
    lab pictures labextension labextension-if-node wheel release-check clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s  %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.stamp-demo ## run the quickstart notebook from start to end and print what came out
	$(RUN) notebooks/run_demo.py $(ARGS)

test: $(VENV)/.stamp-test labextension-if-node ## run the tests, and those that fail again, alone; STRICT=1 for red if one did
	@$(PY) -m compileall -q gpunb tests benchmarks
	$(RUN) $(TESTS) --no-loadscope-reorder $(ARGS)

steady: $(VENV)/.stamp-test labextension-if-node ## look for tests that fail by chance: run all RUNS times (5) on a busy machine
	@$(PY) -m compileall -q gpunb tests benchmarks
	$(RUN) -m tests.rerun.steady --runs $(or $(RUNS),5) $(PARALLEL) --no-loadscope-reorder $(ARGS)

test-portable: $(VENV)/.stamp-test ## run the tests of what works on other systems than Linux too
	$(RUN) -m pytest tests/scheduler tests/test_exceptions.py tests/test_package.py tests/system/test_linux.py $(ARGS)

OLDEST := build/oldest
test-oldest: $(VENV)/.stamp-build ## run the tests with the oldest versions of what gpunb depends on
	$(VENV)/bin/uv venv --quiet --clear --python $(PYTHON) $(OLDEST)
	$(VENV)/bin/uv pip install --quiet --compile-bytecode --python $(OLDEST) --resolution lowest-direct \
	    --requirements pyproject.toml $(addprefix --extra ,demo joblib lab terminal test)
	$(VENV)/bin/uv pip install --quiet --python $(OLDEST) --no-deps --editable .
	PATH="$(CURDIR)/$(OLDEST)/bin:$$PATH" $(OLDEST)/bin/python $(TESTS) tests/scheduler tests/data tests/api \
	    tests/notebook tests/server tests/cli tests/accelerators $(wildcard tests/test_*.py) $(ARGS)

NEWEST := build/newest
NEWEST_PYTHON ?= $(lastword $(shell .ci/pythons))
SHORT := tests/scheduler tests/data/serialize tests/api/test_functions.py tests/api/actors tests/notebook/test_cells.py tests/notebook/test_values.py \
    --ignore tests/scheduler/test_machine.py
test-newest: ## run tests of the core, functions, actors and cells with the newest Python; NEWEST_PYTHON=PATH for another
	@$(MAKE) --no-print-directory VENV=$(NEWEST) PYTHON="$(NEWEST_PYTHON)" $(NEWEST)/.stamp-test
	@$(NEWEST)/bin/python --version
	@$(NEWEST)/bin/python -m compileall -q gpunb tests
	PATH="$(CURDIR)/$(NEWEST)/bin:$$PATH" $(NEWEST)/bin/python $(TESTS) $(SHORT) $(ARGS)

# `make test` draws the same random numbers in each run, and these two draw others.
stress chaos: export SEED := $(or $(SEED),$(shell date +%s))
stress: export PROGRAMS ?= $(if $(PROGRAMS_MINUTES),100,50000)
stress: export PROGRAMS_SEED ?= $(SEED)
stress: export GPUNB_EXAMPLES ?= 2000
stress: $(VENV)/.stamp-test ## run 50000 random programs with faults, and random examples; PROGRAMS, PROGRAMS_MINUTES, SEED
	@echo "The seed is $(SEED); the same again: make stress SEED=$(SEED)"
	$(RUN) -m pytest tests --ignore tests/programs -m hypothesis --hypothesis-seed $(SEED) $(ARGS)
	$(RUN) -m pytest tests/programs $(ARGS)

chaos: export FAULTS ?= $(if $(MINUTES),,100000)
chaos: $(VENV)/.stamp-test ## let 100000 faults happen to live sessions; FAULTS=n for n, SEED=n for others, MINUTES=n for so long
	@echo "The seed is $(SEED); the same again: make chaos SEED=$(SEED)"
	$(RUN) -m pytest -n 0 -s tests/chaos/test_chaos.py $(ARGS)

conformance: $(VENV)/.stamp-test $(VENV)/.stamp-ray ## run the tests of the API that Ray has too, on gpunb, on a head process and on Ray
	GPUNB_CONFORMANCE_BACKEND=gpunb $(RUN) -m pytest tests/conformance/api $(ARGS)
	GPUNB_CONFORMANCE_BACKEND=head $(RUN) -m pytest tests/conformance/api $(ARGS)
	GPUNB_CONFORMANCE_BACKEND=ray $(RUN) -m pytest tests/conformance/api $(ARGS)

test-ray: $(VENV)/.stamp-test $(VENV)/.stamp-ray ## run the tests of the Ray backend, on clusters of several nodes on this machine
	GPUNB_TEST_RAY=1 $(RUN) -m pytest tests/ray $(ARGS)
	GPUNB_CONFORMANCE_BACKEND=gpunb-on-ray $(RUN) -m pytest tests/conformance/api $(ARGS)

# In one process, because each would start a cluster. Ray's processes may take a while to end.
test-ray-short: $(VENV)/.stamp-test $(VENV)/.stamp-ray ## run the tests of cells and of streams on the Ray backend
	GPUNB_TEST_RAY=1 GPUNB_TEST_GRACE=30 $(RUN) -m tests.rerun --folder ray tests/ray/test_cells.py tests/ray/test_streams.py $(ARGS)

lint: $(VENV)/.stamp-lint ## check style, format, types, layers, cycles of imports, and that no test goes by the clock
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	@$(PY) -m tests.rules
	@$(PY) -m tests.test_imports
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

bench: $(VENV)/.stamp-bench ## measure, and compare with the alternatives that are installed
	$(RUN) -m benchmarks $(ARGS)

gpu: ## on a machine with a GPU: run its tests and measurements without a network, and write a report
	$(PYTHON) -m benchmarks.hardware $(ARGS)

docs: export NO_MKDOCS_2_WARNING := 1
docs: $(VENV)/.stamp-docs ## build the documentation into build/docs, with every warning as an error
	$(RUN) docs/tables.py
	$(RUN) -m mkdocs build --strict $(ARGS)
	@echo "Open build/docs/index.html, or look at it live: $(VENV)/bin/mkdocs serve"

pictures: $(VENV)/.stamp-test labextension ## take the pictures of JupyterLab in docs/images again; needs Chromium
	$(RUN) -m tests.browser.documentation

lab: $(VENV)/.stamp-lab $(VENV)/.stamp-notebooks labextension-if-node ## open the notebooks in JupyterLab, with the extension where there is Node
	$(RUN) -m jupyterlab $(ARGS) notebooks/

labextension: $(LABEXTENSION)/package.json $(VENV)/.stamp-venv ## build and test the extension for JupyterLab; needs Node 20
	cd labextension && npm run --silent test
	@mkdir -p $(VENV)/share/jupyter/labextensions $(VENV)/etc/jupyter/jupyter_server_config.d
	@ln -sfn $(CURDIR)/$(LABEXTENSION) $(VENV)/share/jupyter/labextensions/gpunb
	@ln -sfn $(CURDIR)/labextension/jupyter-config/gpunb.json $(VENV)/etc/jupyter/jupyter_server_config.d/

# Tests and notebooks go on without it.
labextension-if-node:
	@if node -e '$(NODE_20)' 2> /dev/null && command -v npm > /dev/null; then \
	    $(MAKE) --no-print-directory labextension || \
	    { test $${GPUNB_REQUIRE_BROWSER:-0} = 0 && \
	      echo "THE JUPYTERLAB EXTENSION WAS NOT BUILT, SO WHAT NEEDS IT IS LEFT OUT: see above" >&2; }; \
	else echo "No Node 20 here: the JupyterLab extension is not built, and what needs it is left out"; fi

wheel: $(VENV)/.stamp-build ## make the source distribution and the wheel, with the extension inside; needs Node 20
	rm -rf dist
	$(PY) -m build --outdir dist

release-check: wheel $(VENV)/.stamp-test ## make them, install them with each extra, and use what was installed
	GPUNB_SLOW_TESTS=1 $(RUN) -m pytest tests/packaging $(ARGS)

clean: ## remove caches and outputs; the environment stays (rm -rf .venv starts anew)
	rm -rf $(LABEXTENSION) labextension/lib labextension/style/view.css tests/browser/screenshots
	rm -rf build dist htmlcov .coverage .coverage.* benchmarks/out notebooks/executed
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name $(VENV) -prune -o -name node_modules -prune -o -type d \
	    \( -name __pycache__ -o -name .ipynb_checkpoints \) -exec rm -rf {} +

$(LABEXTENSION)/package.json: labextension/node_modules/.package-lock.json \
    $(wildcard labextension/*.json labextension/*.mjs labextension/src/* labextension/src/view/* \
    labextension/schema/*) \
    labextension/style/base.css labextension/style/index.js $(wildcard gpunb/live/view.css gpunb/live/view/*)
	cd labextension && npm run --silent build

labextension/node_modules/.package-lock.json: labextension/package-lock.json
	cd labextension && ../.ci/retry "npm packages" npm ci --no-audit --no-fund --ignore-scripts
	@touch $@

# One stamp for each extra of pyproject.toml: .venv/.stamp-test is the environment with gpunb[test].
$(VENV)/.stamp-%: pyproject.toml | $(VENV)/.stamp-venv
	@echo "Installing gpunb[$*] into $(VENV), which can take a few minutes the first time ..."
	@.ci/retry 'gpunb[$*]' $(PY) -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	@touch $@

RECENT := -c 'import sys; sys.exit(sys.version_info < (3, 11))'

$(VENV)/.stamp-venv:
	@command -v $(PYTHON) > /dev/null || \
	    { echo "No $(PYTHON) found. Name the one to use: make ... PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) $(RECENT) || { echo "gpunb needs Python 3.11 or newer; $(PYTHON) is" \
	    "$$($(PYTHON) --version 2>&1). Name another: make ... PYTHON=python3.12" >&2; exit 1; }
	@$(PY) -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@$(PY) $(RECENT) || { echo "$(VENV) has $$($(PY) --version 2>&1), and gpunb needs 3.11 or" \
	    "newer. Remove $(VENV) and run make again." >&2; exit 1; }
	@touch $@
