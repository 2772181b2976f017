# The menu. `make serve` and `make test` need Python >= 3.11 and make, and set up .venv themselves.
.DEFAULT_GOAL := help
.PHONY: help serve test lint bench bench-batching dev clean
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
export PIP_ROOT_USER_ACTION := ignore

help:  ## list these words
	@sed -n 's/^\([a-z-]*\):.*  ## /  make \1\t/p' Makefile | expand -t 23

serve: .venv/.serve  ## serve examples/iris on 127.0.0.1:8000 and print three commands to try
	@sed -n '/^```sh/,/^```$$/{/^```/!p}' examples/iris/README.md
	@echo
	exec $(BIN)/penstock serve examples/iris

test: .venv/.dev  ## run the tests; ARGS="-k lane" passes words on to pytest
	$(BIN)/pytest -q -n 2 --dist loadfile $(ARGS)

lint: .venv/.dev  ## check style, formatting, types, layers and packaging
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/mypy tests
	$(BIN)/lint-imports
	.ci/package

bench: .venv/.dev  ## measure the server over loopback (needs wrk); ARGS="--models iris" narrows it
	$(BIN)/python -m penstock.perf.bench $(ARGS)

bench-batching: .venv/.dev  ## measure the batcher beside the best static settings, 6 minutes; ARGS as above
	$(BIN)/python -m penstock.perf.batching $(ARGS)

dev: .venv/.dev  ## set up .venv with all that the words above need

clean:  ## remove build outputs and caches (.venv stays)
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache perf/.models
	find server batching backends perf tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps: set-up runs again only when what is to be installed has changed.
.venv/.serve: pyproject.toml .ci/venv
	@echo "setting up .venv (once)"
	@.ci/venv .venv
	@$(PIP) -e '.[cpu]' 'tritonclient[http]'
	@touch $@

.venv/.dev: pyproject.toml .ci/venv
	@echo "setting up .venv (once)"
	@.ci/venv .venv
	@$(PIP) -e '.[cpu,tensorflow,dev]'
	@touch $@ .venv/.serve
