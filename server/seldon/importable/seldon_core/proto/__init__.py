"""The messages of seldon.protos, and its services for grpcio."""
