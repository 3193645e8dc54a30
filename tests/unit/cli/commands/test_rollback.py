"""`weft rollback` against a V2 server in a thread of its own."""

import pytest
from tests.unit.mesh.serving import ListingCore, serving

from weft.base.signature import ModelSignature
from weft.cli.__main__ import main

SIGNATURE = ModelSignature("pipe", "1", "", 0, (), ())


def test_the_versions_that_serve_now_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Of this graph, and those that are ready; the router is asked once, with the parameter `rollback`."""
    core = ListingCore(
        {("pipe", "1"): SIGNATURE, ("pipe", "2"): SIGNATURE, ("pipe", "3"): None, ("other", "9"): SIGNATURE}
    )
    with serving(core) as url:
        assert main(["rollback", "pipe", "--url", url]) == 0
        assert capsys.readouterr().out == "pipe: versions 1, 2\n"
        del core.models["pipe", "1"]
        assert main(["rollback", "pipe", "--url", url]) == 0
        assert capsys.readouterr().out == "pipe: version 2\n"
        assert main(["rollback", "pipe", "--url", url, "--json"]) == 0
        assert capsys.readouterr().out == '{"graph": "pipe", "versions": ["2"]}\n'
    assert [("pipe", {"rollback": True})] * 3 == core.loaded


def test_a_refusal_and_a_router_that_is_gone_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Status and message on standard error, exit status 1."""
    with serving(ListingCore({})) as url:
        assert main(["rollback", "pipe", "--url", url]) == 1
        told = capsys.readouterr()
        assert ("", "weft: NOT_FOUND: Request for unknown model: 'pipe' is not found\n") == (told.out, told.err)
    with serving(ListingCore({("pipes", "1"): SIGNATURE})) as url:
        assert main(["rollback", "pipe", "--url", url]) == 1
        assert capsys.readouterr().err.endswith("is not found; did you mean 'pipes'?\n")
    assert main(["rollback", "pipe", "--url", "127.0.0.1:1"]) == 1
    assert capsys.readouterr().err.startswith("weft: UNAVAILABLE: '127.0.0.1:1'")
