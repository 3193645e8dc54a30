"""The frames of ``weft top``: services, queues, rates and latencies as they are now."""
