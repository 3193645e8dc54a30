"""How many programs a device runs at once, and which numbers a CPU multiplies."""

from functools import lru_cache

import torch


@lru_cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 1 for a CPU, where kernels are interpreted."""
    return 1 if device.type == "cpu" else int(torch.cuda.get_device_properties(device).multi_processor_count)


@lru_cache
def multiplies_natively(dtype: torch.dtype) -> bool:
    """Whether torch has instructions of this CPU for products of numbers of the type; else it emulates them.

    As its own settings say, so that ``ATEN_CPU_CAPABILITY`` counts. An emulated product takes up to 60 times that of
    float32 (bfloat16, [384, 1536] @ [1536, 384], an EPYC held to AVX2).
    """
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported() and torch.cpu._is_avx512_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype in (torch.float32, torch.float64)
