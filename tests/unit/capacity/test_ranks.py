"""Language models on several ranks: memory counted by hand and as the engine makes it, and time with exchanges."""

from dataclasses import replace

import pytest

from weft.base.errors import InvalidArgumentError, NotFoundError
from weft.capacity.costs.language_model import LanguageModel
from weft.capacity.devices import find_device
from weft.capacity.ranks import Link, RankTarget, find_link, known_links
from weft.capacity.roofline import DeviceTarget
from weft.llm.config import EngineConfig
from weft.llm.models.model_config import TransformerConfig
from weft.llm.models.weights import random_weights
from weft.llm.parallel.groups import Group, Groups
from weft.llm.parallel.topology import ParallelSizes

#: 512 tokens, width 64, feed-forward 96, 4 layers, 8 heads of 8, two of keys and values.
CONFIG = TransformerConfig(512, 64, 96, 4, 8, 2, 8, 256)
ENGINE = EngineConfig(dtype="float32")
MODEL = LanguageModel(CONFIG, ENGINE)
#: Numbers of a layer that tensor ranks divide, but for keys and values: queries, output, feed-forward.
DIVIDED = 64 * 64 + 64 * 64 + 3 * 96 * 64
KV_HEAD, NORMS, VOCABULARY = 2 * 8 * 64, 2 * 64, 512 * 64
SLOW = Link("slow", 1e9, 1e9, 1e-3, 1e-4)


def place(tensor: int = 1, pipeline: int = 1, context: int = 1, link: Link = SLOW) -> RankTarget:
    """The model on so many H100."""
    parts = MODEL.parts(ParallelSizes(tensor, pipeline, context))
    return RankTarget(DeviceTarget(find_device("H100")), parts, link)


@pytest.mark.parametrize(("tensor", "kv_heads"), [(1, 2), (2, 1), (4, 1)])
def test_a_tensor_rank_has_its_heads_columns_and_words(tensor: int, kv_heads: int) -> None:
    """Four ranks of two heads of keys have one each, so that two have the same."""
    (part,) = MODEL.parts(ParallelSizes(tensor))
    layer = DIVIDED // tensor + kv_heads * KV_HEAD + NORMS
    assert part.weight_bytes == 4 * (4 * layer + 2 * VOCABULARY // tensor + 64)
    assert part.kv_bytes_per_token == 4 * 4 * 2 * kv_heads * 8


def test_stages_have_their_layers_and_the_ends_the_vocabulary() -> None:
    """Context ranks have everything of their stage."""
    first, last = MODEL.parts(ParallelSizes(pipeline=2, context=2))
    layer = DIVIDED + 2 * KV_HEAD + NORMS
    assert first.weight_bytes == 4 * (2 * layer + VOCABULARY)
    assert last.weight_bytes == 4 * (2 * layer + VOCABULARY + 64)
    assert [part.kv_bytes_per_token for part in (first, last)] == [MODEL.kv_bytes_per_token // 2] * 2


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("tensor", [1, 4])
def test_a_rank_takes_what_the_engine_loads_of_it(tensor: int, is_tied: bool) -> None:
    """Tied, the first and the last have the embedding, and the last a packed copy of it on a CPU."""
    config = replace(CONFIG, tie_word_embeddings=is_tied)
    parts = LanguageModel(config, ENGINE).parts(ParallelSizes(tensor, 3))
    for stage, part in enumerate(parts):
        groups = Groups(Group(0, tuple(range(tensor))), Group(stage, (0, 1, 2)))
        loaded = sum(weight.nbytes for weight in random_weights(config, 0, groups=groups).values())
        assert part.weight_bytes == loaded + (4 * VOCABULARY // tensor if is_tied and stage == 2 else 0)


def test_the_cache_of_a_rank_is_what_was_declared() -> None:
    """Bytes of the rank with most layers; blocks, which all ranks have alike, take its part of their bytes."""
    engine = EngineConfig(dtype="float32", kv_cache_bytes=1 << 20, tensor_parallel_size=2, pipeline_parallel_size=3)
    kvs = [part.kv_bytes(1 << 40, 0) for part in replace(MODEL, engine=engine).parts(ParallelSizes(2, 3))]
    assert kvs == [1 << 19, 1 << 20, 1 << 19]
    blocks = replace(MODEL, engine=EngineConfig(dtype="float32", num_blocks=20))
    (whole,), halves = blocks.parts(ParallelSizes()), blocks.parts(ParallelSizes(2, 2))
    assert [4 * part.kv_bytes(1 << 40, 0) for part in halves] == [whole.kv_bytes(1 << 40, 0)] * 2


def test_sizes_that_do_not_divide_the_model_are_refused() -> None:
    """With those that would; and a link that is not known with those that are."""
    with pytest.raises(InvalidArgumentError, match="tensor_parallel_size must be one of 1, 2, 4, 8"):
        MODEL.parts(ParallelSizes(3))
    with pytest.raises(InvalidArgumentError, match="pipeline_parallel_size must be from 1 to num_hidden_layers = 4"):
        MODEL.parts(ParallelSizes(pipeline=5))
    with pytest.raises(NotFoundError, match=r"link 'nvlink' is not known; did you mean 'nvlink[0-9]'"):
        find_link("nvlink")


def test_one_rank_exchanges_nothing() -> None:
    """Its time is that of the model alone."""
    alone = DeviceTarget(find_device("H100"))
    assert place().decode(8, 100) == (alone.decode(MODEL, 8, 100), 0.0)
    assert place().prefill(64, 64) == (alone.prefill(MODEL, 64, 64), 0.0)


def test_tensor_ranks_sum_twice_a_layer_and_gather_logits() -> None:
    """Nine sums of the hidden states of 8 tokens, embedding included, and a half of 8 rows of logits."""
    _, exchange_s = place(tensor=2).decode(8, 100)
    hidden_s, logits_s = 1.1e-3 + 8 * 64 * 4 / 1e9, 1.1e-3 + 8 * 256 * 4 / 1e9
    assert exchange_s == pytest.approx(9 * hidden_s + logits_s)


def test_context_ranks_gather_keys_and_values_of_prompts() -> None:
    """Of each layer, those of the other half of the tokens; a decode step exchanges nothing."""
    _, exchange_s = place(context=2).prefill(64, 64)
    assert exchange_s == pytest.approx(4 * (1.1e-3 + 32 * 2 * 2 * 8 * 4 / 1e9))
    assert 0.0 == place(context=2).decode(8, 100)[1]


def test_a_pipeline_answers_many_at_the_rate_of_a_stage_and_one_as_slowly_as_all() -> None:
    """Stages work at the same time if there is a micro-batch for each."""
    fast = replace(SLOW, start_s=0.0, hop_s=0.0, bytes_per_s=1e15)
    two, alone = place(pipeline=2, link=fast), DeviceTarget(find_device("H100"))
    stages = two.stages
    assert two.decode(1, 100)[0].seconds == pytest.approx(sum(alone.decode(each, 1, 100).seconds for each in stages))
    slowest_s = max(alone.decode(each, 64, 100).seconds for each in stages)
    assert two.decode(128, 100)[0].seconds == pytest.approx(2 * slowest_s)


def test_more_exchange_never_makes_a_step_faster() -> None:
    """Over every link, eight ranks exchange longer than two, and a slower link takes longer."""
    for link in known_links().values():
        assert place(tensor=2, link=link).decode(8, 100)[1] < place(tensor=8, link=link).decode(8, 100)[1]
    times_s = [place(tensor=2, link=find_link(name)).prefill(64, 64)[1] for name in ("nvlink4", "pcie5", "loopback")]
    assert sorted(times_s) == times_s
