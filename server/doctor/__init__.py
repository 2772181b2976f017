"""Doctor: `penstock doctor`, which reports what a machine has for serving, what is wrong, and what to do.

`reading`, `machine`, `packages`, and, in separate processes, `child` read Facts; `machine_rules` and `gpu_rules`,
which are pure, derive Diagnoses from them; a Report presents those as text or as JSON.
"""
