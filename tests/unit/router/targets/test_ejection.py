"""When a replica is left out, for how long, and how many may be at once, as scripts.

The first line of a case in ejection.txt is ``replicas N``; each line behind it is ``R STATUS[*N] ...``, calls that a
replica answers so (it is ejected where the line says so), or

- ``later S``: so many seconds; ``R forgiven``: a new process is there; ``R left``: the replica is no more;
- ``out``: who is ejected now, and when the next one is back;
- ``outage STATUS``: 200 calls a second, of which a half is for replica 0, which fails for 3 s; what that costs.

What is written: when a call ejects, and what ``out`` and ``outage`` find. The last replica has answered a call before.
"""

from pathlib import Path

from tests.case_files import Case, cases

from weft.router.targets.ejection import OutlierDetector, Record


class Script:
    """A detector with some replicas, on a clock that the lines turn."""

    def __init__(self, first: str) -> None:
        self.now_ns = 1_000_000_000
        self.detector = OutlierDetector(lambda: self.now_ns)
        self.replicas = [self.detector.join() for _ in range(int(first.split()[1]))]
        self.detector.note(self.replicas[-1], "OK")

    def told(self, subject: str, *words: str) -> list[str]:
        """What comes of a line."""
        if subject == "later":
            self.now_ns += int(float(words[0]) * 1e9)
        elif subject == "out":
            return [self._out()]
        elif subject == "outage":
            return [self._outage(words[0])]
        elif words == ("forgiven",):
            self.detector.forgive(self.replicas[int(subject)])
        elif words == ("left",):
            self.detector.leave(self.replicas[int(subject)])
        else:
            statuses = [one for word in words for one in self._repeated(word)]
            record = self.replicas[int(subject)]
            found = [number for number, one in enumerate(statuses, 1) if self.detector.note(record, one)]
            return [f"{subject} is ejected by call {number} of {len(statuses)}" for number in found]
        return []

    def _repeated(self, word: str) -> list[str]:
        status, _, times = word.partition("*")
        return [status] * int(times or 1)

    def _out(self) -> str:
        out = [str(i) for i, one in enumerate(self.replicas) if self.detector.is_ejected(one)]
        left_s = (self.detector.next_return_ns() - self.now_ns) / 1e9
        return f"out {' '.join(out) or 'nobody'}" + f", next back in {left_s:g} s" * (left_s < 1e6)

    def _outage(self, status: str) -> str:
        first: Record = self.replicas[0]
        num_failed, back_s = 0, 0.0
        for turn in range(2000):
            self.now_ns += 10_000_000
            self.detector.note(self.replicas[1], "OK")
            if self.detector.is_ejected(first):
                continue
            self.detector.note(first, status if 500 <= turn < 800 else "OK")
            num_failed += 500 <= turn < 800
            back_s = back_s or (turn - 800) / 100 * (turn >= 800)
        return f"{num_failed} calls failed, ejected {first.num_ejected} times, back {back_s:g} s after the outage"


@cases(Path(__file__).with_name("ejection.txt"))
def test_a_script(case: Case) -> None:
    """Who is left out is what is written down."""
    first, *lines = case.lines
    script = Script(first)
    case.check("\n".join(told for line in lines for told in script.told(*line.split())))
