"""``grpc-timeout``: at most eight digits and a unit."""

import math

_SECONDS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_MAX_DIGITS = 8
_MAX_TIMEOUT = "99999999H"


def decode_timeout(value: str) -> float | None:
    """The timeout in seconds; None if the value is no timeout."""
    digits, unit = value[:-1], value[-1:]
    if not (digits.isdecimal() and digits.isascii() and len(digits) <= _MAX_DIGITS and unit in _SECONDS):
        return None
    return int(digits) * _SECONDS[unit]


def encode_timeout(timeout_s: float) -> str:
    """A timeout as a value, rounded up to about three significant digits, so that values repeat.

    Repeated values make repeated field blocks, which servers need not decode again.
    """
    if timeout_s <= 0:
        return "0n"
    for unit, seconds in (("n", 1e-9), ("u", 1e-6), ("m", 1e-3), ("S", 1.0), ("M", 60.0), ("H", 3600.0)):
        count = timeout_s / seconds
        if count < 100_000 or unit == "H":
            number = math.ceil(count - 1e-9)
            step = 10 ** max(0, len(str(number)) - 3)
            number = -(-number // step) * step
            return f"{number}{unit}" if number < 10**_MAX_DIGITS else _MAX_TIMEOUT
    raise AssertionError
