"""ABEJA: serves handler functions of ABEJA Platform 19.04 as its proxy and runtime do."""
