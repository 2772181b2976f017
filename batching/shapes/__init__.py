"""How request tensors are laid out in a run if they are not plain concatenated rows."""
