"""The build of the sample models: its command, run into a folder of its own, and what the built models answer."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from weft.backends import BACKENDS as MODEL_BACKENDS
from weft.backends.postprocess import BACKENDS as POSTPROCESS_BACKENDS
from weft.backends.preprocess import BACKENDS as PREPROCESS_BACKENDS
from weft.base.core import CallContext, InferCall
from weft.base.tensors import Array, decode, encode
from weft.serving.core import ServingCore

pytestmark = pytest.mark.long

BUILD = Path(__file__).resolve().parents[2] / "model_repository/build.py"
BACKENDS = {"preprocess": PREPROCESS_BACKENDS, "model": MODEL_BACKENDS, "postprocess": POSTPROCESS_BACKENDS}
MAX_BATCH_SIZE = 32


def run_build(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`python model_repository/build.py` with arguments."""
    return subprocess.run([sys.executable, str(BUILD), *arguments], capture_output=True, text=True, check=False)


def changes(repository: Path) -> dict[Path, int]:
    """When each file was last changed; the locks of the builds are left out."""
    return {
        path: path.stat().st_mtime_ns for path in repository.rglob("*") if path.is_file() and path.suffix != ".lock"
    }


def figures(repository: Path, sample: str) -> dict[str, float]:
    """What the build measured."""
    return json.loads((repository / f".cache/{sample}.json").read_text())["figures"]


async def answer(repository: Path, service: str, model: str, inputs: dict[str, Array]) -> dict[str, Array]:
    """The model's answer to any number of rows, from that service's own core and backends."""
    core = ServingCore(
        repository / service, BACKENDS[service], model_control="explicit", load_models=[model], num_gpus=0
    )
    await core.start()
    try:
        num_rows = len(next(iter(inputs.values())))
        parts = []
        for start in range(0, num_rows, MAX_BATCH_SIZE):
            rows = slice(start, start + MAX_BATCH_SIZE)
            call = InferCall(model, inputs={name: encode(array[rows]) for name, array in inputs.items()})
            result = await core.infer(call, CallContext())
            parts.append({name: decode(tensor) for name, tensor in result.outputs.items()})
    finally:
        await core.close(grace_s=5)
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


async def embed(repository: Path, texts: list[str]) -> Array:
    """Embeddings of texts, by the three served models of the graph `embed`."""
    rows = np.array([[text.encode()] for text in texts], dtype=np.object_)
    tokens = await answer(repository, "preprocess", "tokenize_minilm", {"TEXT": rows})
    del tokens["num_tokens"]  # for clients, not for the model
    hidden = await answer(repository, "model", "minilm", tokens)
    pooled = await answer(
        repository, "postprocess", "mean_pool", {**hidden, "attention_mask": tokens["attention_mask"]}
    )
    return pooled["EMBEDDING"]


def take_over(sample: str, source: Path, target: Path) -> None:
    """What is built of a sample in one repository, and the record of it, are in another too; nothing if it is not."""
    record = f".cache/{sample}.json"
    if not (source / record).is_file():
        return
    for path in (record, *json.loads((source / record).read_text())["sizes_bytes"]):
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / path, target / path)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete build in a new folder, with the trained networks of the repository where they are up to date."""
    folder = tmp_path_factory.mktemp("samples") / "repository"
    for sample in ("writer", "digits", "digits_cascade"):
        take_over(sample, BUILD.parent, folder)
    built = run_build("--output", str(folder))
    assert built.returncode == 0, built.stderr
    return folder


def test_a_second_build_does_nothing(repository: Path) -> None:
    """A build of what is already built changes no file, says so, and prints the accuracies again."""
    before = changes(repository)
    built = run_build("--output", str(repository))
    assert built.returncode == 0
    assert [line.split()[1:4] for line in built.stdout.splitlines()] == [["up", "to", "date"]] * 6
    assert f"vote {figures(repository, 'digits')['vote']:.3g}" in built.stdout
    assert changes(repository) == before


def test_a_missing_output_alone_is_built_again(repository: Path) -> None:
    """When a file has gone, its sample is built and the others are left alone; --only confines the build."""
    lost, kept = repository / "model/simple/1/model.onnx", repository / "model/minilm/1/model.onnx"
    content, change = lost.read_bytes(), kept.stat().st_mtime_ns
    lost.unlink()
    assert run_build("--output", str(repository), "--only", "digits").returncode == 0
    assert not lost.exists()
    assert run_build("--output", str(repository)).returncode == 0
    assert lost.read_bytes() == content
    assert kept.stat().st_mtime_ns == change


def test_an_unknown_sample_is_refused(repository: Path) -> None:
    """--only with a name that is no sample ends with the names that are."""
    refused = run_build("--output", str(repository), "--only", "embde")
    assert refused.returncode == 2
    assert "embde" in refused.stderr
    assert "triage" in refused.stderr


def test_classifiers_are_good_and_their_vote_no_worse_than_the_worst(repository: Path) -> None:
    """Of the held-out digits each gets 95 of 100 right; tests of the samples compare with what is served."""
    measured = figures(repository, "digits")
    assert measured["vote"] >= min(measured[kind] for kind in ("cnn", "mlp", "forest")) >= 0.95


async def test_held_out_messages_reach_their_team_and_answer(repository: Path) -> None:
    """By the served models, 9 of 10 held-out messages get their team, and 8 of 10 the right answer of that team."""
    messages = json.loads((repository / "data/triage/messages.json").read_text())["held_out"]
    labels = (repository / "postprocess/triage_label/1/labels.txt").read_text().split()
    embeddings = {team: await embed(repository, [message["text"] for message in messages[team]]) for team in labels}
    num_right_teams = num_right_answers = 0
    for team in labels:
        scores = await answer(repository, "model", "support_labels", {"EMBEDDING": embeddings[team]})
        got = await answer(repository, "postprocess", "triage_label", scores)
        num_right_teams += int((got["LABEL"][:, 0] == team.encode()).sum())
        np.testing.assert_allclose(got["PROBS"].sum(axis=1), 1, atol=1e-5)
        got = await answer(repository, "postprocess", f"answer_{team}", {"EMBEDDING": embeddings[team]})
        entries = json.loads((repository / f"postprocess/answer_{team}/1/entries.json").read_text())
        expected = [entries[message["answer"]].encode() for message in messages[team]]
        num_right_answers += sum(row[0] == want for row, want in zip(got["ANSWER"], expected, strict=True))
    measured = figures(repository, "triage")
    assert num_right_teams >= 0.9 * 60
    assert num_right_answers >= 0.8 * 60
    assert num_right_teams / 60 == pytest.approx(measured["held-out teams"])
    assert num_right_answers / 60 == pytest.approx(measured["held-out answers"])


def test_the_language_model_knows_more_than_how_frequent_tokens_are(repository: Path) -> None:
    """On texts that it was not trained on, its perplexity is below half of that of a unigram model."""
    measured = figures(repository, "writer")
    assert measured["held-out perplexity"] < measured["unigram perplexity"] / 2
    assert measured["held-out bits per byte"] < measured["unigram bits per byte"]
    assert 1 < measured["million parameters"] < 5


def test_the_language_model_is_a_folder_of_transformers(repository: Path) -> None:
    """Tokenizer and chat template load by themselves, and the tokenizers before and after it are the same."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(repository / "model/writer/1", local_files_only=True)
    text = "größe 東京 🙂 return a list"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.bos_token_id == ids[0]
    assert text == tokenizer.decode(ids, skip_special_tokens=True)
    messages = [{"role": "user", "content": "Hello"}]
    shown = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert "user: Hello\nassistant:" == shown
    paths = ("model/writer/1", "preprocess/tokenize_writer/1", "postprocess/detokenize_writer/1")
    assert 1 == len({(repository / path / "tokenizer.json").read_bytes() for path in paths})
