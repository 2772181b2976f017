"""The simulator: the server's own Scheduler in virtual time, under made or recorded arrivals. docs/planning.md."""
