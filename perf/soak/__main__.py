"""`python -m penstock.perf.soak`."""

from .command import main

if __name__ == "__main__":
    raise SystemExit(main())
