"""How many programs a device runs at once."""

from functools import lru_cache

import torch


@lru_cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 1 for a CPU, where kernels are interpreted."""
    return 1 if device.type == "cpu" else int(torch.cuda.get_device_properties(device).multi_processor_count)
