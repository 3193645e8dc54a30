"""``python -m benchmarks.language_model.gpu_steps``: decode and prompt steps of an 8-billion Llama on a GPU.

Random weights made on the device. One line for each figure: G1 decode steps, as a CUDA graph and operation by operation
(MBU: weights and cache that a step has to read, by what a copy moves in a second); G2 prompts (MFU, by a large product
of the vendor's library); G7 the same decode steps with 8- and 4-bit weights and 8-bit caches, relative to bfloat16.
Medians of three rounds. Without a CUDA device nothing is measured and the exit status is 2.
"""

import argparse
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from weft.backends.llm.parts import graph_policy
from weft.llm.config import EngineConfig, TransformerConfig
from weft.llm.graphs import CudaRecorder
from weft.llm.models.model import TransformerModel
from weft.llm.models.weights import EMBEDDING, LM_HEAD, random_weights
from weft.llm.runner import ModelRunner
from weft.llm.scheduler.plan import PARAM_COLUMNS, ForwardPlan

LLAMA_8B = TransformerConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=16384,
    dtype="bfloat16",
)
_DECODES = ((1, 1024), (8, 1024), (64, 1024), (256, 1024), (64, 8192))
_PROMPTS = ((1, 512), (1, 2048), (1, 8192), (8, 2048))
_LOWBIT_DECODES = ((1, 1024), (16, 1024), (64, 1024), (64, 8192))
_ROUNDS, _STEPS = 3, 10


@dataclass(frozen=True)
class Bench:
    """What is measured.

    Attributes:
        model: Shape of the model.
        device: "cuda", or "cpu" for a trial of this program, where there are no graphs and figures mean nothing.
        bytes_per_s: What a copy moves, reads and writes counted.
        flops_per_s: Of a large product.
    """

    model: TransformerConfig
    device: str
    bytes_per_s: float
    flops_per_s: float

    def step_s(
        self,
        num_seqs: int,
        q_len: int,
        context: int,
        *,
        graphs: bool,
        network: TransformerModel,
        kv: str = "auto",
    ) -> float:
        """Seconds of a step of equal sequences, ``q_len`` tokens of each, whose cache holds random numbers."""
        runner = self._runner(num_seqs, context, graphs=graphs, network=network, kv=kv)
        if runner.kv.is_floating_point() and runner.kv.dtype.itemsize > 1:
            runner.kv.normal_()
        seconds = step_s(runner, step_plan(num_seqs, q_len, context))
        runner.close()
        del runner  # the next one's cache does not fit beside it
        gc.collect()
        if self.device != "cpu":
            torch.cuda.empty_cache()
        return seconds

    def _runner(self, num_seqs: int, length: int, *, graphs: bool, network: TransformerModel, kv: str) -> ModelRunner:
        config = EngineConfig(
            device=self.device,
            dtype=str(network.dtype).removeprefix("torch."),
            kv_cache_dtype=kv,
            block_size=16,
            max_num_seqs=num_seqs,
            max_model_len=length,
            num_blocks=1 + num_seqs * -(-length // 16),
        ).resolved(self.model)
        runner = ModelRunner(network, config)
        runner.bind_thread()
        if graphs and self.device != "cpu":
            runner.capture(graph_policy(config), CudaRecorder(network.device).record)
        return runner

    def network(self, num_bits: int = 0) -> TransformerModel:
        """The model, its weights rounded to so many bits; 0: as they are."""
        dtype = getattr(torch, self.model.dtype)
        weights = random_weights(self.model, 0, dtype=dtype, device=self.device)
        return TransformerModel(self.model, weights, dtype=dtype, device=self.device, num_bits=num_bits)


def step_plan(num_seqs: int, q_len: int, context: int) -> ForwardPlan:
    """A step of equal sequences, ``q_len`` tokens of each, ``context`` with them; the last of each is sampled after."""
    columns = -(-context // 16)
    slots = np.arange(num_seqs, dtype=np.int32)
    tables = 1 + slots[:, None] * columns + np.arange(columns, dtype=np.int32)
    positions = np.tile(np.arange(context - q_len, context, dtype=np.int32), num_seqs)
    blocks = tables[np.repeat(slots, q_len), positions // 16].astype(np.int64)
    cells = [np.repeat(slots, columns), np.tile(np.arange(columns), num_seqs), tables.reshape(-1)]
    none = np.empty(0, np.int32)
    neutral = dict.fromkeys(PARAM_COLUMNS, 0.0) | {"top_p": 1.0, "repetition_penalty": 1.0}
    return ForwardPlan(
        slots=slots,
        q_start=np.arange(0, num_seqs * q_len + 1, q_len, dtype=np.int32),
        ctx_len=np.full(num_seqs, context, np.int32),
        num_drafts=np.zeros(num_seqs, np.int32),
        positions=positions,
        token_ids=np.arange(num_seqs * q_len, dtype=np.int32) % 97,
        slot_mapping=blocks * 16 + positions % 16,
        sample_rows=np.arange(q_len - 1, num_seqs * q_len, q_len, dtype=np.int32),
        sample_slots=slots,
        sample_positions=np.full(num_seqs, context, np.int32),
        num_logprobs=np.full(num_seqs, -1, np.int32),
        table_delta=np.stack(cells, 1).astype(np.int32),
        new_slots=slots,
        new_params=np.tile(np.array([neutral[name] for name in PARAM_COLUMNS], np.float32), (num_seqs, 1)),
        new_top_k=np.zeros(num_seqs, np.int32),
        new_seeds=np.zeros(num_seqs, np.int64),
        penalty_start=np.zeros(num_seqs + 1, np.int32),
        penalty_tokens=none,
        penalty_counts=none,
        penalty_bias=np.empty(0, np.float32),
        max_q_len=q_len,
        max_ctx_len=context,
    )


def step_s(runner: ModelRunner, plan: ForwardPlan) -> float:
    """Seconds of a step, tokens on the host included: the median of three rounds of ten."""
    runner.run(plan)
    steady = plan._replace(table_delta=plan.table_delta[:0], new_slots=plan.new_slots[:0])
    steady = steady._replace(new_params=plan.new_params[:0], new_top_k=plan.new_top_k[:0], new_seeds=plan.new_seeds[:0])
    return statistics.median(_seconds(lambda: runner.run(steady), _STEPS) for _ in range(_ROUNDS))


def decode_figures(bench: Bench, cases: tuple[tuple[int, int], ...]) -> Iterator[str]:
    """G1: decode steps as graphs and without."""
    network = bench.network()
    head_size = bench.model.vocab_size * bench.model.hidden_size
    num_bytes = (_num_weights(bench) + head_size) * network.dtype.itemsize
    kv_bytes = bench.model.kv_bytes_per_token(bench.model.dtype)
    for num_seqs, context in cases:
        eager_s, graph_s = (
            bench.step_s(num_seqs, 1, context, graphs=graphs, network=network) for graphs in (False, True)
        )
        mbu = (num_bytes + num_seqs * context * kv_bytes) / graph_s / bench.bytes_per_s
        shown = f"G1 decode {num_seqs:>3} x {context:<5} {1e3 * graph_s:8.2f} ms"
        yield f"{shown}  MBU {mbu:.2f}  eager/graph {eager_s / graph_s:.2f}"


def prompt_figures(bench: Bench, cases: tuple[tuple[int, int], ...]) -> Iterator[str]:
    """G2: whole prompts in one step."""
    network = bench.network()
    num_weights = _num_weights(bench)
    for num_seqs, length in cases:
        seconds = bench.step_s(num_seqs, length, length, graphs=False, network=network)
        attention = 2 * bench.model.num_layers * bench.model.num_heads * bench.model.head_dim * length**2
        mfu = num_seqs * (2 * num_weights * length + attention) / seconds / bench.flops_per_s
        yield f"G2 prompt {num_seqs:>3} x {length:<5} {1e3 * seconds:8.2f} ms  MFU {mfu:.2f}"


def lowbit_figures(bench: Bench, cases: tuple[tuple[int, int], ...]) -> Iterator[str]:
    """G7: decode steps with fewer bits."""
    plain: dict[tuple[int, int], float] = {}
    codes = ("int8", "fp8") if bench.device != "cpu" else ("int8",)
    for num_bits, kv in ((0, "auto"), (8, "auto"), (4, "auto"), *((0, each) for each in codes)):
        network = bench.network(num_bits)
        name = f"W{num_bits}" if num_bits else "bf16" if kv == "auto" else f"KV {kv}"
        for case in cases:
            seconds = bench.step_s(case[0], 1, case[1], graphs=True, network=network, kv=kv)
            faster = plain.setdefault(case, seconds) / seconds
            shown = f"G7 {name:<8} {case[0]:>3} x {case[1]:<5} {1e3 * seconds:8.2f} ms"
            yield f"{shown}  {faster:.2f} times as fast as bf16"


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 when everything was measured, 2 without a GPU."""
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args(arguments)
    if not torch.cuda.is_available():
        sys.stderr.write(f"no figures: torch {torch.__version__} sees no CUDA device; run this on a machine with one\n")
        return 2
    bytes_per_s, flops_per_s = _ceilings()
    copied, multiplied = f"copy {bytes_per_s / 1e12:.2f} TB/s", f"product {flops_per_s / 1e12:.0f} TFLOP/s"
    print(f"G0 {torch.cuda.get_device_name()}: {copied}, {multiplied}")
    bench = Bench(LLAMA_8B, "cuda", bytes_per_s, flops_per_s)
    for lines in (
        decode_figures(bench, _DECODES),
        prompt_figures(bench, _PROMPTS),
        lowbit_figures(bench, _LOWBIT_DECODES),
    ):
        for line in lines:
            print(line, flush=True)
        torch.cuda.empty_cache()
    return 0


def _ceilings() -> tuple[float, float]:
    """G0: bytes per second of a copy, reads and writes counted; operations per second of a large product."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    target, square = torch.empty_like(source), torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    copy_s, product_s = _seconds(lambda: target.copy_(source), _STEPS), _seconds(lambda: square @ square, _STEPS)
    return 2 * source.numel() / copy_s, 2 * 8192**3 / product_s


def _seconds(function: Callable[[], object], count: int) -> float:
    function()
    _wait()
    start_s = time.perf_counter()
    for _ in range(count):
        function()
    _wait()
    return (time.perf_counter() - start_s) / count


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _num_weights(bench: Bench) -> int:
    """Numbers in the matrices that a step multiplies with, the LM head not counted."""
    left_out = (EMBEDDING, LM_HEAD)
    parts = [part for name, each in bench.model.weight_parts().items() if name not in left_out for part in each]
    return sum(math.prod(part.shape) for part in parts)


if __name__ == "__main__":
    sys.exit(main())
