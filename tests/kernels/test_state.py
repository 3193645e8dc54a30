"""Inputs of a step from per-slot tables: the reference against a loop, the kernel against the reference."""

from collections.abc import Callable
from itertools import accumulate

import pytest
import torch

from weft_kernels.state import reference, triton_kernel

BLOCK_SIZE, NUM_SLOTS, NUM_COLUMNS = 16, 12, 8
# (slot, new tokens, tokens after the step); slot 11 is that of padding
STEPS = {
    "one token each": [(3, 1, 17), (0, 1, 1), (7, 1, 128), (11, 1, 1)],
    "one and drafts": [(5, 4, 20), (2, 4, 33), (11, 4, 4)],
    "mixed": [(1, 1, 16), (4, 100, 100), (9, 0, 5), (6, 7, 90), (8, 1, 40)],
    "many": [(slot % 11, 1, 1 + slot % 128) for slot in range(150)],
}


def make_step(sequences, device: str) -> dict[str, torch.Tensor]:
    """Arguments: a known token for every other token, and tables of distinct blocks; padding's table is zeros."""
    q_start = [0, *accumulate(q_len for _, q_len, _ in sequences)]
    tables = torch.arange(1, 1 + NUM_SLOTS * NUM_COLUMNS, dtype=torch.int32).view(NUM_SLOTS, NUM_COLUMNS)
    tables[-1] = 0
    token_ids = torch.arange(1000, 1000 + q_start[-1], dtype=torch.int32)
    token_ids[::2] = -1
    arguments = {
        "token_ids": token_ids,
        "q_start": torch.tensor(q_start, dtype=torch.int32),
        "ctx_len": torch.tensor([context for _, _, context in sequences], dtype=torch.int32),
        "slots": torch.tensor([slot for slot, _, _ in sequences], dtype=torch.int32),
        "last_tokens": torch.arange(500, 500 + NUM_SLOTS, dtype=torch.int32),
        "block_tables": tables,
    }
    return {name: tensor.to(device) for name, tensor in arguments.items()}


def check(step_inputs: Callable[..., tuple[torch.Tensor, ...]], name: str, device: str) -> None:
    """What a loop over sequences and tokens gives."""
    sequences = STEPS[name]
    arguments = make_step(sequences, device)
    tables = arguments["block_tables"].tolist()
    expected = []
    for slot, q_len, context in sequences:
        for position in range(context - q_len, context):
            given = int(arguments["token_ids"][len(expected)])
            place = tables[slot][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            expected.append((500 + slot if given < 0 else given, position, place))
    known, positions, slot_mapping = step_inputs(**arguments, block_size=BLOCK_SIZE)
    assert (torch.int32, torch.int32, torch.int64) == (known.dtype, positions.dtype, slot_mapping.dtype)
    actual = list(zip(known.tolist(), positions.tolist(), slot_mapping.tolist(), strict=True))
    assert expected == actual, "inputs differ"


@pytest.mark.parametrize("name", STEPS)
def test_reference_and_kernel_give_ids_positions_and_cache_slots(place_float32, name):
    """Uniform, padded and mixed steps; -1 is the last sampled token of the slot."""
    check(reference.step_inputs, name, place_float32.device)
    check(triton_kernel.step_inputs, name, place_float32.device)


def test_no_tokens_are_no_work(place_float32):
    """An empty step has empty inputs."""
    arguments = make_step([], place_float32.device)
    for module in (reference, triton_kernel):
        assert [0, 0, 0] == [len(x) for x in module.step_inputs(**arguments, block_size=BLOCK_SIZE)]
