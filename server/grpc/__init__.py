"""gRPC on Penstock's own HTTP/2: calls, framing, status and deadlines. What is served with it is in `server/v2/rpc`."""
