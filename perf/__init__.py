"""Measuring from outside: load, reports, budgets. There are three kinds of modules.

- `penstock perf`, the user's command for any v2 server (docs/perf.md, tuning.md, benchmarks.md): `command.py` selects
the subcommand; `profiling/` drives a model with `generator/` and `payloads/` and produces the document that
`reports/` shows; `tuning/` and `peers/` do so repeatedly. `generator_accuracy/` checks the generator against theory and
other clients, with `stub_server.py` as the server; `gate/` is `make bench-gate`.
- `penstock plan` (docs/planning.md): `plan.py` on the `simulator/`.
- The project's own benchmarks, including `soak/` and `gpu/`, each run as `python -m penstock.perf.NAME` and named after
what it measures. They share `server_process.py` (a server in its own process), `processes.py` (its CPU time and memory
from /proc), `wrk.py`, `h2load.py` and `open_loop.py` (the load), `models.py` and `model_variants.py` (what is served),
`background_load.py` (what else the machine does), `side_by_side.py` (several servers in turns) and `baselines/`.
"""
