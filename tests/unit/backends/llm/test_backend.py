"""The backend before an engine that says what it is told to: who enters, what leaves, how it ends."""

import shutil
import sys
from types import ModuleType

import numpy as np
import pytest
from tests.unit.backends.llm.builders import make_request

from weft.backends.llm import LlmBackend
from weft.base.errors import InvalidArgumentError, UnavailableError
from weft.base.signature import ModelSignature
from weft.serving.backends.base import Batch, InstanceContext, ModelContext
from weft.serving.metrics import ExportedMetrics
from weft.serving.request.request import STREAMED


class Stream:
    """A ``ResponseStream`` for one thread of reading."""

    def __init__(self):
        self.answers, self.on_taken = [], None

    def deliver(self, response, *, is_final):
        self.answers.append((response, is_final))


@pytest.fixture
def engines(monkeypatch, engine):
    """Engines that were loaded, with the settings of each; the first is ``engine``."""
    loaded = []

    def load_engine(directory, settings, *, after_deltas, on_lost, codec, on_group):
        made = engine if not loaded else type(engine)()
        made.after_deltas, made.on_lost = after_deltas, on_lost
        loaded.append((made, settings))
        return made

    module = ModuleType("loading")
    module.load_engine = load_engine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "weft.backends.llm.loading", module)
    monkeypatch.setattr(sys, "setswitchinterval", lambda seconds: None)
    return loaded


@pytest.fixture
def make_backend(engines, tmp_path, tokenizer_path):
    """``make_backend(config={}, kind="CPU", **parameters)``: loaded; it is closed after the test."""
    shutil.copy(tokenizer_path, tmp_path / "tokenizer.json")
    made = []

    def make(config=None, kind="CPU", exports=None, **parameters):
        signature = ModelSignature("m", "1", "llm", 0, (), (), is_decoupled=True)
        model = ModelContext(signature, tmp_path, config or {}, parameters, exports=exports)
        backend = LlmBackend(model, InstanceContext("m_0", kind, device_id=1))
        made.append(backend)
        backend.load()
        return backend

    yield make
    for backend in made:
        backend.close()


def _execute(backend, *requests):
    return backend.execute(Batch(list(requests)))


def test_settings_come_from_configuration_and_place(make_backend, engines):
    """Ageing is that of the queue, the device that of the instance."""
    make_backend({"parameters": {"priority_aging_us": {"string_value": "5"}}}, "GPU", max_num_seqs="8", num_blocks="9")
    ((_, settings),) = engines
    config = settings.engine
    assert (8, 9, 5000, "cuda:1") == (config.max_num_seqs, config.num_blocks, config.aging_ns, config.device)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"device": "cuda"}, "'device' is set by instance_group"),
        ({"aging_ns": "5"}, "'aging_ns' is set by parameter 'priority_aging_us'"),
        ({"max_num_sequences": "5"}, "unknown parameter 'max_num_sequences'"),
        ({"migration_limit": "-1"}, "'migration_limit' must be a whole number from 0"),
        ({"load_format": "gguf"}, "'load_format' must be one of safetensors, dummy"),
    ],
)
def test_wrong_parameters_are_refused(make_backend, parameters, message):
    """At load, and before that where the slots are counted."""
    with pytest.raises(InvalidArgumentError, match=message):
        make_backend(**parameters)


def test_there_are_slots_for_what_runs_and_a_few_more():
    """So that a slot is taken in the step after it is free."""
    signature = ModelSignature("m", "1", "llm", 0, (), ())
    counts = [
        LlmBackend.num_slots(ModelContext(signature, None, {}, {"max_num_seqs": str(number)})) for number in (1, 64)
    ]
    assert [2, 72] == counts


def test_requests_enter_the_engine(make_backend, engine):
    """With what the queue knows of them; one that is wrong is refused alone, as is one that the engine refuses."""
    backend = make_backend()
    requests = [make_request(text_input="a", parameters={"cache_salt": "s"}), make_request()]
    requests[0].stream = Stream()  # type: ignore[assignment]
    requests[0].priority, requests[0].enqueue_ns, requests[0].context.deadline_ns = 2, 77, 99
    first, second = _execute(backend, *requests)
    assert first is STREAMED
    assert isinstance(second, InvalidArgumentError)
    (entered,) = engine.requests
    assert (2, 77, 99, b"s") == (entered.level, entered.arrival_ns, entered.deadline_ns, entered.salt)
    assert np.int32 == entered.prompt_ids.dtype
    engine.refusal = InvalidArgumentError("prompt too long")
    request = make_request(text_input="a")
    request.stream = Stream()  # type: ignore[assignment]
    assert [engine.refusal] == _execute(backend, request)
    request.cancel()
    assert [] == engine.cancelled  # it never was there


def test_responses_go_through_the_stream(make_backend, engine, ids_of):
    """Made on the output thread; what the reader takes makes room for more."""
    backend = make_backend()
    request = make_request(text_input="a", stream=True)
    stream = request.stream = Stream()  # type: ignore[assignment]
    _execute(backend, request)
    for text in "bcdefgh":
        engine.say(engine.requests[0], ids_of(text))
    stream.on_taken()
    engine.say(engine.requests[0], ids_of("i"), finish_reason="length", is_last=True)
    backend.close()
    texts = [response.outputs["text_output"][0].decode() for response, _ in stream.answers]
    assert "bcdefghi" == "".join(texts)
    assert [True] == [is_final for _, is_final in stream.answers if is_final]
    request.cancel()
    assert [] == engine.cancelled  # it was over


def test_a_cancelled_request_leaves_the_engine(make_backend, engine):
    """At once, and also one that left before it entered."""
    backend = make_backend()
    for is_early in (False, True):
        request = make_request(text_input="a")
        request.stream = Stream()  # type: ignore[assignment]
        if is_early:
            request.cancel()
        _execute(backend, request)
        request.cancel()
        assert [engine.requests[-1]] == engine.cancelled
        engine.cancelled.clear()


def test_a_request_without_a_stream_is_waited_for(make_backend, engine, ids_of):
    """So does a warm-up."""
    backend = make_backend()
    enqueue = engine.enqueue

    def enqueue_and_say(request):
        enqueue(request)
        engine.say(request, ids_of("b"), finish_reason="length", is_last=True)

    engine.enqueue = enqueue_and_say
    (answer,) = _execute(backend, make_request(text_input="a"))
    assert [b"ab"] == answer.outputs["text_output"].tolist()


def test_a_lost_engine_is_loaded_again(make_backend, engines, engine):
    """The instance is told, and says why until then."""
    backend = make_backend()
    told = []
    backend.on_lost = lambda: told.append(backend.why_lost())
    engine.on_lost(UnavailableError("out of luck"))
    assert ["the engine of instance m_0 has ended: out of luck"] == told
    backend.load()
    assert ("", True, 2) == (backend.why_lost(), engine.is_stopped, len(engines))


def test_a_closed_backend_takes_nothing(make_backend, engine):
    """Engine and output thread have ended, and its figures are gone."""
    exports = ExportedMetrics()
    backend = make_backend(exports=exports)
    backend.close()
    assert engine.is_stopped
    (outcome,) = _execute(backend, make_request(text_input="a"))
    assert isinstance(outcome, UnavailableError)
    assert [] == list(exports.collect())
