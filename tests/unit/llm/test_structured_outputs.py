"""Structured output: whatever the weights are, what comes follows the grammar; compiling holds nobody up."""

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any

import jsonschema
import pytest
import tokenizers
from tests.unit.llm.adapters import merged, save_adapter
from tests.unit.llm.engine_fixture import (
    MODEL,
    Answer,
    answer_all,
    assert_clean,
    assert_equal,
    finish,
    make_engine,
    preempt,
    serve,
    submit,
)
from tests.unit.llm.speculation.heads import random_head
from tests.unit.llm.speculation.proposers import Oracle

from weft.backends.llm.text import TextCodec
from weft.backends.tokenizers import tokenizer_at
from weft.base.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
    UnsupportedError,
)
from weft.llm import grammar
from weft.llm.config import HEADS
from weft.llm.engine import Engine
from weft.llm.grammar import GrammarCompiler, TokenTable
from weft.llm.models.lora import LoraBank
from weft.llm.models.model import TransformerModel
from weft.llm.models.weights import random_weights
from weft.llm.speculation.draft_model import DraftModelProposer
from weft.llm.speculation.heads import HeadProposer
from weft.llm.speculation.ngram import NgramProposer
from weft.llm.speculation.speculator import FixedDepth, Speculator
from weft.llm.structured_outputs import GrammarSpec

#: More than the tokenizer has: the last ids are of no token.
_VOCAB_SIZE, _EOS = 400, 1
_CONFIG = replace(MODEL, vocab_size=_VOCAB_SIZE, eos_token_ids=(_EOS,), max_position_embeddings=1024)
_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["ordinary", "other"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "kind", "age"],
    "additionalProperties": False,
}
_LARK = 'start: "<tool_call>" call "</tool_call>"\ncall: %json {"enum": [{"name": "f"}, {"name": "g"}]}'
_EITHER = {
    "any_of": [
        {"grammar": _LARK},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": "}%lark {"}}}},
        {"regex": r"a/b"},
        {"guided_choice": ['"x"\n']},
    ]
}
_EITHER_TEXTS = (*(f'<tool_call>{{"name":"{name}"}}</tool_call>' for name in "fg"), "a/b", '"x"', '"}%lark{"')
#: Each ends within some tokens; JSON is compact, so that whitespace does not fill the answer.
_FOLLOWED: list[tuple[dict[str, Any], Callable[[str], object]]] = [
    ({"json": _PERSON, "disable_any_whitespace": True}, lambda text: jsonschema.validate(json.loads(text), _PERSON)),
    ({"regex": r"[0-9]{3}-[a-c]{2}"}, lambda text: _is(re.fullmatch(r"[0-9]{3}-[a-c]{2}", text))),
    ({"choice": ["yes", "no", "perhaps ä\n"]}, lambda text: _is(text in ("yes", "no", "perhaps ä\n"))),
    ({"grammar": 'root ::= "[" item ("," item){0,3} "]"\nitem ::= [a-z] | [0-9]'}, lambda text: _is(text[-1] == "]")),
    ({"grammar": _LARK}, lambda text: json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))),
    (_EITHER, lambda text: _is(re.sub(r"\s", "", text) in _EITHER_TEXTS)),
]


def test_bad_words_hold_within_a_grammar() -> None:
    """What follows it comes without them, with forced tokens as drafts and without."""
    outputs = {"regex": "[0-9]{6}-[a-c]{2}"}
    for speculation in (None, "none"):
        (plain,) = answers = [Answer([5, 6], structured_outputs=outputs, max_tokens=40, speculation=speculation)]
        serve(answers, **_options())
        banned = tuple((token,) for token in set(plain.text[:4]))
        other = Answer([5, 6], structured_outputs=outputs, max_tokens=40, speculation=speculation, bad_words=banned)
        serve([other], **_options())
        texts = [b"".join(bytes(_codec().shown_token(token).data) for token in one.text[:-1]) for one in (plain, other)]
        assert all(re.fullmatch(b"[0-9]{6}-[a-c]{2}", text) for text in texts)
        assert set(plain.text[:4]).isdisjoint(other.text)


@pytest.mark.parametrize("way", ["plain", "ngram", "filtered"])
def test_an_output_goes_on_within_its_grammar(way: str) -> None:
    """From each of its tokens on the rest is the same, with log probabilities, drafts and forbidden tokens."""
    more: dict[str, Any] = {"bad_words": ((7,), (8, 9)), "presence_penalty": 0.5} if way == "filtered" else {}
    whole = _answers(24, **more)[::2]
    serve(whole, **_options(enable_prefix_caching=False))
    speculator = Speculator("ngram", FixedDepth(3), NgramProposer) if way == "ngram" else None
    parts = []
    for index, one in enumerate(whole):
        cuts = range(1, len(one.text), 3)
        again = [_answers(24, **more, resume_token_ids=tuple(one.text[:cut]))[2 * index] for cut in cuts]
        parts += [(one, cut, other) for cut, other in zip(cuts, again, strict=True)]
    serve([other for _, _, other in parts], **_options(speculator=speculator))
    for one, cut, other in parts:
        assert (one.text[cut:], one.reasons) == (other.text, other.reasons)
        assert one.logprobs[0][cut:] == other.logprobs[0]


def test_an_output_that_does_not_follow_its_grammar_is_refused() -> None:
    """With the token; also one behind its end."""
    outputs = {"choice": ["yes", "no"]}
    whole = Answer([5, 6], max_tokens=20, structured_outputs=outputs)
    serve([whole], **_options())
    wrong = [(*whole.text[:-1], whole.text[0]), (9, *whole.text[1:-1])]
    answers = [Answer([5], max_tokens=20, structured_outputs=outputs, resume_token_ids=each) for each in wrong]
    answer_all(make_engine(**_options()), answers)
    for answer, place in zip(answers, (len(whole.text) - 1, 0), strict=True):
        assert isinstance(answer.error, InvalidArgumentError)
        assert f"token {wrong[answers.index(answer)][place]} at index {place} does not follow" in answer.error.message


def _is(condition: object) -> None:
    assert condition


@cache
def _codec(merges: bool = True) -> TextCodec:
    """A byte-level tokenizer, trained on this file; without ``merges`` each byte is a token."""
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    size = _VOCAB_SIZE - 20 if merges else 2 + len(alphabet)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([Path(__file__).read_text()], trainer)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        tokenizer.save(str(path))
        return TextCodec(tokenizer_at(path), 1 << 20)


def _compiler(*, merges: bool = True, timeout_s: float = 30.0, **options: Any) -> GrammarCompiler:
    return GrammarCompiler(partial(_codec(merges).token_table, _VOCAB_SIZE), [_EOS], timeout_s=timeout_s, **options)


@cache
def _model(seed: int) -> TransformerModel:
    return TransformerModel(_CONFIG, random_weights(_CONFIG, seed=seed), deterministic=True)


def _options(seed: int = 3, **options: Any) -> dict[str, Any]:
    return {"model": _model(seed), "grammars": _compiler(), "num_blocks": 400, "max_num_batched_tokens": 64} | options


def _answers(max_tokens: int = 160, **more: Any) -> list[Answer]:
    """Of each grammar a greedy request and one with noise, and as many without a grammar among them."""
    answers = []
    for index, (outputs, _) in enumerate(_FOLLOWED):
        prompt = list(range(5 * index + 2, 7 * index + 30))
        kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 8, "top_p": 0.9}]
        for sampling in kinds:
            answers.append(
                Answer(prompt, max_tokens=max_tokens, logprobs=2, structured_outputs=outputs, **sampling | more)
            )
            answers.append(Answer(prompt, max_tokens=20, logprobs=2, **sampling))
    return answers


def _text(tokens: Sequence[int]) -> str:
    assert tokens[-1] == _EOS
    return b"".join(map(_codec().detokenizer.token_bytes, tokens[:-1])).decode()


def _assert_followed(answers: Sequence[Answer]) -> int:
    """Each choice that ended by itself follows its grammar; how many."""
    count = 0
    for answer in answers:
        spec = answer.request.params.structured_outputs
        [check] = [check for outputs, check in _FOLLOWED if GrammarSpec.parse(outputs) == spec] or [None]
        for tokens, reason in zip(answer.tokens, answer.reasons, strict=True):
            if check is not None and reason == "stop":
                check(_text(tokens))
                count += 1
            assert reason in ("stop", "length")
    return count


@pytest.fixture(scope="module")
def expected() -> list[Answer]:
    """Answers of an engine in its simplest form."""
    answers = _answers()
    serve(answers, **_options(enable_prefix_caching=False))
    return answers


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_output_follows_the_grammar_whatever_the_weights(seed: int) -> None:
    """Several choices each, beside requests without a grammar; only ``max_tokens`` cuts one off, as "length"."""
    answers = _answers(n=2)[::2]
    serve(answers, **_options(seed))
    assert _assert_followed(answers) >= 3 * len(_FOLLOWED)
    cut = [Answer([5, 6], max_tokens=3, structured_outputs=outputs) for outputs, _ in _FOLLOWED[:1]]
    serve(cut, **_options(seed))
    assert [["length"]] == [answer.reasons for answer in cut]


def test_output_follows_the_grammar_with_an_adapter(tmp_path: Path) -> None:
    """And is what the model says that the adapter is merged into."""
    weights = random_weights(_CONFIG, seed=3)
    added = save_adapter(tmp_path, _CONFIG, 1)
    model = TransformerModel(
        _CONFIG,
        dict(weights),
        deterministic=True,
        lora=LoraBank(_CONFIG, 1, 4, weights["model.norm.weight"].dtype, "cpu"),
    )
    model.lora.load("x", tmp_path)
    alike = TransformerModel(_CONFIG, merged(_CONFIG, weights, added), deterministic=True)
    with_adapter, without = _answers(lora_name="x")[::2], _answers()[::2]
    serve(with_adapter, **_options(model=model))
    serve(without, **_options(model=alike))
    assert _assert_followed(with_adapter) >= len(_FOLLOWED)
    assert [answer.text for answer in without] == [answer.text for answer in with_adapter]


@pytest.mark.parametrize(
    "way", ["chunks", "cached", "preempted", "ahead", "no drafts", "ngram", "oracle", "draft", *HEADS]
)
def test_it_is_the_same_however_it_is_computed(way: str, expected: list[Answer]) -> None:
    """Chunks, prefix cache, preemption, drafts known and unknown on the host, and none: bitwise the same."""
    answers = _answers(speculation="none" if way == "no drafts" else None)
    if way == "preempted":
        preempt(answers, **_options(num_blocks=56, block_size=4, max_num_seqs=8))
    elif way == "cached":
        serve([*_answers(), *answers], **_options())
    elif way in ("ngram", "oracle", "draft", *HEADS):
        by_name: dict[str, Any] = {
            "ngram": lambda: Speculator("ngram", FixedDepth(3), NgramProposer),
            "oracle": lambda: Oracle(expected, 0.3).speculator(3),
            "draft": lambda: Speculator("draft", FixedDepth(3)),
        }
        options = _options(speculator=by_name.get(way, by_name["draft"])())
        if way == "draft":
            options["proposer"] = DraftModelProposer(_model(3), options["max_num_batched_tokens"])
        if way in HEADS:
            options["proposer"] = HeadProposer(random_head(way, options["model"]), 512)
        engine = serve(answers, **options)
        assert engine.speculator is not None
        assert engine.speculator.num_drafts > 0
        assert engine.speculator.num_accepted > 0 or way in HEADS
    else:
        more = {"chunks": {"long_prefill_token_threshold": 5}, "ahead": {"async_scheduling": "true"}}.get(way, {})
        serve(answers, **_options(**more))  # type: ignore[arg-type]
    assert_equal(expected, answers)
    assert _assert_followed(answers) >= len(_FOLLOWED)


@pytest.mark.parametrize("is_own", [False, True])
def test_whitespace_is_as_the_request_or_its_schema_says(is_own: bool) -> None:
    """None at all, by ``disable_any_whitespace`` or by the schema's own key, whatever names its properties have."""
    name = "whitespace_flexible"
    schema: dict[str, Any] = {"type": "object", "properties": {name: {"type": "boolean"}}, "required": [name]}
    schema |= {"additionalProperties": False} | ({"x-guidance": {name: False}} if is_own else {})
    outputs = {"json": schema, "disable_any_whitespace": not is_own}
    answers = [Answer([5, prompt], max_tokens=80, structured_outputs=outputs) for prompt in range(6, 12)]
    serve(answers, **_options())
    assert {_text(answer.text) for answer in answers} <= {f'{{"{name}":{value}}}' for value in ("true", "false")}


def test_forced_tokens_are_drafts() -> None:
    """Where the grammar leaves one way, and one spelling, a step brings several tokens; a request may do without."""
    outputs = {"json": {"const": {"name": "somebody", "kind": "ordinary"}}, "disable_any_whitespace": True}
    steps = {}
    for speculation in (None, "none"):
        answer = Answer([5, 6], max_tokens=100, structured_outputs=outputs, speculation=speculation)
        engine = serve([answer], **_options(grammars=_compiler(merges=False)))
        assert _text(answer.text) == '{"name":"somebody","kind":"ordinary"}'
        steps[speculation] = engine.metrics.num_steps
    assert steps[None] <= 5
    assert steps["none"] >= 38


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        ({"json": {"properties": {"a": {"items": {"uniqueItems": True}}}}}, "at #/properties/a/items cannot be a"),
        ({"json": {"$defs": {"x": {"allOf": [{"not": {}}]}}, "$ref": "#/$defs/x"}}, 'at #/$defs/x/allOf/0 cannot'),
        ({"json": {"type": "strin"}}, "structured_outputs.json cannot be a grammar: Invalid type: strin; change it"),
        ({"json": {"properties": {"a": {"pattern": "(?=a)b", "type": "string"}}}}, "at #/properties/a cannot be"),
        ({"json": {"enum": []}}, "Unsatisfiable schema"),
        ({"json": {"const": ["xyz"] * 100_000}}, "it is too large"),
        ({"regex": "(a"}, "structured_outputs.regex cannot be a grammar"),
        ({"regex": "a{30000}"}, "forces 30000 bytes at once"),
        ({"grammar": "start: nothing"}, "unknown name"),
        ({"any_of": [{"regex": "a"}, {"json": {"type": "strin"}}]}, "any_of cannot be a grammar: "),
        ({"grammar": "root ::= nothing"}, "Rule 'nothing' not found"),
        ({"grammar": 'root ::= "a"\n' + 'a ::= "b"\n' * 2000}, "of GBNF at most 16384"),
    ],
)  # fmt: skip
def test_a_grammar_that_cannot_be_fails_alone(outputs: dict[str, Any], words: str) -> None:
    """With the place in the schema; a request beside it, and the next one with a grammar, are served."""
    answers = [Answer([5], structured_outputs=outputs), Answer([5]), Answer([5], structured_outputs={"choice": ["x"]})]
    engine = make_engine(**_options())
    submit(engine, answers)
    finish(engine, answers)
    assert isinstance(answers[0].error, InvalidArgumentError)
    assert words in answers[0].error.message
    assert len(answers[0].error.message) < 1000
    assert [None, None] == [answer.error for answer in answers[1:]]
    assert engine.metrics.num_grammar_failures == 1
    assert engine.metrics.outcomes["INVALID_ARGUMENT"] == 1


class _Blocked:
    """A compiler whose grammars begin with a text wait for ``release``; it counts what it began with."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.has_begun = Event()
        self.release = Event()
        compiler = _compiler()

        def compile_grammar(spec: GrammarSpec) -> Any:
            self.begun.append(spec.text)
            if "slow" in spec.text:
                self.has_begun.set()
                self.release.wait(30.0)
            return compiler._compiled(spec)

        self.compiler = _compiler(timeout_s=10.0, compile_grammar=compile_grammar)


@pytest.fixture
def blocked() -> Iterator[_Blocked]:
    blocked = _Blocked()
    yield blocked
    blocked.release.set()


def _slow(name: str = "slow", **more: Any) -> Answer:
    return Answer([5], structured_outputs={"choice": [name, "other"]}, **more)


def _started(blocked: _Blocked, **options: Any) -> Engine:
    engine = make_engine(**_options(grammars=blocked.compiler, **options))
    engine.start()
    return engine


def test_who_waits_for_a_grammar_holds_nobody_up(blocked: _Blocked) -> None:
    """Requests behind it are answered, with a grammar or without; it counts as waiting, and is answered then."""
    engine = _started(blocked)
    slow, others = _slow(), [Answer([5]), Answer([5], structured_outputs={"regex": "ab"})]
    submit(engine, [slow, *others])
    for answer in others:
        answer.wait()
    assert not slow.is_ended
    assert engine.num_waiting == 1
    blocked.release.set()
    assert slow.wait().error is None
    assert engine.stop(grace_s=5.0)
    assert engine.metrics.grammar_compile.count == 2
    assert_clean(engine)


def test_a_grammar_is_compiled_once(blocked: _Blocked) -> None:
    """For requests that wait for it, and for later ones; those used longest ago are forgotten."""
    engine = _started(blocked)
    answers = [_slow(), _slow()]
    submit(engine, answers)
    blocked.release.set()
    for answer in [*answers, *(one for one in [_slow()] if submit(engine, [one]) is None)]:
        answer.wait()
    assert 1 == len(blocked.begun)
    for index in range(grammar._MAX_CACHED):
        is_ready = Event()
        blocked.compiler.submit(GrammarSpec("regex", f"a{{{index + 1}}}"), 1, is_ready.set)
    assert is_ready.wait(30.0)
    again = _slow()
    submit(engine, [again])
    again.wait()
    assert 2 == sum("slow" in text for text in blocked.begun)
    assert engine.stop(grace_s=5.0)


def test_large_grammars_wait_in_bounded_number(blocked: _Blocked) -> None:
    """Also if those that are kept have no room for all of them."""
    tickets = []

    def submit_all() -> None:
        for index in range(300):
            spec = GrammarSpec("choice", f'["slow {index}{"x" * 200_000}"]')
            tickets.append(blocked.compiler.submit(spec, 1, lambda: None))

    with pytest.raises(ResourceExhaustedError, match="grammars wait to be compiled"):
        submit_all()
    for ticket in tickets:
        ticket.leave()


def test_tokens_beyond_the_model_are_spelled_out() -> None:
    """A tokenizer may have more tokens than the model."""
    table = TokenTable([bytes([each]) for each in range(256)] + [b""], [256], lambda text: [300] * len(text))
    is_ready = Event()
    ticket = GrammarCompiler(lambda: table, [256], timeout_s=1.0).submit(GrammarSpec("regex", "abc"), 1, is_ready.set)
    assert is_ready.wait(30.0)
    assert [97, 98, 99] == ticket.matchers[0].forced(9)[:3]


def test_a_special_token_with_brackets_has_a_name() -> None:
    """In a grammar the name stands for the token, and for its text where no special token has it."""
    spec = GrammarSpec("grammar", 'start: <[CALL]> "x" | "y" <[OTHER]>')
    tokens = [bytes([each]) for each in range(256)] + [b"", b"[CALL]"]
    table = TokenTable(tokens, [256, 257], lambda text: list(text.encode()))
    is_ready = Event()
    ticket = GrammarCompiler(lambda: table, [256], timeout_s=1.0).submit(spec, 2, is_ready.set)
    assert is_ready.wait(30.0)
    assert [1, 0] == [
        matcher.num_valid([token, 120]) // 2 for matcher, token in zip(ticket.matchers, (257, 91), strict=True)
    ]
    assert 8 == ticket.matchers[0].num_valid(list(b"y[OTHER]"))


def test_time_and_deadline_pass_while_a_grammar_is_compiled(blocked: _Blocked) -> None:
    """What is being compiled is to blame; what waits behind it is to come again."""
    now = [1]
    engine = _started(blocked, clock_ns=lambda: now[0])
    late, *slow = _slow(deadline_ns=5 * 10**9), _slow("slow 1"), _slow("slow 2"), _slow("slow 3")
    submit(engine, [late])
    blocked.has_begun.wait(30.0)
    submit(engine, slow)
    now[0] = 6 * 10**9
    assert isinstance(late.wait().error, DeadlineExceededError)
    now[0] = 20 * 10**9
    errors = [answer.wait().error for answer in slow]
    assert isinstance(errors[0], InvalidArgumentError)
    assert "was not compiled within 10 s (grammar_timeout_s); simplify it" in errors[0].message
    assert isinstance(errors[2], ResourceExhaustedError)
    free = Answer([5])
    submit(engine, [free])
    assert free.wait().error is None
    assert engine.stop(grace_s=5.0)
    assert engine.metrics.num_grammar_failures == 4


def test_who_is_cancelled_while_a_grammar_is_compiled_waits_for_nothing(blocked: _Blocked) -> None:
    """Nothing comes for it; what nobody waits for any more is not compiled."""
    engine = _started(blocked)
    slow = [_slow(f"slow {index}") for index in range(4)]
    submit(engine, slow)
    blocked.has_begun.wait(30.0)
    for answer in slow[:3]:
        engine.cancel(answer.request)
    free = Answer([5])
    submit(engine, [free])
    free.wait()
    assert engine.num_waiting == 1
    assert engine.metrics.outcomes["cancelled"] == 3
    blocked.release.set()
    assert slow[3].wait().error is None
    assert "slow 2" not in "".join(blocked.begun)
    assert [[], [], []] == [answer.deltas for answer in slow[:3]]
    assert engine.stop(grace_s=5.0)


def test_an_engine_that_stops_awaits_no_grammar(blocked: _Blocked) -> None:
    """The request that waits for it fails, in grace time or after it."""
    engine, slow = _started(blocked), _slow()
    submit(engine, [slow])
    blocked.has_begun.wait(30.0)
    assert engine.stop(grace_s=0.0)
    assert isinstance(slow.wait().error, UnavailableError)


def test_structured_output_that_is_not_available_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a tokenizer, an end-of-text token or the package: with the reason, and the cure."""
    table = partial(_codec().token_table, _VOCAB_SIZE)
    compilers = {
        "no tokenizer": GrammarCompiler(None, [_EOS], timeout_s=1.0),
        "no eos_token_id": GrammarCompiler(table, [], timeout_s=1.0),
    }
    monkeypatch.setitem(sys.modules, "llguidance", None)
    compilers["pip install 'weft-mesh[grammar]'"] = GrammarCompiler(table, [_EOS], timeout_s=1.0)
    for words, compiler in compilers.items():
        engine = make_engine(**_options(grammars=compiler))
        with pytest.raises(UnsupportedError, match=re.escape(words)):
            engine.submit(_slow().request)
        assert engine.stop(grace_s=1.0)


def test_a_grammar_that_takes_too_long_for_each_token_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its masks would hold up all others; a request beside it is served."""
    monkeypatch.setattr(grammar, "_MASKS_S", 0.0)
    monkeypatch.setattr(grammar, "_MASK_OF_TOKEN_S", 0.0)
    answers = [Answer([5], structured_outputs={"regex": "a+"}), Answer([5])]
    engine = make_engine(**_options())
    submit(engine, answers)
    finish(engine, answers)
    assert isinstance(answers[0].error, InvalidArgumentError)
    assert "structured output cannot go on here: a token takes more than" in answers[0].error.message
    assert answers[1].error is None
