"""The simulator: the server's own Scheduler in virtual time, under generated or recorded arrivals. docs/planning.md."""
