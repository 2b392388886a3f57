"""Events of one check → findings: equal events are counted, consequences are folded into their cause. Pure.

45 (channels torn down)                 into what came before it on that GPU; alone it stays information
119 120 154 45, AER, NVRM's own words   into 79 of the same GPU, whichever line said that the GPU is gone
63 64 171 172                           into 48 of the same GPU: which memory, and whether a row was remapped
154 (recovery action)                   into its cause, unless it asks for more than the cause does
SXid, fatal, on a link                  into the Xid 74 at the GPU of that link
NVRM's words about GSP                  into 119 and 120
"""

from __future__ import annotations

from slurm_gpuhealth.findings import SEVERITIES, Finding, Gpu
from slurm_gpuhealth.xid import catalog

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from slurm_gpuhealth.findings import Scalar, Severity
    from slurm_gpuhealth.xid.event import Event

LIMIT = 200
"""Findings of one check; if there are more, one further finding says so."""
SOURCES = {
    "xid": "xid", "fallen_off_bus": "xid", "sxid": "sxid", "aer": "aer", "nvrm": "nvrm", "mlx5": "ib", "mce": "host",
}  # fmt: skip
AFTERMATH = {  # code → its consequences on the same GPU
    "79": ("45", "119", "120", "154"),
    "48": ("63", "64", "171", "172"),
}
RANK = {"RESTART_BM": 3, "RESET_GPU": 2, "DRAIN_P2P": 1}
WORDS: dict[str, Severity] = {  # NVRM's and the adapters' events without a number
    "rate-limit": "info",
    "link": "info",
    "peermem": "info",
    "command": "info",
}


class Group:
    """Equal events: the worst of them, and their number. The only mutable object here; it lives for one `fold`."""

    def __init__(self, event: Event, source: str, code: str) -> None:
        self.event, self.source, self.code = event, source, code
        self.first, self.severity, self.count = event, severity(event), 0
        self.links: dict[int | None, int] = {}
        self.units: dict[str, None] = {}
        self.folded: list[Group] = []
        self.more: dict[str, Scalar] = {}

    def add(self, event: Event) -> None:
        self.count += event.count
        worse = severity(event)
        if event.code == 154 or SEVERITIES.index(worse) > SEVERITIES.index(self.severity):
            self.event, self.severity = event, worse  # the last of several recovery actions holds
        if event.link is not None:
            self.links[event.link] = self.links.get(event.link, 0) + event.count
        if "tpc" in event.details and len(self.units) < 16:
            self.units[f"{event.details.get('gpc')}/{event.details['tpc']}"] = None


def fold(
    events: Iterable[Event], at: Callable[[float | None], float], bridges: Callable[[], Mapping[str, str]]
) -> list[Finding]:
    """Findings in the order in which they were first seen.

    `at`: seconds since boot → time. `bridges`: PCI address with function → the GPU behind it, `""` for several. Called
    only when there are PCIe errors, to leave out those of other devices.
    """
    groups: dict[tuple[str, str, str | None], Group] = {}
    for event in events:
        source = SOURCES.get(event.kind)
        code = str(event.code) if event.code is not None else event.word
        if source is None or code in ("other", "detail"):
            continue
        key = source, code, event.pci
        if key not in groups:
            groups[key] = Group(event, source, code)
        groups[key].add(event)
    ours = _ours(list(groups.values()), bridges)
    worst = sorted(ours, key=lambda group: -SEVERITIES.index(group.severity))[:LIMIT]
    kept = [group for group in ours if group in worst]
    for group in kept:
        if group.code == "74" and max(group.links.values(), default=0) > 2:
            group.more["investigate"] = "CONTACT_SUPPORT"  # NVIDIA: more than twice on one link means hardware
    for effect in kept:
        cause = _cause(effect, kept)
        if cause:
            cause.folded.append(effect)
    folded = {id(effect) for group in kept for effect in group.folded}
    findings = [_finding(group, at) for group in kept if id(group) not in folded]
    if len(ours) > LIMIT:
        message = f"{len(ours) - LIMIT} more kinds of kernel events were left out: the kernel log is being flooded."
        findings.append(Finding(at(None), "kernel", "flood", message))
    return findings


def severity(event: Event) -> Severity:
    """The severity by the source alone, before the policy table."""
    if event.kind == "aer":
        return {"fatal": "fault", "uncorrected": "warning"}.get(event.word, "info")  # type: ignore[return-value]
    if event.kind in ("nvrm", "mlx5"):
        return WORDS.get(event.word, "warning")
    if event.part or (event.kind == "sxid" and event.fatal is None):
        return "info"  # only a data line: the line that says what happened came earlier or is lost
    if event.action in ("RESET_GPU", "RESTART_BM") or (event.action == "CONTACT_SUPPORT" and event.cls == "hardware"):
        return "fault"
    quiet = event.cls != "hardware" or event.kind == "sxid" or (event.action == "IGNORE" and event.link is not None)
    return "info" if quiet else "warning"


def _ours(groups: list[Group], bridges: Callable[[], Mapping[str, str]]) -> list[Group]:
    """The events without PCIe errors of devices that are neither a GPU nor a port above a GPU."""
    if not any(group.source == "aer" for group in groups):
        return groups
    gpus, kept = bridges(), []
    for group in groups:
        if group.source == "aer":
            ports = (group.event.pci, group.event.details.get("source"))
            found = next((gpus[str(port)] for port in ports if port in gpus), None)
            if found is None:
                continue
            group.more.update(port=group.event.pci, gpu=found)
        kept.append(group)
    return kept


def _cause(effect: Group, groups: list[Group]) -> Group | None:
    """The group that explains this one."""
    for cause in groups:
        if cause is effect or cause in effect.folded or (cause.source == effect.source and cause.code in ("45", "154")):
            continue
        same_gpu = _gpu(cause) == _gpu(effect)
        if cause.source == "xid" and effect.source == "xid":
            if same_gpu and effect.code in AFTERMATH.get(cause.code, ()):
                return cause
            if cause.code == effect.code == "79" and effect.event.pci is None:
                return cause  # only its last line is here, not its first
            if same_gpu and (effect.code == "45" or (effect.code == "154" and _rank(cause) >= _rank(effect))):
                return cause
        if cause.code == "79" and effect.source in ("aer", "nvrm") and (same_gpu or effect.event.pci is None):
            return cause
        if cause.code in ("119", "120") and effect.code in ("gsp-timeout", "rate-limit", "memory-subsystem"):
            return cause
        on_link = any(link is not None and link >= 0 for link in effect.links)
        if cause.code == "74" and cause.source == "xid" and effect.source == "sxid" and on_link:
            return cause if effect.event.fatal and cause.severity == "fault" else None
    return None


def _finding(group: Group, at: Callable[[float | None], float]) -> Finding:
    event = group.event
    action = event.action
    recovery = [effect.event for effect in group.folded if effect.code == "154"]
    if recovery and action == "XID_154_EVAL":
        action = recovery[-1].action
    elif action == "XID_154_EVAL":
        action = "RESTART_APP"
    details: dict[str, Scalar] = {
        "class": event.cls,
        "action": action,
        "fatal": event.fatal,
        "link": event.link,
        "pid": event.pid,
        "process": harmless(event.process) if event.process else None,
        "mig": event.mig,
        "previous": event.previous,
        **event.details,
        **group.more,
        "units": " ".join(group.units) if len(group.units) > 1 else None,
        "with": ", ".join(_name(effect) + (f" x{effect.count}" if effect.count > 1 else "") for effect in group.folded),
        "pci": event.pci,
    }
    if group.code == "48":
        codes = {effect.code for effect in group.folded}
        details["remap"] = "failed" if "64" in codes else "recorded" if "63" in codes else None
    gpu = _gpu(group)
    text = f"{_name(group)}{f' on {gpu or event.pci}' if gpu or event.pci else ''}: {event.meaning}."
    if group.code == "48" and details["remap"]:
        text += f" A row remapping {'failed' if details['remap'] == 'failed' else 'waits for the reset'}."
    if event.details.get("recovery"):
        text += f" Now: {event.details['recovery']}."
    said = "" if event.kind in ("xid", "fallen_off_bus", "sxid") else f" The kernel: {event.message}"
    if action:
        said = f" NVIDIA: {catalog.advice(action)}"
    kept = {key: harmless(value) if isinstance(value, str) else value for key, value in details.items()}
    return Finding(
        at(group.first.uptime),
        group.source,
        group.code,
        harmless(text + said),
        Gpu(pci=gpu) if gpu else None,
        severity(event) if action == event.action else "fault" if _rank(group, action) >= 2 else "info",
        count=group.count,
        details={key: value for key, value in kept.items() if value not in (None, "")},
    )


def harmless(text: str) -> str:
    """The text without control characters, cut to a length that fits a line of a log."""
    return "".join(c if c.isprintable() else "?" for c in text[:400])


def _gpu(group: Group) -> str | None:
    """The GPU that it is about, `dddd:bb:dd`."""
    if group.source == "aer":
        return str(group.more.get("gpu") or "") or None
    return group.event.pci if group.source in ("xid", "nvrm") else None


def _rank(group: Group, action: str | None = None) -> int:
    return RANK.get(action or group.event.action or "", 0)


def _name(group: Group) -> str:
    words = {
        "xid": "Xid",
        "sxid": "SXid",
        "aer": "PCIe error",
        "nvrm": "NVIDIA driver",
        "ib": "InfiniBand adapter",
        "host": "host",
    }
    return f"{words[group.source]} {group.code}"
