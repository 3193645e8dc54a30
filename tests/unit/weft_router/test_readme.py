"""What services/router/README.md lists is what there is."""

import argparse
import re
from pathlib import Path

from prometheus_client import CollectorRegistry
from tests.unit.weft_router import make
from tests.unit.weft_router.fake_target import FakeTarget

from weft_common.server.server import add_arguments as add_common_arguments
from weft_router.__main__ import make_parser
from weft_router.arguments import add_arguments, given

README = (Path(__file__).parents[3] / "services/router/README.md").read_text()


def test_every_flag_of_its_own_is_listed_with_its_default() -> None:
    """And no other; of those that all services share it has the ports."""
    common = argparse.ArgumentParser()
    add_common_arguments(common, grpc_port=0, metrics_port=0)
    shared = set(common._option_string_actions)
    own = {
        name: action
        for name, action in make_parser("weft_router", "")._option_string_actions.items()
        if name not in shared
    }
    rows = dict(re.findall(r"(?m)^\| `(--[\w-]+)[^|]*\| ([^|]*) \|", README))
    assert {*own} | {"--grpc-port"} == {*rows}
    for name, action in own.items():
        if action.required or name == "--target":
            expected = "required"
        elif action.const is True:
            expected = "off"
        else:
            expected = f"{action.default:g}" if isinstance(action.default, float) else str(action.default or "none")
        assert expected == rows[name].strip("`"), name


def test_weft_up_gives_the_router_what_it_was_given() -> None:
    """Each argument, and the defaults too, read again is what it was."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    every = ["--model-control-mode", "explicit", "--repository-poll-secs", "2.5", "--load-model=-a", "--load-model=*"]
    every += ["--max-inflight", "0", "--adaptive-inflight", "--max-inflight-per-client=3"]
    every += ["--client-key-header", "x-client-id", "--default-priority=1"]
    every += ["--target-policy=model=sticky:header=x-user", "--target-policy", "postprocess=round_robin"]
    every += ["--state-dir", "some where", "--allow-route-header"]
    for arguments in ([], every):
        options = parser.parse_args(arguments)
        assert options == parser.parse_args(list(given(options)))


async def test_every_metric_is_listed(tmp_path: Path) -> None:
    """By its name, with its labels."""
    async with make.started(tmp_path, FakeTarget()) as s:
        registry = CollectorRegistry()
        for collector in s.core.extension().collectors:
            registry.register(collector)
        families = {f.name + "_total" * (f.type == "counter"): f._labelnames for f in registry.collect()}
    listed = {}
    for name, labels in re.findall(r"(?m)^\| `(weft_\w+(?:\{[\w,]+\}\w+)?)` \| ([^;|]*)", README):
        before, _, rest = name.partition("{")
        choices, _, after = rest.partition("}")
        for choice in choices.split(","):
            listed[before + choice + after] = tuple(labels.strip().split(", "))
    assert families == listed
