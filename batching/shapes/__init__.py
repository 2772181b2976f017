"""How the tensors of requests stand in a run where that is more than rows one after another."""
