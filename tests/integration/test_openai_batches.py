"""OpenAI's files and batches, by OpenAI's own client before a gateway process with a folder for them."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.integration.routing import naming_service, running_router
from tests.integration.talking import GatewayProcess, TalkerCore, running_gateway
from tests.processes import Running, wait_until


@pytest.fixture(scope="module")
def core() -> TalkerCore:
    return TalkerCore()


@pytest.fixture(scope="module")
def router(core: TalkerCore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    graphs = tmp_path_factory.mktemp("graphs")
    with naming_service(core) as address, running_router(graphs, address) as router:
        yield router


@pytest.fixture(scope="module")
def gateway(router: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A gateway for all tests; each has a key of its own, and so sees nothing of another."""
    with running_gateway(router.grpc, "--batch-dir", str(tmp_path_factory.mktemp("batches"))) as gateway:
        yield gateway


@pytest.fixture
def client(gateway: GatewayProcess, request: pytest.FixtureRequest) -> openai.OpenAI:
    """A client with the key of the test."""
    return client_of(gateway, request.node.name)


def client_of(gateway: GatewayProcess, key: str) -> openai.OpenAI:
    safe = "".join(letter if letter.isalnum() else "-" for letter in key)
    return openai.OpenAI(base_url=gateway.url, api_key=safe, max_retries=0, timeout=20)


def chat(number: int, content: str, **changes: Any) -> dict[str, Any]:
    body = {"model": "talker", "messages": [{"role": "user", "content": content}], "max_tokens": 9}
    return {"custom_id": f"c{number}", "method": "POST", "url": "/v1/chat/completions", "body": body} | changes


def upload(client: openai.OpenAI, *requests: Any) -> str:
    lines = "\n".join(each if isinstance(each, str) else json.dumps(each) for each in requests)
    return client.files.create(file=("in.jsonl", io.BytesIO(lines.encode())), purpose="batch").id


def begin(client: openai.OpenAI, *requests: Any) -> str:
    batch = client.batches.create(
        input_file_id=upload(client, *requests), endpoint="/v1/chat/completions", completion_window="24h"
    )
    return batch.id


def ended(client: openai.OpenAI, batch_id: str) -> Any:
    """The batch, once it is over."""
    running = ("in_progress", "finalizing", "cancelling")
    wait_until(lambda: client.batches.retrieve(batch_id).status not in running, "the end of the batch")
    return client.batches.retrieve(batch_id)


def lines_of(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    return [] if file_id is None else [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def test_a_batch_is_answered_in_the_order_of_its_file(client: openai.OpenAI) -> None:
    """Answers are in the output file, refusals in the error file, each with the id and status of its request."""
    requests = [chat(number, f"say {number}") for number in range(150)]
    requests[7]["body"]["model"] = "unknown"
    requests[8]["body"]["messages"] = []
    batch = ended(client, begin(client, *requests))
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 148, 2)
    answers = lines_of(client, batch.output_file_id)
    assert [answer["custom_id"] for answer in answers] == [f"c{n}" for n in range(150) if n not in (7, 8)]
    assert "say 3" in answers[3]["response"]["body"]["choices"][0]["message"]["content"]
    failures = {each["custom_id"]: each["response"] for each in lines_of(client, batch.error_file_id)}
    assert {name: response["status_code"] for name, response in failures.items()} == {"c7": 404, "c8": 400}
    assert "messages" in failures["c8"]["body"]["error"]["message"]


@pytest.mark.parametrize(
    ("request_line", "message"),
    [
        ("{", "no JSON"),
        (chat(1, "a", custom_id=5), "custom_id must be a text, got 5"),
        (chat(0, "a"), "custom_id 'c0' is there twice"),
        (chat(1, "a", method="GET"), "method must be POST, got 'GET'"),
        (chat(1, "a", url="/v1/completions"), "url must be the batch's endpoint"),
        (chat(1, "a", body="text"), "body must be an object, got str"),
    ],
)
def test_a_file_that_is_no_batch_fails_before_anything_runs(
    client: openai.OpenAI, core: TalkerCore, request_line: Any, message: str
) -> None:
    """Its errors name the line."""
    num_calls = len(core.calls)
    batch = ended(client, begin(client, chat(0, "fine"), request_line))
    assert batch.status == "failed"
    assert batch.errors.data[0].line == 2
    assert message in batch.errors.data[0].message
    assert len(core.calls) == num_calls


def test_one_key_sees_nothing_of_another(gateway: GatewayProcess) -> None:
    """Files and batches of another key are not found, listed, read, cancelled or deleted."""
    one, two = client_of(gateway, "one"), client_of(gateway, "two")
    batch = ended(one, begin(one, chat(0, "secret")))
    for attempt in (
        lambda: two.files.retrieve(batch.input_file_id),
        lambda: two.files.content(batch.output_file_id),
        lambda: two.files.delete(batch.input_file_id),
        lambda: two.batches.retrieve(batch.id),
        lambda: two.batches.cancel(batch.id),
        lambda: two.files.retrieve("../" + batch.input_file_id),
    ):
        with pytest.raises(openai.NotFoundError):
            attempt()
    assert (list(two.files.list()), list(two.batches.list())) == ([], [])
    assert [each.id for each in one.batches.list()] == [batch.id]
    assert len(list(one.files.list())) == 2
    one.files.delete(batch.input_file_id)
    assert len(list(one.files.list())) == 1


def test_a_cancelled_batch_keeps_what_is_answered(client: openai.OpenAI, core: TalkerCore) -> None:
    """Requests in flight are cancelled; the answers that are written make the output."""
    batch_id = begin(client, *(chat(number, "a" if number < 64 else "wait HANG") for number in range(70)))
    wait_until(lambda: client.batches.retrieve(batch_id).request_counts.completed >= 64, "64 answers")
    with pytest.raises(openai.ConflictError):
        client.files.delete(client.batches.retrieve(batch_id).input_file_id)
    client.batches.cancel(batch_id)
    batch = ended(client, batch_id)
    assert batch.status == "cancelled"
    assert len(lines_of(client, batch.output_file_id)) == 64
    core.until(lambda: core.num_open == 0)


def test_a_batch_survives_its_gateway(router: Running, core: TalkerCore, tmp_path: Path) -> None:
    """Started again, it goes on when the batch's owner asks, with the requests whose answers are not written."""
    before = len(core.calls)
    with running_gateway(router.grpc, "--batch-dir", str(tmp_path)) as gateway:
        client = client_of(gateway, "owner")
        batch_id = begin(client, *(chat(number, "a" if number < 64 else "wait DOWN") for number in range(70)))
        core.until(lambda: len(core.calls) >= before + 70)
    answered = len(core.calls)
    with running_gateway(router.grpc, "--batch-dir", str(tmp_path)) as gateway:
        client = client_of(gateway, "owner")
        assert client.batches.retrieve(batch_id).status == "in_progress"
        core.until(lambda: len(core.calls) > answered)
        client.batches.cancel(batch_id)
        batch = ended(client, batch_id)
        assert len(lines_of(client, batch.output_file_id)) == 64
    assert sum(b"user:a" in call.inputs["text_input"].data for call in core.calls[before:]) == 64


def test_forms_and_bodies_that_are_wrong(client: openai.OpenAI) -> None:
    """Each is refused with what is allowed."""
    file_id = upload(client, chat(0, "a"))
    for attempt, message in (
        (lambda: client.files.create(file=("a", b""), purpose="vision"), "purpose must be 'batch'"),
        (
            lambda: client.batches.create(input_file_id=file_id, endpoint="/v1/images", completion_window="24h"),
            "endpoint",
        ),
        (
            lambda: client.batches.create(
                input_file_id=file_id,
                endpoint="/v1/completions",
                completion_window="1h",  # type: ignore[arg-type]
            ),
            "completion_window must be '24h'",
        ),
        (lambda: client.batches.list(limit=1000), "limit must be from 1 to 100"),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            attempt()
    with pytest.raises(openai.NotFoundError):
        client.batches.create(input_file_id="file-" + "0" * 32, endpoint="/v1/completions", completion_window="24h")


def test_without_a_folder_neither_is_offered(router: Running) -> None:
    """The error names the argument of the gateway."""
    with running_gateway(router.grpc) as gateway, pytest.raises(openai.NotFoundError, match="--batch-dir"):
        client_of(gateway, "any").batches.list()
