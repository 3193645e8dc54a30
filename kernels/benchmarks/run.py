"""Times each kernel on this machine's GPU beside its baseline: one table, and JSON.

    python kernels/benchmarks/run.py [--json FILE]

Shapes are those of an 8-billion-parameter Llama in bfloat16. A figure is the median of three rounds, each of which runs
for about 50 ms between two events of the device, replaying a CUDA graph. Without a CUDA device nothing is
measured and the exit status is 2.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from weft_kernels.attention.triton_kernel import paged_attention
from weft_kernels.blocks.layout import MAX_CODE, cache_shape, split_layers
from weft_kernels.linear.lowbit_triton_kernel import linear as lowbit
from weft_kernels.linear.quantizers import quantize
from weft_kernels.norm.triton_kernel import rms_norm
from weft_kernels.rope_kv.triton_kernel import rope_and_store
from weft_kernels.sampling.triton_kernel import sample

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, HIDDEN_SIZE, VOCABULARY = 32, 8, 128, 4096, 128_256
BLOCK_SIZE = 16
DTYPE = torch.bfloat16
ROUNDS = 3
ROUND_MS = 50.0


@dataclass(frozen=True)
class Figure:
    """One line of the table.

    Attributes:
        kernel: The kernel.
        case: Its shape.
        microseconds: Median time of a call.
        rate: Work per second in ``unit``.
        unit: "TFLOP/s" or "GB/s".
        ratio: ``rate`` relative to that of ``baseline``.
        baseline: Reference of the ratio.
    """

    kernel: str
    case: str
    microseconds: float
    rate: float
    unit: str
    ratio: float
    baseline: str


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 when everything was measured, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.stderr.write(
            f"no figures: the kernels are timed on a CUDA device, and torch {torch.__version__} sees none; "
            "run this on a machine with a GPU and a CUDA build of torch\n"
        )
        return 2
    torch.manual_seed(0)
    product = measure_product()  # first, so that an idle device's clocks are up before the copy is timed
    copy_gb_s = measure_copy()
    figures = [
        Figure("copy", "2 GiB", 2 * 2**31 / copy_gb_s / 1e3, copy_gb_s, "GB/s", 1.0, "itself"),
        product,
        *measure_lowbit(),
        *measure_prompts(),
        *measure_decoding(copy_gb_s),
        *measure_codes(copy_gb_s),
        measure_mixed(),
        *measure_rows(copy_gb_s),
        *measure_sampling(),
    ]
    sys.stdout.write(table(figures))
    if options.json:
        report = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "figures": [asdict(figure) for figure in figures],
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def microseconds(function: Callable[[], object]) -> float:
    """Median device time of one call, replayed from a CUDA graph to exclude the host's overhead."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    _milliseconds(graph.replay, 3)
    count = max(1, int(ROUND_MS / max(1e-3, _milliseconds(graph.replay, 3) / 3)))
    return statistics.median(_milliseconds(graph.replay, count) / count for _ in range(ROUNDS)) * 1e3


def _milliseconds(function: Callable[[], object], count: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        function()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def measure_copy() -> float:
    """Bandwidth in GB/s of a kernel that reads and writes all it is given: the ceiling of the others.

    A copy would be the device's copy engine once it is in a graph, two thirds as fast on an H200.
    """
    source = torch.zeros(2**29, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / microseconds(lambda: torch.neg(source, out=target)) / 1e3


def measure_prompts() -> list[Figure]:
    """Whole prompts: the paged kernel beside ``scaled_dot_product_attention`` on contiguous keys."""
    figures = []
    for length in (512, 2048, 8192):
        q, kv_layer, tables = _cache(1, length, num_rows=length)
        starts, contexts = _int32(0, length), _int32(length)
        time_us = microseconds(
            lambda q=q, kv=kv_layer, t=tables, s=starts, c=contexts, n=length: paged_attention(
                q, kv, t, s, c, scale=HEAD_DIM**-0.5, max_q_len=n, max_ctx_len=n
            )
        )
        queries = q.transpose(0, 1).unsqueeze(0).contiguous()
        keys, values = torch.randn(2, 1, NUM_KV_HEADS, length, HEAD_DIM, device="cuda", dtype=DTYPE)
        plain_us = microseconds(
            lambda q=queries, k=keys, v=values: functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            )
        )
        work = 2 * 2 * NUM_HEADS * HEAD_DIM * length * (length + 1) / 2
        rate = work / time_us / 1e6
        figures.append(Figure("attention", f"prompt {length}", time_us, rate, "TFLOP/s", plain_us / time_us, "SDPA"))
    return figures


def measure_decoding(copy_gb_s: float) -> list[Figure]:
    """One token per sequence: keys and values read per second."""
    figures = []
    for num_sequences, context in ((1, 1024), (8, 1024), (64, 1024), (256, 1024), (64, 8192), (1, 65536)):
        q, kv_layer, tables = _cache(num_sequences, context, num_rows=num_sequences)
        starts = torch.arange(num_sequences + 1, dtype=torch.int32, device="cuda")
        contexts = torch.full((num_sequences,), context, dtype=torch.int32, device="cuda")
        for deterministic in (False, True):
            time_us = microseconds(
                lambda q=q, kv=kv_layer, t=tables, s=starts, c=contexts, n=context, d=deterministic: paged_attention(
                    q, kv, t, s, c, scale=0.1, max_q_len=1, max_ctx_len=n, deterministic=d
                )
            )
            num_bytes = num_sequences * context * 2 * NUM_KV_HEADS * HEAD_DIM * DTYPE.itemsize
            rate = num_bytes / time_us / 1e3
            case = f"decode {num_sequences} x {context}" + (" deterministic" if deterministic else "")
            figures.append(Figure("attention", case, time_us, rate, "GB/s", rate / copy_gb_s, "copy"))
    return figures


def measure_product() -> Figure:
    """The vendor's product of large matrices: the ceiling of prompts."""
    size = 8192
    left, right = torch.randn(2, size, size, device="cuda", dtype=DTYPE)
    time_us = microseconds(lambda: left @ right)
    return Figure("matmul", f"{size} x {size} x {size}", time_us, 2 * size**3 / time_us / 1e6, "TFLOP/s", 1.0, "itself")


def measure_lowbit() -> list[Figure]:
    """Products with weights of 8 and 4 bits beside the vendor's in bfloat16: what a decode step gains (W8, W4)."""
    figures = []
    weight = torch.randn(2 * 14336, HIDDEN_SIZE, device="cuda", dtype=DTYPE)  # gate and up
    for num_rows in (1, 16, 64, 256):
        x = torch.randn(num_rows, HIDDEN_SIZE, device="cuda", dtype=DTYPE)
        plain_us = microseconds(lambda x=x: functional.linear(x, weight))
        for num_bits in (8, 4):
            codes = quantize(weight, num_bits)
            for deterministic in (False, True):
                time_us = microseconds(lambda x=x, c=codes, d=deterministic: lowbit(x, c, deterministic=d))
                case = f"W{num_bits} {num_rows} rows" + (" deterministic" if deterministic else "")
                rate = codes.num_bytes / time_us / 1e3
                figures.append(Figure("lowbit", case, time_us, rate, "GB/s", plain_us / time_us, "bfloat16"))
    return figures


def measure_codes(copy_gb_s: float) -> list[Figure]:
    """One token per sequence over caches of 8-bit codes (KV8): bytes of codes and scales read per second."""
    figures = []
    num_sequences, context = 64, 8192
    q, _, tables = _cache(1, BLOCK_SIZE, num_rows=num_sequences)
    blocks_each = context // BLOCK_SIZE
    tables = torch.randperm(num_sequences * blocks_each, device="cuda").int().view(num_sequences, blocks_each)
    starts = torch.arange(num_sequences + 1, dtype=torch.int32, device="cuda")
    contexts = torch.full((num_sequences,), context, dtype=torch.int32, device="cuda")
    for kv_dtype in (DTYPE, torch.int8, torch.float8_e4m3fn):
        shape = cache_shape(tables.numel(), 1, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, kv_dtype)
        cache = torch.zeros(shape, dtype=torch.uint8 if kv_dtype in MAX_CODE else kv_dtype, device="cuda").view(
            kv_dtype
        )
        layer = split_layers(cache, NUM_KV_HEADS, HEAD_DIM)[0]
        time_us = microseconds(
            lambda kv=layer: paged_attention(
                q, kv.kv, tables, starts, contexts, kv_scales=kv.scales, scale=0.1, max_q_len=1, max_ctx_len=context
            )
        )
        rate = cache.nbytes / time_us / 1e3
        case = f"{num_sequences} x {context} {str(kv_dtype).removeprefix('torch.')}"
        figures.append(Figure("attention", case, time_us, rate, "GB/s", rate / copy_gb_s, "copy"))
    return figures


def measure_mixed() -> Figure:
    """A decode over 65,536 tokens beside a chunk of a prompt, relative to both one after the other."""
    context, chunk = 65_536, 512
    q, kv_layer, tables = _cache(2, context, num_rows=1 + chunk)

    def attend(starts: Tensor, contexts: Tensor, rows: slice, sequences: slice, longest: int) -> float:
        return microseconds(
            lambda: paged_attention(
                q[rows],
                kv_layer,
                tables[sequences],
                starts,
                contexts,
                scale=0.1,
                max_q_len=longest,
                max_ctx_len=context,
            )
        )

    together_us = attend(_int32(0, 1, 1 + chunk), _int32(context, chunk), slice(None), slice(None), chunk)
    decode_us = attend(_int32(0, 1), _int32(context), slice(0, 1), slice(0, 1), 1)
    chunk_us = attend(_int32(0, chunk), _int32(chunk), slice(1, None), slice(1, 2), chunk)
    num_bytes = (context + chunk) * 2 * NUM_KV_HEADS * HEAD_DIM * DTYPE.itemsize
    ratio = (decode_us + chunk_us) / together_us
    rate = num_bytes / together_us / 1e3
    return Figure("attention", f"decode {context} + chunk {chunk}", together_us, rate, "GB/s", ratio, "one by one")


def measure_rows(copy_gb_s: float) -> list[Figure]:
    """Memory-bound kernels over rows."""
    num_rows = 8192
    x, residual = torch.randn(2, num_rows, HIDDEN_SIZE, device="cuda", dtype=DTYPE)
    weight = torch.ones(HIDDEN_SIZE, device="cuda", dtype=DTYPE)
    norm_us = microseconds(lambda: rms_norm(x, weight, 1e-5, residual))
    norm_bytes = 4 * x.numel() * DTYPE.itemsize
    q, kv_layer, _ = _cache(1, num_rows, num_rows=num_rows)
    k, v = torch.randn(2, num_rows, NUM_KV_HEADS, HEAD_DIM, device="cuda", dtype=DTYPE)
    cos, sin = torch.randn(2, num_rows, HEAD_DIM // 2, device="cuda")
    positions = torch.arange(num_rows, dtype=torch.int32, device="cuda")
    slots = BLOCK_SIZE + torch.randperm(num_rows, device="cuda")
    rope_us = microseconds(lambda: rope_and_store(q, k, v, cos, sin, positions, slots, kv_layer))
    rope_bytes = (2 * q.numel() + 3 * k.numel() + 2 * v.numel()) * DTYPE.itemsize + 2 * cos.numel() * 4
    measured = {"rms_norm": (norm_us, norm_bytes), "rope_and_store": (rope_us, rope_bytes)}
    figures = []
    for name, (time_us, num_bytes) in measured.items():
        rate = num_bytes / time_us / 1e3
        figures.append(Figure(name, f"{num_rows} rows", time_us, rate, "GB/s", rate / copy_gb_s, "copy"))
    return figures


def measure_sampling() -> list[Figure]:
    """Top-p over a large vocabulary, beside an implementation with a sort."""
    figures = []
    for num_rows in (1, 64, 256):
        logits = torch.randn(num_rows, VOCABULARY, device="cuda") * 2.5
        temperature, top_p = torch.full((2, num_rows), 0.9, device="cuda")
        min_p = torch.zeros(num_rows, device="cuda")
        top_k = torch.zeros(num_rows, dtype=torch.int32, device="cuda")
        seeds = torch.arange(num_rows, device="cuda")
        time_us = microseconds(
            lambda a=(logits, temperature, top_k, top_p, min_p, seeds, top_k): sample(*a)  # top_k serves as positions
        )
        sort_us = microseconds(lambda x=logits, p=top_p: _sample_by_sorting(x, p))
        rate = logits.numel() * 4 / time_us / 1e3
        figures.append(Figure("sample", f"{num_rows} x {VOCABULARY}", time_us, rate, "GB/s", sort_us / time_us, "sort"))
    return figures


def _sample_by_sorting(logits: Tensor, top_p: Tensor) -> Tensor:
    probabilities, ids = (logits / 0.9).softmax(-1).sort(dim=-1, descending=True)
    probabilities = probabilities.masked_fill(probabilities.cumsum(-1) - probabilities > top_p.unsqueeze(1), 0.0)
    return ids.gather(1, probabilities.multinomial(1))


def _cache(num_sequences: int, context: int, *, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries ``[num_rows, H, D]``, one layer of a cache, and block tables in random order."""
    blocks_each = -(-context // BLOCK_SIZE)
    num_blocks = num_sequences * blocks_each + 1
    shape = (num_blocks, 2, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    kv_layer = torch.randn(shape, device="cuda", dtype=DTYPE)
    tables = (torch.randperm(num_blocks - 1, device="cuda") + 1).int().view(num_sequences, blocks_each)
    return torch.randn(num_rows, NUM_HEADS, HEAD_DIM, device="cuda", dtype=DTYPE), kv_layer, tables


def _int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def table(figures: list[Figure]) -> str:
    """The figures, one per line."""
    lines = [f"{'kernel':<15} {'case':<28} {'us':>10} {'rate':>10} {'unit':<8} {'ratio':>6}  to"]
    lines += [
        f"{f.kernel:<15} {f.case:<28} {f.microseconds:>10.1f} {f.rate:>10.1f} {f.unit:<8} {f.ratio:>6.2f}  {f.baseline}"
        for f in figures
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
