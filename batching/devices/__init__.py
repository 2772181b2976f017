"""The CPUs and GPUs that models share: turns, rates, memory, and a model's place on them."""
