"""ABEJA: handler functions of ABEJA Platform 19.04, served as its proxy and runtime served them."""
