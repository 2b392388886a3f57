"""The table that `dcgmi diag` prints for people (no `-j`), read into the shape of documents.py.

v4: `| pcie | Fail |`, `| | GPU2: Fail |`, `| Warning: GPU2 | text |`; v3: `| PCIe | Pass - All |`,
`| | Fail - GPU: 1 |`, `| Warning | text |`. It has no error numbers, so failures stay unclassified.
"""

from __future__ import annotations

import re

from slurm_gpuhealth.diagnose.documents import OLD_NAMES, SOFTWARE, Reading, Result, Test, Warned, line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

WIDTH = 45
"""dcgmi cuts a message into pieces of so many characters, even inside words."""
ENTITY = re.compile(r"GPU ?(\d+): (Pass|Fail|Skip|Warn)$")
GROUP = re.compile(r"(Pass|Fail|Skip|Warn)(?: - (?:All|GPUs?:? ?([\d, ]+)))?$")
SECTION = re.compile(r"[|+]-+\s+(\w+)\s+-+[+|]")


class _Rows:
    """The rows of one test, collected from top to bottom."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.summary = ""
        self.status: dict[int, str] = {}
        self.messages: list[tuple[int | None, str]] = []

    def test(self) -> Test:
        texts = [(self._owner(gpu, text), Warned(None, line(text))) for gpu, text in self.messages]
        # "Fail - All" and the level 1 checks of v3 name GPUs only in their warnings.
        status = self.status or {gpu: self.summary for gpu, _ in texts if gpu is not None}
        results = tuple(Result(gpu, s, tuple(w for g, w in texts if g == gpu)) for gpu, s in status.items())
        own = tuple(w for g, w in texts if g not in status)
        if not results and self.summary:  # "Pass - All" names no GPU
            return Test(self.name, (Result(None, self.summary, own),))
        return Test(self.name, results, self.summary, own)

    def _owner(self, gpu: int | None, text: str) -> int | None:
        """The GPU of a warning. v3 names it in the text, or it is the only GPU that failed."""
        failed = {n for n, status in self.status.items() if status != "pass"}
        named = {int(n) for n in re.findall(r"\bGPU ?(\d{1,4})\b", text)}
        told = (named & failed or failed) if self.status else named
        return told.pop() if gpu is None and len(told) == 1 else gpu


def read(text: str) -> Reading | None:
    """The table in `text`; None if there is none."""
    if "| Diagnostic " not in text or "=+" not in text:
        return None
    tests: list[_Rows] = []
    version = None
    open_message = False  # whether a row without a name continues a warning
    for section, name, cell in _rows(text):
        if not name:
            if tests and not _status(tests[-1], cell) and open_message:
                owner, message = tests[-1].messages[-1]
                tests[-1].messages[-1] = (owner, message + cell)
            continue
        open_message = name.startswith(("Warning", "Error"))
        if section == "Metadata":
            version = cell.strip() if name == "DCGM Version" else version
        elif open_message:
            if not tests:  # the lines of v2 and v3 before any check
                tests.append(_Rows(SOFTWARE))
                tests[-1].summary = "fail"
            gpu = re.search(r"GPU ?(\d+)", name)
            tests[-1].messages.append((int(gpu[1]) if gpu else None, cell))
        elif not name.startswith("Info"):
            word = "_".join(name.lower().split())
            tests.append(_Rows(SOFTWARE if section == "Deployment" else OLD_NAMES.get(word, word)))
            _status(tests[-1], cell)
    return Reading(tuple(rows.test() for rows in tests), version=version) if tests else None


def _rows(text: str) -> Iterator[tuple[str, str, str]]:
    """(section, left cell, right cell as wide as dcgmi made it) for each row of the table."""
    section = ""
    for row in text.splitlines():
        if begins := SECTION.match(row):
            section = begins[1]
        elif row.startswith("|") and row.count("|") >= 3:
            _, left, right = row.split("|")[:3]
            if left.strip() != "Diagnostic":
                yield section, left.strip(), right[1 : WIDTH + 1]


def _status(rows: _Rows, cell: str) -> bool:
    """Take a cell if it is a status; else False."""
    if entity := ENTITY.match(cell.strip()):
        rows.status[int(entity[1])] = entity[2].lower()
    elif group := GROUP.match(cell.strip()):
        if group[2]:
            rows.status.update((int(n), group[1].lower()) for n in re.findall(r"\d+", group[2]))
        else:
            rows.summary = group[1].lower()
    else:
        return False
    return True
