"""The folder that a component's modules are looked for in last: `seldon_core`, if seldon-core is not installed."""
