"""The folder that a Cortex project's modules are looked for in last: what Cortex had there of its own."""
