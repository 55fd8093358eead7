# `make train` and `make test` set up all they need in .venv; afterwards neither needs a network.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: train shakespeare test test-model test-slow golden docs lint format clean
.DEFAULT_GOAL := train

train: $(VENV)/runtime  ## the small job on simulated devices
	$(BIN)/python -m train

shakespeare: $(VENV)/runtime shakespeare.zarr  ## 1.1M parameters on Shakespeare's works, and a text that they then write
	$(BIN)/python -m train --config-name=local_shakespeare
	$(BIN)/python -m tools.sample runs/local_shakespeare

shakespeare.zarr: | $(VENV)/runtime  # the texts are in the public domain; tools/make_dataset.py says more
	$(BIN)/python -m tools.make_dataset kind=shakespeare
	$(BIN)/python -m tools.tokenize_text input='shakespeare/train/*.txt' validation='shakespeare/validation/*.txt' output=$@

test: $(VENV)/tests  ## all tests but the slow ones
	$(BIN)/python -m pytest -m "not slow" -n 2 -rs

test-model: $(VENV)/tests  ## what proves the model: the step against its reference, by every mesh; under a minute
	$(BIN)/python -m pytest tests/test_model.py tests/test_reference.py tests/test_step.py -m "not slow" -n 2

test-slow: $(VENV)/tests
	$(BIN)/python -m pytest -m slow -rs

golden: $(VENV)/runtime  ## the losses that tests/test_golden.py expects, written anew
	$(BIN)/python -m tests.renew_golden

docs: $(VENV)/tests  ## the generated figures of README.md and docs/, written anew
	$(BIN)/python -m docs.generate

lint: $(VENV)/tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/tests
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) runs

$(VENV)/runtime: requirements-cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-cpu.txt
	touch $@

$(VENV)/tests: $(VENV)/runtime requirements-test.txt requirements-text.txt requirements-s3.txt requirements-trackers.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-test.txt
	touch $@
