"""Attention by a fixed number of programs: work items, and sequences whose keys are cut into parts."""

import pytest
import torch
from tests.kernels.test_attention import BLOCK_SIZE, make_batch, make_sinks, plain_attention, run_with

from weft_kernels.attention import items_triton_kernel, triton_kernel
from weft_kernels.attention.launch import plan_launch

pytestmark = pytest.mark.long

# as in vLLM's tests of unified attention: a decode, drafts and a chunk of a prompt
VLLM_MIX = ((1, 1328), (5, 18), (129, 463))
LONG_BESIDE_PROMPT = ((1, 300), (1, 9), (40, 40), (20, 130), (1, 200))


def items_of(sequences, *, device="cpu", window=0, deterministic=False, num_processors=132, **plan):
    """Tiles, parts, and stored parts of each sequence, for a model with 8 key-value heads of 4 query heads each."""
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr("weft_kernels.attention.launch.num_processors", lambda device: num_processors)
    lengths = torch.tensor(sequences, dtype=torch.int32)
    q_start = torch.zeros(len(sequences) + 1, dtype=torch.int32)
    q_start[1:] = lengths[:, 0].cumsum(0)
    kv_layer = torch.empty(1, 2, BLOCK_SIZE, 8, 128)
    own = plan_launch(torch.empty(1, 32, 128), kv_layer, int(lengths[:, 0].max()), deterministic=deterministic)
    monkeypatch.undo()
    if plan:
        own = own.__class__(**(vars(own) | plan))
    items = items_triton_kernel.work_items(q_start.to(device), lengths[:, 1].contiguous().to(device), own, 8, window)
    counts = items.cpu().diff()
    tiles = -(-lengths[:, 0] // own.tokens_per_tile)
    assert torch.equal(items[:, 0].cpu(), torch.zeros(3, dtype=torch.int32))
    assert (0 == counts[0] % tiles.clamp(min=1)).all()
    parts = (counts[0] // tiles.clamp(min=1)).tolist()
    assert [tile if part > 1 else 0 for tile, part in zip(tiles.tolist(), parts, strict=True)] == counts[2].tolist()
    return tiles.tolist(), parts, counts[1].tolist()


def test_only_what_others_would_wait_for_is_cut(place_float32):
    """A long decode is cut into many parts beside a prompt, short decodes and a prompt are left whole."""
    _, parts, stored = items_of(((1, 100_000), (1, 900), (512, 512), (1, 1)), device=place_float32.device)
    assert parts[0] > 20
    assert [1, 1, 1] == parts[1:]
    assert [parts[0], 0, 0, 0] == stored


def test_a_full_device_cuts_nothing_and_an_empty_one_as_far_as_is_worth_it(place_float32):
    """256 equal decodes are whole; one alone is cut into parts of 128 keys at least, as many as there are programs."""
    device = place_float32.device
    assert [1] * 256 == items_of(((1, 1024),) * 256, device=device)[1]
    assert [1] == items_of(((1, 150),), device=device)[1]
    assert [8] == items_of(((1, 1024),), device=device)[1]
    assert [64] == items_of(((1, 8192),), device=device)[1]
    assert [64] == items_of(((1, 65_536),), device=device)[1]


def test_sequences_without_tokens_have_no_items(place_float32):
    """Rows of padding cost nothing, also between others, and more sequences than a tile of them."""
    sequences = [(0, 0) if row % 3 else (1, 1 + row) for row in range(600)]
    tiles, parts, _ = items_of(sequences, device=place_float32.device)
    assert [row % 3 == 0 for row in range(600)] == [count > 0 for count in tiles]
    assert all(part == (row % 3 == 0) for row, part in enumerate(parts))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("window", [0, 4096])
def test_parts_stay_within_their_memory(place_float32, window, deterministic):
    """Whatever the lengths are, no more parts are stored than there is room for."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        count = int(torch.randint(1, 40, (1,), generator=generator))
        q_lens = torch.randint(1, 80, (count,), generator=generator) ** 2 // 40 + 1
        contexts = q_lens + torch.randint(0, 2**17, (count,), generator=generator) // q_lens
        sequences = tuple(zip(q_lens.tolist(), contexts.tolist(), strict=True))
        options = {"window": window, "deterministic": deterministic, "device": place_float32.device}
        tiles, parts, stored = items_of(sequences, **options)
        in_parts = [(t * p, s) for t, p, s in zip(tiles, parts, stored, strict=True) if p > 1]
        assert all(needed == own for needed, own in in_parts)
        assert sum(own for _, own in in_parts) <= 66 * (8 if deterministic else 2)
    assert {1} == set(items_of(sequences, num_stored=0, **options)[1])


def check(place, attention=triton_kernel, **options) -> None:
    """A mix with long decodes and a chunk in parts, and others; what was not stored as a part is NaN."""
    plan = {"num_programs": 40, "min_keys_per_part": 32, "num_stored": 16, "deterministic": False} | options
    batch = make_batch(LONG_BESIDE_PROMPT, 8, 2, 40, device=place.device, dtype=place.dtype)
    if plan.pop("has_sinks", False):
        plan["sinks"] = make_sinks(8, place.device)
    expected = plain_attention(batch, window=plan.get("window", 0), sinks=plan.get("sinks"))
    place.assert_close(expected, run_with(batch, attention=attention, is_poisoned=True, **plan))


@pytest.mark.parametrize("options", [
    {}, {"window": 100}, {"num_stored": 7}, {"deterministic": True, "fixed_keys_per_part": 64},
    {"deterministic": True, "fixed_keys_per_part": 64, "window": 100, "num_stored": 40},
    {"has_sinks": True}, {"has_sinks": True, "deterministic": True, "fixed_keys_per_part": 64, "num_stored": 40},
], ids=["parts", "window", "memory for some", "fixed parts", "fixed, window", "sinks", "fixed, sinks"])  # fmt: skip
def test_a_long_decode_in_parts_beside_a_prompt(place, options):
    """Few programs take all items in turns; unstored and unseen places hold NaN."""
    check(place, **options)


def test_vllms_mix(place_float32):
    """A decode of 1,328 tokens in parts, drafts, and a chunk of a prompt in one call."""
    batch = make_batch(VLLM_MIX, 2, 1, 32, device=place_float32.device)
    actual = run_with(batch, deterministic=False, is_poisoned=True, num_programs=16, num_stored=40)
    place_float32.assert_close(plain_attention(batch), actual)


def test_lengths_may_change_under_a_launch_that_stays(place_float32):
    """What a CUDA graph freezes, programs and shapes, holds for other contexts in the same tensors."""
    batch = make_batch(((1, 300), (1, 9), (1, 70)), 4, 2, 32, device=place_float32.device)
    options = {"deterministic": False, "num_programs": 5, "min_keys_per_part": 32, "num_stored": 12}
    for lengths in ((300, 9, 70), (1, 1, 1), (17, 9, 64)):
        batch.ctx_len.copy_(torch.tensor(lengths, dtype=torch.int32))
        cut = type(batch)(
            *(batch.q, batch.kv_layer, batch.block_tables, batch.q_start, batch.ctx_len),
            tuple(key[:length] for key, length in zip(batch.keys, lengths, strict=True)),
            tuple(value[:length] for value, length in zip(batch.values, lengths, strict=True)),
        )
        place_float32.assert_close(plain_attention(cut), run_with(batch, is_poisoned=True, **options))
