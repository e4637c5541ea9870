PYTHON ?= python3
VENV := .venv/bin
DEMO_INSTALLED := .venv/demo-installed
INSTALLED := .venv/installed
DOCS_INSTALLED := .venv/docs-installed
PIP := $(VENV)/python -m pip install --constraint constraints.txt --no-warn-script-location

TIMED := $(PYTHON) tests/support/timed.py
# Tests of Ray and of ranks share one process each, and every other file has one: see tests/conftest.py.
TESTS := $(TIMED) $(VENV)/python -m pytest --numprocesses 2 --dist loadgroup --no-loadscope-reorder
# What `make quick` leaves out, besides examples of benchmarks: imports and interpreted kernels take long.
LEFT_OUT := cqs/integrations tests/integrations tests/benchmarks tests/plotting tests/judged \
	tests/patterns/test_sizes.py tests/test_matrix.py tests/test_fused_merge.py \
	tests/worker/test_terms_in_kernels.py

.PHONY: help demo quick test touched test-all test-gpu mutants judge lint docs notebooks wheel check-dist check-package clean

help:  # the first target, so that `make` alone prints it
	@echo "make demo          attention on a private Ray cluster, checked (installs 1.4 GB)"
	@echo "make quick         the fast tests: no Ray, no GPU (a minute)"
	@echo "make test          what the library, Ray and the adaptors promise (7 to 13 minutes on 2 cores)"
	@echo "make touched       long tests, suites and faults that changes since the last complete run affect"
	@echo "make test-all      every test, judged suites and faults: before a release (hours)"
	@echo "make test-gpu      the tests that need a GPU, with the PyTorch that is installed"
	@echo "make mutants       check that tests notice faults: WORDS='merge scheduler ...' or all"
	@echo "make judge         published tests of other projects: SUITES='onnx_attention ...' or all"
	@echo "make lint          ruff, mypy, import layers, words of the glossary, budgets of lines"
	@echo "make docs          the site, in site/html/index.html"
	@echo "make notebooks     run the notebooks and store their outputs"
	@echo "make wheel         dist/: wheel and source distribution"
	@echo "make check-dist    check what would be published"
	@echo "make check-package the same, and follow README.md in a clean environment"
	@echo "make clean         remove .venv, dist and site"

demo: $(DEMO_INSTALLED)
	$(VENV)/python -m cqs demo

# One thread each: on small tensors more threads wait for each other, and long where cores are busy.
quick test touched test-all judge mutants: export OMP_NUM_THREADS := 1

# No Ray, no GPU, no other library, nothing above a second: for a hook before each commit.
quick: $(INSTALLED)
	$(TESTS) -m "not ray and not gpu and not slow and not long" tests cqs $(LEFT_OUT:%=--ignore=%)

test: $(INSTALLED)
	$(TESTS) -m "not long"

# Long tests, suites and faults that changes since SINCE affect; no test begins after 40 minutes.
SINCE ?= $(shell cat tests/complete-run.txt)
touched: $(INSTALLED)
	$(TIMED) $(VENV)/python -m tests.support.touched $(SINCE)

# Also large samples, pages, notebooks, model families and benchmark programs.
test-all: $(INSTALLED)
	$(TESTS)
	$(MAKE) judge mutants

# One-line faults of the package, each of which a named test must notice: ten minutes on 2 cores.
mutants: $(INSTALLED)
	$(VENV)/python -m tests.mutants --jobs 2 $(WORDS)

# Other people's tests and cases, run by cqs: one table.
judge: $(INSTALLED)
	$(VENV)/python -m tests.judged $(SUITES)

lint: $(INSTALLED)
	$(VENV)/ruff check
	$(VENV)/ruff format --check
	$(VENV)/mypy
	$(VENV)/lint-imports
	$(VENV)/python -m tests.support.language
	$(VENV)/python -m tests.support.budgets

# The site: site/html/index.html. A warning is an error.
docs: $(DOCS_INSTALLED)
	$(VENV)/python -m sphinx --quiet --fail-on-warning --keep-going \
		-c docs -d site/doctrees . site/html

# Runs them and stores them with their outputs.
notebooks: $(INSTALLED)
	$(VENV)/python notebooks/execute.py

# dist/: the wheel, and the source distribution that it is built from.
wheel: $(INSTALLED)
	$(VENV)/python -m build --no-isolation

# Of the wheel and the source distribution: metadata, contents, citation, and notebooks with the wheel.
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
$(DEMO_INSTALLED): pyproject.toml constraints.txt
	@echo "Installing PyTorch, Ray and matplotlib into .venv (1.4 GB, about a minute)"
	$(PYTHON) -m venv .venv
	$(PIP) $$(grep '^torch==' constraints.txt)
	$(PIP) --editable '.[cpu,plots,ray]'
	touch $@

$(INSTALLED): $(DEMO_INSTALLED)
	$(PIP) --quiet --editable '.[dev]'
	touch $@

$(DOCS_INSTALLED): $(DEMO_INSTALLED)
	$(PIP) --quiet --editable '.[docs]'
	touch $@
