"""The V2 inference protocol of Triton Inference Server and KServe: messages, server, client."""
