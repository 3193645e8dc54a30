"""``python -m tests.compat.triton_qa.cases REPORT FILE [Class.test ...]``: run cases of unittest.

What became of each is written at once, so that a case that never ends loses no other.
"""

import importlib.util
import json
import signal
import sys
import unittest
from pathlib import Path
from typing import Any

import numpy as np

#: Longest time of one case, in seconds.
_CASE_S = 600


class Result(unittest.TextTestResult):
    """Writes a line of JSON per case: its name, what became of it, and why it failed."""

    report: Path

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self.why = ""
        signal.alarm(_CASE_S)

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        super().addError(test, err)
        self.why = f"{self.why}{self.errors[-1][1]}"
        if not isinstance(test, unittest.TestCase):  # what a class or the module needs failed
            self._write(str(test), "failed")

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        super().addFailure(test, err)
        self.why = f"{self.why}{self.failures[-1][1]}"

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
        super().addSubTest(test, subtest, err)
        if err is not None:
            self.why = f"{self.why}{self._exc_info_to_string(err, test)}"

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        super().addSkip(test, reason)
        self._write(test.id().partition(".")[2], "skipped", reason)

    def stopTest(self, test: unittest.TestCase) -> None:
        signal.alarm(0)
        super().stopTest(test)
        if not self.skipped or self.skipped[-1][0] is not test:
            self._write(test.id().partition(".")[2], "failed" if self.why else "passed", self.why)

    def _write(self, name: str, outcome: str, why: str = "") -> None:
        with self.report.open("a") as file:
            file.write(json.dumps({"name": name, "outcome": outcome, "why": (why or self.why)[-3000:]}) + "\n")


def _too_long(*_: object) -> None:
    raise TimeoutError(f"the case took longer than {_CASE_S} s")


def main() -> None:
    """Load the file as ``unittest.main`` would, and run."""
    report, file, *names = sys.argv[1:]
    Result.report = Path(report)
    sys.argv = [file]
    sys.path[0] = str(Path(file).resolve().parent)
    name = Path(file).stem
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{file} is no module")
    np.NINF = -np.inf  # which NumPy 2 has not
    sys.path += ["../common", "../../common"]
    util = importlib.import_module("test_util")
    util.validate_for_trt_model = util.validate_for_libtorch_model = lambda *_, **__: False  # TensorRT and TorchScript
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    loader = unittest.defaultTestLoader
    suite = loader.loadTestsFromNames(names, module) if names else loader.loadTestsFromModule(module)
    signal.signal(signal.SIGALRM, _too_long)
    unittest.TextTestRunner(resultclass=Result, verbosity=2).run(suite)


if __name__ == "__main__":
    main()
