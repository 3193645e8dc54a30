"""What docs/language-models.md says of names, defaults and files is so."""

import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

from weft.backends.llm import metric_names as own
from weft.backends.llm import settings, tensors
from weft.base.signature import DEFAULT_MIGRATION_LIMIT
from weft.base.text.pbtxt import render
from weft.cli import __main__ as weft
from weft.language import GraphSource
from weft.llm.config import EngineConfig
from weft.llm.request import SamplingParams
from weft.router.compile import check_graph
from weft.tools.offline import OfflineCatalog
from weft.v2.protocol.handover import DEFAULT_MIN_TOKENS

ROOT = Path(__file__).resolve().parents[3]
GUIDE = (ROOT / "docs/language-models.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
COMMANDS = [
    line[2:].partition("#")[0].strip() for language, text in BLOCKS if not language for line in text.split("\n")
]


def rows(heading: str) -> list[list[str]]:
    """Cells of the tables under a heading."""
    section = GUIDE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return [line.strip("| ").split(" | ") for line in section.split("\n") if line.startswith("| ") and "`" in line]


def names(cell: str) -> list[str]:
    """Names in backquotes."""
    return re.findall(r"`(\w+)`", cell)


def test_every_parameter_is_listed_with_its_default() -> None:
    """Those of the engine but for what other parts of the configuration decide, and the backend's own."""
    expected = {f.name: str(f.default).lower() for f in fields(EngineConfig) if f.name not in settings._DECIDED}
    expected = {name: text.removesuffix(".0") or "none" for name, text in expected.items()}
    listed = {name: cells[2] for cells in rows("Parameters of the engine") for name in names(cells[0])}
    own = {
        "max_text_bytes": str(1 << 20),
        "load_format": "safetensors",
        "generation_config": "auto",
        "metric_names": "weft",
        "migration_limit": str(DEFAULT_MIGRATION_LIMIT),
        "kv_events": "none",
        "role": "both",
        "prefill_min_tokens": str(DEFAULT_MIN_TOKENS),
        "kv_transfer_timeout_ms": "5000",
        "kv_offload_path": "temporary files",
    }
    assert expected | own == listed


def test_every_sampling_parameter_is_listed_with_its_default() -> None:
    """In the order of the names of its row."""
    words = {None: "none", (): "none", True: "true", False: "false"}
    listed = {}
    for cells in rows("Sampling parameters"):
        found = names(cells[0])
        listed |= dict(zip(found, cells[1].split(", "), strict=True))
    expected = {f.name: words[f.default] if f.default in (None, ()) else f.default for f in fields(SamplingParams)}
    expected = {
        name: words[value] if isinstance(value, bool) else value if isinstance(value, str) else f"{value:g}"
        for name, value in expected.items()
    }
    assert expected | {"seed": "drawn", "speculation": "the model's", "lora_name": "none"} == listed


def test_every_tensor_is_listed_with_its_type() -> None:
    """Inputs `return_...` by two of them."""
    kinds = {}
    for cells in rows("Tensors"):
        for part in re.findall(
            r"((?:`\w+`,? ?)+(?:and so on, )?)(STRING|INT32|UINT32|FP32|BOOL) `\[(\S+)\]`", cells[0]
        ):
            kinds |= dict.fromkeys(names(part[0]), (f"TYPE_{part[1]}", part[2].replace("n", "-1")))
    known = {
        name: (tensor.data_type, str(tensor.dims[0]))
        for name, tensor in (tensors.INPUTS | tensors.OUTPUTS).items()  # type: ignore[operator]
    }
    assert {} == {name: kind for name, kind in kinds.items() if known.get(name) != kind}
    assert {f"return_{name}" for name in tensors.ON_REQUEST} - {"return_finish_reason", "return_logprobs"} == (
        known.keys() - kinds.keys()
    )


def test_every_metric_is_listed() -> None:
    """Counters with the suffix that they are scraped with."""
    families = (*own._FAMILIES, *own._OF_SPECULATION, *own._RATES, *own._ROLE, *own._OF_GROUPS, *own._OF_RANKS)
    expected = {f"weft_llm_{name}{'_total' * (kind is own._COUNT)}" for kind, name, *_ in families}
    assert expected == {name for cells in rows("Metrics") for name in names(cells[0])}


def test_every_file_is_there() -> None:
    """Those that the guide links to, and the engine's."""
    linked = [ROOT / "docs" / path.partition("#")[0] for path in re.findall(r"\]\(([^)]+)\)", GUIDE)]
    steps = GUIDE.partition("## How the engine works")[2].partition("\n## ")[0]
    package = ROOT / "services/weft"
    own = [package / path if "/" in path else package / "llm" / path for path in re.findall(r"`([\w/]+\.py)`", steps)]
    assert len(own) > 12
    assert [] == [str(path) for path in (*linked, *own) if not path.exists()]


def test_the_graph_is_right() -> None:
    """It passes `weft check` over the sample models without a warning."""
    (text,) = [text for language, text in BLOCKS if language == "pbtxt"]
    frame = (ROOT / "model_repository/graphs/write/1/graph.pbtxt").read_text().partition("node {")[0]
    assert "" == render(check_graph(GraphSource(frame + text, "docs"), OfflineCatalog(ROOT / "model_repository")))


@pytest.mark.parametrize("command", [line for line in (*COMMANDS, *GUIDE.split("`")[1::2]) if line.startswith("weft ")])
def test_a_command_is_taken(command: str) -> None:
    """Its flags and arguments exist."""
    assert weft.make_parser().parse_args(shlex.split(command)[1:]).run
