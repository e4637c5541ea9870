PYTHON ?= python3
VENV := .venv/bin
INSTALLED := .venv/installed
DOCS_INSTALLED := .venv/docs-installed

.PHONY: demo test test-ray test-rest test-kernels test-gpu lint docs notebooks wheel check-dist check-package clean

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
