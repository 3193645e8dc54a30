"""Adapters: answers are those of the model with the adapter merged into its weights, whatever else is in the batch."""

import contextlib
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.case_files import says
from tests.unit.llm.adapters import CONFIG, merged, save_adapter
from tests.unit.llm.engine_fixture import MODEL, Answer, answer_all, make_engine, preempt, random_prompts, submit
from tests.unit.llm.test_graphs import FakeRecorder

from weft.base.errors import InvalidArgumentError, NotFoundError, ResourceExhaustedError, WeftError
from weft.capacity.costs.language_model import LanguageModel
from weft.llm.config import EngineConfig, TransformerConfig
from weft.llm.graphs import GraphPolicy
from weft.llm.models.lora import LoraBank
from weft.llm.models.model import TransformerModel
from weft.llm.models.registry import config_from_json
from weft.llm.models.weights import random_weights
from weft.llm.speculation.draft_model import DraftModelProposer
from weft.llm.speculation.ngram import NgramProposer
from weft.llm.speculation.speculator import FixedDepth, Speculator

torch.set_num_threads(1)

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": 95,
}
_MOE = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("Llama", "Qwen2", "Phi3", "Gemma2", "Gemma3", "Granite")},
    "GptOss": {"num_local_experts": 4},
    "Qwen2Moe": _MOE,
}
_MAX_ABS_ERROR = 1e-4


def make_model(
    config: TransformerConfig, weights: dict[str, torch.Tensor], num_slots: int = 0, **options: Any
) -> TransformerModel:
    """A model with as many slots, rank 8."""
    lora = LoraBank(config, num_slots, 8, torch.float32, "cpu") if num_slots else None
    return TransformerModel(config, dict(weights), lora=lora, **options)


def logits_of(model: TransformerModel, texts: list[torch.Tensor], slots: list[int] | None) -> list[torch.Tensor]:
    """Logits of every position of texts that one step computes, each with the adapter of its slot."""
    lengths = torch.tensor([len(text) for text in texts])
    ends = lengths.cumsum(0)
    blocks = torch.arange(1, 1 + len(texts), dtype=torch.int32)
    positions = torch.cat([torch.arange(len(text), dtype=torch.int32) for text in texts])
    hidden = model.forward(
        torch.cat(texts).int(),
        positions,
        model.new_kv(1 + len(texts), 64),
        blocks[:, None],
        torch.cat((torch.zeros(1, dtype=torch.int64), ends)).int(),
        lengths.int(),
        blocks.long().repeat_interleave(lengths) * 64 + positions,
        int(lengths.max()),
        int(lengths.max()),
        None if slots is None else torch.tensor(slots, dtype=torch.int32).repeat_interleave(lengths),
    )
    return list(model.logits(hidden).split(lengths.tolist()))


@pytest.mark.parametrize("changes", [
    {},
    {"use_rslora": True, "targets": ("q_proj", "v_proj", "qkv_proj", "down_proj")},
    {"rank_pattern": {"o_proj": 8, "down_proj": 1}, "alpha_pattern": {"o_proj": 3}, "targets": ("o_proj", "down_proj")},
], ids=["all", "some, rslora", "patterns"])  # fmt: skip
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_are_those_of_merged_weights(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    """Two adapters and the model alone in one step; biases, fused files and norms of each architecture."""
    config = config_from_json({"architectures": [f"{name}ForCausalLM"], **SIZES, **ARCHITECTURES[name]})
    weights = random_weights(config, 3)
    added = [save_adapter(tmp_path / str(seed), config, seed, **changes) for seed in (1, 2)]
    model = make_model(config, weights, num_slots=2)
    for seed in (1, 2):
        model.lora.load(str(seed), tmp_path / str(seed))
    slots = [adapter.slot for adapter in model.lora.adapters]
    texts = [torch.randint(1, 95, (length,), generator=torch.Generator().manual_seed(length)) for length in (9, 1, 30)]
    actual = logits_of(model, texts, [slots[0], -1, slots[1]])
    for text, own, got in zip(texts, (added[0], {}, added[1]), actual, strict=True):
        (expected,) = logits_of(make_model(config, merged(config, weights, own)), [text], None)
        assert _MAX_ABS_ERROR > (expected - got).abs().max().item()
        if own:
            (base,) = logits_of(model, [text], None)
            assert 100 * _MAX_ABS_ERROR < (base - got).abs().max().item()


NAMES = "abcdefgh"


class Adapters:
    """Folders ``a`` to ``h`` of adapters of ``MODEL``, and what the models say that they are merged into."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._added = {name: save_adapter(folder / name, MODEL, seed) for seed, name in enumerate(NAMES)} | {"": {}}
        self._texts: dict[str, list[int]] = {}

    def model(self, names: str = NAMES, **options: Any) -> TransformerModel:
        """``MODEL`` with eight slots and these adapters loaded."""
        model = make_model(MODEL, random_weights(MODEL, 3), 8, **{"deterministic": True} | options)
        for name in names:
            model.lora.load(name, self.folder / name)
        return model

    def merged(self, name: str) -> TransformerModel:
        """``MODEL`` with the adapter merged in."""
        return TransformerModel(MODEL, merged(MODEL, random_weights(MODEL, 3), self._added[name]), deterministic=True)

    def check(self, answers: list[Answer], name: str | None = None) -> None:
        """Each has the tokens of the merged model; of that of adapter ``name`` if it is given."""
        for answer in answers:
            own, params = name or answer.request.params.lora_name, answer.request.params
            prompt = answer.request.prompt_ids.tolist()
            key = repr((prompt, own, params.max_tokens))
            if key not in self._texts:
                alone = Answer(prompt, max_tokens=params.max_tokens)
                answer_all(make_engine(model=self.merged(own)), [alone])
                self._texts[key] = alone.text
            assert answer.error is None
            assert self._texts[key] == answer.text


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    """Eight adapters."""
    return Adapters(tmp_path_factory.mktemp("adapters"))


def requests(count: int, **options: Any) -> list[Answer]:
    """Requests in turn for the model and each of eight adapters."""
    prompts, names = random_prompts(count, 1, 40, 5), ["", *NAMES]
    return [Answer(prompt, lora_name=names[i % 9], **{"max_tokens": 12} | options) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize("options", [
    {},
    {"max_num_batched_tokens": 16, "max_num_seqs": 5},
    {"async_scheduling": "true"},
    {"num_blocks": 24, "kv_offload_bytes": 1 << 20},
    {"enable_prefix_caching": False},
    {"speculation": "ngram", "speculator": lambda: Speculator("ngram", FixedDepth(3), NgramProposer)},
    {"speculation": "draft", "draft_model": "x", "speculator": lambda: Speculator("draft", FixedDepth(3)),
     "proposer": lambda: DraftModelProposer(TransformerModel(MODEL, dict(random_weights(MODEL, 3))), 20)},
], ids=lambda options: "-".join(options) or "plain")  # fmt: skip
def test_eight_adapters_in_a_batch(adapters: Adapters, options: dict[str, Any]) -> None:
    """Each answer has the tokens of merged weights: chunked, ahead, preempted, with a second tier and with drafts."""
    answers = requests(27)
    options = {name: value() if callable(value) else value for name, value in options.items()}
    engine = make_engine(model=adapters.model(), **options)
    answer_all(engine, answers)
    adapters.check(answers)
    assert [set()] * 8 == [adapter.requests for adapter in engine.lora.adapters]
    if "speculator" in options:
        assert engine.speculator.num_accepted > 0


def test_captured_steps_have_adapters(adapters: Adapters) -> None:
    """Steps with an adapter replay graphs of their own; those without, graphs that know of none."""
    recorder, answers = FakeRecorder(), requests(9)
    engine = make_engine(model=adapters.model(), max_num_seqs=6)
    runner: Any = engine._core._runner
    runner.capture(GraphPolicy(6, (1,)), recorder.record)
    assert 0 == recorder.num_recorded % 2
    answer_all(engine, answers)
    adapters.check(answers)
    assert recorder.num_replays > 0


def test_preempted_with_adapters(adapters: Adapters) -> None:
    """A sequence that is computed again has its adapter again."""
    answers = requests(9, max_tokens=50)
    preempt(answers, model=adapters.model())
    adapters.check(answers)


def test_a_row_does_not_depend_on_the_others(adapters: Adapters) -> None:
    """In deterministic mode log probabilities with an adapter are bitwise those of the request alone, in any slot."""
    together = requests(18, logprobs=2)
    answer_all(make_engine(model=adapters.model()), together)
    for answer, alone in zip(together[:9], requests(18, logprobs=2), strict=False):
        answer_all(make_engine(model=adapters.model("hgfedcba")), [alone])
        assert answer.logprobs == alone.logprobs


def test_each_adapter_has_a_prefix_cache_of_its_own(adapters: Adapters) -> None:
    """A prompt is found again with the same adapter alone; another one under the same name finds nothing."""
    prompt = random_prompts(1, 40, 40)[0]
    engine = make_engine(model=adapters.model("ab"))
    engine.start()

    def cached(name: str) -> int:
        answer = Answer(prompt, lora_name=name, max_tokens=4)
        submit(engine, [answer])
        return answer.wait().deltas[0].num_cached_tokens

    found = [cached(name) for name in ("a", "a", "b", "", "", "b")]
    engine.lora.unload("a")
    engine.lora.load("a", adapters.folder / "c")
    found.append(cached("a"))
    assert engine.stop(grace_s=5.0)
    assert [0, 32, 0, 0, 32, 32, 0] == found


@pytest.mark.parametrize("num_bits", [8, 4])
def test_adapters_of_rounded_weights(adapters: Adapters, num_bits: int) -> None:
    """An adapter adds the same to rounded weights: the logits are near those of merged ones, far from those without."""
    text = torch.arange(1, 31)
    model = adapters.model("a", num_bits=num_bits)
    (without,) = logits_of(model, [text], None)
    slot = model.lora.adapters[0].slot
    (with_it,) = logits_of(model, [text], [slot])
    (expected,) = logits_of(adapters.merged("a"), [text], None)
    assert 2 * (with_it - expected).norm() < (without - expected).norm()


def test_several_answers(adapters: Adapters) -> None:
    """Forks of one prompt have the adapter of their request."""
    (prompt,) = random_prompts(1, 30, 30)
    answer = Answer(prompt, lora_name="b", n=3, max_tokens=12)
    answer_all(make_engine(model=adapters.model()), [answer])
    alone = Answer(prompt, max_tokens=12)
    answer_all(make_engine(model=adapters.merged("b")), [alone])
    assert [alone.text] * 3 == answer.tokens


def test_unloaded_while_it_serves(adapters: Adapters) -> None:
    """Running requests finish with the adapter, new ones are refused, and its slot is free when the last has ended."""
    reached, goes_on = threading.Event(), threading.Event()

    def wait(delta: Any) -> None:
        reached.set()
        goes_on.wait(30)

    (prompt,) = random_prompts(1, 30, 30)
    engine = make_engine(model=adapters.model())
    running = Answer(prompt, lora_name="c", max_tokens=12, on_delta=wait)
    engine.submit(running.request)
    engine.start()
    assert reached.wait(30)
    engine.lora.unload("c")
    with pytest.raises(NotFoundError, match=r"adapter 'c' is not loaded; loaded are 'a', 'b', 'd', 'e', 'f', 'g', 'h'"):
        engine.submit(Answer(prompt, lora_name="c").request)
    with pytest.raises(NotFoundError, match="'c' is not loaded"):
        engine.lora.unload("c")
    with pytest.raises(ResourceExhaustedError, match="max_loras = 8"):
        engine.lora.load("c", adapters.folder / "c")
    goes_on.set()
    running.wait()
    adapters.check([running])
    engine.lora.load("c", adapters.folder / "d")  # into the slot that it had
    again = Answer(prompt, lora_name="c", max_tokens=12)
    engine.submit(again.request)
    again.wait()
    assert engine.stop(grace_s=5.0)
    adapters.check([again], "d")


def test_loaded_and_unloaded_under_traffic(adapters: Adapters) -> None:
    """Other adapters come and go in the same slots while requests run: no token is wrong."""
    engine = make_engine(model=adapters.model("abcd"), max_num_seqs=8)
    engine.start()
    stopping, num_loads = threading.Event(), 0

    def change() -> None:
        nonlocal num_loads
        while not stopping.is_set():
            loaded = []
            for name in "efgh":
                with contextlib.suppress(ResourceExhaustedError):  # slots of unloaded ones that are still in use
                    engine.lora.load(name, adapters.folder / name)
                    loaded.append(name)
            for name in loaded:
                engine.lora.unload(name)
                num_loads += 1

    changing = threading.Thread(target=change)
    changing.start()
    done: list[Answer] = []
    try:
        for _ in range(6):
            wave, num_refused = requests(27), 0
            for answer in wave:
                try:
                    engine.submit(answer.request)
                    done.append(answer)
                except NotFoundError:
                    num_refused += 1
                    assert answer.request.params.lora_name in "efgh"
            for answer in done:
                answer.wait()
    finally:
        stopping.set()
        changing.join()
        assert engine.stop(grace_s=5.0)
    adapters.check(done)
    assert num_loads > 4


def test_requests_that_fail_give_their_adapter_back(adapters: Adapters) -> None:
    """Cancelled, late, refused by the sink or lost with a step: none keeps its slot."""

    def fail(plan: Any) -> None:
        raise RuntimeError("a step")

    engine = make_engine(model=adapters.model("a"), before_step=fail)
    answers = [Answer([1, 2], lora_name="a") for _ in range(3)]
    answers.append(Answer([1, 2], lora_name="a", deadline_ns=1))
    submit(engine, answers)
    engine.cancel(answers[0].request)
    engine.start()
    for answer in answers[1:]:
        assert answer.wait().error is not None
    assert engine.stop(grace_s=5.0)
    (adapter,) = engine.lora.adapters
    assert set() == adapter.requests
    stopped = make_engine(model=adapters.model("a"))
    stopped.submit(Answer([1], lora_name="a").request)
    stopped.stop(0.0)
    assert set() == stopped.lora.adapters[0].requests


def test_a_refused_grammar_gives_the_adapter_back(adapters: Adapters) -> None:
    """Without a tokenizer there are no grammars."""
    engine = make_engine(model=adapters.model("a"))
    with pytest.raises(WeftError, match="tokenizer"):
        engine.submit(Answer([1], lora_name="a", structured_outputs={"regex": "a"}).request)
    assert set() == engine.lora.adapters[0].requests


def test_without_adapters_a_name_is_refused() -> None:
    """The message says what to set."""
    with pytest.raises(NotFoundError, match="'x' is not loaded; the model has none: set its parameter 'lora_adapters'"):
        make_engine().submit(Answer([1], lora_name="x").request)


def _without(name: str, half: str) -> Callable[[dict[str, Any]], Any]:
    return lambda tensors: tensors.pop(f"base_model.model.model.layers.0.{name}.lora_{half}.weight")


def _with(name: str, tensor: torch.Tensor) -> Callable[[dict[str, Any]], Any]:
    return lambda tensors: tensors.update({f"base_model.model.{name}": tensor})


_Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(("config", "change", "words"), [
    ({"peft_type": "IA3"}, None, "peft_type must be LORA, got 'IA3'"),
    ({"use_dora": True}, None, "use_dora is not supported, got True; merge it into the model"),
    ({"modules_to_save": ["lm_head"]}, None, "modules_to_save is not supported"),
    ({"bias": "all"}, None, "bias must be none, got 'all'"),
    ({"r": 0}, None, "r must be a whole number above 0, at most 2^32, got 0"),
    ({"r": "8"}, None, "r must be a whole number above 0, at most 2^32, got '8'"),
    ({"lora_alpha": float("inf")}, None, "lora_alpha must be a number above 0, at most 2^32, got inf"),
    ({"lora_alpha": 1e300}, None, "lora_alpha must be a number above 0, at most 2^32, got 1e+300"),
    ({"lora_alpha": 10**400}, None, "lora_alpha must be a number above 0, at most 2^32, got 1000"),
    ({"rank_pattern": {"(": 2}}, None, "rank_pattern has a key that is no pattern"),
    ({"alpha_pattern": {"a{99999999999}": 2}}, None, "alpha_pattern has a key that is no pattern"),
    ({"rank_pattern": 3}, None, "rank_pattern must be an object"),
    ({"init_lora_weights": "pissa_niter_4"}, None, "init_lora_weights changed the model's own weights"),
    ({"init_lora_weights": "lora_ga"}, None, "init_lora_weights changed the model's own weights"),
    ({"r": 9}, None, "rank must be at most max_lora_rank = 8, got 9; raise max_lora_rank"),
    ({"r": 3}, None, "'model.layers.0.mlp.down_proj.lora_A.weight' must be finite numbers of shape [3, 48]...[4, 48]"),
    ({}, _without("self_attn.q_proj", "B"), "q_proj.lora_B.weight' is missing"),
    ({}, _with("lm_head.lora_A.weight", torch.ones(4, 32)), "lm_head.lora_A.weight' is of no module"),
    ({}, _with("model.layers.0.mlp.experts.0.up_proj.lora_A.weight", torch.ones(4, 32)), "experts.0...of no module"),
    ({}, _with(f"{_Q}.lora_A.weight", torch.full((4, 32), torch.nan)), "q_proj.lora_A.weight' must be finite"),
    ({}, _with(f"{_Q}.lora_A.weight", torch.ones(4, 32).int()), "of shape [4, 32], got int32"),
    ({}, lambda tensors: tensors.clear(), "has no tensors"),
])  # fmt: skip
def test_what_is_not_supported_is_refused(
    tmp_path: Path, config: dict[str, Any], change: Callable[[dict[str, Any]], Any] | None, words: str
) -> None:
    """By name, with the reason; nothing is loaded, and the slot stays free."""
    save_adapter(tmp_path, MODEL, 1)
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    if change is not None:
        tensors = load_file(tmp_path / "adapter_model.safetensors")
        change(tensors)
        save_file(tensors, tmp_path / "adapter_model.safetensors")
    model = make_model(MODEL, random_weights(MODEL, 3), 1)
    with pytest.raises(InvalidArgumentError) as caught:
        model.lora.load("x", tmp_path)
    assert says(words, caught.value.message), caught.value.message
    assert [] == model.lora.adapters
    save_adapter(tmp_path, MODEL, 1)
    model.lora.load("x", tmp_path)
    with pytest.raises(InvalidArgumentError, match="adapter 'x' is loaded already"):
        model.lora.load("x", tmp_path)


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_missing_or_torn_file_is_named(tmp_path: Path, missing: str) -> None:
    """NOT_FOUND without the file; INVALID_ARGUMENT if it is cut short."""
    save_adapter(tmp_path, MODEL, 1)
    model, path = make_model(MODEL, random_weights(MODEL, 3), 1), tmp_path / missing
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(InvalidArgumentError, match=missing):
        model.lora.load("x", tmp_path)
    path.unlink()
    with pytest.raises(NotFoundError, match=f"no {missing} in"):
        model.lora.load("x", tmp_path)


@pytest.mark.parametrize("name", ["Llama", "Qwen2Moe"])
def test_plans_count_the_slots(name: str) -> None:
    """What ``weft plan`` takes for adapters is what they are allocated; experts have none."""
    config = config_from_json({"architectures": [f"{name}ForCausalLM"], **SIZES, **ARCHITECTURES[name]})
    bank = LoraBank(config, 3, 8, torch.float32, "cpu")
    TransformerModel(config, random_weights(config, 3), lora=bank)
    allocated = sum(linear.a.nbytes + linear.b.nbytes for linear in bank.linears.values())
    assert allocated == LanguageModel(config, EngineConfig(max_loras=3, max_lora_rank=8, dtype="float32")).adapter_bytes


@pytest.mark.parametrize(("text", "expected"), [
    ("a=x, b=/y/z", {"a": "x", "b": "/y/z"}),
    ("", {}),
    ("org/a=x", {"org/a": "x"}),
])  # fmt: skip
def test_adapters_of_a_configuration(text: str, expected: dict[str, str]) -> None:
    """Names and folders."""
    assert expected == EngineConfig(lora_adapters=text).adapters


@pytest.mark.parametrize("text", ["a", "a=", "=x", "a=x,a=y", "a:b=x", "a b=x"])
def test_malformed_adapters_are_refused(text: str) -> None:
    """At load."""
    with pytest.raises(InvalidArgumentError, match="lora_adapters must be NAME=FOLDER"):
        EngineConfig(lora_adapters=text)
