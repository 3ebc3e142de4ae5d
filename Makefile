# make help says what each target does.
PYTHON ?= python3
TORCH ?= torch==2.13.0
TRITON ?= triton==3.6.0
TWINE ?= twine==7.0.0
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEVICE_MARKS := gpu or hopper or multi_gpu

.DEFAULT_GOAL := help
.PHONY: help setup run test test-rest test-all test-gpu remember lint format docs dist clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## (.*)/make \1|\2/' | awk -F'|' '{printf "%-14s %s\n", $$1, $$2}'

setup: $(STAMP) ## install everything into .venv (the targets below do it by themselves, once)

run: $(STAMP) ## train a small model on flashtile and on plain attention, compare them, and write a table and a PNG
	@echo "==> examples/demo.py"
	@$(BIN)/python examples/demo.py

# Both halves of the tests: the ordinary ones, then Triton's kernels in its interpreter, which needs a process of its own.
# $(1): what they are called; $(2): options of both halves; $(3): of the first. Every worker reads all tests, which takes
# a third less if their bytecode may be kept.
run_tests = @status=0; unset PYTHONDONTWRITEBYTECODE; \
	echo "==> tests on the CPU: $(1)"; \
	$(BIN)/python -m pytest -n $(WORKERS) $(2) $(3) -m "not ($(DEVICE_MARKS) or interpreter)" || status=1; \
	echo "==> Triton kernels in the interpreter: $(1)"; \
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n $(WORKERS) $(2) -m interpreter || status=1; \
	exit $$status

test: $(STAMP) ## the quick tests, without a GPU: one case of each, every public function and kernel (3 minutes on two cores)
	$(call run_tests,the quick part,--part quick,--complete)

test-rest: $(STAMP) ## the tests that `make test` leaves out
	$(call run_tests,the rest,--part rest)

test-all: $(STAMP) ## all tests that need no GPU: those of `make test` and of `make test-rest`
	$(call run_tests,all of them,,--complete)

test-gpu: $(STAMP) ## the tests that need a GPU
	@status=0; \
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "($(DEVICE_MARKS)) and not alone" || status=1; \
	$(BIN)/python -m pytest -m "($(DEVICE_MARKS)) and alone" || status=1; \
	exit $$status

remember: $(STAMP) ## compile the kernels with new checks of machine code, and record the checks that pass
	@$(BIN)/python -m pytest -n $(WORKERS) --remember

lint: $(STAMP) ## ruff (rules and format) and mypy
	@status=0; \
	echo "==> ruff check"; $(BIN)/ruff check . || status=1; \
	echo "==> ruff format --check"; $(BIN)/ruff format --check . || status=1; \
	echo "==> mypy"; $(BIN)/mypy || status=1; \
	exit $$status

format: $(STAMP) ## rewrite the sources as ruff wants them
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: $(STAMP) ## the site of the documents, in site/; it needs no server and no network
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "==> site/index.html"

dist: $(BIN)/twine ## wheel and sdist, in dist/, checked; the same bytes for the same commit
	@rm -rf dist
	@SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m hatchling build
	@$(BIN)/twine check --strict dist/*

$(BIN)/twine: | $(STAMP)
	@$(BIN)/pip install --disable-pip-version-check "$(TWINE)"

clean: ## remove .venv and caches
	rm -rf $(VENV) site .pytest_cache .ruff_cache .mypy_cache .hypothesis

# The stamp is written last, so an interrupted installation starts again, and a finished one is not repeated until
# what it was made from changes. A GPU build of torch brings its own Triton; only where there is none is ours installed.
$(STAMP): pyproject.toml requirements-dev.txt
	@echo "==> setting up $(VENV), once: $(TORCH), $(TRITON) and the packages of requirements-dev.txt"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "flashtile needs Python 3.10 or newer; set PYTHON=")'
	@test -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV) || { \
	  echo "Python has no working venv module; on Debian and Ubuntu: apt-get install python3-venv"; rm -rf $(VENV); exit 1; }
	@$(BIN)/pip install --disable-pip-version-check -r requirements-dev.txt "$(TORCH)"
	@case "$$(uname -s)" in Linux) $(BIN)/python -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("triton"))' \
	  || $(BIN)/pip install --disable-pip-version-check "$(TRITON)";; esac
	@$(BIN)/pip install --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@
	@echo "==> installed"
