"""The KServe v2 dialect (Triton's protocol): decoding requests, encoding answers, the control plane."""
