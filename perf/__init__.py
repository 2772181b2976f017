"""Measuring from outside: load, reports, budgets. There are three kinds of modules.

- `penstock perf`, the user's command for any v2 server (docs/perf.md, tuning.md, benchmarks.md): `command.py` selects
the subcommand; `profiling/` drives a model with `generator/` and `payloads/` and produces the document that
`reports/` shows; `tuning/` and `peers/` do so repeatedly. `truth/` checks the generator against theory and other
clients, with `bare.py` as the server; `gate/` is `make bench-gate`.
- `penstock plan` (docs/planning.md): `plan.py` on the `simulator/`.
- The project's own benchmarks, including `soak/` and `gpu/`, each run as `python -m penstock.perf.NAME` and named after
what it measures. They share `load.py` (a server as a process, wrk), `h2load.py`, `flood.py` (an open loop with
kernel timestamps), `models.py`, `calm.py`, `beside.py`, and `processes.py`, through which all of them read /proc.
"""
