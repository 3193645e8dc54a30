"""Every architecture in the engine: tokens are those of transformers with the same weights, in every mode."""

import gc
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.unit.llm.engine_fixture import Answer, assert_clean, submit
from tests.unit.llm.speculation.heads import eagle3_folder
from tokenizers import Tokenizer, models, pre_tokenizers

from weft.backends.llm import loading
from weft.backends.llm.loading import load_engine
from weft.backends.llm.settings import Settings
from weft.base.errors import InvalidArgumentError, UnsupportedError
from weft.cli.__main__ import main
from weft.llm.config import EngineConfig
from weft.llm.engine import Engine
from weft.llm.models.foreign import ForeignConfig
from weft.llm.models.foreign_model import ForeignModel
from weft.llm.models.registry import ARCHITECTURES, config_from_json, read_config
from weft.llm.speculation.speculator import FixedDepth, Speculator

torch.set_num_threads(1)

_PAGE = Path(__file__).parents[3] / "docs/language-models.md"
_VOCAB_SIZE, _NUM_NEW = 96, 12
#: Longest and shortest; the window of five layers of six is longer than some and shorter than others.
_LENGTHS = (70, 5, 33, 19, 48, 1)
_SHAPE: dict[str, Any] = {
    "vocab_size": _VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
#: Classes of transformers, with what differs from ``_SHAPE``.
_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 24},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": {"head_dim": 16},
    "Gemma2": {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 24, "attn_logit_softcapping": 5.0},
    "Gemma3": {
        "num_hidden_layers": 7,
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 24,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        },
    },
    "GptOss": {
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 24,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "Mixtral": {"num_local_experts": 4, "sliding_window": 24},
    "Qwen2Moe": {**_MOE, "num_hidden_layers": 3, "mlp_only_layers": [1], "shared_expert_intermediate_size": 32},
    "Qwen3Moe": {**_MOE, "head_dim": 16, "norm_topk_prob": True},
    "Granite": {"embedding_multiplier": 3.0, "attention_multiplier": 0.4, "residual_multiplier": 0.5},
    "Olmo2": {"attention_bias": True},
    "Phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}},
}
#: The last two of four layers have the keys and values of the first two.
_SHARING: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "head_dim": 16,
    "sliding_window": 24,
    "vocab_size_per_layer_input": _VOCAB_SIZE,
    "hidden_size_per_layer_input": 8,
}
#: Those that have no module, and run through transformers.
_FOREIGN: dict[str, dict[str, Any]] = {
    "Cohere": {"logit_scale": 0.5},
    "Gemma3n": _SHARING | {"activation_sparsity_pattern": [0.5] * 4},
    "Gemma4": _SHARING | {"global_head_dim": 32},
    "GPTNeoX": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}},
    "GraniteMoeSWA": {"num_local_experts": 4, "sliding_window": 24},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "Starcoder2": {"sliding_window": 24},
}
#: Classes that the documentation lists.
_SERVED = re.search(r"<!-- transformers -->\n(.*?)\n<!-- end -->", _PAGE.read_text(), re.DOTALL)[1].split(", ")  # type: ignore[index]
_own_only = pytest.mark.parametrize("theirs", _ARCHITECTURES, indirect=True)
_quantisable = pytest.mark.parametrize("theirs", sorted(_ARCHITECTURES.keys() - {"GptOss"}), indirect=True)
_two_foreign = pytest.mark.parametrize("theirs", ["Gemma4", "Olmoe"], indirect=True)


def _small_config(name: str, fields: dict[str, Any]) -> Any:
    """A configuration of transformers for the class, of those of the fields that it has."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = next(kind for kind, found in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if found == name)
    config_class = transformers.CONFIG_MAPPING[kind]
    known = (
        config_class().to_dict().keys() | config_class.attribute_map.keys() | {"attn_implementation", "global_head_dim"}
    )
    return config_class(**{field: value for field, value in fields.items() if field in known})


@pytest.fixture(scope="module", params=_ARCHITECTURES | _FOREIGN)
def theirs(request: pytest.FixtureRequest) -> Any:
    """A random model of transformers, the same every time."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(11)
    name, changes = f"{request.param}ForCausalLM", (_ARCHITECTURES | _FOREIGN)[request.param]
    config = _small_config(name, _SHAPE | changes | {"attn_implementation": "eager"})
    model = getattr(transformers, name)(config)
    for parameter in model.parameters():
        parameter.data.mul_(6.0) if parameter.dim() == 2 else parameter.data.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


@pytest.fixture(scope="module")
def folder(theirs: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its folder, with a tokenizer of words and a text."""
    path = tmp_path_factory.mktemp("architecture")
    theirs.save_pretrained(path)
    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(_VOCAB_SIZE)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "text.txt").write_text(" ".join(f"w{number}" for number in torch.randint(0, _VOCAB_SIZE, (400,)).tolist()))
    return path


def _prompts() -> list[list[int]]:
    """Prompts of all lengths, the longer ones with a common beginning."""
    text = torch.randint(0, _VOCAB_SIZE, (128,), generator=torch.Generator().manual_seed(2)).tolist()
    return [text[:16] + text[count : 2 * count - 16] if count > 30 else text[:count] for count in _LENGTHS]


@pytest.fixture(scope="module")
def expected(theirs: Any) -> list[list[int]]:
    """Greedy tokens of transformers."""
    tokens = []
    for prompt in _prompts():
        ids = torch.tensor([prompt])
        for _ in range(_NUM_NEW):
            with torch.no_grad():
                ids = torch.cat((ids, theirs(ids).logits[:, -1:].argmax(-1)), 1)
        tokens.append(ids[0, len(prompt) :].tolist())
    return tokens


def _serve(folder: Path, rounds: list[list[Answer]], **settings: Any) -> Engine:
    options: dict[str, Any] = {"dtype": "float32", "num_blocks": 200, "block_size": 4} | settings
    config = EngineConfig(**options)
    engine = load_engine(
        folder, Settings(config, 1 << 20, has_weights=True), after_deltas=lambda: None, on_lost=lambda error: None
    )
    engine.start()
    for answers in rounds:
        submit(engine, answers)
        for answer in answers:
            answer.wait()
    assert engine.stop(grace_s=5.0)
    assert_clean(engine)
    return engine


def _answers(prompts: list[list[int]], **options: Any) -> list[Answer]:
    return [Answer(prompt, max_tokens=_NUM_NEW, **options) for prompt in prompts]


def test_every_architecture_is_here() -> None:
    """But MiMo, a Qwen 2 with a head, which transformers has not."""
    assert {each.architecture for each in ARCHITECTURES} == {f"{name}ForCausalLM" for name in (*_ARCHITECTURES, "MiMo")}


def test_preempted_sequences(folder: Path, expected: list[list[int]]) -> None:
    """Tokens are the same where a cache that is too small for all has some sequences computed again."""
    first, answers = Answer([1], max_tokens=1), _answers(_prompts())  # so that it expects short answers
    options: dict[str, Any] = {"max_num_seqs": 6, "max_num_batched_tokens": 64, "num_blocks": 26, "watermark": 0.0}
    engine = _serve(folder, [[first], answers], **options)
    assert expected == [answer.text for answer in answers]
    assert engine.num_preemptions > 0


@pytest.mark.parametrize("step_tokens", [8, 128])
def test_tokens_are_those_of_transformers(folder: Path, expected: list[list[int]], step_tokens: int) -> None:
    """Prompts of mixed lengths in one batch, whole and in chunks, and again from the prefix cache."""
    first, again = _answers(_prompts()), _answers(_prompts())
    engine = _serve(folder, [first, again], max_num_seqs=6, max_num_batched_tokens=step_tokens)
    assert expected == [answer.text for answer in first]
    assert expected == [answer.text for answer in again]
    assert engine.metrics.num_cached_tokens > sum(_LENGTHS) / 2


@_own_only
def test_deterministic_mode(folder: Path, expected: list[list[int]]) -> None:
    """In deterministic mode too, in steps of 8 tokens."""
    answers = _answers(_prompts())
    _serve(folder, [answers], max_num_seqs=6, max_num_batched_tokens=8, deterministic=True)
    assert expected == [answer.text for answer in answers]


@_two_foreign
@pytest.mark.parametrize("setting", [{"deterministic": True}, {"quantization": "int8"}])
def test_what_transformers_cannot(folder: Path, setting: dict[str, Any]) -> None:
    """Deterministic mode and rounded weights are refused for a model that runs through transformers."""
    with pytest.raises(InvalidArgumentError, match=r"must not be set for .*, which runs through transformers; remove"):
        _serve(folder, [], **setting)


@_two_foreign
def test_a_file_without_a_weight(folder: Path, tmp_path: Path) -> None:
    """A checkpoint that lacks a weight is refused by its name, and is not served with a random one in its place."""
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    weights = load_file(folder / "model.safetensors")
    lost = max(name for name in weights if name.endswith("layernorm.weight"))
    save_file({name: weight for name, weight in weights.items() if name != lost}, tmp_path / "model.safetensors")
    with pytest.raises(InvalidArgumentError, match=f"1 weights are missing, first '{re.escape(lost)}'"):
        _serve(tmp_path, [])


@_two_foreign
def test_models_load_at_once(folder: Path) -> None:
    """Models that several threads load at a time have one type of numbers each."""
    config = read_config(folder)
    assert isinstance(config, ForeignConfig)
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda dtype: ForeignModel(config, folder, dtype=dtype), [torch.bfloat16] * 6))
    assert {torch.bfloat16} == {parameter.dtype for model in made for parameter in model._model.parameters()}


@_two_foreign
def test_a_cache_goes_with_its_engine(folder: Path) -> None:
    """The thread that has loaded a model, and tried its steps, keeps nothing of the cache."""
    _serve(folder, [], speculation="ngram")
    gc.collect()
    least_bytes = 200 * 4 * 2 * 2 * 2 * 16 * 4  # blocks, their tokens, layers, keys and values, heads, width, float32
    tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor]
    assert not [each.shape for each in tensors if each.untyped_storage().nbytes() >= least_bytes]


@pytest.mark.parametrize("theirs", ["Gemma3n", "Gemma4"], indirect=True)
def test_shared_keys_and_values_are_stored_once(folder: Path) -> None:
    """Of four layers, the last two of which have those of the first two, the cache has two."""
    config = read_config(folder)
    assert isinstance(config, ForeignConfig)
    assert 2 == ForeignModel(config, folder).new_kv(1, 4).shape[1]
    assert 2 * 2 * 2 * config.head_dim * 4 == config.kv_bytes_per_token("float32")


@pytest.fixture
def _always_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether they pay or not."""
    monkeypatch.setattr(loading, "AdaptiveDepth", lambda most, *costs: FixedDepth(most))
    monkeypatch.setattr(loading, "DraftBalance", lambda: None)


def _assert_drafts_change_nothing(folder: Path, expected: list[list[int]], **settings: Any) -> Speculator:
    answers = _answers(_prompts())
    speculator = _serve(folder, [answers], **settings).speculator
    assert expected == [answer.text for answer in answers]
    assert speculator is not None
    return speculator


@pytest.mark.long
@pytest.mark.usefixtures("_always_drafts")
def test_speculation_changes_nothing(folder: Path, expected: list[list[int]]) -> None:
    """With drafts of a proposer, the model itself for one, the tokens are the same."""
    _assert_drafts_change_nothing(folder, expected, speculation="ngram")
    speculator = _assert_drafts_change_nothing(folder, expected, speculation="draft", draft_model=str(folder))
    assert speculator.num_accepted > 0.4 * speculator.num_drafts > 0  # with a window fewer, behind the first one


@pytest.mark.long
@_own_only
@pytest.mark.usefixtures("_always_drafts")
def test_a_head_changes_nothing(folder: Path, expected: list[list[int]], tmp_path: Path) -> None:
    """Nor do those of an EAGLE-3 head that knows nothing; where all layers have a window it is refused."""
    head = str(eagle3_folder(tmp_path / "head", folder))
    if all(read_config(folder).windows):
        with pytest.raises(InvalidArgumentError, match="must have a sliding window of at most 24 tokens"):
            _serve(folder, [], speculation="eagle3", draft_model=head)
    else:
        assert _assert_drafts_change_nothing(folder, expected, speculation="eagle3", draft_model=head).num_drafts > 0


@_own_only
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_rounded_weights(folder: Path, quantization: str) -> None:
    """A sequence has the same log probabilities alone and beside others."""
    together, alone = _answers(_prompts(), logprobs=1), _answers(_prompts()[:1], logprobs=1)
    options: dict[str, Any] = {"deterministic": True, "quantization": quantization}
    _serve(folder, [together], **options)
    _serve(folder, [alone], max_num_batched_tokens=64, **options)
    assert alone[0].logprobs == together[0].logprobs


@_quantisable
def test_a_quantised_folder(folder: Path, tmp_path: Path) -> None:
    """GPTQ, which walks through the layers, writes a folder that is served; its text is as likely as before."""
    small = tmp_path / "small"
    arguments = ["--output", str(small), "--method", "gptq", "--group-size", "16", "--data", str(folder / "text.txt")]
    assert 0 == main(["quantize", str(folder), *arguments, "--max-loss", "20%"])
    answers = _answers(_prompts())
    _serve(small, [answers])
    assert [_NUM_NEW] * len(_LENGTHS) == [len(answer.text) for answer in answers]


def _foreign_config(name: str) -> ForeignConfig:
    """A small configuration of the class, as its file says it."""
    small = _SHAPE | {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": _VOCAB_SIZE}
    small |= {"head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    fields = _small_config(name, small).to_dict() | {"architectures": [name]}
    read = config_from_json(json.loads(json.dumps(fields, default=str)))
    assert isinstance(read, ForeignConfig)
    return read


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("CodeGenForCausalLM", "its attention cannot be exchanged"),
        ("DeepseekV2ForCausalLM", "its keys and values differ in number or width from what its configuration says"),
        ("GraniteMoeHybridForCausalLM", "it has layers of type linear_attention"),
        ("MoshiForCausalLM", "its attention is not told its window"),
        ("DiffLlamaForCausalLM", "its logits differ by .* of their size with a paged cache"),
    ],
)
def test_other_caches_are_refused(name: str, words: str) -> None:
    """A model that keeps something else than keys and values, or hides a window, is refused with the reason."""
    with pytest.raises(UnsupportedError, match=words):
        ForeignModel(_foreign_config(name), None)


@pytest.mark.long
@pytest.mark.parametrize("name", _SERVED)
def test_through_transformers(name: str) -> None:
    """Each class that the page of language models lists gives the logits of transformers over a paged cache."""
    ForeignModel(_foreign_config(name), None, seed=3)
