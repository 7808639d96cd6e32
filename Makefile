# The same few words for people and for CI. Needs python3 (3.11 or newer), git and GNU make; the rest lands in .venv/.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# Quiet, never asking; errors are still shown.
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check --no-input

.DEFAULT_GOAL := help
.PHONY: help install test hard adapters optimizers package chaos mutants storm fuzz lint format demo demo-pipeline etcd bench-codec gpu clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 12

install: $(STAMP) ## make .venv/ with farflung (editable) and the development tools
	@:

# The stamp makes every later run instant, until what should be installed changes.
# torch goes first and pinned, so that the step after it finds torch in place and looks for no other one.
# No build isolation: the pinned setuptools builds farflung, instead of a second one being downloaded.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "farflung needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) -V 2>&1); try: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	@echo "Installing into .venv/; the first time takes a few minutes (torch is large)." >&2
	@$(PIP) install -c constraints.txt torch setuptools
	@$(PIP) install -c constraints.txt --no-build-isolation -e ".[dev]"
	@touch $@

# Images of containers like to forbid bytecode: then each of a thousand processes would compile all that it imports.
test hard adapters optimizers: export PYTHONDONTWRITEBYTECODE =

# Three processes for two cores: tests of real processes wait for most of their time.
test: $(STAMP) ## run the tests, three processes (minutes; more seeds and longer runs are in make hard)
	@$(BIN)/python -m pytest -n 3 --dist loadgroup --no-loadscope-reorder

# What real processes make of faults. Two at a time, where they are judged by what comes of it. A run that is broken
# again and again goes on as fast as it can meanwhile: it has the machine for itself, as has what is judged by seconds.
ALONE := $(filter-out tests/chaos/test_failpoints.py,$(wildcard tests/chaos/test_*.py)) tests/lab
hard: export FARFLUNG_LONG ?= 1
hard: $(STAMP) ## what CI runs too: every failpoint, the fault matrix, partitions, crowds and what is long (half an hour)
	@$(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder -m "hard or chaos" $(addprefix --ignore=,$(ALONE))
	@$(BIN)/python -m pytest -n 0 -m "hard or chaos" $(ALONE)

# A layer over .venv/, so that lint and the other tests see what they always see: its name, what is installed in it, and
# what pytest is told. A machine that reaches no registry has not run these tests, and says so: that is no fault of
# farflung's.
define in_a_layer
	@$(BIN)/python -m venv --without-pip .venv/$(1)
	@purelib='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	echo "import site; site.addsitedir('$$($(BIN)/python -c "$$purelib")')" > "$$(.venv/$(1)/bin/python -c "$$purelib")/below.pth"; \
	if timeout 300 $(PIP) --python .venv/$(1)/bin/python install -c constraints.txt $(2); then \
	HF_HUB_OFFLINE=1 .venv/$(1)/bin/python -m pytest -n 0 $(3); \
	else echo "NOT RUN: the tests that need $(2), which cannot be installed here" >&2; fi
endef
LOOPS := transformers accelerate lightning peft trl wandb mlflow-skinny
LEAN := bitsandbytes galore-torch apollo-torch adam-mini pytorch-optimizer

adapters: $(STAMP) ## the tests that need transformers, accelerate, lightning, peft, trl, a model hub, wandb or mlflow; NOT RUN where these can't be had (minutes)
	$(call in_a_layer,adapters,$(LOOPS),-k "adapters or hf or prepare or llama or transformers or mlflow_reads or biases_offline" tests/peer/adapters tests/peer/builtin tests/peer/pipeline tests/real/test_adapters.py tests/console/test_tracking.py tests/console/test_data_commands.py tests/console/test_generate.py)

optimizers: $(STAMP) ## the tests of inner optimizers from packages of their own; NOT RUN where these can't be had (a minute or two)
	$(call in_a_layer,optimizers,$(LEAN),tests/optim/test_packaged.py tests/real/test_optimizers.py)

package: $(STAMP) ## dist/: the wheel and the source archive, checked; the wheel, installed elsewhere, makes a round (a minute)
	@rm -rf dist
	@$(BIN)/python -m build --no-isolation --outdir dist .
	@FARFLUNG_LONG=1 FARFLUNG_WHEEL="$$(ls $(CURDIR)/dist/*.whl)" $(BIN)/python -m pytest -n 0 -q tests/house/test_packaging.py tests/house/test_deploy.py

chaos: $(STAMP) ## the same with 200 kills of the coordinator, as docs/reliability.md tells it (half an hour)
	@FARFLUNG_LONG=20 $(BIN)/python -m pytest -n 0 -q tests/chaos

mutants: $(STAMP) ## break each rule of the protocol by one line and see whether the tests notice (three quarters of an hour)
	@$(BIN)/python tests/house/mutants.py

storm: $(STAMP) ## 16 peers, faults that come by chance, 15 minutes
	@$(BIN)/python benchmarks/storm.py

fuzz: $(STAMP) ## a million damaged frames and files for every parser of what others send, then a minute of each guided by coverage
	@$(BIN)/python benchmarks/fuzz.py
	@$(BIN)/python benchmarks/fuzz_guided.py

# mypy follows folders, not editable installs, and the checkout may have any name: so it is shown the checkout
# through a link called farflung.
lint: $(STAMP) ## style, format and types; changes nothing
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@mkdir -p .venv/typing && ln -sfn ../.. .venv/typing/farflung
	@cd .venv/typing && MYPYPATH=. ../bin/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p farflung

format: $(STAMP) ## rewrite the files: the safe fixes, then the format
	@$(BIN)/ruff check --fix --exit-zero .
	@$(BIN)/ruff format .

demo: $(STAMP) ## one machine: a coordinator, three peers, the dashboard
	@$(BIN)/farflung demo

demo-pipeline: $(STAMP) ## one machine: a model in three stages of two peers; one is killed, its stage refilled (about 90 s)
	@$(BIN)/python benchmarks/demo_pipeline.py

# Debian's package, where it is missing and may be installed; its own service is not needed.
etcd: $(STAMP) ## three etcd on this machine, to try `farflung coordinate --store` with; until Ctrl-C
	@command -v etcd >/dev/null || { echo "Installing Debian's etcd-server." >&2; $(if $(filter 0,$(shell id -u)),,sudo) apt-get install -y etcd-server >&2; }
	@$(BIN)/python benchmarks/etcd.py

bench-codec: $(STAMP) ## the codecs' speed and error, beside others' (about half a minute)
	@$(BIN)/python benchmarks/codec.py

gpu: $(STAMP) ## on a machine with a GPU: every test and figure that needs one, as a table, in ten minutes; exit code 2 where there is none
	@$(BIN)/python benchmarks/gpu.py

clean: ## remove caches and build products; .venv/ and runs/ stay
	@rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage
	@find . -name __pycache__ -type d -not -path './.venv/*' -not -path './.git/*' -prune -exec rm -rf {} +
