"""`python -m penstock.perf.generator_accuracy`."""

from .command import main

if __name__ == "__main__":
    raise SystemExit(main())
