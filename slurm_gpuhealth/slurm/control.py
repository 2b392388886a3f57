"""Questions and orders to Slurm through its own programs, each with a deadline and an error that says what to do.

SlurmError
├── ControllerDown   no answer; try again later
├── Refused          an answer, and it is no: `rc`, `text` (what the program said of itself, never a record)
│   ├── NoSuchJob    slurmctld does not know the job: it has ended
│   └── Unreadable   a record that can't be read safely
└── NoProgram        the program is not where the configuration says
"""

from __future__ import annotations

from slurm_gpuhealth import child
from slurm_gpuhealth.slurm import node as records
from slurm_gpuhealth.slurm import reason as reasons

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from slurm_gpuhealth.config import settings
    from slurm_gpuhealth.slurm.reason import Reason

GRACE = 1.0
"""Seconds between SIGTERM and SIGKILL for one of Slurm's programs."""
NO_ANSWER = (
    # Slurm's words (slurm_errno) for a controller that is away, starting, on standby or not to be authenticated to.
    "Unable to contact slurm controller",
    "Unable to establish",
    "could not establish a configuration source",
    "Connection refused",
    "timed out",
    "Zero Bytes were transmitted",
    "standby mode",
    "authentication",
)


NO_JOB = "slurm_load_jobs error: Invalid job id specified"
"""All that scontrol says of a job that slurmctld does not know (22.05 to 26.05), on standard error, with exit 1."""


class SlurmError(Exception):
    """Slurm could not be asked, or said no."""


class ControllerDown(SlurmError):
    """slurmctld did not answer in time or at all."""


class Refused(SlurmError):
    """slurmctld or the client said no."""

    def __init__(self, what: str, rc: int, text: str, out: str = "") -> None:
        super().__init__(f"{what}: exit {rc}: {text}")
        self.rc, self.text = rc, text
        self.out = out
        """What stood on standard output, too: it may be a user's words."""


class NoSuchJob(Refused):
    """The controller does not know the job (any more)."""


class NoSuchNode(Refused):
    """The controller does not know the node."""


class Unreadable(Refused):
    """An answer that can't be told apart from what a user put into it: it says nothing, of nobody."""


class NoProgram(SlurmError):
    """There is no such program."""


def show_node(slurm: settings.Slurm, name: str) -> records.NodeRecord:
    """The node's record. NoSuchNode, or Unreadable where it can't be read safely."""
    unknown = f"Node {_name(name)} not found"  # all that scontrol prints then, on standard output
    try:
        text = _ask(slurm, slurm.scontrol, "-o", "show", "node", name)
    except Refused as error:
        if unknown in (error.out, error.text):
            raise NoSuchNode(f"scontrol show node {name}", error.rc, unknown) from None
        raise
    try:
        return records.parse_node(text, name)
    except ValueError as error:
        raise Unreadable(f"scontrol show node {name}", 0, str(error)) from None


def show_nodes(slurm: settings.Slurm, names: str = "") -> list[records.NodeRecord]:
    """The records of a hostlist's nodes, of all when it is "", in one call; what can't be read safely is left out."""
    return records.parse_nodes(_ask(slurm, slurm.scontrol, "-o", "show", "node", *([names] if names else [])))


def show_job(slurm: settings.Slurm, job_id: int) -> records.JobRecord:
    """The job's record. NoSuchJob, or Unreadable where it can't be read safely."""
    try:
        text = _ask(slurm, slurm.scontrol, "-o", "show", "job", str(int(job_id)))
    except Refused as error:
        if error.rc == 1 and not error.out and error.text == NO_JOB:
            raise NoSuchJob(f"scontrol show job {job_id}", 1, NO_JOB) from None
        raise
    try:
        return records.parse_job(text, job_id)
    except ValueError as error:
        raise Unreadable(f"scontrol show job {job_id}", 0, str(error)) from None


def is_expedited(slurm: settings.Slurm, job_id: int) -> bool:
    """Whether Slurm starts this run's job anew if one of its epilogs fails. Unreadable where it can't be told."""
    if records.parse_version(_ask(slurm, slurm.scontrol, "-V")) < records.EXPEDITES:  # asks no controller
        return False
    text = _ask(slurm, slurm.scontrol, "--json", "show", "job", str(int(job_id)))
    try:
        return records.parse_expedited(text, job_id)
    except ValueError as error:
        raise Unreadable(f"scontrol --json show job {job_id}", 0, str(error)) from None


def drain(slurm: settings.Slurm, name: str, reason: Reason) -> None:
    """Drain the node, whatever its reason says now: `hold.take` looks first."""
    _ask(slurm, slurm.scontrol, "update", f"NodeName={_name(name)}", "State=DRAIN", f"Reason={reasons.write(reason)}")


def set_reason(slurm: settings.Slurm, name: str, reason: Reason) -> None:
    """Replace the text on a node that is drained; on one in service Slurm drops it without a word."""
    _ask(slurm, slurm.scontrol, "update", f"NodeName={_name(name)}", f"Reason={reasons.write(reason)}")


def undrain(slurm: settings.Slurm, name: str) -> None:
    """Take the drain away; a DOWN stays. No error on a node that is not drained."""
    _ask(slurm, slurm.scontrol, "update", f"NodeName={_name(name)}", "State=UNDRAIN")


def resume(slurm: settings.Slurm, name: str) -> None:
    """Put a DOWN node back into service: only for a DOWN that our own reboot made."""
    _ask(slurm, slurm.scontrol, "update", f"NodeName={_name(name)}", "State=RESUME")


def undrain_all(slurm: settings.Slurm, names: Sequence[str], comment: str | None = None) -> None:
    """`undrain` of many nodes in one call, with the same Comment for all, which slurmctld writes first."""
    remarks = [] if comment is None else [f"Comment={_line(comment)}"]
    _ask(slurm, slurm.scontrol, "update", f"NodeName={','.join(map(_name, names))}", *remarks, "State=UNDRAIN")


def comment_all(slurm: settings.Slurm, names: Sequence[str], comment: str) -> None:
    """The same Comment for many nodes, in one call."""
    _ask(slurm, slurm.scontrol, "update", f"NodeName={','.join(map(_name, names))}", f"Comment={_line(comment)}")


def reboot(slurm: settings.Slurm, name: str, reason: Reason) -> None:
    """Have Slurm reboot the idle node; it comes back DOWN with our reason. Any other `nextstate` would put an untested
    node into service, and so would none."""
    words = ["ASAP", "nextstate=DOWN", f"reason={reasons.write(reason)}"]
    _ask(slurm, slurm.scontrol, "reboot", *words, _name(name))


def cancel_reboot(slurm: settings.Slurm, name: str) -> None:
    """Take back a reboot that the node has not been told of; Refused when it has."""
    _ask(slurm, slurm.scontrol, "cancel_reboot", _name(name))


def set_remarks(slurm: settings.Slurm, name: str, **texts: str) -> None:
    """Replace the node's `comment` or `extra` as a whole: `remark.put` keeps the site's part."""
    _ask(slurm, slurm.scontrol, "update", f"NodeName={_name(name)}", *(f"{k}={_line(v)}" for k, v in texts.items()))


def set_text(slurm: settings.Slurm, name: str, text: str) -> None:
    """Put somebody's own reason back on a node that is drained."""
    _ask(slurm, slurm.scontrol, "update", f"NodeName={_name(name)}", f"Reason={_line(text)}")


def put_out(slurm: settings.Slurm, name: str, state: str, text: str) -> None:
    """Take the node out with somebody's own words: `state` is DRAIN, DOWN or FAIL."""
    _ask(slurm, slurm.scontrol, "update", f"NodeName={_name(name)}", f"State={state}", f"Reason={_line(text)}")


def requeue(slurm: settings.Slurm, job: records.JobRecord) -> None:
    """Put a job back into the queue, not held; Slurm starts it again after AuthInfo's cred_expire, 120 s by default.

    Also one of --no-requeue: for a job that never began. Its own wish is put back afterwards.
    """
    if not job.requeue:
        _ask(slurm, slurm.scontrol, "update", f"JobId={job.name}", "Requeue=1")
    _ask(slurm, slurm.scontrol, "requeue", job.name)
    if not job.requeue:
        _ask(slurm, slurm.scontrol, "update", f"JobId={job.name}", "Requeue=0")


def asks_by_name(slurm: settings.Slurm, job: records.JobRecord) -> bool:
    """Whether the job asks for nodes by name (--nodelist), or it can't be told: then `keep_off` does nothing."""
    return records.parse_excluded(_ask(slurm, slurm.scontrol, "-o", "show", "job", job.name)) is None


def keep_off(slurm: settings.Slurm, job: records.JobRecord, node: str) -> None:
    """Keep a pending job away from a node, beside those that its user excludes; not one that asks for nodes by name."""
    excluded = records.parse_excluded(_ask(slurm, slurm.scontrol, "-o", "show", "job", job.name))
    if excluded is None:
        return
    nodes = ",".join([*excluded, _name(node)])
    _ask(slurm, slurm.scontrol, "update", f"JobId={job.name}", f"ExcNodeList={nodes}")


def pending(slurm: settings.Slurm) -> list[tuple[tuple[str, ...], str]]:
    """Each pending job's partitions, and why it waits; an array is one. Of all partitions, hidden ones too."""
    return records.parse_pending(_ask(slurm, slurm.squeue, "-h", "-a", "-t", "PD", "-o", "%P|%r"))


def config(slurm: settings.Slurm) -> dict[str, tuple[str, ...]]:
    """slurmctld's configuration: key → values, none for `(null)`."""
    return records.parse_config(_ask(slurm, slurm.scontrol, "show", "config"))


def events(slurm: settings.Slurm, names: Sequence[str]) -> list[records.Event]:
    """What slurmdbd has of these nodes' drains and DOWNs of the last minutes, by time; none where there is no slurmdbd.

    A row is made by each `State=`; by a `Reason=` alone, none. sacctmgr lies beside scontrol.
    """
    import os

    sacctmgr = os.path.join(os.path.dirname(slurm.scontrol), "sacctmgr")
    when = ("start=now-10minutes", "end=now+10minutes")  # without an end, rows of this very second are left out
    words = (f"nodes={','.join(map(_name, names))}", *when, f"format={records.EVENT}")
    try:
        return records.parse_events(_ask(slurm, sacctmgr, "-n", "-P", "show", "event", *words))
    except SlurmError:
        return []


def up(slurm: settings.Slurm) -> float:
    """Seconds since slurmctld started; infinite where it does not say."""
    return records.parse_up(_ask(slurm, slurm.scontrol, "show", "config"))


def gres_map(slurm: settings.Slurm, name: str) -> tuple[tuple[str, ...], ...]:
    """Device files of the GPU at each of Slurm's positions on this node. Asks no controller; changes only with a boot.

    slurmd writes the list to stderr. For a device file that is missing it waits, 19 s in 22.05: past our deadline,
    and so ControllerDown with slurmd's words.
    """
    import os

    # -N is for several slurmd on a host, which not every build of Slurm can do; a node named as its host needs none.
    several = [] if name == os.uname().nodename.partition(".")[0] else ["-N", _name(name)]
    text = _ask(slurm, slurm.slurmd, "-G", *several, streams=2)
    try:
        return records.parse_gres(text)
    except ValueError as error:
        raise Refused("slurmd -G", 0, str(error)) from None


def holds(slurm: settings.Slurm, group: str = "", name: str = "") -> tuple[list[records.Hold], int]:
    """Our holds, claims included, and the number of nodes in `group` (a hostlist; "": all with GPUs). One call.

    Refused when the node `name` is not one of them: no limit would hold for it.
    """
    which = ["-n", group] if group else []
    text = _ask(slurm, slurm.sinfo, "-h", "-a", "-N", "-o", "%N|%G|%H|%T|%E", *which)
    try:
        return records.parse_holds(text, every=bool(group), one=name)
    except ValueError as error:
        raise Refused("drain.nodes", 0, f"{error} by the budget (drain.nodes is {group!r}; empty: Gres=gpu)") from None


def known(slurm: settings.Slurm, names: Sequence[str]) -> set[str]:
    """Those of the nodes that Slurm has; of others sinfo says nothing."""
    which = ",".join(name for name in names if name and reasons.WORD.issuperset(name))
    return set(_ask(slurm, slurm.sinfo, "-h", "-a", "-N", "-o", "%N", "-n", which).split()) if which else set()


def jobs(slurm: settings.Slurm, name: str) -> list[tuple[str, str, float]]:
    """The jobs on a node, ending ones included: id, user, end (seconds since the epoch; 0 without a time limit)."""
    text = _ask(slurm, slurm.squeue, "-h", "-a", "-w", _name(name), "-o", "%i|%u|%e")
    rows = [line.split("|") for line in text.splitlines() if line.count("|") == 2]
    return [(job, user, float(end) if end.isdigit() else 0.0) for job, user, end in rows]


def hostnames(slurm: settings.Slurm, names: str) -> list[str]:
    """The nodes of a hostlist, `n[1-3],n7`, each once. Asks no controller."""
    return list(dict.fromkeys(_ask(slurm, slurm.scontrol, "show", "hostnames", names).split()))


def _ask(slurm: settings.Slurm, *argv: str, streams: int = 1) -> str:
    """Run one of Slurm's programs; its standard output, with `streams=2` standard error after it."""
    # A hook's environment lacks PATH and may lack SLURM_CONF; a person's may hold SINFO_FORMAT: neither is handed on.
    done = child.run(
        argv, timeout=slurm.timeout, grace=GRACE, env={"SLURM_CONF": slurm.conf, "SLURM_TIME_FORMAT": "%s", "TZ": "UTC"}
    )
    what = " ".join(argv)
    out, err = (data.decode("utf-8", "backslashreplace") for data in (done.stdout, done.stderr))
    if done.timed_out or done.rc is None:
        said = f": {err.strip()}" if err.strip() else ""
        raise ControllerDown(f"{what}: no answer in {min(slurm.timeout, round(done.seconds, 1)):g} s{said}")
    if done.rc in (126, 127) and err.startswith(f"{argv[0]}: "):
        raise NoProgram(f"{err}: set its path in the table [slurm] of gpuhealth.toml")
    if done.rc:
        # Standard output may hold records, and in them what users wrote: only standard error is the program's own word.
        text = err.strip()
        if any(words in text for words in NO_ANSWER):
            raise ControllerDown(f"{what}: {text}")
        raise Refused(what, done.rc, text, out.strip())
    return out + err if streams == 2 else out


def _line(text: str) -> str:
    if "\n" in text or "\0" in text:
        raise ValueError(f"not one line: {text[:80]!r}")
    return text


def _name(name: str) -> str:
    """`name` if it can only mean one node: scontrol takes `ALL` and `n[1-500]` for many. Raises ValueError."""
    if not name or not reasons.WORD.issuperset(name) or name.upper() in ("ALL", "DEFAULT"):
        raise ValueError(f"{name!r} is not the name of one node")
    return name
