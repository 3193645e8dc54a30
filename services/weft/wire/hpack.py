"""HPACK, the header compression of HTTP/2 (RFC 7541), fast for header blocks that repeat.

A block that was decoded before is one dictionary look-up (0.07 us; a new one of ten fields 2-5 us, with the ``hpack``
library 16-22 us). Encoding uses no state, so callers can keep its result. The static table is the library's.
"""

from collections.abc import Iterable
from typing import Any, Final

from hpack.huffman_table import HUFFMAN_COMPLETE, HUFFMAN_EMIT_SYMBOL, HUFFMAN_FAIL, HUFFMAN_TABLE
from hpack.table import HeaderTable

from weft.wire.frames import ErrorCode, Http2ConnectionError

#: The state after bits that no symbol begins with, or the end-of-string symbol; it is never left.
_REJECTED: Final = 256
#: States in which the bits since the last symbol are ones and fewer than eight, so that they may be padding.
_ACCEPTING: Final = frozenset({0, *(state for state, flags, _ in HUFFMAN_TABLE if flags & HUFFMAN_COMPLETE)})

_Row = list[tuple[int, str]]  # for each byte, the next state and the symbols that are complete with it
_rows: Final[list[_Row | None]] = [*([None] * _REJECTED), [(_REJECTED, "")] * 256]


def _huffman_text(data: bytes) -> str:
    """The string that ``data`` encodes, as latin-1, in time linear in its length (RFC 7541, section 5.2).

    The library's state machine takes four bits at a time. Two of its steps are one here, which is four times as fast
    (0.3 us for a time-out). All rows would take 25 ms and some megabytes: one is made when it is first needed.
    """
    state = 0
    symbols: list[str] = []
    for byte in data:
        row = _rows[state]
        if row is None:
            row = _rows[state] = [_step(state, each) for each in range(256)]
        state, completed = row[byte]
        symbols.append(completed)
    if state not in _ACCEPTING:
        raise Http2ConnectionError(ErrorCode.COMPRESSION_ERROR, "header block: a string that is not Huffman-coded")
    return "".join(symbols)


def _step(state: int, byte: int) -> tuple[int, str]:
    symbols = ""
    for nibble in (byte >> 4, byte & 0x0F):
        state, flags, symbol = HUFFMAN_TABLE[state * 16 + nibble]
        if flags & HUFFMAN_FAIL:
            return _REJECTED, ""
        if flags & HUFFMAN_EMIT_SYMBOL:
            symbols += chr(symbol)
    return state, symbols


_INITIAL_TABLE_BYTES: Final = 4096  # RFC 9113, section 6.5.2: until the peer has seen another value
_FIELD_OVERHEAD_BYTES: Final = 32  # RFC 7541, section 4.1; RFC 9113, section 6.5.2
_MAX_INTEGER_SHIFT: Final = 28  # four bytes after the prefix
_MAX_SIZE_UPDATES: Final = 2  # RFC 7541, section 4.2

#: Fields of a block that may be decoded after the list is full, for the dynamic table's sake; a bomb has thousands.
_MAX_DROPPED_FIELDS: Final = 256

_MAX_CACHED_FIELDS: Final = 640  # over all blocks; each counts as four more: about 50 usual blocks
_MAX_CACHED_BLOCK_FIELDS: Final = 64
_MAX_CACHED_BLOCK_BYTES: Final = 1024

# Index 0 is not used (RFC 7541, section 6.1).
_STATIC_FIELDS: Final = [("", ""), *((name.decode(), value.decode()) for name, value in HeaderTable.STATIC_TABLE)]
_NUM_STATIC: Final = len(_STATIC_FIELDS)


class DecodedHeaders:
    """A decoded header block. Do not change it: repeated blocks share one object.

    Attributes:
        is_too_large: The list is over the limit; ``fields`` holds those before the limit.
        content_bytes: Cache for the announced content length; -1: none, or not looked up.
    """

    __slots__ = ("content_bytes", "fields", "is_too_large", "memo")

    def __init__(self, fields: tuple[tuple[str, str], ...], is_too_large: bool) -> None:
        self.fields = fields
        self.is_too_large = is_too_large
        self.memo: Any = None
        self.content_bytes = -1


class Decoder:
    """Decodes the field blocks of one connection, in the order in which they arrive.

    Time is linear in the size of a block. Memory is at most the larger of ``max_table_bytes`` and 4096 for the dynamic
    table, ``max_list_bytes`` for a result, and some 50 small blocks with their results for the cache.

    Args:
        max_table_bytes: SETTINGS_HEADER_TABLE_SIZE as sent to the peer. Unless the peer updates it, the table's size is
            4096, as the protocol has it.

    Attributes:
        num_fields: Of the last block that was decoded, not found in the cache.
        stateless_blocks, table_blocks: The cache: blocks that mean the same always, or as the dynamic table is now.
    """

    __slots__ = (
        "_capacity_bytes", "_entries", "_free_bytes", "_max_list_bytes", "_max_table_bytes", "_num_cached_fields",
        "num_fields", "stateless_blocks", "table_blocks",
    )  # fmt: skip

    def __init__(self, *, max_table_bytes: int = 4096, max_list_bytes: int = 65536) -> None:
        self.num_fields = 0
        self._max_table_bytes = max_table_bytes
        self._max_list_bytes = max_list_bytes
        self._capacity_bytes = _INITIAL_TABLE_BYTES
        self._free_bytes = _INITIAL_TABLE_BYTES
        self._entries: list[tuple[str, str]] = []  # the newest last
        self.table_blocks: dict[bytes, DecodedHeaders] = {}  # refer to the dynamic table as it is now
        self.stateless_blocks: dict[bytes, DecodedHeaders] = {}
        self._num_cached_fields = 0  # at most; blocks that were dropped with the table's change may be counted

    def decode(self, block: bytes) -> DecodedHeaders:
        """Decode a block (all fragments joined); equal blocks that mean the same give the same object."""
        cached = self.table_blocks.get(block) or self.stateless_blocks.get(block)
        if cached is not None:
            return cached
        try:
            return self._decode_new(block)
        except IndexError:
            raise _malformed("the block ends within a field, or refers to an entry that is not in the table") from None

    def _decode_new(self, block: bytes) -> DecodedHeaders:  # noqa: PLR0915  # a function a field costs more than its field
        text = block.decode("latin-1")  # slices of it are names and values
        end = len(block)
        entries = self._entries
        room_bytes = self._max_list_bytes
        fields: list[tuple[str, str]] = []
        refers_to_table = False
        num_dropped = 0
        position = self._update_size(block) if block else 0
        changes_table = position > 0
        while position < end:
            first = block[position]
            position += 1
            mask = 0x7F if first >= 0x80 else 0x3F if first >= 0x40 else 0x0F
            index = first & mask
            if index == mask:
                index, position = _integer(block, position, mask)
            if index < _NUM_STATIC:
                field = _STATIC_FIELDS[index]
            else:
                field = entries[_NUM_STATIC - 1 - index]
                refers_to_table = True
            name, value = field
            if first < 0x80:  # a literal
                if not index:
                    name, position = _string(block, text, position)
                length = block[position]
                if length < 0x7F:  # short and not Huffman-coded
                    position += 1 + length
                    value = text[position - length : position]
                else:
                    value, position = _string(block, text, position)
                field = (name, value)
                if first >= 0x40:
                    self._insert(field)
                    changes_table = True
                elif first >= 0x20:
                    raise _malformed("a table size update after a field")
            elif not index:
                raise _malformed("index 0")
            room_bytes -= _FIELD_OVERHEAD_BYTES + len(name) + len(value)
            if room_bytes >= 0:
                fields.append(field)
                continue
            num_dropped += 1
            if num_dropped > _MAX_DROPPED_FIELDS:
                text = f"{num_dropped} header fields beyond a list of {self._max_list_bytes} bytes"
                raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, text)
        if position != end:
            raise IndexError
        self.num_fields = len(fields) + num_dropped
        decoded = DecodedHeaders(tuple(fields), room_bytes < 0)
        if not changes_table and end <= _MAX_CACHED_BLOCK_BYTES and len(fields) <= _MAX_CACHED_BLOCK_FIELDS:
            self._keep(block, decoded, self.table_blocks if refers_to_table else self.stateless_blocks)
        return decoded

    def _keep(self, block: bytes, decoded: DecodedHeaders, blocks: dict[bytes, DecodedHeaders]) -> None:
        self._num_cached_fields += len(decoded.fields) + 4
        if self._num_cached_fields > _MAX_CACHED_FIELDS:
            # To start afresh is cheaper than to look for what to drop, and a block that matters soon comes again.
            self.table_blocks.clear()
            self.stateless_blocks.clear()
            self._num_cached_fields = len(decoded.fields) + 4
        blocks[block] = decoded

    def _insert(self, field: tuple[str, str]) -> None:
        size_bytes = _FIELD_OVERHEAD_BYTES + len(field[0]) + len(field[1])
        if size_bytes > self._free_bytes:
            self._evict(size_bytes)
        if size_bytes <= self._free_bytes:  # else the field is larger than the table, which is empty now
            self._entries.append(field)
            self._free_bytes -= size_bytes
        self.table_blocks.clear()

    def _evict(self, size_bytes: int) -> None:
        count = 0
        free_bytes = self._free_bytes
        for name, value in self._entries:
            if free_bytes >= size_bytes:
                break
            free_bytes += _FIELD_OVERHEAD_BYTES + len(name) + len(value)
            count += 1
        del self._entries[:count]
        self._free_bytes = free_bytes

    def _update_size(self, block: bytes) -> int:
        if not 0x20 <= block[0] < 0x40:
            return 0
        position = count = 0
        while position < len(block) and 0x20 <= block[position] < 0x40:
            count += 1
            if count > _MAX_SIZE_UPDATES:
                raise _malformed("three table size updates in a block")
            capacity_bytes = block[position] & 0x1F
            position += 1
            if capacity_bytes == 0x1F:
                capacity_bytes, position = _integer(block, position, 0x1F)
            if capacity_bytes > self._max_table_bytes:
                raise _malformed(f"a table size of {capacity_bytes} bytes where {self._max_table_bytes} are allowed")
            self._free_bytes += capacity_bytes - self._capacity_bytes
            self._capacity_bytes = capacity_bytes
            self._evict(0)
        self.table_blocks.clear()
        return position


def _malformed(reason: str) -> Http2ConnectionError:
    return Http2ConnectionError(ErrorCode.COMPRESSION_ERROR, f"header block: {reason}")


def _integer(block: bytes, position: int, value: int) -> tuple[int, int]:
    shift = 0
    while True:
        byte = block[position]
        position += 1
        value += (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift >= _MAX_INTEGER_SHIFT:
            raise _malformed("an integer of more than five bytes")


def _string(block: bytes, text: str, position: int) -> tuple[str, int]:
    first = block[position]
    position += 1
    length = first & 0x7F
    if length == 0x7F:
        length, position = _integer(block, position, 0x7F)
    end = position + length
    if end > len(block):
        raise IndexError
    return (_huffman_text(block[position:end]) if first >= 0x80 else text[position:end]), end


# Intermediaries must not put these into a table either (RFC 7541, section 7.1.3).
_SECRETS: Final = frozenset({"authorization", "cookie", "proxy-authorization", "set-cookie", "x-api-key"})
_INDEX_BY_FIELD: Final = {field: index for index, field in enumerate(_STATIC_FIELDS) if field[1]}
_NAMES_WITH_VALUES: Final = frozenset(name for name, _ in _INDEX_BY_FIELD)
_INDEX_BY_NAME: Final = {name: index for index, (name, _) in reversed(list(enumerate(_STATIC_FIELDS))) if index}
_encoded_names: Final[dict[str, bytes]] = {}  # with the pattern before them
_MAX_KEPT_NAMES: Final = 512
_MAX_KEPT_NAME_BYTES: Final = 64


def encode(fields: Iterable[tuple[str, str | bytes]]) -> bytes:
    """A block of fields, independent of all blocks before it.

    Nothing is put into the dynamic table, so the result can be kept and sent on any connection. Strings are not
    Huffman-coded: that would save a fifth of the bytes and cost ten times as much as all the rest.
    """
    block = bytearray()
    for name, value in fields:
        if name in _NAMES_WITH_VALUES and (index := _INDEX_BY_FIELD.get((name, value))):  # type: ignore[arg-type]
            block.append(0x80 | index)
            continue
        block += _encoded_names.get(name) or _encode_name(name)
        data = value if isinstance(value, bytes) else value.encode("latin-1")
        _append_integer(block, 0x00, 0x7F, len(data))
        block += data
    return bytes(block)


def _encode_name(name: str) -> bytes:
    block = bytearray()
    pattern = 0x10 if name in _SECRETS else 0x00
    if index := _INDEX_BY_NAME.get(name):
        _append_integer(block, pattern, 0x0F, index)
    else:
        data = name.encode("latin-1")
        block.append(pattern)
        _append_integer(block, 0x00, 0x7F, len(data))
        block += data
    if len(block) <= _MAX_KEPT_NAME_BYTES:
        if len(_encoded_names) >= _MAX_KEPT_NAMES:
            _encoded_names.clear()
        _encoded_names[name] = bytes(block)
    return bytes(block)


def _append_integer(block: bytearray, pattern: int, mask: int, value: int) -> None:
    if value < mask:
        block.append(pattern | value)
        return
    block.append(pattern | mask)
    value -= mask
    while value >= 0x80:
        block.append(value & 0x7F | 0x80)
        value >>= 7
    block.append(value)
