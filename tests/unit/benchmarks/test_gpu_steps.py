"""The measurement of steps on a GPU: without one it says so; its plans are those of the scheduler."""

import numpy as np
import pytest
import torch
from benchmarks.language_model import gpu_steps


def test_a_plan_has_every_token_in_a_block_of_its_own_sequence() -> None:
    """Positions end with the context, cache slots follow from the tables, and no block is shared or the null block."""
    plan = gpu_steps.step_plan(3, 5, 40)
    assert [40, 40, 40] == plan.ctx_len.tolist()
    assert [*range(35, 40)] * 3 == plan.positions.tolist()
    tables = {(slot, index): block for slot, index, block in plan.table_delta.tolist()}
    assert set(range(1, 10)) == set(tables.values())
    rows = zip(np.repeat(plan.slots, 5).tolist(), plan.positions.tolist(), strict=True)
    assert [tables[slot, at // 16] * 16 + at % 16 for slot, at in rows] == plan.slot_mapping.tolist()
    assert [4, 9, 14] == plan.sample_rows.tolist()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2, and what to do."""
    assert 2 == gpu_steps.main([])
    assert "sees no CUDA device" in capsys.readouterr().err
