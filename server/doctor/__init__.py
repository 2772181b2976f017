"""Doctor: `penstock doctor`, which says what a machine has for serving, what is wrong with it, and what to do.

The way of its work: `reading`, `machine`, `packages`, `libraries` and, in processes of their own, `child` read Facts;
`machine_rules` and `gpu_rules`, which are pure, make Diagnoses of them; a Report is those, as text or as JSON.
"""
