"""Tokenizers in every form in which models are published, against the libraries that define these forms."""

import base64
import io
import json
import random
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import tiktoken

from weft.backends.llm.tensors import chat_parameters
from weft.backends.llm.text import TextCodec
from weft.backends.tokenizers import find_tokenizer, load_tokenizer, tokenizer_at
from weft.base.errors import InvalidArgumentError
from weft.serving.detokenizer import Detokenizer
from weft.serving.detokenizer.stages import BYTE_BY_CHAR
from weft_protos.sentencepiece_pb2 import ModelProto

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import sentencepiece

#: The first object of sentencepiece in a process warns of its wrapper of C++, which does not survive an error there.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

_ROOT = Path(__file__).parents[3]
#: What tokenizers are trained on here.
_DOCS = [_ROOT / "docs" / name for name in ("python-models.md", "language-models.md")]
_TEXTS = [
    *("", " ", "  ", "a", " a", "a ", "   def f(x):\n\treturn x  # y\n", "\r\n\r\n", "\t\t", "\x00\x01", "\ufeffx"),
    *(
        "Straße, naïve café",
        "e\u0301 \u00e9",
        "ﬁ ² ½",
        "你好\uff0c世界",
        "日本語テキスト",
        "नमस्ते",
        "שלום",
        "👩‍👩‍👧 😀😀",
        "\U0001d4b3\U0001d4b4",
        "\u2028",
    ),
    *("1234567890 3.14", "it's we'll DON'T", "x = {'a': [1, 2]}", "====", '"""' * 7, " " * 40, "-" * 33, "ab" * 25),
    *("<s>", "</s>a", "a<unk>b", "<0x41>", "<sep>", "x<sep>y", "▁", "a▁b"),
]


@pytest.fixture(scope="module", name="texts")
def _texts() -> list[str]:
    """Edge cases, prose and code of this repository, and random characters."""
    drawn = random.Random(1)
    files = [_ROOT / "README.md", _ROOT / "docs/language-models.md", Path(__file__)]
    parts = [part for file in files for part in file.read_text(encoding="utf-8").split("\n\n")[::3]]
    alphabet = "aab  =-_e\n\t\"'0159<>/s.,()你é😀self"
    noise = ["".join(drawn.choices(alphabet, k=drawn.randrange(1, 40))) for _ in range(150)]
    noise += ["".join(chr(drawn.randrange(0x20, 0x2FFF)) for _ in range(8)) for _ in range(100)]
    return [*_TEXTS, *parts, *noise]


def _trained(**options: Any) -> bytes:
    lines = [line for file in _DOCS for line in file.read_text("utf-8").splitlines()]
    writer = io.BytesIO()
    given: dict[str, Any] = {"vocab_size": 900, "byte_fallback": True, "minloglevel": 2, "num_threads": 1}
    given |= {"remove_extra_whitespaces": False, "normalization_rule_name": "identity", "split_digits": True}
    given["allow_whitespace_only_pieces"] = True
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=writer, **(given | options))
    return writer.getvalue()


_MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "bpe"},
    "across words": {"model_type": "bpe", "split_by_whitespace": False, "split_by_unicode_script": False},
    "gemma": {
        **{"model_type": "bpe", "add_dummy_prefix": False, "control_symbols": ["<turn>"]},
        "user_defined_symbols": ["<sep>", "▁▁", "▁▁▁", "\n\n"],
    },
    "symbols behind a space": {"model_type": "bpe", "user_defined_symbols": ["<sep>", "▁▁▁▁"]},
    "no bytes": {"model_type": "bpe", "byte_fallback": False},
    "unigram": {"model_type": "unigram"},
    "unigram, no prefix": {"model_type": "unigram", "add_dummy_prefix": False, "user_defined_symbols": ["<sep>"]},
}


@cache
def _model(name: str) -> bytes:
    return _trained(**_MODELS[name])


@pytest.mark.parametrize("name", _MODELS)
def test_sentencepiece(tmp_path: Path, texts: list[str], name: str) -> None:
    """Ids and texts are SentencePiece's; for unigram a text may have another segmentation of the same score."""
    path = tmp_path / "tokenizer.model"
    path.write_bytes(_model(name))
    reference = sentencepiece.SentencePieceProcessor(model_file=str(path))
    tokenizer = load_tokenizer(tokenizer_at(path), "model")
    tokenizer.encode_special_tokens = True  # as in SentencePiece, where they are no text
    detokenizer = Detokenizer(tokenizer)
    for text in texts:
        expected = reference.encode(text)
        got = tokenizer.encode(text, add_special_tokens=False).ids
        if "unigram" in name:
            assert sum(map(reference.get_score, got)) == pytest.approx(
                sum(map(reference.get_score, expected)), abs=1e-3
            )
        elif (text, name) != ("<sep>", "symbols behind a space"):  # a symbol alone is not behind a space
            assert got == expected, text
        if "no bytes" not in name:  # there an unknown character is the text " ⁇ "
            assert tokenizer.decode(got) == reference.decode(got), text
        _streams(detokenizer, tokenizer, got)


def _streams(detokenizer: Detokenizer, tokenizer: Any, ids: list[int]) -> None:
    """The text of tokens that come one by one is that of all."""
    stream = detokenizer.stream()
    assert "".join(stream.push([each]) for each in ids) + stream.finish() == tokenizer.decode(ids)


def test_extra_spaces_and_replaced_characters(tmp_path: Path) -> None:
    """A model of T5's kind removes spaces and replaces characters before it splits."""
    path = tmp_path / "tokenizer.model"
    options = {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True}
    path.write_bytes(_trained(model_type="unigram", byte_fallback=False, **options))
    reference = sentencepiece.SentencePieceProcessor(model_file=str(path))
    tokenizer = load_tokenizer(tokenizer_at(path), "model")
    for text in ("", "  ", " a  b ", "the\u3000model", "ﬁle ½ \uff21\uff22\uff23", "a\tb\n c", "batch　size"):
        assert tokenizer.encode(text, add_special_tokens=False).ids == reference.encode(text), text


def test_a_damaged_table_of_characters_is_refused(tmp_path: Path) -> None:
    """At load, by name, wherever it is cut or changed; what is taken may replace others, and never fails."""
    proto = ModelProto.FromString(
        _trained(model_type="unigram", byte_fallback=False, normalization_rule_name="nmt_nfkc")
    )
    table, path, drawn = proto.normalizer_spec.precompiled_charsmap, tmp_path / "tokenizer.model", random.Random(3)
    size = int.from_bytes(table[:4], "little")
    damaged = [table[:3], table[: size // 2], table[: size + 4], b"\0\0\0\0" + table[4:], b"\4\0\0\0abcd"]
    for _ in range(60):
        place = drawn.randrange(4, size)
        damaged.append(table[:place] + drawn.randbytes(64) + table[place + 64 :])
    refused = []
    for index, data in enumerate(damaged):
        proto.normalizer_spec.precompiled_charsmap = data
        path.write_bytes(proto.SerializeToString())
        try:
            tokenizer = load_tokenizer(tokenizer_at(path), "model")
        except InvalidArgumentError as error:
            refused.append(error.message)
            continue
        assert index >= 5
        for text in (*_TEXTS, *(chr(point) for point in range(0x20, 0x2FFF, 29))):
            tokenizer.encode(text)
    assert len(refused) >= 5 + 30
    assert all("precompiled_charsmap is damaged" in message for message in refused)


def test_special_tokens_of_a_folder(tmp_path: Path) -> None:
    """``tokenizer_config.json`` adds tokens, says which begin a text, and whether each part begins with a space."""
    (tmp_path / "tokenizer.model").write_bytes(_trained(model_type="bpe"))
    config: dict[str, Any] = {
        "added_tokens_decoder": {"900": {"content": "<|end|>", "special": True}, "901": {"content": "<tool>"}},
        "chat_template": "{{ messages }}",
        "eos_token": {"content": "<|end|>"},
    }
    said = tmp_path / "tokenizer_config.json"
    for legacy, after in ((True, ["▁", "a"]), (False, ["a"])):
        said.write_text(json.dumps(config | {"legacy": legacy, "add_eos_token": True}))
        codec = TextCodec.from_folder(tmp_path, 1000)
        assert codec is not None
        _, ids = codec.ids(b"a<|end|>a<tool>", "t", adds_special_tokens=True, parses_special_tokens=True)
        shown = [codec._tokenizer.id_to_token(each) for each in ids]
        assert shown[:2] == ["<s>", "▁a"]
        assert shown[2:] in (["<|end|>", *tail, "<tool>", "<|end|>"] for tail in (after, ["▁a"][: int(legacy)]))
        _, ids = codec.ids(b"<|end|>", "t", adds_special_tokens=False, parses_special_tokens=False)
        assert 900 not in ids
    found = chat_parameters(tmp_path)
    assert found["chat_template"] == "{{ messages }}"
    assert found["bos_token"] == "<s>"
    assert json.loads(found["special_tokens"]) == ["<unk>", "<s>", "</s>", "<|end|>"]
    table = codec.token_table(902)
    assert table.tokens[ids[-1]]
    assert table.special_ids == [0, 1, 2, 900]


@cache
def _byte_level() -> str:
    """A byte-level BPE of 700 tokens, trained here, as ``tokenizer.json`` has it."""
    import tokenizers

    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    trained.train([str(file) for file in _DOCS], trainer)
    return str(trained.to_str())


def _ranks() -> dict[bytes, int]:
    vocabulary: dict[str, int] = json.loads(_byte_level())["model"]["vocab"]
    return {bytes(BYTE_BY_CHAR[char] for char in token): rank for token, rank in vocabulary.items()}


_PATTERN = r"'s|'t| ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+"


def _tiktoken(folder: Path, ranks: dict[bytes, int]) -> int:
    lines = [b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ranks.items()]
    (folder / "own.tiktoken").write_bytes(b"".join(lines))
    added = {"700": {"content": "<|end|>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps({"pat_str": _PATTERN, "added_tokens_decoder": added}))
    return 0


def _tekken(folder: Path, ranks: dict[bytes, int]) -> int:
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode()}
        for token, rank in sorted(ranks.items(), key=lambda item: item[1])
    ]
    sizes = {"default_vocab_size": 710, "default_num_special_tokens": 10}
    special = [{"rank": rank, "token_str": text} for rank, text in enumerate(("<unk>", "<s>", "</s>", "[INST]"))]
    content = {"config": {"pattern": _PATTERN, **sizes}, "vocab": vocabulary, "special_tokens": special}
    (folder / "tekken.json").write_text(json.dumps(content))
    return 10


@pytest.mark.parametrize("write", [_tiktoken, _tekken])
def test_tiktoken(tmp_path: Path, texts: list[str], write: Callable[[Path, dict[bytes, int]], int]) -> None:
    """Ids and texts of tiktoken's and Mistral's files are tiktoken's, behind the special tokens."""
    ranks = _ranks()
    first = write(tmp_path, ranks)
    reference = tiktoken.Encoding("own", pat_str=_PATTERN, mergeable_ranks=ranks, special_tokens={})
    file = find_tokenizer(tmp_path)
    assert file is not None
    tokenizer = load_tokenizer(file, "model")
    detokenizer = Detokenizer(tokenizer)
    tokenizer.encode_special_tokens = True
    for text in texts:
        got = tokenizer.encode(text, add_special_tokens=False).ids
        assert [each - first for each in got] == reference.encode_ordinary(text), text
        assert tokenizer.decode(got) == text
        _streams(detokenizer, tokenizer, got)
    tokenizer.encode_special_tokens = False
    text, ids = ("a[INST]b", [1, 3]) if first else ("a<|end|>b", [700])
    got = tokenizer.encode(text).ids
    assert [each for each in got if each in ids] == ids


def _written(folder: Path, model: str, tokens: list[str], types: list[int], **more: Any) -> Path:
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for name, value in more.items():
        getattr(writer, f"add_{name}")(value)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.close):
        step()
    return path


@pytest.mark.parametrize("name", ["llama", "gemma", "unigram"])
def test_sentencepiece_in_a_gguf(tmp_path: Path, texts: list[str], name: str) -> None:
    """A vocabulary with scores gives the tokenizer that it was converted from, its template too."""
    path = tmp_path / "tokenizer.model"
    path.write_bytes(_model(name))
    pieces = ModelProto.FromString(path.read_bytes()).pieces
    written = _written(
        tmp_path,
        "t5" if name == "unigram" else "llama",
        [piece.piece for piece in pieces],
        [piece.type for piece in pieces],
        token_scores=[piece.score for piece in pieces],
        add_space_prefix=name != "gemma",
        add_bos_token=True,
        add_eos_token=False,
        bos_token_id=1,
        eos_token_id=2,
        chat_template="{{ bos_token }}",
    )
    expected, got = (load_tokenizer(tokenizer_at(file), "model") for file in (path, written))
    for text in texts:
        assert got.encode(text).ids == expected.encode(text).ids, text
    path.unlink()
    assert chat_parameters(tmp_path)["chat_template"] == "{{ bos_token }}"
    assert chat_parameters(tmp_path)["eos_token"] == "</s>"


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "refact", "gpt-4o", "tekken"])
def test_bytes_in_a_gguf(tmp_path: Path, texts: list[str], pre: str) -> None:
    """Merges and the name of a pre-tokenizer give the tokenizer of the folder that the file was made of."""
    import tokenizers
    from tokenizers import pre_tokenizers

    reference = tokenizers.Tokenizer.from_str(_byte_level())
    model = json.loads(reference.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    written = _written(
        tmp_path,
        "gpt2",
        [*tokens, "<|im_end|>", "  "],
        [1] * len(tokens) + [3, 4],
        tokenizer_pre=pre,
        token_merges=[" ".join(pair) for pair in model["merges"]],
        bos_token_id=len(tokens),
        eos_token_id=len(tokens),
    )
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre in ("gpt-2", "refact"))
    parts: list[Any] = [byte_level]
    if pre == "refact":
        parts.insert(0, pre_tokenizers.Digits(individual_digits=True))
    elif pre != "gpt-2":
        parts.insert(0, pre_tokenizers.Split(tokenizers.Regex(_PUBLISHED[pre]), "isolated"))
    reference.pre_tokenizer = pre_tokenizers.Sequence(parts)
    reference.normalizer = tokenizers.normalizers.NFC() if pre == "qwen2" else None
    reference.add_special_tokens(["<|im_end|>"])
    reference.add_tokens([tokenizers.AddedToken("  ", normalized=False)])
    got = load_tokenizer(tokenizer_at(written), "model")
    for text in [*texts, "a<|im_end|>b"]:
        ids = got.encode(text, add_special_tokens=False).ids
        assert ids == reference.encode(text).ids, text
        _streams(Detokenizer(got), got, ids)
    assert (got.encode("a").ids[0] == len(tokens)) == (pre in ("llama-bpe", "tekken"))


_END = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_BIG, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_START, _SHORT = r"[^\r\n\p{L}\p{N}]?", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
#: As ``tokenizer.json`` of Llama 3, Qwen 2, gpt-oss and Mistral Nemo have them.
_PUBLISHED = {
    "llama-bpe": rf"{_WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_END}",
    "qwen2": rf"{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_END}",
    "gpt-4o": rf"{_START}{_BIG}*{_SMALL}+{_SHORT}|{_START}{_BIG}+{_SMALL}*{_SHORT}|"
    rf"\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_END}",
    "tekken": rf"{_START}{_BIG}*{_SMALL}+|{_START}{_BIG}+{_SMALL}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_END}",
}


def _damaged(change: Callable[[Any], None]) -> bytes:
    proto = ModelProto.FromString(_trained(model_type="bpe", vocab_size=400))
    change(proto)
    return proto.SerializeToString()


def _set(field: str, value: Any, number: int = 300) -> Callable[[Any], None]:
    return lambda proto: setattr(proto.pieces[number], field, value)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.model", b"", "with pieces"),
        ("tokenizer.model", b"\x0a\xff\xff", "no SentencePiece model"),
        ("tokenizer.model", b"garbage " * 99, "no SentencePiece model"),
        ("tokenizer.model", _set("piece", ""), "a text of its own"),
        ("tokenizer.model", _set("piece", "<s>"), "a text of its own"),
        ("tokenizer.model", _set("score", float("nan")), "a finite score"),
        ("tokenizer.model", _set("type", 1, 5), "256 bytes or for none, got 255"),
        ("tokenizer.model", _set("piece", "a" * 2000), "the longest of 2000"),
        ("tokenizer.model", lambda proto: setattr(proto.trainer_spec, "model_type", 3), "BPE or UNIGRAM"),
        ("qwen.tiktoken", b"IQ== 0\nIg= 1\n", "not Base64"),
        ("qwen.tiktoken", b"IQ== 0\nIg== one\n", "each line must have a token and its rank"),
        ("qwen.tiktoken", b"IQ== 0\nIg== 1\n", "each byte as a token"),
        ("other.tiktoken", b"IQ== 0\n", "'pat_str' of tokenizer_config.json"),
        ("tekken.json", b"[1]", "must hold a JSON object"),
        ("tekken.json", b"{}", "those of tekken"),
        (
            *("tekken.json",),
            b'{"config": {"default_vocab_size": 1e300, "default_num_special_tokens": 1e299},'
            b' "vocab": [], "special_tokens": []}',
            "got 1e\\+299 of 1e\\+300",
        ),
        ("tokenizer.json", b"{", "is not JSON"),
        ("tokenizer.json", b"{}", "is not a tokenizer"),
    ],
)
def test_wrong_files(tmp_path: Path, name: str, content: Any, words: str) -> None:
    """What is torn, of another kind or too large is refused, with the file and the cure."""
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else _damaged(content))
    with pytest.raises(InvalidArgumentError, match=words) as caught:
        load_tokenizer(tokenizer_at(tmp_path / name), "model")
    assert str(tmp_path / name) in caught.value.message


@pytest.mark.parametrize(
    ("model", "more", "words"),
    [
        ("bert", {}, "must be llama or t5, or gpt2 .* got 'bert'"),
        ("gpt2", {"tokenizer_pre": "default"}, "got 'gpt2' with 'default'"),
        ("gpt2", {"tokenizer_pre": "gpt-2", "token_merges": ["a x"]}, "is not a tokenizer"),
        ("gpt2", {"tokenizer_pre": "gpt-2", "token_merges": ["ab"]}, "is not a tokenizer"),
        ("llama", {}, "a score for each token, got 0 for 2"),
        ("llama", {"token_scores": [0.0]}, "a score for each token, got 1 for 2"),
        ("llama", {"token_scores": [0.0, float("inf")]}, "a finite score"),
    ],
)
def test_wrong_tokenizers_in_a_gguf(tmp_path: Path, model: str, more: dict[str, Any], words: str) -> None:
    """Metadata that are missing, wrong or of a kind that is not read are refused."""
    with pytest.raises(InvalidArgumentError, match=words):
        load_tokenizer(tokenizer_at(_written(tmp_path, model, ["a", "b"], [1, 1], **more)), "model")


@pytest.mark.parametrize("model", ["none", "no_vocab"])
def test_a_gguf_without_a_tokenizer(tmp_path: Path, model: str) -> None:
    """Its model takes token ids alone; whoever asks for the tokenizer of this file is told."""
    path = _written(tmp_path, model, ["a"], [1])
    assert find_tokenizer(tmp_path) is None
    assert chat_parameters(tmp_path) == {}
    with pytest.raises(InvalidArgumentError, match=r"has no tokenizer; put the model's tokenizer.json beside it"):
        tokenizer_at(path)


def test_wrong_fields_beside_a_tokenizer(tmp_path: Path) -> None:
    """Ids of added tokens follow those of the file; a token that begins a text must be there."""
    (tmp_path / "tokenizer.model").write_bytes(_trained(model_type="bpe", vocab_size=400))
    said = tmp_path / "tokenizer_config.json"
    for added, words in (
        ({"402": {"content": "<x>"}}, "must have id 402, and gets 400: ids have gaps"),
        ({"x": {"content": "<x>"}}, "added_tokens_decoder"),
        ({"9" * 5000: {"content": "<x>"}}, "added_tokens_decoder"),
        ({"400": {}}, "added_tokens_decoder"),
        ({}, "lacks '<none>', with which a text begins or ends"),
    ):
        said.write_text(json.dumps({"added_tokens_decoder": added, "bos_token": "<none>", "add_bos_token": True}))
        with pytest.raises(InvalidArgumentError, match=words):
            load_tokenizer(tokenizer_at(tmp_path / "tokenizer.model"), "model")
