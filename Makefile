# One command for everything a contributor does. `make` lists them.
# Everything is made inside this folder: the environment in .venv/, the small model in .cache/.

PYTHON ?= python3
VENV := .venv
ENVIRONMENT := $(PYTHON) scripts/environment.py

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-vllm test test-gpu check clean

help: ## List the targets
	@awk -F ': ## ' '/^[a-z-]+: ## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

setup: ## Make .venv/ with all the tests need: real vLLM for CPU and a small real model (once, 3 to 6 minutes)
	@$(ENVIRONMENT) test
	@$(VENV)/bin/python scripts/small_model.py

demo: ## Tune the simulated engine: no GPU, no vLLM, no download but the tuner's own requirements
	@$(ENVIRONMENT) core
	$(VENV)/bin/tune run --config examples/demo.yaml

demo-vllm: ## Tune real vLLM on this machine's CPU (minutes)
	@$(MAKE) --no-print-directory setup
	$(VENV)/bin/tune run --config examples/demo-vllm.yaml

test: ## Run every test that this machine can run
	@$(MAKE) --no-print-directory setup
	$(VENV)/bin/python -m pytest

test-gpu: ## Run the tests that need a GPU and real vLLM
	@$(MAKE) --no-print-directory setup
	$(VENV)/bin/python -m pytest -m gpu

check: ## Lint, formatting, types
	@$(ENVIRONMENT) check
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

clean: ## Remove the environment, the small model and every cache; runs/ stays
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
