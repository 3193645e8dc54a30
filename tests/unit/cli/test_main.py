"""The command line itself."""

import subprocess
import sys
from pathlib import Path

import pytest

from weft.cli.__main__ import main

HEAVY = ("grpc", "numpy", "google.protobuf", "torch", "weft.base.core", "weft.router.core", "weft.serving")


def test_help_imports_nothing_heavy() -> None:
    """`weft --help` loads neither gRPC nor numpy, nor what of Weft needs them, which keeps it fast."""
    code = (
        "import sys\nfrom weft.cli.__main__ import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as done:\n    assert done.code == 0\n"
        f"print('loaded:', [name for name in {HEAVY} if name in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1] == "loaded: []"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["up", "--router-port", "65536"],
        ["up", "--start-timeout-s", "0"],
        ["up", "--in-process", "router"],
        ["up", "--in-process="],
        ["up", "--in-process", "model,"],
        ["infer"],
        ["infer", "m", "--input", "no-equals-sign"],
        ["infer", "m", "--timeout-ms", "-1"],
        ["up", "--model-control-mode", "sometimes"],
        ["feedback", "g", "--request-id", "r"],
        ["feedback", "g", "--reward", "1"],
        ["feedback", "g", "--reward", "1", "--request-id", "r", "--path", "p"],
        *(["feedback", "g", "--request-id", "r", "--reward", reward] for reward in ("1.1", "-0.1", "nan", "inf", "x")),
        *(["feedback", name, "--reward", "1", "--path", "p"] for name in ("/1", "g/", "g/0", "g/x", "g/" + "9" * 20)),
        ["lock", "--url", "a:1", "--target", "model=b:1"],
        ["lock", "--target", "model"],
        ["lock", "-o", "a", "--check", "b"],
        ["rollback"],
        ["convert"],
        ["draw", "g", "--format", "pdf"],
        *(["explain", "g", "--remaining-ms", limit] for limit in ("0", "inf", "nan", "x")),
        ["explain", "g", "--param", "k"],
        ["convert", "x", "--lock", "a", "--repository", "b"],
        ["check"],
        ["check", "x", "--format", "yaml"],
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong usage ends with status 2 and a usage line on standard error."""
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    assert "usage: weft" in capsys.readouterr().err


def test_one_port_for_two_listeners_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2 at once, not an error of the router when everything else runs."""
    assert main(["up", "--router-port", "18001", "--metrics-port", "18001"]) == 2
    assert capsys.readouterr().err == "weft: --router-port and --metrics-port are both 18001; choose two\n"


def test_a_folder_of_batches_needs_a_gateway(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2 at once."""
    assert main(["up", "--batch-dir", str(tmp_path)]) == 2
    assert "--batch-dir needs --http-port" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--load-model", "g"], "--load-model needs --model-control-mode explicit; without it every graph is loaded"),
        (["--repository-poll-secs", "0"], "--repository-poll-secs must be above 0 and at most 86400, got 0"),
        (["--max-inflight", "-1"], "--max-inflight must be at least 0, got -1"),
        (["--state-dir", __file__], f"--state-dir {__file__} is no folder"),
        (["--tls-cert", "router.pem"], "--tls-cert and --tls-key go together"),
        (["--tls-client-ca", "ca.pem"], "--tls-client-ca needs --tls-cert and --tls-key"),
    ],
)
def test_wrong_arguments_of_the_router_are_told_before_anything_starts(
    arguments: list[str], fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the words of the router itself."""
    assert main(["up", *arguments]) == 2
    assert capsys.readouterr().err == f"weft: {fault}\n"


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        ("batch g --input i --output o", "jobs"),
        ("optimize m --data d --max-loss 1%", "optimize,model,preprocess,postprocess"),
    ],
)
def test_a_package_that_is_missing_is_told_by_what_installs_it(
    arguments: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where only the base is installed, a command that needs more says so in one line."""
    for name in ("weft.cli.commands.batch", "weft.cli.commands.optimize"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert 1 == main(arguments.split())
    told = capsys.readouterr().err
    assert f"pip install 'weft-mesh[{extra}]'" in told
    assert "Traceback" not in told
