"""Dashboards, alert rules and autoscalers ask for metrics and labels that the services have."""

import contextlib
import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from tests.chain import write_repository
from tests.faults.mesh import Mesh, Service, wait_serving
from tests.messages import request_from_call

from weft.base.core import InferCall
from weft.base.tensors import encode
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
#: Added by the scrape configuration, and by Prometheus itself.
SCRAPED = {"service", "instance", "job", "namespace", "pod"}
#: Only where there is a GPU; their names are those of the collector.
GPU_NAMES = set(re.findall(r'"(nv_[a-z_]+)"', (ROOT / "services/weft/serving/metrics.py").read_text()))


#: A language model without weights, in two ranks.
LLM_FILES = {
    "config.pbtxt": """backend: "llm" parameters { key: "load_format" value { string_value: "dummy" } }
        parameters { key: "num_blocks" value { string_value: "8" } }
        parameters { key: "tensor_parallel_size" value { string_value: "2" } }""",
    "1/config.json": json.dumps(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 32,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 64,
        }
    ),
}


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, set[str]]]:
    """Sample names of a mesh that has answered and failed, with the labels seen; some have no sample yet."""
    folder = tmp_path_factory.mktemp("dashboards")
    with contextlib.closing(Mesh(folder, router_arguments=["--workers=2"])) as mesh:
        mesh.start()
        models = write_repository(folder / "on_demand") / "model"
        for name, text in LLM_FILES.items():
            (models / "llm" / name).parent.mkdir(parents=True, exist_ok=True)
            (models / "llm" / name).write_text(text)
        arguments = ["--repository", str(models), "--load-on-demand"]
        on_demand = Service("weft.services.model", arguments, folder / "on_demand.log").start()
        try:
            wait_serving(on_demand.address)
            for address, name, source in (
                (mesh.router.address, "chain", "X"),
                (mesh.router.address, "work", "A"),
                (on_demand.address, "work", "A"),
                (mesh.models[0].address, "work", "wrong"),
                (on_demand.address, "llm", "input_ids"),
            ):
                array = np.zeros(1, np.int32) if name == "llm" else np.zeros((1, 1), np.float32)
                call = InferCall(name, inputs={source: encode(array)})
                with grpc.insecure_channel(address) as channel, contextlib.suppress(grpc.RpcError):
                    GRPCInferenceServiceStub(channel).ModelInfer(request_from_call(call), timeout=120)
            found: dict[str, set[str]] = {"up": set()}
            for service in (*mesh.services, on_demand):
                with urllib.request.urlopen(f"http://{service.metrics_address}/metrics", timeout=20) as response:
                    text = response.read().decode()
                for family in text_string_to_metric_families(text):
                    for suffix in ("", "_total", "_bucket"):
                        found.setdefault(family.name + suffix, set())
                    for sample in family.samples:
                        # The parser adds the suffix to counters that have none.
                        name = sample.name.removesuffix("_total") if sample.name.startswith("nv_") else sample.name
                        found.setdefault(name, set()).update(sample.labels)
            yield found
        finally:
            on_demand.end()


def expressions() -> dict[str, str]:
    """Every query, by where it stands."""
    found = {}
    for file in sorted((DEPLOY / "grafana").glob("*.json")):
        for panel in json.loads(file.read_text())["panels"]:
            for target in panel.get("targets", []):
                found[f"{file.stem}: {panel['title']} {target['refId']}"] = target["expr"]
    rules = yaml.safe_load((DEPLOY / "kubernetes/components/prometheus/alerts.yml").read_text())
    for group in rules["groups"]:
        found |= {f"alert {rule['alert']}": rule["expr"] for rule in group["rules"]}
    for scaled in yaml.safe_load_all((DEPLOY / "kubernetes/components/keda/scaled-objects.yaml").read_text()):
        for i, trigger in enumerate(scaled["spec"]["triggers"]):
            if "query" in trigger["metadata"]:
                found[f"keda {scaled['metadata']['name']} {i}"] = trigger["metadata"]["query"]
    adapter = yaml.safe_load((DEPLOY / "kubernetes/components/hpa/prometheus-adapter.yaml").read_text())
    found |= {f"adapter {i}": rule["seriesQuery"] for i, rule in enumerate(adapter["rules"]["custom"])}
    return found


def selectors(expression: object) -> Iterator[promql_parser.VectorSelector]:
    """The metrics that a parsed query asks for."""
    if isinstance(expression, promql_parser.VectorSelector):
        yield expression
    for name in ("expr", "lhs", "rhs", "vector_selector", "selector", "args"):
        part = getattr(expression, name, None)
        for inner in part if isinstance(part, list) else [part]:
            if inner is not None:
                yield from selectors(inner)


@pytest.mark.parametrize("query", [pytest.param(query, id=place) for place, query in expressions().items()])
def test_a_query_finds_something(families: dict[str, set[str]], query: str) -> None:
    """It parses; each metric that it names is served, and has the labels that it is asked by."""
    source = query.replace("$__rate_interval", "1m")
    found = list(selectors(promql_parser.parse(source)))
    assert found
    for selector in found:
        if selector.name not in GPU_NAMES:
            assert selector.name in families, source
            labels = {matcher.name for matcher in selector.matchers.matchers}
            known = families[selector.name]
            assert not known or labels <= known | SCRAPED, (selector.name, labels, known)
    grouped = {label.strip() for group in re.findall(r"by \(([^)]*)\)", source) for label in group.split(",")}
    seen = [families.get(selector.name, set()) for selector in found]
    assert not all(seen) or grouped <= SCRAPED.union(*seen)


def test_every_alert_says_what_is_the_matter() -> None:
    """With a severity and a sentence whose labels are those that the query keeps."""
    rules = yaml.safe_load((DEPLOY / "kubernetes/components/prometheus/alerts.yml").read_text())
    for rule in [rule for group in rules["groups"] for rule in group["rules"]]:
        assert rule["labels"]["severity"] in ("page", "ticket")
        named = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        if grouped := re.findall(r"by \(([^)]*)\)", rule["expr"]):
            assert named <= {label.strip() for group in grouped for label in group.split(",")}, rule["alert"]
