"""Adapters from end to end: OpenAI's client, a gateway, a router and a model service, with peft's files."""

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from safetensors.torch import load_file, save_file
from tests.integration.language_model import Service, ask, running_service, write_folder, write_model
from tests.integration.routing import running_router
from tests.integration.talking import GatewayProcess, running_gateway
from tests.unit.llm.adapters import save_adapter
from tritonclient.utils import InferenceServerException

from weft.llm.models.registry import read_config

pytestmark = pytest.mark.long

NAMES = ("sql", "chat", "law")
PROMPT = "the quick brown fox"


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.long)])
def service(tmp_path_factory: pytest.TempPathFactory, request: Any) -> Iterator[Service]:
    """``base``, a model with two adapters, a third that may be loaded, and two instances; and its merged models.

    Instances are in one process, and then in two ranks each.
    """
    root, folder = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("hf")
    write_folder(folder)
    config = read_config(folder)
    for seed, name in enumerate(NAMES):
        place = folder / ("adapters" if name == "sql" else "more") / name
        added = save_adapter(place, config, seed)
        merged = tmp_path_factory.mktemp(name)
        for file in folder.glob("*.json"):
            (merged / file.name).write_bytes(file.read_bytes())
        weights = load_file(folder / "model.safetensors")
        for module, change in added.items():
            weights[f"{module}.weight"] += change
        save_file(weights, merged / "model.safetensors")
        write_model(root, f"merged-{name}", merged, max_num_seqs=4, num_blocks=64)
    (folder / "more" / "torn").mkdir()
    (folder / "more" / "loop").symlink_to("loop")
    write_model(
        root, "base", folder, "instance_group { count: 2 kind: KIND_CPU }", max_loras=3, lora_root="more",
        max_num_seqs=8, num_blocks=128, metric_names="vllm", tensor_parallel_size=request.param,
    )  # fmt: skip
    with running_service(root) as service:
        yield service


@pytest.fixture(scope="module")
def router(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_router(tmp_path_factory.mktemp("graphs"), service.grpc) as router:
        yield router.grpc


@pytest.fixture(scope="module")
def gateway(router: str) -> Iterator[GatewayProcess]:
    with running_gateway(router, "--allow-runtime-lora") as gateway:
        yield gateway


def post(gateway: GatewayProcess, path: str, **body: Any) -> tuple[int, str]:
    """Status and text, or the message of an error."""
    request = urllib.request.Request(
        f"{gateway.url}/{path}", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["error"]["message"]


def complete(gateway: GatewayProcess, model: str, prompt: str = PROMPT, **options: Any) -> str:
    """The text of a greedy completion, whose ``model`` is the name that was asked for."""
    with openai.OpenAI(base_url=gateway.url, api_key="none", max_retries=0, timeout=30) as client:
        got = client.completions.create(model=model, prompt=prompt, temperature=0, max_tokens=16, **options)
        assert model == got.model
        return got.choices[0].text


def listed(gateway: GatewayProcess) -> dict[str, dict[str, Any]]:
    """What ``/v1/models`` has of adapters."""
    with urllib.request.urlopen(f"{gateway.url}/models", timeout=30) as response:
        found = {one["id"]: one for one in json.loads(response.read())["data"] if "parent" in one}
    for name, one in found.items():
        with urllib.request.urlopen(f"{gateway.url}/models/{name}", timeout=30) as response:
            assert one == json.loads(response.read())
    return found


def test_a_request_names_its_adapter(service: Service, gateway: GatewayProcess) -> None:
    """As OpenAI's ``model``, alone or behind the model's name, or as ``lora_name``: the merged model's text."""
    expected = complete(gateway, "merged-sql")
    assert expected != complete(gateway, "base")
    assert [expected] * 2 == [complete(gateway, name) for name in ("sql", "base:sql")]
    assert (
        expected
        == ask(
            service, "base", PROMPT, sampling={"lora_name": "sql", "max_tokens": 16}, exclude_input_in_output=True
        ).text
    )
    with openai.OpenAI(base_url=gateway.url, api_key="none", max_retries=0, timeout=30) as client:
        assert ("base:sql", "base") == ((one := client.models.retrieve("base:sql")).id, one.model_extra["parent"])
        for name in ("base:nope", "merged-sql:sql", ":sql"):
            with pytest.raises(openai.NotFoundError):
                client.models.retrieve(name)
    assert ("base", True) == (listed(gateway)["sql"]["parent"], listed(gateway)["sql"]["root"].endswith("adapters/sql"))


def test_an_unknown_adapter_is_not_found(service: Service, gateway: GatewayProcess) -> None:
    """404 and NOT_FOUND; the model's message lists those that are loaded."""
    for name, words in (
        ("base:nope", "'nope' is not loaded; loaded are 'sql'"),
        ("base:", "does not exist"),
        ("nope", "does not exist"),
        ("x:y", "does not exist"),
    ):
        with pytest.raises(openai.NotFoundError, match=words):
            complete(gateway, name)
    with pytest.raises(InferenceServerException, match="'nope' is not loaded; loaded are 'sql'") as caught:
        ask(service, "base", PROMPT, sampling={"lora_name": "nope"})
    assert "StatusCode.NOT_FOUND" == caught.value.status()


def test_an_adapter_comes_and_goes(gateway: GatewayProcess) -> None:
    """Loaded into every instance, listed, used, and gone; each twice."""
    body = {"lora_name": "chat", "lora_path": "chat"}
    slashed = {"lora_name": "org/chat", "lora_path": "chat"}
    assert 200 == post(gateway, "load_lora_adapter", **slashed)[0]
    assert {"sql", "org/chat"} == listed(gateway).keys()
    assert 200 == post(gateway, "unload_lora_adapter", **slashed)[0]
    assert (200, "Success: LoRA adapter 'chat' added successfully.") == post(gateway, "load_lora_adapter", **body)
    status, message = post(gateway, "load_lora_adapter", **body)
    assert (400, True) == (status, "adapter 'chat' is loaded already" in message)
    assert {"sql", "chat"} == listed(gateway).keys()
    expected = complete(gateway, "merged-chat")
    with ThreadPoolExecutor(8) as pool:
        assert {expected} == set(pool.map(lambda _: complete(gateway, "chat"), range(16)))
    assert (200, "Success: LoRA adapter 'chat' removed successfully.") == post(
        gateway, "unload_lora_adapter", lora_name="chat"
    )
    assert 404 == post(gateway, "unload_lora_adapter", lora_name="chat")[0]
    with pytest.raises(openai.NotFoundError):
        complete(gateway, "base:chat")


@pytest.mark.parametrize(("body", "status", "words"), [
    ({"lora_name": "x"}, 400, "'lora_path' is missing"),
    ({"lora_path": "x"}, 400, "'lora_name' is missing"),
    ({"lora_name": 3, "lora_path": "chat"}, 400, "lora_name"),
    ({"lora_name": "x", "lora_path": "../adapters/sql"}, 400, "within the model's lora_root"),
    ({"lora_name": "x", "lora_path": "/etc"}, 400, "within the model's lora_root"),
    ({"lora_name": "x", "lora_path": "a\0b"}, 400, "lora_path"),
    ({"lora_name": "x", "lora_path": "none"}, 404, "no adapter_config.json in"),
    ({"lora_name": "x", "lora_path": "torn"}, 404, "no adapter_config.json in"),
    ({"lora_name": "x", "lora_path": "loop"}, 400, "cannot be read"),
    ({"lora_name": "a:b", "lora_path": "chat"}, 400, "a name without spaces"),
    ({"lora_name": "x", "lora_path": "chat", "model": "merged-sql"}, 400, "has no adapters"),
    ({"lora_name": "x", "lora_path": "chat", "model": "nope"}, 404, "does not exist"),
], ids=str)  # fmt: skip
def test_bad_loads_are_refused(gateway: GatewayProcess, body: dict[str, Any], status: int, words: str) -> None:
    """With what is wrong; nothing is loaded."""
    got, message = post(gateway, "load_lora_adapter", **body)
    assert (status, True) == (got, words in message), message
    assert {"sql"} == listed(gateway).keys()


def test_adapters_in_use_are_a_gauge(service: Service) -> None:
    """As vLLM's: the labels name the adapters of requests that run, and those of requests that wait, by instance."""
    text = {"lora_name": "sql", "max_tokens": 2000, "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, service, "base", PROMPT, sampling=text)
        found: list[str] = []
        while not found and not asked.done():
            found = [
                key for key in service.scrape() if "lora_requests_info" in key and 'running_lora_adapters="sql"' in key
            ]
        asked.result(timeout=60)
    assert found
    assert all(label in found[0] for label in ('max_lora="3"', 'model_name="base"', 'waiting_lora_adapters=""'))


def test_without_the_argument_nothing_is_loaded(router: str, service: Service) -> None:
    """The gateway offers neither; a model without ``lora_root`` takes none from whoever asks it itself."""
    with running_gateway(router) as gateway:
        assert 404 == post(gateway, "load_lora_adapter", lora_name="chat", lora_path="chat")[0]
    with pytest.raises(InferenceServerException, match="of a model with 'lora_adapters' or 'max_loras'"):
        ask(service, "merged-sql", None, ["lora_adapters"])


def test_loads_under_traffic_change_no_text(gateway: GatewayProcess) -> None:
    """While adapters come and go, every answer of the others is the merged model's."""
    prompts = [f"{PROMPT} {number}" for number in range(12)]
    expected = {name: [complete(gateway, f"merged-{name}", prompt) for prompt in prompts] for name in NAMES}
    stopping, num_changes, texts = threading.Event(), 0, []

    def change() -> None:
        nonlocal num_changes
        while not stopping.is_set():
            for name in ("chat", "law"):
                loads = post(gateway, "load_lora_adapter", lora_name=name, lora_path=name)[0]
                assert loads in (200, 429)
                num_changes += loads == 200 and post(gateway, "unload_lora_adapter", lora_name=name)[0] == 200

    def asked(index: int) -> int:
        name, number = NAMES[index % 3], index // 3 % 12
        try:
            texts.append(complete(gateway, f"base:{name}", prompts[number]) == expected[name][number])
        except openai.NotFoundError:
            assert name != "sql"
            return 0
        return 1

    changing = ThreadPoolExecutor(1)
    done = changing.submit(change)
    try:
        with ThreadPoolExecutor(6) as pool:
            num_answers = sum(pool.map(asked, range(144)))
    finally:
        stopping.set()
        done.result(timeout=30)
    assert num_answers >= 48
    assert all(texts)
    assert num_changes > 2
