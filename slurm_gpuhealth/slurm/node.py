"""Slurm's records as values: a node, a job, the configuration, the list of gres. Text in, values out, no I/O.

Admins and users can put almost anything into reasons, comments and job names, even newlines. An ambiguous text raises
ValueError; nothing is guessed. Samples: tests/corpus/slurm.
"""

from __future__ import annotations

import re

from slurm_gpuhealth.frozen import frozen
from slurm_gpuhealth.slurm import reason as reasons

TYPE_CHECKING = False
if TYPE_CHECKING:
    from slurm_gpuhealth.slurm.reason import Owner, Reason

STAMP = re.compile(r" \[([^\s@\]]+)@([^\s\]]+)\](?= [A-Z]\w*=|\s*$)")
"""The end of a reason. If a reason has a newline, scontrol prints the rest after this stamp, behind eight spaces. Then
the stamp is not the end: the whole text counts as the reason, and it is not ours."""
INSTANCE = re.compile(r" Instance(?:Id|Type)=")
JOB_STATE = re.compile(
    r" JobState=(?P<state>[A-Z_]+) Reason=(?P<reason>\S*)(?: [A-Za-z]+=\S*){1,4}?"
    r" Requeue=(?P<requeue>[01]) Restarts=(?P<restarts>\d+) BatchFlag=(?P<batch>\d) Reboot=\d"
    r" ExitCode=(?P<code>\d+):(?P<signal>\d+)"
)
JOB_TASK = re.compile(r"JobId=\d+ ArrayJobId=(\d+) ArrayTaskId=(\d+) ")
EXCLUDED = re.compile(r" ReqNodeList=(\S+) ExcNodeList=([\w.,\[\]()-]+) ")
JOB_NODES = re.compile(r" NumNodes=(\d+)(?:-\d+)? NumCPUs=")
JOB_START = re.compile(r" StartTime=(\S+) EndTime=\S+ Deadline=")
EVENT = "NodeName,TimeStart,TimeEnd,State,Reason"
OUT = {"DRAIN": "DRAIN", "FAIL": "FAIL", "DOWN": "DOWN", "INVAL": "DRAIN", "BOOT": "BOOT"}
"""slurmdbd's states → Slurm's orders. INVAL hides which it was, while slurmd reports less than configured."""
SERVING = ("idle", "mixed", "allocated", "completing", "planned", "reserved", "blocked")
"""sinfo's words for a node that is not drained. Without accounting 23.11 to 25.11 keep a reason when its drain ends."""
EXPEDITES = (25, 11)
"""The first Slurm that knows --requeue=expedite. scontrol of 22.05 does not know --json."""
DEVICES = re.compile(r"([^\[\],]+)(?:\[([\d,-]+)\])?")


@frozen
class NodeRecord:
    """slurmctld's record of a node."""

    name: str
    base: str
    """`IDLE`, `MIXED`, `ALLOCATED`, `DOWN`, `FUTURE`, …"""
    flags: frozenset[str]
    """`DRAIN`, `MAINTENANCE`, `NOT_RESPONDING`, …"""
    reason: str = ""
    reason_user: str = ""
    reason_time: float = 0.0
    """Seconds since the epoch; 0 without a reason."""
    comment: str = ""
    extra: str = ""
    gres: str = ""
    partitions: tuple[str, ...] = ()
    boot_time: float = 0.0
    alloc_cpus: int = 0
    alloc_tres: str = ""

    @property
    def owner(self) -> Owner:
        return reasons.owner(self.base, self.flags, self.reason)

    @property
    def ours(self) -> Reason | None:
        """Our reason if the hold is ours."""
        return reasons.parse(self.reason) if self.owner == "us" else None

    @property
    def counts(self) -> Reason | None:
        """Our reason while the node is out of service, as the budget counts it (`parse_holds`): also if the hold is not
        ours any more, because an admin has set the node to FAIL or it is DOWN."""
        return reasons.parse(self.reason) if self.owner != "none" else None

    @property
    def has_job(self) -> bool:
        """Whether a job is here, or is ending: its epilog still runs."""
        return bool(self.alloc_cpus or self.alloc_tres or "COMPLETING" in self.flags)


@frozen
class Hold:
    """A node that we hold, as the budget sees it."""

    node: str
    ours: Reason
    time: float
    """When slurmctld accepted the reason, in its whole seconds: the order of claims."""


@frozen
class Event:
    """A row of slurmdbd's record: a node was out of service."""

    node: str
    start: float
    end: float
    """0.0: it still is out."""
    state: str
    """`DRAIN`, `DOWN` or `FAIL`; `BOOT`: it reboots."""
    reason: str
    """Its first 255 bytes."""


@frozen
class JobRecord:
    state: str
    reason: str
    requeue: bool
    restarts: int
    batch: bool
    exit_code: int
    signal: int
    num_nodes: int
    name: str
    """This job's name for scontrol: `12`, or `10_2`: the last task of an array has the number of the whole array."""
    het: bool = False
    """A component of a heterogeneous job: the other components may have begun."""
    start: float = 0.0
    """When this run began; 0.0: not yet, or a name imitates the field. A job's number may be used again one day."""


def parse_node(text: str, name: str) -> NodeRecord:
    """The answer of `scontrol -o show node NAME`. Raises ValueError if it is not that node's record."""
    head, _, rest = text.strip().partition(" Reason=")
    fields = dict(word.split("=", 1) for word in reversed(head.split()) if "=" in word)  # the first of a key wins
    if fields.get("NodeName") != name or not fields.get("State"):
        raise ValueError(f"not the record of node {name}")
    base, *flags = (word.rstrip("*~#!%$@^-") for word in fields["State"].split("+"))
    reason, user, time, after = _parse_reason(rest) if rest else ("", "", 0.0, head)
    comment, extra = _parse_remarks(after)
    return NodeRecord(
        name=name,
        base=base,
        flags=frozenset(flags),
        reason=reason,
        reason_user=user,
        reason_time=time,
        comment=comment,
        extra=extra,
        gres=_given(fields.get("Gres", "")),
        partitions=tuple(fields["Partitions"].split(",")) if fields.get("Partitions") else (),
        boot_time=_seconds(fields.get("BootTime", "")),
        alloc_cpus=int(fields.get("CPUAlloc", "0")),
        alloc_tres=_given(fields.get("AllocTRES", "")),
    )


def parse_nodes(text: str) -> list[NodeRecord]:
    """The records in the answer of `scontrol -o show node`; what is not a record, or may be forged, is left out.

    A reason with a newline can contain a text like a record, so a name that comes twice is left out.
    """
    records: dict[str, NodeRecord | None] = {}
    for piece in re.split(r"^(?=NodeName=)", text, flags=re.MULTILINE):
        name = piece.partition(" ")[0].partition("=")[2]
        try:
            records[name] = None if name in records else parse_node(piece, name)
        except ValueError:
            continue
    return [record for record in records.values() if record]


def parse_job(text: str, job_id: int) -> JobRecord:
    """The answer of `scontrol -o show job ID`.

    The user chooses job name and comment, which may have newlines and stand before and after what we read. So the part
    that only Slurm writes must be there exactly once: if a user forges a second one, this raises ValueError.
    """
    pieces = re.split(
        r"^(?=JobId=\d+ )", text, flags=re.MULTILINE
    )  # for an array's last task scontrol prints all tasks
    records = [piece for piece in pieces if piece.startswith(f"JobId={job_id} ")]
    states = list(JOB_STATE.finditer(records[0])) if len(records) == 1 else []
    nodes = JOB_NODES.findall(records[0]) if len(records) == 1 else []
    if len(states) != 1 or len(nodes) != 1:
        raise ValueError(
            f"job {job_id}: its record can't be read safely"
        )  # the record itself is not shown: it has the user's words
    found = states[0]
    task, starts = JOB_TASK.match(records[0]), JOB_START.findall(records[0])
    return JobRecord(
        state=found["state"],
        reason=found["reason"],
        requeue=found["requeue"] == "1",
        restarts=int(found["restarts"]),
        batch=found["batch"] != "0",
        exit_code=int(found["code"]),
        signal=int(found["signal"]),
        num_nodes=int(nodes[0]),
        name=f"{task[1]}_{task[2]}" if task else str(job_id),
        het=records[0].startswith(f"JobId={job_id} HetJobId="),
        start=_seconds(starts[0]) if len(starts) == 1 else 0.0,
    )


def parse_version(text: str) -> tuple[int, ...]:
    """`slurm-wlm 22.05.8` → (22, 5, 8)."""
    return tuple(map(int, re.findall(r"\d+", text)[:3]))


def parse_expedited(text: str, job_id: int) -> bool:
    """`scontrol --json show job ID`: whether it is of --requeue=expedite (25.11 and later) and failed by its exit code.

    The one-line record is not used: there ExpeditedRequeue=Yes stands between texts that the job's user writes.
    """
    import json

    try:
        (job,) = (job for job in json.loads(text)["jobs"] if job["job_id"] == job_id)
        if "EXPEDITED_REQUEUE" not in job["flags"]:
            return False
        return "FAILED" in job["job_state"] and job["exit_code"]["return_code"]["number"] > 0
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"job {job_id}: no record of it in JSON") from None


def parse_excluded(text: str) -> tuple[str, ...] | None:
    """ExcNodeList of `scontrol -o show job`, a hostlist; None if the job names its nodes, or this is not known."""
    found = EXCLUDED.findall(text)
    if len(found) != 1 or found[0][0] != "(null)":
        return None
    return (found[0][1],) if found[0][1] != "(null)" else ()


def parse_pending(text: str) -> list[tuple[tuple[str, ...], str]]:
    """`squeue -o '%P|%a|%r'`: partitions and Slurm's reason of each job; users can't write any of it."""
    jobs = []
    for line in text.splitlines():
        partitions, account, reason = (*line.split("|", 2), "", "")[:3]
        if account == "(null)" and reason == "InvalidAccount":
            reason = "None"  # without accounting, 23.11.4 says so now and then of a job that waits for a node
        jobs.append((tuple(partitions.split(",")), reason.strip()))
    return jobs


def parse_config(text: str) -> dict[str, tuple[str, ...]]:
    """`scontrol show config`: key → values. 22.05 has `Prolog = X`, later releases `Prolog[0] = X`, `Prolog[1] = Y`."""
    config: dict[str, tuple[str, ...]] = {}
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        name = key.strip().partition("[")[0]
        if equals and name and " " not in name:
            config[name] = config.get(name, ()) + ((value.strip(),) if value.strip() != "(null)" else ())
    return config


def parse_events(text: str) -> list[Event]:
    """`sacctmgr -n -P show event format=EVENT`; other lines, such as a reason's second line, are left out."""
    rows = [line.split("|", 4) for line in text.splitlines()]
    found = [
        Event(node, _seconds(start), _seconds(end), next((OUT[one] for one in OUT if one in state), ""), reason)
        for node, start, end, state, reason in (row for row in rows if len(row) == 5)
    ]
    return sorted((one for one in found if one.start and one.state), key=lambda one: one.start)


def parse_up(text: str) -> float:
    """How long slurmctld had been up when it wrote `scontrol show config`; both times are by its clock."""
    head, _, rest = text.partition("\n")
    boot = _seconds(parse_config(rest).get("BOOT_TIME", ("",))[0])
    said = _seconds(head.rpartition(" ")[2])
    return max(0.0, said - boot) if boot and said else float("inf")


def parse_gres(text: str) -> tuple[tuple[str, ...], ...]:
    """`slurmd -G`: the device files at each position in Slurm's list of GPUs, the GPU's own file first.

    SLURM_JOB_GPUS counts the positions in this list. `Index=` is something else: a number from the file's name. A MIG
    slice is one position with several files. Raises ValueError if the files do not match the count.
    """
    positions: list[tuple[str, ...]] = []
    for line in text.splitlines():
        if " Name=gpu " not in line:  # an MPS or shard gres has its own lines for the same files
            continue
        match = re.search(r" Count=(\d+) .*?\bFile=(\S+)", line)
        count, files = (int(match[1]), expand(match[2])) if match else (0, ())
        if count == 1 and files:
            positions.append(files)
        elif count == len(files) > 0:
            positions += [(file,) for file in files]
        else:
            raise ValueError(f"slurmd -G: {count} GPUs with {len(files)} device files: {line.strip()!r}")
    return tuple(positions)


def parse_shared(text: str) -> bool:
    """`slurmd -G`: whether several jobs may have a part of the same GPU, by shards or MPS."""
    return " Name=shard " in text or " Name=mps " in text


def expand(text: str) -> tuple[str, ...]:
    """`/dev/nvidia[0-1,3],/dev/x` → its files; leading zeros are kept."""
    names: list[str] = []
    for stem, ranges in DEVICES.findall(text):
        for item in ranges.split(",") if ranges else [""]:
            first, _, last = item.partition("-")
            if not item:
                names.append(stem)
                continue
            if int(last or first) - int(first) > 4096:
                raise ValueError(f"{text[:80]!r}: too long a range")
            names += [f"{stem}{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1)]
    return tuple(names)


def parse_holds(text: str, every: bool, one: str = "") -> tuple[list[Hold], int]:
    """`sinfo -h -a -N -o '%N|%G|%H|%T|%E'`: the nodes that we hold, and how many nodes there are.

    `every`: count nodes without GPUs too. ValueError if the node `one` is not counted. sinfo lists a node once for each
    partition. A reason with a newline continues in the next line; then it is not ours.
    """
    seen: dict[str, str] = {}
    times: dict[str, float] = {}
    name = ""
    for line in text.splitlines():
        node, _, rest = line.partition("|")
        gres, _, rest = rest.partition("|")
        when, _, rest = rest.partition("|")
        state, fourth, reason = rest.partition("|")
        if fourth and reasons.WORD.issuperset(node):
            name = node if every or re.search(r"\bgpu\b", gres) else ""
            if name:
                serves = state.rstrip("*~#!%$@^-+") in SERVING
                seen[name], times[name] = "" if serves else reason, _seconds(when)
        elif name:
            seen[name] += f"\n{line}"
    if one and one not in seen:
        raise ValueError(f"{one} is not among the {len(seen)} nodes that are counted")
    read = {node: reasons.parse(reason) for node, reason in seen.items()}
    return [Hold(node, ours, times[node]) for node, ours in read.items() if ours], len(seen)


def parse_counted(text: str, every: bool) -> frozenset[str]:
    """`sinfo -h -a -N -o '%N|%G'`: the nodes that `parse_holds` counts."""
    rows = (line.partition("|") for line in text.splitlines())
    return frozenset(node for node, _, gres in rows if every or re.search(r"\bgpu\b", gres))


def _parse_reason(rest: str) -> tuple[str, str, float, str]:
    """The text after ` Reason=` as reason, user, time, and the rest of the record."""
    stamp = STAMP.search(rest)
    if not stamp:
        return rest.strip(), "", 0.0, ""
    return _given(rest[: stamp.start()].strip()), stamp[1], _seconds(stamp[2]), rest[stamp.end() :]


def _parse_remarks(after: str) -> tuple[str, str]:
    """Comment and Extra, which come last, in this order."""
    text, key, extra = f"{after} ".rpartition(" Extra=")
    comment = (text if key else extra).partition(" Comment=")[2]
    return _given(comment.strip()), _given(INSTANCE.split(extra)[0].strip()) if key else ""


def _given(text: str) -> str:
    return "" if text in ("(null)", "none", "None", "N/A", "n/a") else text


def _seconds(text: str) -> float:
    """Slurm's time as seconds since the epoch: `%s` (SLURM_TIME_FORMAT) or local ISO; 0 for `None` and `Unknown`."""
    if text.isdigit():
        return float(text)
    import time

    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return 0.0
