"""How many programs a device runs at once, and which numbers a CPU multiplies."""

import platform
from functools import lru_cache

import torch

IS_X86 = platform.machine().lower() in ("x86_64", "amd64")


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
    if not torch.backends.mkldnn.is_available():
        return dtype in (torch.float32, torch.float64)
    if dtype == torch.bfloat16:
        has_instructions = not IS_X86 or torch.cpu._is_avx512_bf16_supported()  # oneDNN takes any AVX-512 for enough
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported() and has_instructions)
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype in (torch.float32, torch.float64)


@lru_cache
def largest_code() -> int:
    """The largest magnitude of one factor of torch's products of 8-bit codes: 127, or 63 where products are wrong.

    Without VNNI, x86 adds two products in 16 bits, which saturate: 2 * 255 * 127 does not fit, 2 * 127 * 127 does.
    https://uxlfoundation.github.io/oneDNN/dev_guide_int8_computations.html
    """
    full = torch.full((32, 32), 127, dtype=torch.int8)
    return 127 if bool((torch._int_mm(full, full) == 32 * 127 * 127).all()) else 63
