# `make demo` and `make test` set up what they need, in a virtual environment of their own.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# CuPy, where there is a GPU to compute on.
EXTRAS := test,demo,lint,docs$(shell command -v nvidia-smi >/dev/null 2>&1 && echo ,gpu)
TEST_ARGS ?= --numprocesses 2 --dist loadfile

.PHONY: ready demo gallery test test-long soak upstream audit lint docs kernel dist-check format clean

# The virtual environment alone.
ready: $(VENV)/ready

# Images on every GPU, or on four simulated ones.
demo: $(VENV)/ready
	$(BIN)/python -m examples segment_images --out demo

# Every example, with a table of the results.
gallery: $(VENV)/ready
	$(BIN)/python -m examples --out demo

test: $(VENV)/ready
	$(BIN)/python -m pytest -m 'not long' $(TEST_ARGS)

# The tests that take long. They run before a change lands, and once a day where there is a CI.
test-long: $(VENV)/ready
	$(BIN)/python -m pytest -m long $(TEST_ARGS)

# Many tasks while things break, on simulated devices; SOAK_ARGS="--help" says what can be set.
soak: $(VENV)/ready
	$(BIN)/python -m tests.soak $(SOAK_ARGS)

# distributed's own tests without and with the plugin; UPSTREAM_ARGS="--help" says what can be set.
upstream: $(VENV)/ready
	$(BIN)/python -m tests.upstream $(UPSTREAM_ARGS)

# Known vulnerabilities of the dependencies that are installed. It asks the package registry, and
# fails where the registry knows nothing of one.
audit: $(VENV)/ready
	$(PYTHON) -m venv build/audit
	build/audit/bin/python -m pip install --quiet pip-audit
	build/audit/bin/pip-audit --strict --skip-editable --progress-spinner off --timeout 10 \
		--path "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The kernel as PTX, after its source has changed. It needs nvcc; PTX of this version and target runs
# with each driver since CUDA 11.7, on each GPU since Volta.
kernel:
	mkdir -p build
	nvcc -ptx -O3 -arch=compute_75 csrc/copy_boxes.cu -o build/copy_boxes.ptx
	(echo "// From csrc/copy_boxes.cu: $$(sha256sum < csrc/copy_boxes.cu | cut -c1-64)"; echo; \
	sed -n -e 's/^\.version .*/.version 7.7/' -e 's/^\.target .*/.target sm_70/' \
		-e '/^\.version/,$$p' build/copy_boxes.ptx) > dask_devctx/driver/copy_boxes.ptx

# The documentation site, into build/site; a warning is an error, so that each page is read again.
# It works offline.
docs: $(VENV)/ready
	$(BIN)/python -m sphinx --fresh-env --fail-on-warning --keep-going --quiet docs build/site
	@echo build/site/index.html

# The sdist and the wheels, with a C compiler and without one.
dist-check: $(VENV)/ready
	$(BIN)/python -m tests.distributions

format: $(VENV)/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(VENV)/ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --editable '.[$(EXTRAS)]'
	touch $@

clean:
	rm -rf $(VENV) demo build dist *.egg-info
