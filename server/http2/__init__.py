"""HTTP/2 connections: frames, header blocks, streams and flow control, independent of what they carry."""
