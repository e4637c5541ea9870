PYTHON ?= python3
VENV := .venv/bin
INSTALLED := .venv/installed
DOCS_INSTALLED := .venv/docs-installed

.PHONY: help language demo test test-ray test-rest test-kernels test-gpu lint docs notebooks wheel check-dist check-package clean

help:  # the first target, so that `make` alone shows it
	@echo "make demo          attention over a real text on a private Ray cluster, checked"
	@echo "make test          every test (about 15 minutes on 2 cores)"
	@echo "make test-gpu      the tests that need a GPU, with the PyTorch that is installed"
	@echo "make lint          ruff and mypy"
	@echo "make language      list words that the glossary replaces, and long sentences"
	@echo "make docs          the site, in site/html/docs/index.html"
	@echo "make notebooks     run the notebooks and store their outputs"
	@echo "make wheel         dist/: wheel and source distribution"
	@echo "make check-dist    check what would be published"
	@echo "make check-package the same, and follow README.md in a clean environment"
	@echo "make clean         remove .venv, dist and site"

demo: $(INSTALLED)
	$(VENV)/python -m cqs demo

# Ray's tests wait more than they compute, and look at what else runs: apart, but beside the others,
# and those beside whatever else is to be made. One thread each: on small tensors more threads wait for
# each other, and long where cores are busy.
ifneq (,$(filter test,$(MAKECMDGOALS)))
MAKEFLAGS += --jobs=2 --output-sync
endif
test-ray test-rest: export OMP_NUM_THREADS := 1

test: test-rest test-ray test-kernels

test-ray: $(INSTALLED)
	$(VENV)/python -m pytest -m ray

test-rest: $(INSTALLED)
	$(VENV)/python -m pytest -m "not ray" --ignore tests/worker/test_compilation.py

# They compile for a minute, after Ray's tests if those are made too.
test-kernels: $(INSTALLED)
	$(VENV)/python -m pytest tests/worker/test_compilation.py

lint: $(INSTALLED)
	$(VENV)/ruff check
	$(VENV)/ruff format --check
	$(VENV)/mypy

# Not part of lint yet: pages and docstrings are being rewritten.
language: $(INSTALLED)
	$(VENV)/python -m tests.support.language

# The site: site/html/docs/index.html. A warning is an error.
docs: $(DOCS_INSTALLED)
	$(VENV)/python -m sphinx --quiet --fail-on-warning --keep-going \
		-c docs -d site/doctrees . site/html

# Runs them and stores them with their outputs.
notebooks: $(INSTALLED)
	$(VENV)/python notebooks/execute.py

# dist/: the wheel, and the source distribution that it is built from.
wheel: $(INSTALLED)
	$(VENV)/python -m build --no-isolation

# Of the wheel and the source distribution: metadata, contents, citation.
check-dist: $(INSTALLED)
	$(VENV)/python tests/check_package.py dist

# The same, and as a new user: a clean environment (downloads), and README.md there.
check-package: $(INSTALLED)
	$(VENV)/python tests/check_package.py

# Where a GPU is, with the torch that is installed there: nothing is downloaded.
test-gpu:
	$(PYTHON) -m pytest -m gpu

clean:
	rm -rf .venv dist site

# torch first and by its exact version: a range would take the newest build.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(VENV)/python -m pip install --quiet $$(grep '^torch==' constraints.txt)
	$(VENV)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

$(DOCS_INSTALLED): $(INSTALLED)
	$(VENV)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@
