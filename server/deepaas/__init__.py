"""DEEPaaS: serves DEEPaaS V2 models as deepaas 2.6.0 does."""
