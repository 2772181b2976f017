"""Measuring from outside: load, reports, budgets. Three kinds of modules stand here.

- `penstock perf`, the user's command for any v2 server (docs/perf.md, tuning.md, benchmarks.md): `command.py` chooses
  the word; `profiling/` drives a model with `generator/` and `payloads/` and leaves the document that `reports/` shows;
  `tuning/` and `peers/` do so again and again. `truth/` holds the generator against theory and other clients, with
  `bare.py` as the server; `gate/` is `make bench-gate`.
- `penstock plan` (docs/planning.md): `plan.py` on the `simulator/`.
- The project's own benches, each run as `python -m penstock.perf.NAME` and named after what it weighs, `soak/` and
  `gpu/` among them. They share `load.py` (a server as a process, wrk), `h2load.py`, `flood.py` (an open loop with
  kernel stamps), `models.py`, `calm.py`, `beside.py` and `processes.py`, with which everybody reads /proc.
"""
