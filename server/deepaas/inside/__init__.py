"""Inside: the code that runs in the workers of a DEEPaaS model."""
