# `make book` and `make test` are the two commands of the README; both make the environment when it is missing.
SHELL := /bin/sh
# Another environment that happens to be active must not leak into ours.
unexport VIRTUAL_ENV
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ENV := $(VENV)/made
NAMES ?=
ALL ?=

.DEFAULT_GOAL := help
.PHONY: help env book serve notebooks results test lint claims api readme mutate constraints benchmark clean report

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

env: $(ENV)  ## make the environment in .venv (once; again when a requirements file changes)

$(ENV): requirements.txt requirements-model.txt constraints.txt
	$(PYTHON) tools/environment.py $(VENV)
	@touch $@

book: $(ENV)  ## build the book into _build/html
	@$(BIN)/python tools/notebooks.py check
	@rm -rf _build
	@$(BIN)/jupyter-book build . -n -W --keep-going -q
	@echo "The book is built: open _build/html/index.html"

serve:  ## show the built book at http://127.0.0.1:8000
	@test -f _build/html/index.html || $(MAKE) book
	@$(PYTHON) -m http.server --bind 127.0.0.1 --directory _build/html 8000

notebooks: $(ENV)  ## run chapters again: make notebooks NAMES="identity/ceiling index" (all without NAMES)
	@$(BIN)/python tools/notebooks.py build $(NAMES)

results: $(ENV)  ## make stale records again, and say first how long it takes (every record: make results ALL=1)
	@$(BIN)/python tools/refresh.py --cores 2 $(if $(ALL),--all)
	@$(BIN)/snakemake -c2 --quiet rules $(if $(ALL),--config everything=1)

test: $(ENV)  ## every check: library, chapters, built book, browser
	@$(BIN)/python -m pytest -n 2

lint: $(ENV)  ## format, style, types and spelling
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/codespell
	@$(BIN)/python tools/links.py
	@echo "lint: nothing to report"

claims: $(ENV)  ## write the ledger of claims, book/claims.md
	@$(BIN)/python tools/claims.py build

api: $(ENV)  ## write the page of the library, book/api.md
	@$(BIN)/python tools/api.py build

report: $(ENV)  ## write the pages of the reports, book/tool/report.md and diff_report.md
	@$(BIN)/python tools/report_fields.py build

readme: $(ENV)  ## draw the figure of the README and write its table of chapters
	@$(BIN)/python tools/readme.py

mutate: $(ENV)  ## break things on purpose, one at a time: does a check see each?
	@$(BIN)/python tools/mutate.py

benchmark: $(ENV)  ## time the score moments and the comparison of checkpoints against others: see benchmarks/README.md
	@OMP_NUM_THREADS=1 PYTHONPATH=$(VENV)/peers $(BIN)/python benchmarks/score_moments.py
	@$(BIN)/python benchmarks/checkpoint_diff.py --output benchmarks/checkpoint_diff.json
	@$(BIN)/python benchmarks/tables.py

constraints: $(ENV)  ## write constraints.txt again after a change of requirements.txt
	@$(PYTHON) -m venv $(VENV)/uv && $(VENV)/uv/bin/pip install -q uv
	@$(VENV)/uv/bin/uv pip compile -q --universal --python-version 3.11 --no-header --no-annotate \
	    --no-emit-package ceilings requirements.txt -o $(VENV)/constraints.txt
	@{ echo "# Every version beneath requirements.txt, for all platforms; installs nothing by itself (pip install -r … -c this)."; \
	   echo "# Made by: make constraints"; cat $(VENV)/constraints.txt; } > constraints.txt

clean:  ## remove what was built, but not the environment
	rm -rf _build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tools tests book benchmarks -name __pycache__ -prune -exec rm -rf {} +
