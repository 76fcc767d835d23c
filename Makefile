# On a fresh machine one command is enough: every target makes the virtual environment it needs.
PYTHON ?= python3
BIN := .venv/bin
INPUTS := pyproject.toml setup.py constraints.txt $(wildcard src/credo/kernels/build.py src/credo/kernels/source/*)

.PHONY: demo test test-torch check format bench docs docs-serve dist clean

demo: .venv/experiments.stamp     ## Adam, MC-dropout and VOGN on handwritten digits, side by side
	$(BIN)/credo demo --out demo

# A file of tests stays in one process, so what its tests share is made once.
test: .venv/dev.stamp             ## every test, in two processes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

# With VERSION=2.15.0, say; TESTS narrows what is run. On Linux the package index answers with a CUDA build of several
# gigabytes; TORCH_INDEX=https://download.pytorch.org/whl/cpu has small ones. `make clean` removes the environment.
TESTS ?= tests
test-torch: .venv-torch-$(VERSION)/torch.stamp    ## every test with another version of torch
	.venv-torch-$(VERSION)/bin/python -c "import platform as p, numpy as n, torch as t; print('python', p.python_version(), 'torch', t.__version__, 'numpy', n.__version__)"
	.venv-torch-$(VERSION)/bin/python -m pytest $(TESTS)

.venv-torch-%/torch.stamp: $(INPUTS)
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) 'torch==$*'
	echo 'torch==$*' > $(@D)/constraints.txt
	$(@D)/bin/pip install --quiet --constraint $(@D)/constraints.txt --editable '.[test]'
	@touch $@

.venv-torch-/torch.stamp:
	@echo "say which version: make test-torch VERSION=2.15.0" >&2; exit 2

check: .venv/dev.stamp            ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/dev.stamp           ## mends what `make check` would complain about, where a tool can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: .venv/docs.stamp            ## the site, into site/; needs no network once the environment is there
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: .venv/docs.stamp      ## the same while it is written, at http://127.0.0.1:8000
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

dist: .venv/dist.stamp            ## sdist and wheel, checked, installed into a clean environment and tried there
	PYTHON=$(PYTHON) tools/dist.sh $(BIN)

bench: .venv-bench/bench.stamp    ## time and memory beside Adam and the other libraries
	.venv-bench/bin/python -m benchmarks.run
	.venv-bench/bin/python -m benchmarks.kronecker
	.venv-bench/bin/python -m benchmarks.importing

clean:
	rm -rf .venv .venv-bench .venv-torch-* build dist demo site .cache src/*.egg-info src/credo/kernels/*.so .*_cache .hypothesis

# One stamp per environment and extra; the kernels are rebuilt when their sources change. `core` is the package
# alone. The peers have an environment of their own: one brings a torchvision that breaks lightning in the other.
%.stamp: $(INPUTS)
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --constraint constraints.txt --editable '.[$(filter-out core,$(*F))]'
	@touch $@
