# make demo | test | soak | bench | hardware | matrix | lint | docs     each does all the set-up that it needs on a fresh Debian 12, as root
PYTHON := .venv/bin/python
SOURCES := $(shell find slurm_gpuhealth -name '*.py' -o -name '*.json' -o -name '*.toml') $(wildcard scripts/gpuhealth-*)

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Empty: compiled once is enough, for tests start Python by the hundred.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test unit integration soak bench hardware matrix lint docs clean

demo: .venv/installed tests/fakes/nvml/libnvidia-ml.so.1
	@$(PYTHON) -m tests.demo

test: lint unit integration

unit: .venv/installed tests/fakes/nvml/libnvidia-ml.so.1
	$(PYTHON) -m pytest tests/unit -n 3 --dist worksteal

# They wait far more than they work: six clusters keep two cores busy.
integration: .venv/installed tests/fakes/nvml/libnvidia-ml.so.1
	$(PYTHON) -m pytest tests/integration -n 6

# The long search: new random histories (SOAK=1000000 of them, or SOAK_MINUTES=60; SEED=N plays those of N again), then
# what `make test` does in short: scribbled journals, hostile logs, slow calls, kills at random points, a wave of 200 nodes.
soak: .venv/installed tests/fakes/nvml/libnvidia-ml.so.1
	@$(PYTHON) -m tests.soak
	GPUHEALTH_SOAK=1 $(PYTHON) -m pytest tests/unit/test_journal_corrupt.py tests/unit/test_logs*.py tests/unit/test_deadline.py
	GPUHEALTH_SOAK=1 $(PYTHON) -m pytest tests/integration -n 6 -o timeout=7200 -k "killed or when_every_node_fails"

bench: .venv/installed tests/fakes/nvml/libnvidia-ml.so.1
	for file in bench/*.py; do $(PYTHON) $$file || exit 1; done

# On a machine with an NVIDIA GPU, as root: what we read against nvidia-smi, and DCGM's levels (LEVELS=1,2 for those only).
hardware: .venv/installed
	@$(PYTHON) -m tests.hardware

# The tests in roots of Debian's and Ubuntu's releases (ROOTS="trixie forky"), with their Slurms and Pythons. See docs/compatibility.md.
matrix:
	@scripts/setup debootstrap
	@/usr/bin/python3 -m tests.matrix

lint: .venv/installed
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

docs: .venv/installed
	$(PYTHON) scripts/gen-docs

# Installed as on a node, not "editable": what an editable install adds to every start-up would be measured too.
.venv/installed: .venv/tools $(SOURCES)
	@rm -rf build
	@.venv/bin/pip install --quiet --no-deps --no-build-isolation --force-reinstall .
	@touch $@

.venv/tools: pyproject.toml scripts/setup
	@scripts/setup
	@echo "Making .venv: the project and its tools, in a Python environment of their own" >&2
	@/usr/bin/python3 -m venv .venv
	@.venv/bin/pip install --quiet 'pip>=21.2' 'setuptools>=77' # older ones know no extra that names another
	@.venv/bin/pip install --quiet '.[dev]'
	@touch $@

tests/fakes/nvml/libnvidia-ml.so.1: tests/fakes/nvml/nvml.c | .venv/tools
	@$(MAKE) --silent -C tests/fakes/nvml

clean:
	rm -rf .venv .cache build *.egg-info tests/fakes/nvml/*.so.1
