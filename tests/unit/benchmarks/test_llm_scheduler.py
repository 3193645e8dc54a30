"""The benchmark of the language-model scheduler: its loads are what they say."""

import re

from benchmarks import llm_scheduler
from benchmarks.llm_scheduler import Case, Load


def test_a_load_stays_full():
    """Who ends is replaced, so that there are always as many, and the next step fills every slot."""
    load = Load(Case("small", num_running=8, num_waiting=20, mean_output=4), seed=0)
    num_ended = sum(load.step()[3] for _ in range(20))
    assert num_ended > 0
    assert 28 == load.scheduler.num_running + load.scheduler.num_waiting
    assert load.scheduler.schedule() is not None
    assert 8 == load.scheduler.num_running
    load.scheduler.check()


def test_scarce_blocks_and_levels_preempt():
    """With three levels and a pool that is too small, some lose their slots."""
    case = Case("scarce", num_running=8, num_waiting=20, mean_output=60, num_blocks=80, num_levels=3)
    row = llm_scheduler.measure(case, num_rounds=1, num_warm=0, num_steps=200)
    assert row.num_preemptions > 0
    assert row.step_us <= row.step_p99_us
    assert re.search(r"scarce +\d+", llm_scheduler.render([row]))
