"""Messages and tensors between the processes of one server: frames over a Unix socket, tensors in shared memory."""
