"""The command line itself."""

import subprocess
import sys

import pytest

from weft_cli.__main__ import main

HEAVY = ("grpc", "numpy", "google.protobuf", "torch", "weft_common", "weft_router", "weft_serving")


def test_help_imports_nothing_heavy() -> None:
    """`weft --help` loads neither gRPC nor numpy nor any other package of Weft, which keeps it fast."""
    code = (
        "import sys\nfrom weft_cli.__main__ import main\n"
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
        ["infer"],
        ["infer", "m", "--input", "no-equals-sign"],
        ["infer", "m", "--timeout-ms", "-1"],
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
