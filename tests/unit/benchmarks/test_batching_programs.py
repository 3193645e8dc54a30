"""The benchmarks of queue and batches: their models are what they say, and they run."""

import re
from pathlib import Path

import pytest
from benchmarks import buckets, priorities, scheduler

from weft.base.text.pbtxt import parse
from weft_protos.model_config_pb2 import ModelConfig

REPOSITORY = Path(__file__).resolve().parents[3] / "model_repository"


@pytest.mark.parametrize(
    ("case", "has_buckets", "is_batching"),
    [("buckets", True, True), ("exact shapes", False, True), ("batching off", False, False)],
)
def test_cases_of_buckets(tmp_path, case, has_buckets, is_batching):
    """Each case takes away what its name says from the repository's model, and nothing else."""
    buckets.write_repository(REPOSITORY, tmp_path, case)
    text = (tmp_path / "model" / "minilm" / "config.pbtxt").read_bytes()
    config, _ = parse(text, ModelConfig(), file="config.pbtxt")
    assert has_buckets == any(key.startswith("batch_buckets") for key in config.parameters)
    assert is_batching == config.HasField("dynamic_batching")
    assert (2, "1") == (config.instance_group[0].count, config.parameters["intra_op_thread_count"].string_value)
    assert (tmp_path / "graphs" / "embed" / "1" / "graph.pbtxt").is_file()


def test_scheduler_measures_every_case():
    """A row for each case and part; with 32 at once batches are formed, and without dynamic_batching they are not."""
    rows = scheduler.measure(num_rounds=1, num_requests=128)
    assert len(rows) == 3 * len(scheduler.CASES)
    batches = {(row.case, row.part): row.mean_batch for row in rows}
    assert 1 == batches["one by one", "model, 32 at once"]
    assert batches["batching", "model, 32 at once"] > 8
    assert re.search(r"batching, 3 levels, ageing +policy +\d", scheduler.render(rows))


def test_models_of_priorities(tmp_path):
    """The same model with and without levels."""
    priorities.write_repository(tmp_path)
    levels = {}
    for path in tmp_path.glob("*/config.pbtxt"):
        config, _ = parse(path.read_bytes(), ModelConfig(), file=str(path))
        levels[path.parent.name] = config.dynamic_batching.priority_levels
    assert {"levels": 2, "first_come": 0} == levels
