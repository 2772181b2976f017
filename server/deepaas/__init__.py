"""DEEPaaS: models of DEEPaaS V2, served as deepaas 2.6.0 served them."""
