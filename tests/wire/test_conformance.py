"""What a server makes of what clients send: the exchanges of the folder ``exchanges``, for which it has one runner.

A line that begins with ``>`` is sent: a frame (``notation.py``), ``call STREAM METHOD BODY [field: value]``, which is a
whole call of ``test.Echo``, ``open STREAM METHOD``, whose client goes on sending, or ``SIGTERM``, for the server.
A line that begins with ``<`` is what has to come before the next one is sent:

- ``connection error CODE|CODE``: GOAWAY with one of the codes, or a closed connection.
- ``stream error STREAM CODE|CODE``: RST_STREAM with one of them, or a connection error with one of them.
- ``answer STREAM "message" [field: value]``: the messages, if there are some in the line, fields, and status OK.
- ``end STREAM OUTCOME|OUTCOME [field: value]``: a gRPC status, ``error`` for any but OK, ``HTTP4`` for any status of
  HTTP that begins so, ``RST_STREAM:CODE``, or ``any``.
- ``alive``: PING is answered and no error comes before; ``alive or reset``: streams may be reset before.
- ``DATA STREAM SIZE``: so many bytes, in frames of 16,384 at most; ``silence``: no more come.
- a frame: the next one of its kind, with this beginning of its payload; ``closed``; ``exit STATUS`` of the server.

``server ARGUMENT name=limit`` gives the case a server of its own, ``settings NAME=VALUE`` is what it must announce,
``table SIZE`` bounds the table of fields that answers may use, ``held LOW HIGH`` is how many bytes the server holds.
A case without a connection error ends with ``alive or reset``. Of our own server more is asked than h2spec does: it
says why it ends something, and says the right thing.
What grpcio does otherwise is an expected failure (``conftest.py``): ``WEFT_TEST_WIRES=grpcio pytest -rx tests/wire``.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from tests.wire import peer as h2
from tests.wire.conftest import StartEcho
from tests.wire.echo_process import EchoService
from tests.wire.notation import CODES, Case, fields_of, frame_of, piece_of, read_cases, request_of, words
from tests.wire.peer import Answer, Closed, Frame, Peer

ERROR_S = 2.0  # how long an error may take to come
STATUSES = {code.value[0]: code.name for code in grpc.StatusCode}
CASES = [
    pytest.param(case, id=f"{path.stem}: {case.name}")
    for path in sorted(Path(__file__).with_name("exchanges").glob("*.txt"))
    for case in read_cases(path)
]


class Exchange:
    """One case in the course of being played."""

    def __init__(self, peer: Peer, echo: EchoService) -> None:
        self.peer = peer
        self.echo = echo
        self.has_failed = False

    def play(self, lines: tuple[str, ...]) -> None:
        """All lines; answers that follow one another may come in any order."""
        pending: list[list[str]] = []
        for line in (*lines, ""):
            mark, *rest = words(line) or [""]
            if pending and (mark, rest[:1]) not in (("<", ["answer"]), ("<", ["end"])):
                self._answers(pending)
                pending = []
            if mark == ">":
                self._send(rest)
            elif mark == "<" and rest[0] in ("answer", "end"):
                pending.append(rest)
            elif mark == "<":
                self._expect(rest)
            elif mark == "held":
                low, high = map(int, rest)
                self.echo.wait_stats(lambda found, low=low, high=high: low <= found["num_buffered_bytes"] <= high)
            elif mark == "table":
                self.peer.decoder.max_allowed_table_size = int(rest[0])
            elif mark == "settings":
                number = piece_of(rest[0])
                assert number in h2.settings_frame(self.peer.settings), self.peer.settings

    def _send(self, what: list[str]) -> None:
        if what == ["SIGTERM"]:
            os.kill(self.echo.pid, signal.SIGTERM)
        else:
            line = " ".join(what).replace("{over}", str(self.peer.settings.get(h2.MAX_FRAME_SIZE, 1 << 14) + 1))
            self.peer.try_send(request_of(line, self.peer) or frame_of(line, self.peer.encoder))

    def _expect(self, what: list[str]) -> None:
        match what:
            case ["connection", "error", codes]:
                self._expect_error(codes.split("|"), None)
                self.has_failed = True
            case ["stream", "error", stream_id, codes]:
                self.has_failed = self._expect_error(codes.split("|"), int(stream_id))
            case ["alive", *or_reset]:
                is_alive(self.peer, () if or_reset else (h2.GOAWAY, h2.RST_STREAM))
            case ["DATA", stream_id, size]:
                self._expect_data(int(stream_id), int(size))
            case ["silence"]:
                assert sum(sizes_of_data(self.peer)) == 0
            case ["closed"]:
                self.peer.wait_closed()
                self.has_failed = True
            case ["exit", status]:
                self.peer.close()
                assert int(status) == self.echo.stop()
            case _:
                sent = frame_of(" ".join(what))
                wanted = Frame(sent[3], sent[4], int.from_bytes(sent[5:9], "big"), sent[9:])
                read = self.peer.read_until(
                    lambda read: (
                        (read.kind, read.stream_id) == (wanted.kind, wanted.stream_id)
                        and (read.kind not in (h2.PING, h2.SETTINGS) or read.flags & h2.ACK == wanted.flags & h2.ACK)
                    )
                )
                assert read.payload.startswith(wanted.payload), read

    def _expect_error(self, codes: list[str], stream_id: int | None) -> bool:
        """Reads an error of a stream or of the connection, and returns whether it was of the latter."""
        came: list[Frame] = []
        is_strict = self.echo.wire == "weft"
        try:
            while True:
                read = self.peer.read(ERROR_S)
                came.append(read)
                is_error = read.kind == h2.GOAWAY or (read.kind == h2.RST_STREAM and read.stream_id == stream_id)
                if is_error and (is_strict or CODES[read.error_code] in codes):
                    break
        except Closed:
            assert not is_strict, f"the connection ended without an error, but {came}"
            return True
        except TimeoutError:
            raise AssertionError(f"no error came, but {came}") from None
        assert CODES[read.error_code] in codes, f"expected {codes}, but {came} came"
        return read.kind == h2.GOAWAY

    def _expect_data(self, stream_id: int, size: int) -> None:
        came: list[int] = []
        while sum(came) < size:
            came.append(len(self.peer.read_kind(h2.DATA, stream_id).payload))
        assert sum(came) == size
        assert max(came) <= 1 << 14

    def _answers(self, wanted: list[list[str]]) -> None:
        answers = self.peer.read_answers([int(what[1], 0) for what in wanted])
        for (kind, _, *rest), answer in zip(wanted, answers, strict=True):
            fields = [piece for piece in rest if piece.startswith("[")]
            outcomes = rest[0].split("|") if kind == "end" else ["OK"]
            bodies = [piece_of(piece) for piece in rest if piece not in fields] if kind == "answer" else []
            assert any(is_outcome(answer, outcome) for outcome in outcomes), answer
            assert bodies in ([], answer.messages), answer
            for name, value in fields_of(fields):
                assert (answer.headers | answer.trailers)[name.decode()] == value.decode(), answer


def is_outcome(answer: Answer, outcome: str) -> bool:
    """Whether a stream ended so."""
    if answer.reset_code not in (None, h2.NO_ERROR):
        return outcome in (f"RST_STREAM:{CODES[answer.reset_code]}", "any")
    if outcome == "error":
        return answer.status not in (None, 0) and answer.status in STATUSES
    by_http = outcome.startswith("HTTP") and f"HTTP{answer.headers.get(':status', '')}".startswith(outcome)
    return by_http or outcome in ("any", STATUSES.get(answer.status or 0) if answer.status is not None else "")


def is_alive(peer: Peer, errors: tuple[int, ...] = ()) -> None:
    """PING is answered, without a frame of these kinds before it."""
    peer.send(h2.ping(b"isalive?"))
    while (read := peer.read()).kind != h2.PING or not read.flags & h2.ACK or read.payload != b"isalive?":
        assert read.kind not in errors, read


def sizes_of_data(peer: Peer) -> list[int]:
    """The sizes of DATA that come while SETTINGS are acknowledged three times over."""
    sizes = []
    for _ in range(3):
        peer.send(h2.settings_frame())
        while (read := peer.read()).kind != h2.SETTINGS or not read.flags & h2.ACK:
            assert read.kind not in (h2.GOAWAY, h2.RST_STREAM), read
            if read.kind == h2.DATA:
                sizes.append(len(read.payload))
    return sizes


@pytest.fixture
def served(request: pytest.FixtureRequest, echo: EchoService, start_echo: StartEcho) -> Iterator[Exchange]:
    """The exchange of a case, with the shared service or one of its own."""
    case: Case = request.getfixturevalue("case")
    for line in case.lines:
        if line == "server" or line.startswith("server "):
            arguments = words(line)[1:]
            limits = dict(word.split("=") for word in arguments if not word.startswith("-"))
            echo = start_echo(*(word for word in arguments if word.startswith("-")), **limits)
    with Peer.connect(echo.address) as peer:
        yield Exchange(peer.handshake(), echo)


@pytest.mark.parametrize("case", CASES)
def test_exchange(case: Case, served: Exchange) -> None:
    """The server does what the case says, and the connection goes on unless the case ends it."""
    served.play(case.lines)
    if not served.has_failed:
        is_alive(served.peer)


def test_settings_are_the_servers_first_frame(echo: EchoService) -> None:
    """The server's preface is SETTINGS, whatever the client asks for first (section 3.4)."""
    with Peer.connect(echo.address) as peer:
        peer.send(h2.PREFACE, h2.settings_frame(), peer.request("/test.Echo/Unary", b"a"))
        first = peer.read()
        assert (h2.SETTINGS, 0, 0) == (first.kind, first.flags & h2.ACK, first.stream_id)
        assert [b"a"] == peer.read_answer().messages


def test_a_preface_in_pieces(echo: EchoService) -> None:
    """The preface and a request may arrive byte by byte (section 3.4)."""
    with Peer.connect(echo.address) as peer:
        for byte in h2.PREFACE + h2.settings_frame() + peer.request("/test.Echo/Unary", b"a"):
            peer.send(bytes([byte]))
        assert [b"a"] == peer.read_answer().messages


@pytest.mark.parametrize("preface", [b"INVALID CONNECTION PREFACE\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"])
def test_another_preface(echo: EchoService, preface: bytes) -> None:
    """What is not the preface of HTTP/2 ends the connection (section 3.4)."""
    with Peer.connect(echo.address) as peer:
        peer.send(preface)
        peer.wait_gone()


def test_a_preface_without_settings(echo: EchoService) -> None:
    """The client's first frame must be SETTINGS (section 3.4)."""
    with Peer.connect(echo.address) as peer:
        peer.send(h2.PREFACE)
        Exchange(peer, echo).play(('> PING 0 "12345678"', "< connection error PROTOCOL_ERROR"))
