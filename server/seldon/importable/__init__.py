"""The last folder on a component's import path: it provides `seldon_core` if seldon-core is not installed."""
