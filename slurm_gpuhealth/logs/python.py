"""Python exceptions in a log: their class and the innermost frame in the user's code; fingerprints of messages."""

from __future__ import annotations

import re

from slurm_gpuhealth.logs import line

NAME = re.compile(
    r"(?:E\s+|Error executing job.{0,80}|\w+: )?((?:[A-Za-z_]\w{0,60}\.){0,8}(?:Exception|[A-Z_]\w{0,80}"
    r"(?:Error|Exception|Interrupt|Exit|Died|Warning|Timeout|Killed|OutOfMemory|StopIteration|Abort|Failure)))"
    r"(?=: |:$|\(|$)"
)
FRAME = re.compile(r'\s*File "([^"\n]{1,400})", line \d+(?:, in (\S{1,80}))?')
LIBRARY = re.compile(
    r"site-packages|dist-packages|/lib(?:64)?/python\d|^<|/torch/|/deepspeed/|/bin/|/transformers/|/accelerate/|/lightning/|/pytorch_lightning/|/jax/|/ray/|multiprocessing/|/torchrun$"
)
LOOK = 16384
# Parts of a message that differ from run to run; they are replaced in this order.
PARTS = (
    (re.compile(r"https?://\S+"), "<url>"),
    (re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b(?:[:<]\d+>?)?"), "<host>"),
    (re.compile(r"(?:[A-Za-z]:)?(?:/[\w.@%+=,~-]+){1,40}/?"), "<path>"),
    (
        re.compile(
            r"\b0x[0-9a-fA-F]+\b|\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b|\b(?=[a-f]*\d)[0-9a-f]{8,64}\b"
        ),
        "#",
    ),
    (re.compile(r"\b[A-Za-z][A-Za-z-]{0,40}\d+(?:[.-][\w.-]{1,80})?(?=[<:,\s]|$)"), "<name>"),
    (re.compile(r"[-+]?\d+(?:[.,]\d+)*(?:[eE][-+]?\d+)?"), "#"),
    (re.compile(r"(?:# ?){2,}"), "# "),
    (re.compile(r"\s+"), " "),
)
SAFE = re.compile(r"\b(?:float|int|uint|bfloat|fp|bf|complex)\d{1,3}\b")


def exception(message: str) -> str:
    """The exception's class, without its module, if the line is the last one of a traceback; else ""."""
    found = NAME.match(message)
    return found[1].rpartition(".")[2] if found else ""


class Frames:
    """Looks for frames in a block of `size` bytes, and stops when that has cost as much as reading the block."""

    def __init__(self, size: int) -> None:
        self.left = 4096 + size // 64

    def innermost(self, block: bytes, at: int) -> str:
        """The innermost frame of the user's own code, `train.py:step`, in the traceback that ends at `at`; "" if none.

        Lines of other ranks may stand in between: only lines with the same prefix as the line at `at` are read.
        """
        if self.left <= 0:
            return ""
        self.left -= 4
        end = block.find(b"\n", at, at + 200)
        prefix = _prefix(block[at : end if end >= 0 else at + 200].decode("utf-8", "replace"))
        for raw in reversed(block[max(0, at - LOOK) : at].split(b"\n")):
            if b'File "' not in raw:
                if b"Traceback (most" in raw and _prefix(raw[:200].decode("utf-8", "replace")) == prefix:
                    return ""
                continue
            self.left -= 1
            text = raw[-1000:].decode("utf-8", "replace") if len(raw) > 1000 else raw.decode("utf-8", "replace")
            if _prefix(text) != prefix:
                continue
            found = FRAME.search(text)
            if found and not LIBRARY.search(found[1]):
                return f"{found[1].rpartition('/')[2]}:{found[2] or '<module>'}"[:200]
        return ""


def _prefix(text: str) -> tuple[str, ...]:
    """The rank or worker in the line's prefix."""
    for pattern in line.PREFIXES[: line.KEY]:
        found = pattern.match(text)
        if found:
            return tuple(value or "" for value in found.groups())
    return ()


def fingerprint(error: str, where: str, message: str) -> str:
    """error | frame | message, the same on every node, rank and run."""
    kept = SAFE.sub(lambda found: found[0].translate(HIDE), message[:300])
    for pattern, instead in PARTS:
        kept = pattern.sub(instead, kept)
    return f"{error} | {where} | {kept.translate(SHOW).strip()[:160]}"


# The digits in a data type's name belong to the message: they are hidden while the patterns above are applied.
HIDE = str.maketrans("0123456789", "".join(chr(0xE000 + digit) for digit in range(10)))
SHOW = str.maketrans("".join(chr(0xE000 + digit) for digit in range(10)), "0123456789")
