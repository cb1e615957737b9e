# make demo and make test each work alone in a fresh clone; make help lists the rest.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
# Waiting threads that spin make torch up to 50 times slower beside another process; small models want one thread each.
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= passive
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help setup demo test lint format parity bench bench-trl repro clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-9s %s\n", $$1, $$2}'

setup: $(VENV)/base.ok ## make .venv and install the pinned requirements

demo: $(VENV)/base.ok $(VENV)/plots.ok ## SFT, GRPO and F-GRPO on the built-in world: table and figures, about 4 minutes
	$(PY) repro.py run demo

test: $(VENV)/base.ok $(VENV)/test.ok $(VENV)/plots.ok lint ## lint and tests, those of figures too
	$(PY) -m pytest

lint: $(VENV)/test.ok ## ruff: format and lint
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .

format: $(VENV)/test.ok ## let ruff rewrite the files
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

parity: .venv-parity/ok ## value and gradient of our losses beside those of TRL, in an environment of its own (optional)
	.venv-parity/bin/python tests/parity.py

bench: $(VENV)/base.ok ## seconds and memory of a step's parts, beside a floor, for seven cases (about 3 minutes)
	$(PY) bench.py

bench-trl: .venv-parity/ok ## the same cases beside TRL's GRPOTrainer, paired in one run (about 25 minutes)
	.venv-parity/bin/python bench.py --sides ours trl

repro: $(VENV)/base.ok $(VENV)/plots.ok ## every table and figure that runs here; resumable arm by arm (hours)
	$(PY) repro.py run all

clean: ## remove the environments and caches; runs/ and results/ stay
	rm -rf $(VENV) .venv-parity .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Python 3.10 or newer is needed: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/base.ok: requirements.txt | $(PY)
	@$(PY) -m pip --version > /dev/null 2>&1 || $(PY) -m ensurepip
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

$(VENV)/%.ok: requirements-%.txt $(VENV)/base.ok | $(PY)
	$(PY) -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

.venv-parity/ok: requirements.txt requirements-parity.txt
	@$(MAKE) --no-print-directory VENV=.venv-parity .venv-parity/bin/python
	@.venv-parity/bin/python -m pip --version > /dev/null 2>&1 || .venv-parity/bin/python -m ensurepip
	.venv-parity/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt -r requirements-parity.txt
	@touch $@
