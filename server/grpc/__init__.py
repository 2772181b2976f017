"""gRPC on Penstock's own HTTP/2: calls, framing, status and deadlines. The services are in `server/v2/rpc`."""
