"""What the wire costs: Weft beside Triton Inference Server, one hop between two processes, bursts of calls."""
