"""HTTP/2 connections: frames, header blocks, streams and flow control. Knows nothing of what is carried."""
