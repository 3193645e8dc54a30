"""``/openapi.json`` is valid, and holds: schemathesis asks a real mesh what the document says."""

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from openapi_spec_validator import validate
from tests.encoders import save_encoder, save_tokenizer
from tests.integration.language_model import write_folder, write_model
from tests.integration.talking import running_gateway
from tests.processes import scrape
from tests.unit.llm.adapters import save_adapter

from weft.gateway.main import ENDPOINTS
from weft.gateway.openapi import PATH
from weft.llm.models.registry import read_config
from weft.mesh.running import running_mesh

#: What is served, by what the examples of the document name.
ENCODERS = {
    "embedder": ("RobertaModel", {"type_vocab_size": 1}),
    "ranker": ("BertForSequenceClassification", {"num_labels": 1}),
}
ADDER = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            left, right = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("INPUT0", "INPUT1"))
            answers.append(pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("OUTPUT0", left + right)]))
        return answers
"""
ADDER_CONFIG = """
backend: "python" max_batch_size: 8
input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ 2 ] }, { name: "INPUT1" data_type: TYPE_INT32 dims: [ 2 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 2 ] } ]
"""
CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance"),
    *("negative_data_rejection", "unsupported_method", "allow_header_conformance"),
)
#: What a server may say beside that it takes or refuses a request: it does not offer it, or lacks the time.
CONFIG = '[checks.not_a_server_error]\nexpected-statuses = ["2xx", "3xx", "4xx", 501, 503, 504]\n'
#: Loads and unloads would change what the other requests need.
LEFT_OUT = "repository/models|lora_adapter"
#: Paths of the same handlers as others.
ALIASES = "/versions/|^/rerank|^/v2/rerank|^/score"


class Served(NamedTuple):
    http: str
    metrics: str
    router: str
    model: str


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A mesh with a language model, an encoder, a ranker and a model of two tensors."""
    root, files = tmp_path_factory.mktemp("mesh"), tmp_path_factory.mktemp("files")
    (root / "graphs").mkdir()
    (root / "model").mkdir()
    write_folder(files)
    (files / "chat_template.jinja").write_text("{% for one in messages %}{{ one.content }}{% endfor %}{{ tools }}")
    save_adapter(files / "adapters/sql", read_config(files), 0)
    write_model(root / "model", "writer", files, max_num_seqs=8, num_blocks=128, max_loras=2, lora_root="adapters")
    for name, (architecture, fields) in ENCODERS.items():
        folder = root / "model" / name / "1"
        save_encoder(folder, architecture, **fields)
        save_tokenizer(folder)
        (folder.parent / "config.pbtxt").write_text('backend: "encoder"\n')
    (root / "model/adder/1").mkdir(parents=True)
    (root / "model/adder/1/model.py").write_text(ADDER)
    (root / "model/adder/config.pbtxt").write_text(ADDER_CONFIG)
    batches = str(tmp_path_factory.mktemp("batches"))
    with running_mesh(root, ["--http-port", "0", "--batch-dir", batches]) as mesh:
        gateway = mesh["gateway"]
        yield Served(gateway.http, gateway.metrics, mesh["router"].grpc, mesh["model"].grpc)


def document_of(address: str) -> Any:
    with urllib.request.urlopen(f"http://{address}{PATH}", timeout=20) as response:
        assert "application/json" == response.headers["content-type"]
        return json.loads(response.read())


def test_the_document_is_valid_and_has_every_endpoint(served: Served) -> None:
    """By the specification's own schema; so has that of a gateway before a model service alone, without batches."""
    document = document_of(served.http)
    validate(document)
    assert "3.1.0" == document["openapi"]
    assert {one.path for one in ENDPOINTS} | {PATH, "/v1/batches/{id}", "/v2/models/{name}/infer"} <= {
        *document["paths"]
    }
    operations = [one for path in document["paths"].values() for one in path.values()]
    assert [] == [one["operationId"] for one in operations if "summary" not in one]
    with running_gateway(served.model) as gateway:
        alone = document_of(gateway.address)
    validate(alone)
    assert {"/v1/batches", "/v1/files"} == {
        re.sub("/{.*", "", path) for path in {*document["paths"]} - {*alone["paths"]}
    }


def narrowed(document: Any) -> Any:
    """The document for the models that are served: with others there is but 404."""
    for path, methods in document["paths"].items():
        for operation in methods.values():
            content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            if "model" in content.get("schema", {}).get("properties", {}):
                content["schema"]["properties"]["model"]["enum"] = [content["example"]["model"]]
            for parameter in operation["parameters"]:
                served = {"name": "adder" if path.startswith("/v2") else "writer", "version": "1"}
                if "/models/{name}" in path and "/trace/" not in path and parameter["name"] in served:
                    parameter["schema"]["enum"] = [served[parameter["name"]]]
    return document


@pytest.mark.parametrize(
    ("phases", "left_out", "statuses"),
    [
        ("examples", f"{LEFT_OUT}|{ALIASES}", {"200"}),
        pytest.param("examples,coverage,fuzzing", LEFT_OUT, {"200", "400"}, marks=pytest.mark.long),
    ],
)
def test_every_request_is_answered_as_the_document_says(
    served: Served, tmp_path: Path, phases: str, left_out: str, statuses: set[str]
) -> None:
    """No request makes it fail; each answer has a status, a content type and fields that are documented.

    Bodies that the document does not allow are refused.
    """
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    (tmp_path / "openapi.json").write_text(json.dumps(narrowed(document_of(served.http))))
    command = [
        sys.executable, "-m", "schemathesis.cli", "--config-file", "schemathesis.toml", "run", "openapi.json",
        "--url", f"http://{served.http}", "--phases", phases, "--max-examples", "10", "--seed", "7",
        "--generation-deterministic", "--no-shrink", "--no-color", "--continue-on-failure",
        "--exclude-path-regex", left_out, "--checks", ",".join(CHECKS),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    given: dict[str, set[str]] = {}
    for sample in scrape(served.metrics):
        if found := re.match(r'weft_gateway_requests_total\{endpoint="(.*?)",status="(.*?)"\}', sample):
            given.setdefault(found[1], set()).add(found[2])
    asked = [one.path for one in ENDPOINTS if not re.search(left_out, one.path)]
    assert [] == [path for path in asked if not statuses <= given[path]]
