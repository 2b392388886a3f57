"""Reads pickles of plain values: dicts, lists, tuples, texts and numbers. Python's own unpickler is not used.

A user wrote the file, so nothing in it may be called or imported, and no length or index in it is believed. What it
costs is bounded by its bytes: a key is a text or a number (the hash of a nested tuple can take for ever), and no value
is compared or copied here.

Entries of a flight recorder are dicts alike, thousands in a file, of which few are looked at: a dict whose values all
fit FLAT is passed over in one step, and stays packed (`bytes`) until `unpacked` is asked for it.
"""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any, TypeVar

    T = TypeVar("T")

MOST = 2_000_000
"""Steps for one file: each makes at most one small object. A call that is not packed takes 100."""
SIMPLE = rb"h.|j.{4}|K.|M..|J.{4}|\x8a\x08.{8}|[N\x88\x89]|G.{8}"
LIST = rb"\](?:\((?:" + SIMPLE + rb"|\](?:\((?:" + SIMPLE + rb"){0,16}e)?){0,512}e)?"
FLAT = re.compile(rb"\}\((?:(?:h.|j.{4})(?:(?:h.|j.{4}){2}\x86|" + SIMPLE + rb"|" + LIST + rb")){8,64}u", re.DOTALL)
INTS = {b"K": "<B", b"M": "<H", b"J": "<i"}
TEXTS = {b"\x8c": "<B", b"X": "<I"}
PUTS = {b"q": "<B", b"r": "<I"}
GETS = {b"h": "<B", b"j": "<I"}
CONSTANTS = {b"N": None, b"\x88": True, b"\x89": False}
SKIPPED = {b"\x80": 1, b"\x95": 8}
"""Operations without effect here, and the bytes of their arguments: the protocol, the length of a frame."""
CALLS = frozenset(b"c\x93iRob\x81\x92\x82\x83\x84PQ")
"""What imports, calls, makes or changes objects."""


class Refused(ValueError):
    """The file is damaged, or holds more than plain values; the text says which."""


def load(data: bytes) -> tuple[Any, dict[int, Any]]:
    """The value in a pickle, and the memo that `unpacked` needs. Raises Refused for anything but plain values."""
    memo: dict[int, Any] = {}
    return _run(data, memo, packed=True), memo


def unpacked(data: bytes, memo: dict[int, Any]) -> dict[Any, Any]:
    """A packed dict."""
    return _of(dict, _run(data + b".", memo, packed=False))


def _run(data: bytes, memo: dict[int, Any], packed: bool) -> Any:
    try:
        return _steps(data, memo, packed)
    except (IndexError, KeyError, struct.error):
        raise Refused("damaged or cut short") from None


def _steps(data: bytes, memo: dict[int, Any], packed: bool) -> Any:
    stack: list[Any] = []
    marks: list[list[Any]] = []
    at = 0

    def number(form: str) -> int:
        nonlocal at
        (value,) = struct.unpack_from(form, data, at)
        at += struct.calcsize(form)
        return int(value)

    for _ in range(MOST):
        op = data[at : at + 1]
        found = FLAT.match(data, at) if packed and op == b"}" else None
        if found:
            stack.append(found[0])
            at = found.end()
            continue
        at += 1
        if op in GETS:
            stack.append(memo[number(GETS[op])])
        elif op in INTS:
            stack.append(number(INTS[op]))
        elif op in CONSTANTS:
            stack.append(CONSTANTS[op])
        elif op == b"(":
            marks.append(stack)
            stack = []
        elif op == b"]":
            stack.append([])
        elif op == b"}":
            stack.append({})
        elif op in b"eut" and op:
            items, stack = stack, marks.pop()
            if op == b"t":
                stack.append(tuple(items))
            elif op == b"e":
                _of(list, stack[-1]).extend(items)
            else:
                _of(dict, stack[-1]).update((_key(key), value) for key, value in zip(items[::2], items[1::2]))
        elif op in TEXTS:
            size = number(TEXTS[op])
            stack.append(data[at : at + size].decode("utf-8", "replace"))
            at += size
        elif op in PUTS:
            memo[number(PUTS[op])] = stack[-1]
        elif op == b"\x94":
            memo[len(memo)] = stack[-1]
        elif op in b"\x85\x86\x87" and op:
            size = op[0] - 0x84
            if len(stack) < size:
                raise IndexError
            stack[-size:] = [tuple(stack[-size:])]
        elif op == b")":
            stack.append(())
        elif op == b"\x8a":
            size = number("<B")
            if size > 8:
                raise Refused("holds a number beyond 64 bits")
            stack.append(int.from_bytes(data[at : at + size], "little", signed=True))
            at += size
        elif op == b"G":
            (value,) = struct.unpack_from(">d", data, at)
            stack.append(value)
            at += 8
        elif op == b"a":
            value = stack.pop()
            _of(list, stack[-1]).append(value)
        elif op == b"s":
            value, key = stack.pop(), stack.pop()
            _of(dict, stack[-1])[_key(key)] = value
        elif op in SKIPPED:
            at += SKIPPED[op]
        elif op == b".":
            return stack[-1]
        elif not op:
            raise IndexError
        else:
            called = op[0] in CALLS
            raise Refused("would call code: only plain values are read" if called else "holds more than plain values")
    raise Refused("holds too much")


def _of(kind: type[T], value: Any) -> T:
    if type(value) is not kind:
        raise Refused("damaged or cut short")
    return value


def _key(key: Any) -> Any:
    if type(key) not in (str, int):
        raise Refused("has a key that is neither a text nor a number")
    return key
