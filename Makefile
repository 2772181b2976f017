# `make serve` and `make test` need only Python >= 3.11 and make; they set up .venv themselves.
.DEFAULT_GOAL := help
.PHONY: help serve test lint lint-types lint-rest bench bench-batching bench-gate image-cpu image-gpu dev clean
BIN := .venv/bin
# setuptools prints an eight-line warning for -e
PIP := PYTHONWARNINGS=ignore $(BIN)/python -m pip --disable-pip-version-check install --quiet
export PIP_ROOT_USER_ACTION := ignore

help:  ## list these targets
	@sed -n 's/^\([a-z-]*\):.*  ## /  make \1\t/p' Makefile | expand -t 23

serve: .venv/.serve  ## serve examples/iris on 127.0.0.1:8000 and print three commands to try
	@sed -n '/^```sh/,/^```$$/{/^```/!p}' examples/iris/README.md
	@echo
	exec $(BIN)/penstock serve examples/iris

# In file order: xdist's default runs the files with the most tests first and leaves the slowest to the end.
test: .venv/.dev  ## run the tests; ARGS="-k lane" passes arguments to pytest
	$(BIN)/pytest -q -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

lint: lint-types lint-rest  ## check style, formatting, types, layers and packaging; faster with -j2

lint-types: .venv/.dev
	$(BIN)/mypy
	$(BIN)/mypy tests

lint-rest: .venv/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	.ci/package

bench: .venv/.dev  ## measure the server over loopback (needs wrk); ARGS="--models iris" selects models
	$(BIN)/python -m penstock.perf.bench $(ARGS)

bench-batching: .venv/.dev  ## compare the batcher with the best static settings, 9 minutes; ARGS as above
	$(BIN)/python -m penstock.perf.batching $(ARGS)

bench-gate: .venv/.dev  ## report what exceeds perf/gate/budgets.toml, 3 minutes; ARGS="--only trip", --update
	$(BIN)/python -m penstock.perf.gate $(ARGS)

image-cpu:  ## build the image penstock:cpu with docker, podman or buildah; ARGS="--build-arg BASE=..." passes arguments
	@.ci/image build cpu $(ARGS)

image-gpu:  ## build the image penstock:gpu, in the same way
	@.ci/image build gpu $(ARGS)

dev: .venv/.dev  ## set up .venv with everything the targets above need

clean:  ## remove build outputs and caches (.venv and .peers stay)
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache perf/.models
	find server batching backends perf tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamp files: setup runs again only if the dependencies have changed.
.venv/.serve: pyproject.toml .ci/venv
	@echo "setting up .venv (once)"
	@.ci/venv .venv
	@$(PIP) -e '.[cpu]' 'tritonclient[http]'
	@touch $@

.venv/.dev: pyproject.toml .ci/venv
	@echo "setting up .venv (once)"
	@.ci/venv .venv
	@$(PIP) --no-compile -e '.[cpu,tensorflow,dev]'
	@$(BIN)/python -m compileall -q -j 0 .venv/lib >/dev/null || true  # on all cores; pip would use one
	@touch $@ .venv/.serve
