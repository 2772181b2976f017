"""Inside: what runs in the workers of a DEEPaaS model."""
