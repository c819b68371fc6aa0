"""Sizes of the pages of a parquet file, read before a library decompresses them: a file says in a few bytes that a page
has gigabytes, and a dictionary gives one value to every row.

A page header is a struct of Thrift's compact protocol (https://github.com/apache/parquet-format).
"""

from io import BufferedReader
from typing import Any

TYPE, SIZE, PACKED = 1, 2, 3
"""Fields of a header: a page's type, its bytes, and those that it has in the file."""
OF_DATA = {0: 5, 3: 8}
"""Field that describes a page with values, by its type; its own field 1 is the number of values."""
PER_VALUE = 4
DEEPEST = 8
LONGEST = 1 << 31


def widest(file: BufferedReader, chunk: Any) -> int:
    """Bytes of the largest page of a column in a row group, and at least PER_VALUE for each value in it; no value has
    more. chunk: the column's metadata in pyarrow. ValueError: the pages are not as it says."""
    at = chunk.data_page_offset
    if chunk.has_dictionary_page and chunk.dictionary_page_offset:
        at = min(at, chunk.dictionary_page_offset)
    end, seen, most = at + chunk.total_compressed_size, 0, 0
    while seen < chunk.num_values and at < end:
        file.seek(at)
        header = _struct(file, DEEPEST)
        size, packed = header.get(SIZE), header.get(PACKED)
        if type(size) is not int or type(packed) is not int or size < 0 or packed < 0:
            raise ValueError("a page without its size")
        count = 0
        if (kind := header.get(TYPE)) in OF_DATA:
            said = header.get(OF_DATA[kind])
            count = said.get(1, -1) if isinstance(said, dict) else -1
            if type(count) is not int or count < 0:
                raise ValueError("a page without the number of its values")
        seen, most = seen + count, max(most, size, PER_VALUE * count)
        at = file.tell() + packed
    return most


def _struct(file: BufferedReader, depth: int) -> dict[int, Any]:
    """Whole numbers and structs by field; other values are passed over."""
    if depth == 0:
        raise ValueError("a page header of too many structs")
    found: dict[int, Any] = {}
    field = 0
    while head := _byte(file):
        kind = head & 15
        field = field + (head >> 4) if head >> 4 else _number(file)
        match kind:
            case 1 | 2:  # true, false
                pass
            case 3:
                found[field] = _byte(file)
            case 4 | 5 | 6:
                found[field] = _number(file)
            case 8:
                length = _varint(file)
                if length > LONGEST:
                    raise ValueError(f"a page header with a field of {length} bytes")
                file.seek(length, 1)
            case 12:
                found[field] = _struct(file, depth - 1)
            case _:
                raise ValueError(f"a page header with a field of type {kind}")
    return found


def _number(file: BufferedReader) -> int:
    value = _varint(file)
    return value >> 1 ^ -(value & 1)


def _varint(file: BufferedReader) -> int:
    value = 0
    for shift in range(0, 70, 7):
        byte = _byte(file)
        value |= (byte & 127) << shift
        if byte < 128:
            return value
    raise ValueError("a number of over 10 bytes")


def _byte(file: BufferedReader) -> int:
    if not (byte := file.read(1)):
        raise ValueError("a page header that is cut off")
    return byte[0]
