# Three commands matter: `make s3`, `make demo` and `make test`. `make help` lists the rest.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest
MATRIX ?= 3.12 3.13
INSTALL := -m pip install --quiet --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help install s3 demo test cuda check format lint types docs docs-serve browser soak soak-long fuzz crash mutants wheel matrix lowest integrations audit bench-peers bench clean

help:  ## list the targets
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(STAMP)  ## create .venv and install everything in it

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("streammega needs Python 3.11 or newer; set PYTHON=python3.11 or so" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(INSTALL) "torch==2.13.0"
	$(BIN)/python $(INSTALL) -e '.[dev]'
	@touch $@

s3: $(STAMP)  ## a shell with an S3 server on this machine and s3://bucket, until you leave it (S3="--port 9000")
	@$(BIN)/python tools/s3_server.py $(S3)

demo: $(STAMP)  ## train from s3:// on two ranks, kill it twice, resume, and prove that no token differs (DEMO="my/texts": your files)
	$(BIN)/python tools/demo.py $(DEMO)

test: $(STAMP)  ## the tests, on the CPU whatever the machine has; four at once, for many wait for servers and processes
	CUDA_VISIBLE_DEVICES= $(PYTEST) -n 4 --dist worksteal -m "not soak"

cuda: $(STAMP)  ## what needs a GPU: the tests marked cuda (some need two), what a step costs; skipped with a reason where there is none
	$(PYTEST) -m cuda -rs --timeout 600
	$(BIN)/python tools/bench/training.py --device cuda --figures cost

check: $(STAMP) format lint types test  ## what CI runs: format, lint, types, tests

format: $(STAMP)  ## fail if a file is not formatted (mend: .venv/bin/ruff format)
	$(BIN)/ruff format --check .

lint: $(STAMP)  ## ruff, and no new small modules or Protocols of one class
	$(BIN)/ruff check .
	$(BIN)/python tools/style_report.py --gate

types: $(STAMP)  ## mypy
	$(BIN)/mypy

docs: $(STAMP)  ## the site of the pages, in site/, without network; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

docs-serve: $(STAMP)  ## show the site on http://127.0.0.1:8000, with each change of a page
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

browser: docs  ## look at the site and view in chromium (Debian: apt-get install chromium), at desktop and phone width; pictures in browser-run/
	$(BIN)/python tools/browser.py

soak: $(STAMP)  ## long runs: 20,000 configurations against megatron-core, killed runs, 100,000 batches, random calls of loaders, sequences of conversions, ten times the random cases of make test, kernels that check every index (two to three hours)
	$(PYTEST) -n 2 -m soak --timeout 1800
	STREAMMEGA_EXAMPLES=10 CUDA_VISIBLE_DEVICES= $(PYTEST) -n 2 -m many_examples --timeout 1800
	STREAMMEGA_CHECKED=1 CUDA_VISIBLE_DEVICES= $(PYTEST) -n 2 -m "not soak" --timeout 900 tests/kernels tests/loading --ignore tests/kernels/test_warmup.py

soak-long: $(STAMP)  ## an hour at a low rate with outages of two minutes: memory, threads, descriptors and speed stay; goes on where it was ended (SOAK="--hours 8")
	nice -n 10 $(BIN)/python tools/soak_long.py $(SOAK)

fuzz: $(STAMP)  ## fuzz what reads input from outside, 20 s a target, on from where it was ended (FUZZ="--target idx --seconds 600")
	$(BIN)/python $(INSTALL) -e '.[fuzz]'
	$(BIN)/python tools/fuzz/run.py $(FUZZ)

crash: $(STAMP)  ## a disk and a bucket that fail or lie at every operation of all that writes, and 1,000 SIGKILLs; goes on where it was ended (CRASH="--kills", "--again" or names of scenes)
	$(BIN)/python tools/crash.py $(CRASH)

mutants: $(STAMP)  ## changes of the core that no test notices, by cosmic-ray; goes on where it was ended (MUTANTS="--mutants 500 --room order")
	$(BIN)/python $(INSTALL) -e '.[mutants]'
	$(BIN)/python tools/mutants.py $(MUTANTS)

wheel: $(STAMP)  ## a wheel and an sdist in dist/; the wheel, installed alone in .venv-wheel, passes tools/smoke.py
	rm -rf dist build
	$(BIN)/python -m build --outdir dist
	$(PYTHON) -m venv --clear .venv-wheel
	.venv-wheel/bin/python $(INSTALL) "torch==2.13.0"
	.venv-wheel/bin/python $(INSTALL) dist/*.whl
	.venv-wheel/bin/python -m pip check
	.venv-wheel/bin/streammega --version
	.venv-wheel/bin/python -P tools/smoke.py

matrix:  ## the tests on other Pythons (MATRIX=3.13: on one; TESTS=tests/order: some), and a dry run of pip for 3.14
	for version in $(MATRIX); do \
	  python$$version -m venv .venv-$$version && \
	  .venv-$$version/bin/python $(INSTALL) -e '.[dev]' && \
	  CUDA_VISIBLE_DEVICES= .venv-$$version/bin/python -m pytest -n 4 --dist worksteal -rs -m "not soak" $(TESTS) || exit 1; done
	.venv-$(lastword $(MATRIX))/bin/python $(INSTALL) --dry-run --ignore-installed --only-binary=:all: \
	  --python-version 3.14 --target .venv-3.14 '.[convert]'

lowest:  ## the tests and tools/smoke.py with the lowest version of every dependency (TESTS=tests/order: some of them)
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install --quiet --disable-pip-version-check uv
	.venv-lowest/bin/uv pip install --quiet --python .venv-lowest/bin/python --resolution lowest-direct '.[dev]'
	.venv-lowest/bin/python -P tools/smoke.py
# kernels of its own: those of .venv are of another LLVM
	CUDA_VISIBLE_DEVICES= NUMBA_CACHE_DIR=$(CURDIR)/.venv-lowest/kernels .venv-lowest/bin/python -m pytest -n 4 --dist worksteal -rs -m "not soak" $(TESTS)

integrations:  ## the tests against other trainers, in .venv-integrations with those that .venv has not
	$(PYTHON) -m venv .venv-integrations
	.venv-integrations/bin/python $(INSTALL) "torch==2.13.0"
	.venv-integrations/bin/python $(INSTALL) -e '.[integrations]'
	CUDA_VISIBLE_DEVICES= .venv-integrations/bin/python -m pytest -rs tests/integrations tests/loading/test_frameworks.py

audit: $(STAMP)  ## known faults of the installed packages, and a bill of materials in dist/sbom.json
	$(PYTHON) -m venv .venv-audit
	.venv-audit/bin/python -m pip install --quiet --disable-pip-version-check pip-audit cyclonedx-bom
	mkdir -p dist
	.venv-audit/bin/cyclonedx-py environment $(BIN)/python --output-file dist/sbom.json
	.venv-audit/bin/pip-audit --path "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"

bench-peers:  ## .venv-bench, with the other loaders that tools/bench/table.py measures (a few GB)
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check "torch==2.13.0"
	printf 'torch==2.13.0\nhuggingface-hub<1\n' > .venv-bench/constraints.txt
	for peer in -e.[convert,metrics] megatron-core==0.16.1 boto3 matplotlib litdata mosaicml-streaming s3torchconnector 'multi-storage-client[boto3]' datasets grain; do \
	  .venv-bench/bin/python -m pip install --quiet --disable-pip-version-check -c .venv-bench/constraints.txt "$$peer" || exit 1; done

bench:  ## the table of docs/benchmarks.md, both sides of every figure, in half an hour; after bench-peers (BENCH="--figures stalls": ten minutes of waits)
	.venv-bench/bin/python tools/bench/table.py $(BENCH)

clean:  ## remove .venv, caches and the demo's folder
	rm -rf $(VENV) .venv-* demo-run site browser-run fuzz-run soak-long-run mutants-run crash-progress.json build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
