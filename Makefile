# Two commands: `make serve` starts the whole stack with the embedded nano model, `make test` proves it.
#
#   make serve [CONFIG=deploy/gemma4.yaml]   install if needed, then serve on 127.0.0.1:8000; Ctrl-C or SIGTERM drains
#   make test | test-full                    the tiers pure, cpu and serve without the slow tests | everything that this machine can run
#   make test-artefacts                      the image, the chart, the unit and compose.yaml, with the extra [artefacts]
#   make test-nodes                          Ray on several machines, which are namespaces of this one; root
#   make coverage                           make test, with a table of the lines that no test runs
#   make quality [QUALITY_ARGS=...]         the nano models' exam: every setup against transformers, every planted fault
#   make lint | bench | clean                ruff, mypy and sizes | benchmarks | remove what the tools leave behind (not .venv)
#   make pictures                           draws the boards of a live run, and steps of load
#   make docs                               writes docs/settings.md, dashboards/METRICS.md, deploy/haproxy_errors and the chart's schema
#   make install-gpu                         adds the extra [gpu]
#
# PYTHON (3.11 or 3.12) makes the virtual environment; pip's own settings decide where packages, and so torch's build, come from.

PYTHON ?= python3
CONFIG ?= deploy/nano.yaml
PYTEST_ARGS ?=
# One more than CPUs: some tests wait for most of their time.
WORKERS ?= $(shell n=$$(nproc); echo $$((n < 4 ? n + 1 : 4)))

# Where it is set, every process of a stack, and of its tests, would compile all modules anew.
export PYTHONDONTWRITEBYTECODE :=

VENV := .venv
# Errors of types that benches and GPU tests may have; names that are not there they may not: CPUs run little of them.
LENIENT := arg-type assignment call-arg func-returns-value var-annotated
PACKAGES := $(foreach package,kernels engine cluster deploy dashboards,$(if $(wildcard $(package)/*.py),$(package)))
BIN := $(VENV)/bin

# A stamp a set of extras. While it is newer than the two files that say what to install, nothing asks pip.
EXTRAS-serve :=
EXTRAS-test := [test]
EXTRAS-lint := [lint,test]
EXTRAS-gpu := [gpu]
EXTRAS-artefacts := [artefacts,test]

.PHONY: serve test test-full test-artefacts test-nodes coverage quality lint bench clean install-gpu docs pictures
.DELETE_ON_ERROR:
.SECONDARY:

# exec: the launcher is make's own child, and make passes SIGTERM on to it and waits while it drains.
serve: $(VENV)/.installed-serve
	@exec $(BIN)/python -m deploy.cli serve $(CONFIG)

# First what may share the machine, a file at a time on each of some workers; then, whatever came of that, what must have it for itself.
test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "(pure or cpu) and not alone and not slow" $(PYTEST_ARGS); shared=$$?; \
	$(BIN)/python -m pytest -m "(alone or serve) and not (gpu or gpu4 or slow)" $(PYTEST_ARGS) && exit $$shared

test-full: $(VENV)/.installed-test
	$(BIN)/python -m pytest tests training $(PYTEST_ARGS)

test-artefacts: export QUARTET_BUILD_OPTIONS ?=
test-artefacts: $(VENV)/.installed-artefacts
	$(BIN)/python -m pytest -m artefacts $(PYTEST_ARGS)

test-nodes: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m nodes $(PYTEST_ARGS)

# The lines that the tests of `make test` run, children included: half as much CPU again, so not part of it.
coverage: $(VENV)/.installed-test
	rm -rf .coverage
	$(BIN)/python -m coverage run -m pytest -m "(pure or cpu or serve) and not slow" $(PYTEST_ARGS)
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report

quality: $(VENV)/.installed-test
	$(BIN)/python -m tests.quality.run $(QUALITY_ARGS)

lint: $(VENV)/.installed-lint
	@$(BIN)/python -m tests.support.sizes
	$(BIN)/ruff check .
	$(BIN)/mypy $(PACKAGES)
	$(BIN)/mypy --implicit-reexport --follow-imports=silent $(LENIENT:%=--disable-error-code=%) tests/bench tests/gpu tests/quality

bench: $(VENV)/.installed-test
	$(BIN)/python -m tests.bench.engine

docs: $(VENV)/.installed-serve
	$(BIN)/python -m tests.support.settings_reference
	$(BIN)/python -m tests.support.monitoring.metrics_reference
	$(BIN)/python -m tests.support.edge.haproxy_errors
	$(BIN)/python -m tests.support.artefacts.values_schema

pictures: $(VENV)/.installed-test
	$(BIN)/python -m tests.support.stack.live_stack dashboards/pictures
	$(BIN)/python -m tests.support.stack.load_steps tests/bench/autoscaling.png

install-gpu: $(VENV)/.installed-gpu

clean:
	rm -rf build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info < (3, 13) else "Quartet needs Python 3.11 or 3.12, not " + sys.version.split()[0] + ": set PYTHON")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-%: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt '.$(EXTRAS-$*)'
	rm -rf build quartet.egg-info
	touch $(VENV)/.installed-serve $@
