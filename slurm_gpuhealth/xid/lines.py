"""Parses one kernel message: text without a log's stamp → Event. The catalogue is not used here.

Forms: open-gpu-kernel-modules 595.45.04 (krcReportXid and its neighbours), Linux drivers/pci/pcie/aer.c, mlx5's
health.c and events.c, and lines from real machines. Users choose the process names and paths in other messages, so
every pattern begins at the first character, where the driver's own word stands.
"""

from __future__ import annotations

import re

from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.xid import advise, words
from slurm_gpuhealth.xid.event import Event

TYPE_CHECKING = False
if TYPE_CHECKING:
    from slurm_gpuhealth.findings import Scalar

# Some kernel messages begin with a task's name, 15 bytes that the user chooses: "NAME[PID]: segfault at", "NAME: page
# allocation failure". That is too short for a PCI address, so a message without an address is doubted.
TASK = re.compile(
    r"(?:\\x[0-9a-f]{2}|.){0,15}(?:\[\d+\])?(?:\[\d+\][: ]|: page allocation| invoked oom"
    r"| uses obsolete \(| is deprecated, please use)",
    re.S,
)
COMM = 15
"""Bytes of a task's name. A believed message is longer than that, and than the sign that the kernel puts after it."""
FULL = r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}(?:\.[0-7])?"
PCI = rf"(?:{FULL}|[0-9a-f]{{2}}:[0-9a-f]{{2}}(?:\.[0-7])?)"
ADDRESS = re.compile(r"(?:PCI:)?(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})(\.[0-7])?(?![0-9a-f:])", re.I)
XID = re.compile(r"NVRM: Xid:? ?(?:\(([^)]{0,80})\))?:? ?(\d{1,4})(?:[,:] ?(.*)|\s*)$", re.S)
# An address that somebody has masked.
ELIDED = re.compile(r"PCI:[0-9a-fx.:*]{3,20}(?: GPU-I:.*)?$", re.I)
MIG = re.compile(r" GPU-I:(\d+)")
PID = re.compile(r"pid=(?:(\d+)|'?<unknown>'?)(?:,\s*|\s*$)(name=)?")
# How messages begin: this tells where a process name with commas ends.
MESSAGE = re.compile(
    r"Ch\b|[Cc]hannel |Graphics |GPU |GPC|NVLink|Row |Timeout|Contained|Uncontained|An |DRAM |SRAM |MMU |Engine|\.\.\."
    r"|[0-9a-f]{8}\b|[A-Z_0-9/]+ (?:Non-?f|F)atal|errorString|intr|engmask|caused by|$"
)
PREVIOUS = re.compile(r"caused by previous Xid (\d+)\s*$")
LINK = re.compile(r"\b[Ll]ink (-?\d+)")
DETAILS = (
    re.compile(r"\(GPC (?P<gpc>\d+), TPC (?P<tpc>\d+)(?:, SM (?P<sm>\d+))?\)"),
    re.compile(r"ENGINE (?P<engine>\w+).{0,60}? faulted @ (?P<address>\w+).{0,20}? of type (?P<fault>FAULT_\w+)"),
)
NVLINK_XIDS = frozenset((74, 136, 137, *range(144, 151), 155))
SXID = re.compile(r"nvidia-nvswitch(\d+): SXid \((?:PCI:)?([^)]{0,40})\): (\d{1,6})(?:, ?(.*))?$", re.S)
SXID_HEAD = re.compile(r"(Non-)?fatal\b,?\s*(?:Link (-?\d+)\s*)?(.*)", re.I | re.S)
SXID_PART = re.compile(r"(?:Severity (\d+) (?:Engine instance (\d+))?|Data \{)")
FABRIC_MANAGER = re.compile(
    r"(?:\[[A-Z]+\] \[tid \d+\]|(?:\S+ )?nv-fabricmanager(?:\[\d+\])?:(?: \[[^\]]*\])*) "
    rf"detected NVSwitch (non-)?fatal error (\d+) on fid \d+ on NVSwitch pci bus id ({PCI})(?:.*? port (\d+))?",
    re.I,
)
UUID = re.compile(rf"NVRM: GPU (?:at )?(?:PCI:)?({PCI}): (GPU-[0-9a-f]{{8}}(?:-[0-9a-f]{{4,12}}){{4}})", re.I)
SERIAL = re.compile(rf"NVRM: GPU (?:({PCI}): )?(?:Board Serial Number:|GPU serial number is) (\w+)", re.I)
NVRM = re.compile(rf"NVRM: +(?:GPU(\d+)\b|GPU (?:at )?(?:PCI:)?({PCI})\b|The NVIDIA GPU ({PCI})\b)?(.*)", re.S | re.I)
PEERMEM = re.compile(r"nv(?:idia)?[-_]peer[-_]?mem[ :]")
AER = re.compile(rf"([\w.-]{{1,30}}) ({FULL}): +(.*)", re.I | re.S)
SEVERITY = r"(?:Un)?correct\w+(?: \((?:Non-)?Fatal\))?"
AER_HEAD = re.compile(
    rf"AER: (?:Multiple )?(?P<severity>{SEVERITY}) error (?:message )?received(?P<rest>.*)"
    rf"|(?:AER: )?PCIe Bus Error: severity=(?P<bus>{SEVERITY})(?:, type=(?P<layer>[\w ]+))?"
    r"|DPC: (?P<dpc>containment event|\w[\w ]{0,30} detected).*",
    re.I | re.S,
)
AER_PART = re.compile(
    r"(?:AER: +)?(?:device \[(?P<device>[0-9a-f:]{9})\] error status/mask=(?P<status>[0-9a-f]+)/(?P<mask>[0-9a-f]+)"
    r"|\[ ?(?P<bit>\d\d?)\] (?P<name>[^(]*)(?P<first>\(First\))?|device has no AER-aware driver|TLP Header:"
    # what the kernel says without "AER: ": before 4.20, and where the firmware reports the error (APEI)
    r"|aer_\w+[:=]|Error of this Agent|can't find device of ID|broadcast \w+ message|Root Port link has been reset)"
    r"|AER:(?! enabled with IRQ)",
    re.I,
)
MLX = re.compile(rf"mlx[45]_\w+ ({FULL})(?: [\w-]+)?: (.*)", re.I | re.S)


def read(text: str, line: int, uptime: float | None = None, logged: bool = True) -> Event | None:
    """The message as an event; None if it is not about our devices. `logged`: a log's stamp stood before it."""
    if text.startswith(("NVRM: Xid ", "NVRM: Xid: ")):
        return _xid(text, line, uptime, logged)
    if text.startswith("NVRM: "):
        return None if TASK.match(text) else _nvrm(text, line, uptime)
    if text.startswith("nvidia-nvswitch"):
        return _sxid(text, line, uptime)
    if text.startswith("mlx"):
        return _mlx(text, line, uptime) or _aer(text, line, uptime)
    if text.startswith("mce: [Hardware Error]"):
        meaning = "The processor reports a machine check"
        return Event(line, "mce", uptime=uptime, cls="hardware", word="machine-check", meaning=meaning, message=text)
    if PEERMEM.match(text) and not TASK.match(text):
        return Event(
            line,
            "nvrm",
            uptime=uptime,
            cls="driver",
            word="peermem",
            meaning="GPUDirect RDMA (peer memory) complains",
            message=text,
        )
    return _aer(text, line, uptime) or _fabric_manager(text, line, uptime)


def pci(text: str, function: bool = False) -> str | None:
    """The address at the start of `text`, as `dddd:bb:dd`; with `function` and if it has one, as `dddd:bb:dd.f`."""
    found = ADDRESS.match(text)
    if not found:
        return None
    domain, bus, device, fn = found.groups()
    return f"{int(domain or '0', 16):04x}:{bus}:{device}{fn or '' if function else ''}".lower()


def _xid(text: str, line: int, uptime: float | None, logged: bool) -> Event | None:
    found = XID.match(text)
    if not found:
        return None
    where, number, message = found[1] or "", int(found[2]), found[3] or ""
    address = pci(where)
    # "NVRM: Xid 79, x" fits into a task's name, an address does not. The driver always prints one; a quote may lack it.
    if not address and not ELIDED.match(where) and (logged or TASK.match(text)):
        return None
    pid, process, message = _process(message)
    instance = MIG.search(where)
    previous = PREVIOUS.search(message) if number == 45 else None
    nvlink = number in NVLINK_XIDS
    link = LINK.search(message) if nvlink else None
    fatal = None
    if nvlink:
        fatal = True if re.search(r"\b[Ff]atal\b", message) else None
        fatal = False if re.search(r"\bnon-?fatal\b", message, re.I) else fatal
    before = int(previous[1]) if previous else None
    cls, action, meaning, more = advise.on_xid(number, message if nvlink or number == 154 else "", before)
    details: dict[str, Scalar] = dict(more)
    for pattern in DETAILS:
        seen = pattern.search(message) if number in (13, 31) else None
        if seen:
            details.update({k: int(v) if v.isdecimal() else v for k, v in seen.groupdict().items() if v})
    return Event(
        line, "xid", number, address, pid, process, int(instance[1]) if instance else None, fatal,
        int(link[1]) if link else None, before, cls, action, meaning, message, uptime, details=details,
    )  # fmt: skip


def _process(rest: str) -> tuple[int | None, str | None, str]:
    """pid, name and message of `pid=P, name=NAME, MSG`. NAME is at most 15 characters of anything, `, ` included."""
    found = PID.match(rest)
    if not found:
        return None, None, rest
    pid, message = int(found[1]) if found[1] else None, rest[found.end() :]
    if not found[2]:
        return pid, None, message
    ends = [end.start() for end in re.finditer(",(?: |$)", message[:120])]
    short = [end for end in ends if end <= 15] or ends[:1]
    end = next((end for end in short if MESSAGE.match(message[end + 2 :])), short[0] if short else len(message))
    name = message[:end]
    return pid, None if name.strip("'") in ("<unknown>", "") else name, message[end + 2 :]


def _nvrm(text: str, line: int, uptime: float | None) -> Event | None:
    """All other messages of the driver with the prefix `NVRM:`."""
    uuid, serial, found = UUID.match(text), SERIAL.match(text), NVRM.match(text)
    if uuid:
        return Event(
            line, "gpu_uuid", pci=pci(uuid[1]), meaning="Names the GPU", details={"uuid": uuid[2]}, message=text
        )
    if serial:
        where = pci(serial[1]) if serial[1] else None
        return Event(
            line, "gpu_serial", pci=where, meaning="Names the GPU", details={"serial": serial[2]}, message=text
        )
    if not found:
        return None
    index, at, the_gpu, message = found.groups()
    where = pci(at or the_gpu or "") or next((pci(one) for one in re.findall(rf"\b{FULL}", message[:160], re.I)), None)
    event = Event(
        line, "nvrm", pci=where, cls="driver", message=text, details={"gpu_index": int(index)} if index else {}
    )
    if "fallen off the bus" in message:
        cls, action, meaning, details = advise.on_xid(79, "", None)
        return replace(event, kind="fallen_off_bus", code=79, cls=cls, action=action, meaning=meaning, details=details,
                       part=where is None and "not responding" in message)  # fmt: skip
    if the_gpu:  # the first of three lines about a GPU that is gone or that this driver does not support
        return replace(event, word="gone-head", meaning="The driver says something about this GPU in its next lines")
    if words.QUIET.match(text):
        return None
    said = words.named(words.NVRM, message, max(0, COMM + 1 - found.start(4)))
    word, meaning = said or ("other", "A message of the NVIDIA driver")
    return replace(event, word=word, meaning=meaning)


def _sxid(text: str, line: int, uptime: float | None) -> Event | None:
    found = SXID.match(text)
    if not found:
        return None
    switch, where, number, message = int(found[1]), found[2], int(found[3]), found[4] or ""
    head, part = SXID_HEAD.match(message), SXID_PART.match(message)
    fatal = head[1] is None if head else None
    cls, action, meaning, more = advise.on_sxid(number, fatal)
    details = {**more, "nvswitch": switch}
    if part and part[2]:
        details["engine"] = int(part[2])
    link = int(head[2]) if head and head[2] else None
    message = head[3].removesuffix(" (First)") if head else message
    return Event(
        line, "sxid", uptime=uptime, code=number, pci=pci(where, function=True), fatal=fatal, link=link,
        cls=cls, action=action, meaning=meaning, message=message, part=bool(part), details=details,
    )  # fmt: skip


def _fabric_manager(text: str, line: int, uptime: float | None) -> Event | None:
    """The fabric manager's own report of a switch error, in its log or through syslog."""
    found = FABRIC_MANAGER.match(text)
    if not found:
        return None
    fatal = found[1] is None
    cls, action, meaning, details = advise.on_sxid(int(found[2]), fatal)
    link = int(found[4]) if found[4] else None
    return Event(
        line, "sxid", uptime=uptime, code=int(found[2]), pci=pci(found[3], function=True), fatal=fatal, link=link,
        cls=cls, action=action, meaning=meaning, message=text, details=details,
    )  # fmt: skip


def _aer(text: str, line: int, uptime: float | None) -> Event | None:
    """One of the lines that the kernel prints for one PCIe error."""
    device = AER.match(text)
    if not device or device.end(2) < COMM:
        return None
    where, message = pci(device[2], function=True), device[3]
    head = AER_HEAD.match(message)
    part = None if head else AER_PART.match(message)
    if not head and not part:
        return None
    said = {key: value.strip() for key, value in (head or part).groupdict().items() if value}  # type: ignore[union-attr]
    severity = said.pop("bus", "") or said.pop("severity", "")
    if said.pop("dpc", ""):
        severity = "Uncorrectable (Fatal)" if "ERR_FATAL" in message else "Uncorrectable"
    details: dict[str, Scalar] = {"severity": severity} if severity else {}
    source = re.search(FULL, said.pop("rest", ""), re.I)
    if source:
        details["source"] = pci(source[0], function=True)
    if "bit" in said:
        details["bit"] = int(said.pop("bit"))
    fatal = "(fatal)" in severity.lower() if severity else None
    names = {"": "detail", "c": "corrected", "u": "fatal" if fatal else "uncorrected"}
    word = names[severity[:1].lower()]
    cls = "information" if word in ("corrected", "detail") else "hardware"
    return Event(
        line, "aer", uptime=uptime, pci=where, fatal=fatal, cls=cls,
        meaning=f"PCIe error, {said.get('name') or severity or 'no severity given'}", message=message,
        part=not (head and head["severity"]), word=word, details={**details, **said},
    )  # fmt: skip


def _mlx(text: str, line: int, uptime: float | None) -> Event | None:
    found = MLX.match(text)
    if not found:
        return None
    message = found[2]
    name = words.named(words.MLX, message)
    if not name and not words.TROUBLE.search(message):
        return None
    word, meaning = name or ("other", "A message of the adapter's driver")
    cls = "information" if word.startswith("link") else "driver" if word == "other" else "hardware"
    return Event(
        line,
        "mlx5",
        uptime=uptime,
        pci=pci(found[1], function=True),
        cls=cls,
        word=word,
        meaning=meaning,
        message=message,
    )
