"""Triton's GRPCInferenceService, health and reflection, on the gRPC lane."""
