# `make` lists the targets. Each first finds or makes the Python environment (.ci/environment.py): an activated one is used
# as it is, otherwise .venv. Variables: TORCH=cpu, TESTED=1, PYTHON=..., LAB_ARGS=..., TEST_ARGS=..., BENCH_ARGS=...

ENVIRONMENT = $(or $(PYTHON),python3) .ci/environment.py
NOTEBOOKS ?= $(sort $(wildcard notebooks/*.ipynb))

.DEFAULT_GOAL := help
.PHONY: help lab test notebooks html bench lint clean

help:  ## print this list
	@sed -n 's/^\([a-z]*\):  *## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

lab:  ## open the course in JupyterLab
	@$(ENVIRONMENT) lab

test:  ## run the tests, then every notebook
	@$(ENVIRONMENT) test

notebooks:  ## run every notebook again and store its outputs (NOTEBOOKS=... for some of them)
	@$(ENVIRONMENT) run test .ci/notebooks.py execute $(NOTEBOOKS)

html:  ## the course as web pages, in site/
	@$(ENVIRONMENT) run test .ci/notebooks.py html $(NOTEBOOKS)

bench:  ## measure this machine, also against other libraries
	@$(ENVIRONMENT) run test,bench -m tests.bench $(BENCH_ARGS)

lint:  ## ruff, over modules and notebooks
	@$(ENVIRONMENT) run test -m ruff check
	@$(ENVIRONMENT) run test -m ruff format --check

clean:  ## remove what tools left behind
	rm -rf site build *.egg-info .coverage htmlcov .pytest_cache .ruff_cache .hypothesis
	find helpers tests notebooks .ci -name __pycache__ -prune -exec rm -rf {} +
	@echo "Kept: .venv, the generated images and caches in data/, your runs and predictions."
