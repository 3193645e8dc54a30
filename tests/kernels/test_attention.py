"""Paged attention: the reference against a plain softmax, and the kernel against the reference."""

import dataclasses
import itertools
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from weft_kernels import jit
from weft_kernels.attention import reference, triton_kernel
from weft_kernels.attention.launch import plan_launch
from weft_kernels.blocks.layout import MAX_CODE, cache_shape, quantize, split_layers

MIXED = ((1, 37), (5, 18), (33, 33))
SINGLE = ((1, 1), (1, 70), (1, 33))
HEADS = ((4, 4), (8, 2), (5, 1))
BLOCK_SIZE = 16
LAYER = 1


@dataclasses.dataclass(frozen=True)
class Batch:
    """Sequences of ``(q_len, ctx_len)`` in a cache that holds NaN wherever none of their tokens stands."""

    q: Tensor
    kv_layer: Tensor
    block_tables: Tensor
    q_start: Tensor
    ctx_len: Tensor
    keys: tuple[Tensor, ...]  # of each sequence, [ctx_len, K, D]; of codes the numbers that they stand for
    values: tuple[Tensor, ...]
    kv_scales: Tensor | None = None

    @property
    def limits(self) -> dict[str, int]:
        """The arguments that bound the batch."""
        return {"max_q_len": int(self.q_start.diff().max()), "max_ctx_len": int(self.ctx_len.max())}

    def run(self, attention: Callable[..., Tensor], **options) -> Tensor:
        """The result of ``attention`` for the whole batch."""
        options = {"scale": self.q.shape[2] ** -0.5, "kv_scales": self.kv_scales} | options
        arguments = (self.q, self.kv_layer, self.block_tables, self.q_start, self.ctx_len)
        return attention(*arguments, **self.limits, **options)

    def only(self, sequence: int, first: int, last: int) -> "Batch":
        """A batch of the tokens ``[first, last)`` of one sequence's step, as a chunked prompt would bring them."""
        begin, end = self.q_start[sequence : sequence + 2].tolist()
        context = self.ctx_len[sequence : sequence + 1] - (end - begin) + last
        return dataclasses.replace(
            self,
            q=self.q[begin + first : begin + last],
            block_tables=self.block_tables[sequence : sequence + 1],
            q_start=torch.tensor([0, last - first], dtype=torch.int32, device=self.q.device),
            ctx_len=context,
        )

    def chunks(self, sequence: int, size: int) -> list["Batch"]:
        """One sequence's step in chunks of ``size`` tokens."""
        q_len = int(self.q_start.diff()[sequence])
        return [self.only(sequence, first, min(first + size, q_len)) for first in range(0, q_len, size)]


def make_batch(
    sequences, num_heads, num_kv_heads, head_dim, *, device="cpu", dtype=torch.float32, kv_dtype=None, seed=0, layout=0
):
    """A ``Batch`` with values by ``seed`` and blocks strewn over the cache by ``layout``."""
    kv_dtype = kv_dtype or dtype
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-context // BLOCK_SIZE) for _, context in sequences]
    num_blocks = sum(needed) + 3
    free = (torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(layout)) + 1).tolist()
    shape = cache_shape(num_blocks, 3, BLOCK_SIZE, num_kv_heads, head_dim, kv_dtype)
    if kv_dtype in MAX_CODE:  # bytes of 255 are NaN as float32, and so is a scale of them
        kv = torch.full(shape, 255, dtype=torch.uint8).view(kv_dtype)
    else:
        kv = torch.full(shape, float("nan"), dtype=dtype)
    cache = split_layers(kv, num_kv_heads, head_dim)[LAYER]
    block_tables = torch.zeros(len(sequences), max(needed) + 1, dtype=torch.int32)
    keys, values, queries = [], [], []
    for sequence, (q_len, context) in enumerate(sequences):
        both = torch.randn(2, context, num_kv_heads, head_dim, generator=generator).to(dtype)
        stored, scales = both, None
        if cache.scales is not None:
            stored, scales = quantize(both, kv_dtype)
            both = stored.float() * scales.unsqueeze(-1)
        for index in range(needed[sequence]):
            block = block_tables[sequence, index] = free.pop()
            first = index * BLOCK_SIZE
            count = min(BLOCK_SIZE, context - first)
            cache.kv[block, :, :count] = stored[:, first : first + count]
            if cache.scales is not None:
                cache.scales[block, :, :count] = scales[:, first : first + count]
        queries.append(torch.randn(q_len, num_heads, head_dim, generator=generator).to(dtype))
        keys.append(both[0])
        values.append(both[1])
    q_start = torch.tensor([0, *itertools.accumulate(q_len for q_len, _ in sequences)], dtype=torch.int32)
    ctx_len = torch.tensor([context for _, context in sequences], dtype=torch.int32)
    tensors = (torch.cat(queries), kv, block_tables, q_start, ctx_len)
    q, kv, block_tables, q_start, ctx_len = (tensor.to(device) for tensor in tensors)
    cache = split_layers(kv, num_kv_heads, head_dim)[LAYER]
    return Batch(q, cache.kv, block_tables, q_start, ctx_len, tuple(keys), tuple(values), cache.scales)


def make_sinks(num_heads: int, device="cpu") -> Tensor:
    """Scores of sinks, of which one takes nearly all weight and one nearly none."""
    sinks = torch.randn(num_heads, generator=torch.Generator().manual_seed(5))
    sinks[0], sinks[-1] = 9.0, -90.0
    return sinks.to(device)


def plain_attention(batch: Batch, *, window=0, soft_cap=0.0, sinks=None) -> Tensor:
    """Softmax attention sequence by sequence, from the keys and values that went into the cache, in float64."""
    parts = []
    bounds = itertools.pairwise(batch.q_start.tolist())
    for (begin, end), *cached in zip(bounds, batch.keys, batch.values, strict=True):
        q = batch.q[begin:end].double().cpu()
        key, value = (x.double().repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in cached)
        scores = torch.einsum("qhd,khd->hqk", q, key) * q.shape[2] ** -0.5
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        own = torch.arange(key.shape[0] - q.shape[0], key.shape[0])[:, None]
        seen = torch.arange(key.shape[0])[None]
        is_visible = (seen <= own) & ((seen > own - window) if window else True)
        scores = scores.masked_fill(~is_visible, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks.double().cpu().view(-1, 1, 1).expand(-1, len(scores[0]), 1)), -1)
        weights = scores.softmax(-1)[..., : key.shape[0]]
        parts.append(torch.einsum("hqk,khd->qhd", weights, value))
    return torch.cat(parts)


@pytest.fixture(params=["compiled", "torch"])
def reference_form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which form of the reference runs: with numba, or as without it."""
    if request.param == "torch":
        monkeypatch.setattr(jit, "is_available", lambda: False)
    return request.param


SEQUENCES = (MIXED, SINGLE, ((1, 200), (1, 64), (1, 65), (3, 130)), ((70, 150), (1, 5)))
OF_NUMBERS = ((4, 4, 0, 0.0), (8, 2, 7, 0.0), (5, 1, 0, 0.0), (12, 6, 7, 0.0), (8, 2, 0, 2.0), (8, 2, 20, 3.0))
OF_CODES = ((8, 2, torch.int8), (5, 1, torch.float8_e4m3fn))


@pytest.mark.usefixtures("reference_form")
@pytest.mark.parametrize(("sequences", "num_heads", "num_kv_heads", "window", "soft_cap", "kv_dtype"), [
    *((sequences, *case, None) for sequences in SEQUENCES for case in OF_NUMBERS),
    *((sequences, *heads, 20, 0.0, kv_dtype) for sequences in (MIXED, SINGLE) for *heads, kv_dtype in OF_CODES),
])  # fmt: skip
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_reference_is_a_softmax_over_what_a_token_sees(
    sequences, num_heads, num_kv_heads, window, soft_cap, kv_dtype, deterministic
):
    """Both ways of the reference agree with a plain softmax, and no NaN beyond a context reaches them.

    Of 8-bit codes and scales it is a softmax over the numbers that they stand for.
    """
    batch = make_batch(sequences, num_heads, num_kv_heads, 80, kv_dtype=kv_dtype)
    actual = batch.run(reference.paged_attention, window=window, soft_cap=soft_cap, deterministic=deterministic)
    expected = plain_attention(batch, window=window, soft_cap=soft_cap)
    assert (expected - actual).abs().max() < 1e-5


@pytest.mark.usefixtures("reference_form")
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "window", "soft_cap", "kv_dtype"), [
    (4, 4, 0, 0.0, None), (8, 2, 7, 0.0, None), (5, 1, 0, 2.0, None), (8, 2, 0, 0.0, torch.int8),
])  # fmt: skip
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("sequences", [MIXED, SINGLE, SEQUENCES[3]])
def test_a_sink_takes_weight_and_gives_nothing(
    sequences, num_heads, num_kv_heads, window, soft_cap, kv_dtype, deterministic
):
    """In every form of the reference; in deterministic mode a row is bitwise its own in chunks, too."""
    batch = make_batch(sequences, num_heads, num_kv_heads, 80, kv_dtype=kv_dtype)
    options = {"window": window, "soft_cap": soft_cap, "sinks": make_sinks(num_heads)}
    actual = batch.run(reference.paged_attention, deterministic=deterministic, **options)
    assert (plain_attention(batch, **options) - actual).abs().max() < 1e-5
    if deterministic:
        chunks = [each.run(reference.paged_attention, deterministic=True, **options) for each in batch.chunks(0, 7)]
        assert torch.equal(actual[: batch.q_start[1]], torch.cat(chunks))


@pytest.mark.parametrize(("kv_dtype", "bound"), [(torch.int8, 0.012), (torch.float8_e4m3fn, 0.05)])
def test_codes_cost_little(kv_dtype, bound):
    """The relative error of an output over normal keys and values is 0.8-0.9 % with int8 and 3.8 % with fp8."""
    exact, rounded = (make_batch(((1, 700), (3, 200)), 8, 2, 80, kv_dtype=each) for each in (None, kv_dtype))
    expected, actual = plain_attention(exact), rounded.run(reference.paged_attention)
    assert (actual - expected).norm() / expected.norm() < bound


@pytest.mark.usefixtures("reference_form")
@pytest.mark.parametrize("sequences", [((1, 200), (3, 150), (40, 90)), ((2, 333),)])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])
def test_a_window_reads_its_own_blocks_alone(sequences, deterministic, kv_dtype):
    """With NaN in each block that lies behind a sequence's window, nothing changes."""
    batch = make_batch(sequences, 8, 2, 80, kv_dtype=kv_dtype)
    options = {"window": 20, "deterministic": deterministic}
    expected = batch.run(reference.paged_attention, **options)
    num_hidden = 0
    for table, length, q_len in zip(batch.block_tables, batch.ctx_len, batch.q_start.diff(), strict=True):
        hidden = table[: (length - q_len + 1 - 20) // BLOCK_SIZE].clone()
        num_hidden += len(hidden)
        if batch.kv_scales is None:
            batch.kv_layer[hidden] = float("nan")
        else:
            batch.kv_scales[hidden] = float("nan")
    assert num_hidden > 10
    assert torch.equal(expected, batch.run(reference.paged_attention, **options))


@pytest.mark.usefixtures("reference_form")
@pytest.mark.parametrize("sequences", [MIXED, SINGLE, ((1, 40), (70, 150), (1, 5), (1, 130))])
@pytest.mark.parametrize("deterministic", [False, True])
def test_layers_share_what_a_step_works_out(sequences, deterministic):
    """With one dict for all layers, whose windows differ, each result is bitwise that of a call of its own."""
    batch = make_batch(sequences, 8, 2, 80)
    cache: dict = {}
    for window in (0, 7, 0, 20):
        expected = batch.run(reference.paged_attention, window=window, deterministic=deterministic)
        options = {"window": window, "deterministic": deterministic, "step_cache": cache}
        assert torch.equal(expected, batch.run(reference.paged_attention, **options))
    assert len(cache) <= 1


@pytest.mark.usefixtures("reference_form")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 1.5e-2), (torch.float16, 2e-3)])
def test_the_reference_in_16_bits_rounds_once(deterministic, dtype, bound):
    """What 16 bits cost is the rounding of the result, since the sums are float32."""
    batch = make_batch(((1, 90), (1, 40), (1, 7), (20, 60)), 8, 2, 80, dtype=dtype)
    actual = batch.run(reference.paged_attention, deterministic=deterministic)
    assert dtype == actual.dtype
    assert (plain_attention(batch) - actual).abs().max() < bound


@pytest.mark.parametrize("block_size", [4, 8, 64, 256])
def test_any_block_size_gives_the_same_bits(monkeypatch, block_size):
    """How the cache is cut into blocks changes no result."""
    sequences = ((1, 300), (3, 77))
    expected = make_batch(sequences, 8, 2, 80).run(reference.paged_attention)
    monkeypatch.setattr(sys.modules[__name__], "BLOCK_SIZE", block_size)
    assert torch.equal(expected, make_batch(sequences, 8, 2, 80).run(reference.paged_attention))


def test_a_compiled_row_is_its_own_in_any_mode():
    """One kernel serves both modes, so their results are bitwise equal."""
    batch = make_batch(MIXED, 8, 2, 80)
    fast, exact = (batch.run(reference.paged_attention, deterministic=each) for each in (False, True))
    assert torch.equal(fast, exact)


@pytest.mark.parametrize("place_of_nan", ["query", "own key"])
def test_a_nan_stays_with_its_sequence(place_of_nan):
    """A NaN in a query or in a key that it sees makes that token's result NaN, and no other sequence's."""
    batch = make_batch(((1, 40), (1, 70)), 8, 2, 80)
    expected = batch.run(reference.paged_attention)
    if place_of_nan == "query":
        batch.q[0] = float("nan")
    else:
        batch.kv_layer[batch.block_tables[0, 0], 0, 3] = float("nan")
    actual = batch.run(reference.paged_attention)
    assert actual[0].isnan().all()
    assert torch.equal(expected[1], actual[1])


@pytest.mark.usefixtures("reference_form")
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "kv_dtype"), [
    *((*heads, torch.float32) for heads in (*HEADS, (12, 6))),
    (8, 2, torch.bfloat16),
    (8, 2, torch.int8),
])  # fmt: skip
@pytest.mark.parametrize("window", [0, 9])
def test_a_row_of_the_deterministic_reference_is_bitwise_its_own(num_heads, num_kv_heads, kv_dtype, window):
    """A sequence's rows are equal alone, in a batch, permuted, chunked in any way and in other blocks."""
    types = {"kv_dtype": kv_dtype} if kv_dtype == torch.int8 else {"dtype": kv_dtype}
    sequences = ((150, 150), (3, 77), (1, 130), (40, 41))
    batch = make_batch(sequences, num_heads, num_kv_heads, 80, **types)
    options = {"window": window, "deterministic": True}
    together = batch.run(reference.paged_attention, **options)
    for sequence, (begin, end) in enumerate(itertools.pairwise(batch.q_start.tolist())):
        for size in (1, 7, 16, 150):
            chunks = [chunk.run(reference.paged_attention, **options) for chunk in batch.chunks(sequence, size)]
            assert torch.equal(together[begin:end], torch.cat(chunks)), f"sequence {sequence}, chunks of {size}"
    elsewhere = make_batch(sequences, num_heads, num_kv_heads, 80, **types, layout=1)
    assert not torch.equal(batch.block_tables, elsewhere.block_tables)
    assert torch.equal(together, elsewhere.run(reference.paged_attention, **options))
    order = [2, 0, 3, 1]
    rows = [together[batch.q_start[i] : batch.q_start[i + 1]] for i in order]
    permuted = dataclasses.replace(
        batch,
        q=torch.cat([batch.q[batch.q_start[i] : batch.q_start[i + 1]] for i in order]),
        block_tables=batch.block_tables[order],
        q_start=torch.tensor([0, *itertools.accumulate(len(part) for part in rows)], dtype=torch.int32),
        ctx_len=batch.ctx_len[order],
    )
    assert torch.equal(torch.cat(rows), permuted.run(reference.paged_attention, **options))


def check_kernel(attention: Callable[..., Tensor], place, **options) -> None:
    """``attention`` agrees with the reference on a mixed batch: the check that a wrong kernel must not pass."""
    batch = make_batch(MIXED, 8, 2, 64, device=place.device, dtype=place.dtype)
    if options.pop("has_sinks", False):
        options["sinks"] = make_sinks(8, place.device)
    expected = plain_attention(batch, **options)
    place.assert_close(expected, batch.run(attention, **options))


KERNEL_CASES = [
    (MIXED, 32, {}),
    (MIXED, 80, {"window": 7}),
    (MIXED, 64, {"soft_cap": 2.0, "deterministic": True}),
    (SINGLE, 80, {}),
    (SINGLE, 64, {"window": 20, "soft_cap": 3.0}),
    (MIXED, 64, {"has_sinks": True, "window": 20}),
    (SINGLE, 80, {"has_sinks": True, "deterministic": True}),
]
KERNEL_CASES_OF_CODES = [
    (MIXED, 64, {"window": 20}, (8, 2)),
    (MIXED, 80, {"deterministic": True}, (5, 1)),
    (SINGLE, 18, {"soft_cap": 2.0}, (3, 3)),
]


@pytest.mark.parametrize(("sequences", "head_dim", "options", "heads", "kv_dtype"), [
    *(
        pytest.param(*case, heads, None, marks=pytest.mark.long if (row + column) % len(HEADS) else ())
        for row, case in enumerate(KERNEL_CASES)
        for column, heads in enumerate(HEADS)
    ),
    *((*case, kv_dtype) for case in KERNEL_CASES_OF_CODES for kv_dtype in (torch.int8, torch.float8_e4m3fn)),
])  # fmt: skip
def test_the_kernel_is_a_softmax_over_what_a_token_sees(place, sequences, head_dim, options, heads, kv_dtype):
    """Prompts, chunks and single tokens over scattered blocks of numbers and of codes, whose rests hold NaN."""
    batch = make_batch(sequences, *heads, head_dim, device=place.device, dtype=place.dtype, kv_dtype=kv_dtype)
    options = dict(options)
    if options.pop("has_sinks", False):
        options["sinks"] = make_sinks(heads[0], place.device)
    expected = plain_attention(batch, **{k: v for k, v in options.items() if k != "deterministic"})
    place.assert_close(expected, batch.run(triton_kernel.paged_attention, **options))


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_kernel_reads_no_block_behind_a_window(place_float32, deterministic):
    """Blocks that no new token sees are another sequence's by now: NaN in them reaches nobody."""
    batch = make_batch(((1, 70), (5, 150)), 4, 2, 32, device=place_float32.device)
    for sequence, (q_len, context) in enumerate(((1, 70), (5, 150))):
        num_behind = (context - q_len + 1 - 20) // BLOCK_SIZE
        assert num_behind % 2, "the last of them is in a tile of keys that is read"
        batch.kv_layer[batch.block_tables[sequence, :num_behind].long()] = float("nan")
    actual = batch.run(triton_kernel.paged_attention, window=20, deterministic=deterministic)
    place_float32.assert_close(plain_attention(batch, window=20), actual)


def run_with(
    batch: Batch, *, window=0, sinks=None, deterministic=True, attention=triton_kernel, is_poisoned=False, **plan
) -> Tensor:
    """The kernel's result with a changed plan; poisoned: the memory for parts, and behind it, holds NaN."""
    own = plan_launch(batch.q, batch.kv_layer, batch.limits["max_q_len"], deterministic=deterministic)
    own = dataclasses.replace(own, **plan)
    arguments = (batch.q, batch.kv_layer, batch.block_tables, batch.q_start, batch.ctx_len)
    options = {"scale": batch.q.shape[2] ** -0.5, "window": window, "soft_cap": 0.0, "sinks": sinks}
    cache = {}
    if is_poisoned:
        rows = (2 * own.num_stored * batch.kv_layer.shape[3], own.rows_per_tile)
        sizes = ((*rows, batch.q.shape[2]), rows, rows)
        cache["attention_parts"] = tuple(torch.full(size, float("nan"), device=batch.q.device) for size in sizes)
    return attention.launch(*arguments, **options, plan=own, step_cache=cache)


def run_in_parts(batch: Batch, *, is_stored: bool, sinks: Tensor | None = None) -> Tensor:
    """The deterministic result with parts of 32 keys, each walked by its own program or all by one."""
    return run_with(batch, fixed_keys_per_part=32, num_programs=64, num_stored=1000 if is_stored else 0, sinks=sinks)


@pytest.mark.parametrize("sequences", [((1, 70), (1, 9), (1, 32)), ((2, 70), (9, 40))])
def test_parts_are_merged_alike_by_one_program_and_by_a_second_kernel(place, sequences):
    """The result is right, and bitwise the same however the parts are spread over programs."""
    batch = make_batch(sequences, 4, 2, 32, device=place.device, dtype=place.dtype)
    for sinks in (None, make_sinks(4, place.device)):
        stored = run_in_parts(batch, is_stored=True, sinks=sinks)
        place.assert_close(plain_attention(batch, sinks=sinks), stored)
        assert torch.equal(stored, run_in_parts(batch, is_stored=False, sinks=sinks))


@pytest.mark.usefixtures("rows_alike")
@pytest.mark.parametrize("size", [1, 7, 16])
def test_a_row_of_the_deterministic_kernel_is_bitwise_its_own(place, size):
    """A prompt in chunks, whose single tokens are walked in parts, equals the prompt at once beside others."""
    batch = make_batch(((17, 45), (1, 37)), 2, 1, 32, device=place.device, dtype=place.dtype)
    together = run_in_parts(batch, is_stored=False)
    chunks = [run_in_parts(chunk, is_stored=size == 1) for chunk in batch.chunks(0, size)]
    assert torch.equal(together[:17], torch.cat(chunks))


def test_a_plan_depends_on_the_model_alone(monkeypatch):
    """Single tokens have one plan, prompts another; deterministic ones have one tile and one length of parts."""
    monkeypatch.setattr("weft_kernels.attention.launch.num_processors", lambda device: 132)
    kv_layer = torch.empty(1, 2, 16, 8, 128)
    for deterministic, num_plans in ((False, 2), (True, 1)):
        plans = [
            plan_launch(torch.empty(num_tokens, 32, 128), kv_layer, max_q_len, deterministic=deterministic)
            for num_tokens, max_q_len in ((1, 1), (256, 1), (64, 4), (70, 70), (2000, 500))
        ]
        assert num_plans == len(set(plans))
        assert plans[0] == plans[1] == plans[2]
    assert 4 * 132 == plans[0].num_programs


def test_a_block_far_into_the_cache_is_read(place_float32):
    """An element's offset may exceed 32 bits; the cache is address space of which three pages are touched."""
    shape = (3, 2, 16, 1, 16)
    stride = 1 << 30
    memory = torch.empty(2 * stride + 512, dtype=torch.float16, device=place_float32.device)
    kv_layer = memory.as_strided(shape, (stride, 256, 16, 16, 1))
    near = make_batch(((1, 16),), 1, 1, 16, device=place_float32.device, dtype=torch.float16)
    kv_layer[2] = near.kv_layer[near.block_tables[0, 0]]
    far = dataclasses.replace(near, kv_layer=kv_layer, block_tables=torch.full_like(near.block_tables, 2))
    expected = near.run(triton_kernel.paged_attention)
    assert torch.equal(expected, far.run(triton_kernel.paged_attention))
