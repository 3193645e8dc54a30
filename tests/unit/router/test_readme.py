"""What docs/router.md lists is what there is."""

import argparse
import re
from pathlib import Path

from prometheus_client import CollectorRegistry
from tests.unit.router import make
from tests.unit.router.fake_target import FakeTarget

from weft.router.arguments import add_arguments, given

PAGE = (Path(__file__).parents[3] / "docs/router.md").read_text()


def test_weft_up_gives_the_router_what_it_was_given() -> None:
    """Each argument, and the defaults too, read again is what it was."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    every = ["--model-control-mode", "explicit", "--repository-poll-secs", "2.5", "--load-model=-a", "--load-model=*"]
    every += ["--max-inflight", "0", "--adaptive-inflight", "--max-inflight-per-client=3"]
    every += ["--client-key-header", "x-client-id", "--default-priority=1"]
    every += ["--target-policy=model=sticky:header=x-user", "--target-policy", "postprocess=round_robin"]
    every += ["--state-dir", "some where", "--allow-route-header", "--rollouts=lease:a/b"]
    for arguments in ([], every):
        options = parser.parse_args(arguments)
        assert options == parser.parse_args(list(given(options)))


async def test_every_metric_is_listed(tmp_path: Path) -> None:
    """By its name, with its labels."""
    async with make.started(tmp_path, FakeTarget()) as s:
        registry = CollectorRegistry()
        for collector in s.core.extension().collectors:
            registry.register(collector)
        families = {f.name + "_total" * (f.type == "counter"): f._labelnames for f in registry.collect()}  # type: ignore[attr-defined]
    listed = {}
    for name, labels in re.findall(r"(?m)^\| `(weft_\w+(?:\{[\w,]+\}\w+)?)` \| ([^;|]*)", PAGE):
        before, _, rest = name.partition("{")
        choices, _, after = rest.partition("}")
        for choice in choices.split(","):
            listed[before + choice + after] = tuple(labels.strip().split(", "))
    assert families == listed
