# On a fresh machine one command is enough: every target makes the virtual environment it needs.
PYTHON ?= python3
BIN := .venv/bin
INPUTS := pyproject.toml setup.py constraints.txt $(wildcard src/credo/kernels/build.py src/credo/kernels/source/*)

.PHONY: demo test check format bench clean

demo: .venv/experiments.stamp     ## Adam, MC-dropout and VOGN on handwritten digits, side by side
	$(BIN)/credo demo --out demo

test: .venv/dev.stamp             ## every test
	$(BIN)/python -m pytest

check: .venv/dev.stamp            ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/dev.stamp           ## mends what `make check` would complain about, where a tool can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv-bench/bench.stamp    ## time and memory beside Adam and the other libraries
	.venv-bench/bin/python -m benchmarks.run
	.venv-bench/bin/python -m benchmarks.kronecker
	.venv-bench/bin/python -m benchmarks.importing

clean:
	rm -rf .venv .venv-bench build dist demo src/*.egg-info src/credo/kernels/*.so .*_cache .hypothesis

# One stamp per environment and extra; the kernels are rebuilt when their sources change. `core` is the package
# alone. The peers have an environment of their own: one brings a torchvision that breaks lightning in the other.
%.stamp: $(INPUTS)
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --constraint constraints.txt --editable '.[$(filter-out core,$(*F))]'
	@touch $@
