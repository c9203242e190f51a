# mindferry: `make help` lists the verbs. Everything happens in .venv; nothing else is touched.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
DEMO := demo-run

.DEFAULT_GOAL := help
.PHONY: help demo test sanitize check format install clean

help:  ## list what can be made
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 18

# One stamp per set of extras; a change of the pins installs again.
$(VENV)/.installed-run: pyproject.toml
	@echo "== installing mindferry with MindSpore, mindformers and PyTorch into $(VENV) (about 2.5 GB)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || python3 -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@$(BIN)/python -m pip install --quiet --editable '.[torch]'
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed-run
	@echo "== installing what tests and checks need"
	@$(BIN)/python -m pip install --quiet --editable '.[torch,test,check]'
	@touch $@

install: $(VENV)/.installed-run  ## make .venv and install mindferry in it

demo: $(VENV)/.installed-run  ## build a small GPT-2, migrate it, verify it, train it
	@echo "== the whole road with a small GPT-2, in $(DEMO)/"
	@$(BIN)/python -m mindferry.demo $(DEMO)

test: $(VENV)/.installed-test  ## run the tests
	@echo "== running the tests (the long ones: $(BIN)/pytest -m long)"
	@$(BIN)/python -m pytest -m "not long" $(PYTEST_ARGS)

sanitize: $(VENV)/.installed-test  ## run the kernels' tests under AddressSanitizer and UBSan
	@echo "== the kernels' tests under AddressSanitizer and UndefinedBehaviorSanitizer"
	@$(BIN)/python -m tests.kernels.sanitized

check: $(VENV)/.installed-test  ## lint, format and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(VENV)/.installed-test  ## rewrite the sources in the house style
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:  ## remove .venv and the demo
	rm -rf $(VENV) $(DEMO)
