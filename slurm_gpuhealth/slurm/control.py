"""Questions and orders to Slurm through its own programs. Each has a deadline, and an error that says what to do.

SlurmError
├── ControllerDown   no answer; try again later
├── Refused          Slurm said no: `rc`, `text` (the program's own message, never a record)
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
    # Slurm's words (slurm_errno) for a controller that is down, starting, on standby, or does not accept us.
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
"""If slurmctld does not know a job, scontrol prints only this, on standard error, and exits 1 (22.05 to 26.05)."""


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
        """Its standard output, which may have a user's words."""


class NoSuchJob(Refused):
    """slurmctld does not know the job (any more)."""


class NoSuchNode(Refused):
    """slurmctld does not know the node."""


class Unreadable(Refused):
    """A user's text in the answer makes it ambiguous, so nothing of it is used."""


class NoProgram(SlurmError):
    """There is no such program."""


def show_node(slurm: settings.Slurm, name: str) -> records.NodeRecord:
    """The node's record. NoSuchNode, or Unreadable if it can't be read safely."""
    unknown = f"Node {_name(name)} not found"  # then scontrol prints only this, on standard output
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
    """The records of a hostlist's nodes ("": all), in one call. Records that can't be read safely are left out."""
    return records.parse_nodes(_ask(slurm, slurm.scontrol, "-o", "show", "node", *([names] if names else [])))


def show_job(slurm: settings.Slurm, job_id: int) -> records.JobRecord:
    """The job's record. NoSuchJob, or Unreadable if it can't be read safely."""
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


def job_names(slurm: settings.Slurm, job_id: int) -> tuple[str, str, str]:
    """The array's job, the task in it ("" where there is none), and the job's name."""
    answer = _ask(slurm, slurm.squeue, "-h", "-a", "-t", "all", "-j", str(job_id), "-o", "%A|%F|%K|%j")
    for line in answer.splitlines():
        number, _, rest = line.partition("|")
        array, _, rest = rest.partition("|")
        task, _, name = rest.partition("|")
        if number == str(job_id) and array.isdigit():
            return array, task if task.isdigit() else "", name
    raise Unreadable(f"squeue -j {job_id}", 0, "no line that begins with this job")


def is_expedited(slurm: settings.Slurm, job_id: int) -> bool:
    """Whether Slurm starts this job again if one of its epilogs fails. Raises Unreadable if the answer is unclear."""
    if records.parse_version(_ask(slurm, slurm.scontrol, "-V")) < records.EXPEDITES:  # asks no controller
        return False
    text = _ask(slurm, slurm.scontrol, "--json", "show", "job", str(int(job_id)))
    try:
        return records.parse_expedited(text, job_id)
    except ValueError as error:
        raise Unreadable(f"scontrol --json show job {job_id}", 0, str(error)) from None


def drain(slurm: settings.Slurm, name: str, reason: Reason) -> None:
    """Drain the node, whatever its reason is now. `hold.take` looks first."""
    _ask(slurm, slurm.scontrol, "update", f"NodeName={_name(name)}", "State=DRAIN", f"Reason={reasons.write(reason)}")


def set_reason(slurm: settings.Slurm, name: str, reason: Reason) -> None:
    """Replace the reason of a drained node. On a node in service Slurm ignores it without an error."""
    _ask(slurm, slurm.scontrol, "update", f"NodeName={_name(name)}", f"Reason={reasons.write(reason)}")


def undrain(slurm: settings.Slurm, name: str) -> None:
    """End the drain; a DOWN stays. No error if the node is not drained."""
    _ask(slurm, slurm.scontrol, "update", f"NodeName={_name(name)}", "State=UNDRAIN")


def resume(slurm: settings.Slurm, name: str) -> None:
    """Put a DOWN node back into service. Only for a DOWN that our own reboot caused."""
    _ask(slurm, slurm.scontrol, "update", f"NodeName={_name(name)}", "State=RESUME")


def undrain_all(slurm: settings.Slurm, names: Sequence[str], comment: str | None = None) -> None:
    """`undrain` many nodes in one call, with the same Comment for all; slurmctld writes the Comment first."""
    remarks = [] if comment is None else [f"Comment={_line(comment)}"]
    _ask(slurm, slurm.scontrol, "update", f"NodeName={','.join(map(_name, names))}", *remarks, "State=UNDRAIN")


def comment_all(slurm: settings.Slurm, names: Sequence[str], comment: str) -> None:
    """The same Comment for many nodes, in one call."""
    _ask(slurm, slurm.scontrol, "update", f"NodeName={','.join(map(_name, names))}", f"Comment={_line(comment)}")


def reboot(slurm: settings.Slurm, name: str, reason: Reason) -> None:
    """Have Slurm reboot the idle node; it comes back DOWN with our reason. With any other `nextstate`, or without one,
    Slurm would put an untested node into service."""
    words = ["ASAP", "nextstate=DOWN", f"reason={reasons.write(reason)}"]
    _ask(slurm, slurm.scontrol, "reboot", *words, _name(name))


def cancel_reboot(slurm: settings.Slurm, name: str) -> None:
    """Cancel a reboot that was not sent to the node yet; Refused if it was."""
    _ask(slurm, slurm.scontrol, "cancel_reboot", _name(name))


def set_remarks(slurm: settings.Slurm, name: str, **texts: str) -> None:
    """Replace the node's `comment` or `extra` as a whole: `remark.put` keeps the site's part."""
    _ask(slurm, slurm.scontrol, "update", f"NodeName={_name(name)}", *(f"{k}={_line(v)}" for k, v in texts.items()))


def set_text(slurm: settings.Slurm, name: str, text: str) -> None:
    """Put somebody's own reason back on a node that is drained."""
    _ask(slurm, slurm.scontrol, "update", f"NodeName={_name(name)}", f"Reason={_line(text)}")


def put_out(slurm: settings.Slurm, name: str, state: str, text: str) -> None:
    """Take the node out of service with somebody's own reason: `state` is DRAIN, DOWN or FAIL."""
    _ask(slurm, slurm.scontrol, "update", f"NodeName={_name(name)}", f"State={state}", f"Reason={_line(text)}")


def requeue(slurm: settings.Slurm, job: records.JobRecord) -> None:
    """Put a job back into the queue, not held; Slurm starts it again after AuthInfo's cred_expire, 120 s by default.

    Works for a job with --no-requeue too, because it never began here. Its Requeue setting is restored afterwards.
    """
    if not job.requeue:
        _ask(slurm, slurm.scontrol, "update", f"JobId={job.name}", "Requeue=1")
    _ask(slurm, slurm.scontrol, "requeue", job.name)
    if not job.requeue:
        _ask(slurm, slurm.scontrol, "update", f"JobId={job.name}", "Requeue=0")


def asks_by_name(slurm: settings.Slurm, job: records.JobRecord) -> bool:
    """Whether the job asks for nodes by name (--nodelist), or this is not known: then `keep_off` does nothing."""
    return records.parse_excluded(_ask(slurm, slurm.scontrol, "-o", "show", "job", job.name)) is None


def keep_off(slurm: settings.Slurm, job: records.JobRecord, node: str) -> None:
    """Add a node to those that a pending job excludes, unless the job asks for nodes by name."""
    excluded = records.parse_excluded(_ask(slurm, slurm.scontrol, "-o", "show", "job", job.name))
    if excluded is None:
        return
    nodes = ",".join([*excluded, _name(node)])
    _ask(slurm, slurm.scontrol, "update", f"JobId={job.name}", f"ExcNodeList={nodes}")


def pending(slurm: settings.Slurm) -> list[tuple[tuple[str, ...], str]]:
    """Partitions of each pending job, and why it waits; an array is one job. Includes hidden partitions."""
    return records.parse_pending(_ask(slurm, slurm.squeue, "-h", "-a", "-t", "PD", "-o", "%P|%a|%r"))


def config(slurm: settings.Slurm) -> dict[str, tuple[str, ...]]:
    """slurmctld's configuration: key → values; no value for `(null)`."""
    return records.parse_config(_ask(slurm, slurm.scontrol, "show", "config"))


def events(slurm: settings.Slurm, names: Sequence[str]) -> list[records.Event]:
    """slurmdbd's record of these nodes' drains and DOWNs in the last minutes, by time; empty without slurmdbd.

    Each `State=` makes a row; `Reason=` alone does not. sacctmgr is in the same folder as scontrol.
    """
    import os

    sacctmgr = os.path.join(os.path.dirname(slurm.scontrol), "sacctmgr")
    when = ("start=now-10minutes", "end=now+10minutes")  # without an end, it leaves out rows of the current second
    words = (f"nodes={','.join(map(_name, names))}", *when, f"format={records.EVENT}")
    try:
        return records.parse_events(_ask(slurm, sacctmgr, "-n", "-P", "show", "event", *words))
    except SlurmError:
        return []


def up(slurm: settings.Slurm) -> float:
    """Seconds since slurmctld started; infinite if it does not say."""
    return records.parse_up(_ask(slurm, slurm.scontrol, "show", "config"))


def gres_map(slurm: settings.Slurm, name: str) -> tuple[tuple[tuple[str, ...], ...], bool]:
    """Device files of the GPU at each of Slurm's positions on this node, and whether jobs may share these GPUs.
    Does not ask slurmctld; a boot may change it.

    slurmd writes the list to stderr. If a device file is missing, slurmd waits for it, 19 s in 22.05. That is longer
    than our deadline, and gives ControllerDown with slurmd's words.
    """
    import os

    # -N is for several slurmd on a host. Not every build of Slurm has it, and a node with its host's name needs none.
    several = [] if name == os.uname().nodename.partition(".")[0] else ["-N", _name(name)]
    text = _ask(slurm, slurm.slurmd, "-G", *several, streams=2)
    try:
        return records.parse_gres(text), records.parse_shared(text)
    except ValueError as error:
        raise Refused("slurmd -G", 0, str(error)) from None


def holds(slurm: settings.Slurm, group: str = "", name: str = "") -> tuple[list[records.Hold], int]:
    """Our holds, with claims, and the number of nodes in `group` (a hostlist; "": all with GPUs). One call.

    Refused if the node `name` is not in the group: no limit would apply to it.
    """
    which = ["-n", group] if group else []
    text = _ask(slurm, slurm.sinfo, "-h", "-a", "-N", "-o", "%N|%G|%H|%T|%E", *which)
    try:
        return records.parse_holds(text, every=bool(group), one=name)
    except ValueError as error:
        raise Refused("drain.nodes", 0, f"{error} by the budget (drain.nodes is {group!r}; empty: Gres=gpu)") from None


def counted(slurm: settings.Slurm, group: str = "") -> frozenset[str]:
    """The nodes in `group` (a hostlist; "": all with GPUs): those that `holds` counts."""
    text = _ask(slurm, slurm.sinfo, "-h", "-a", "-N", "-o", "%N|%G", *(["-n", group] if group else []))
    return records.parse_counted(text, every=bool(group))


def known(slurm: settings.Slurm, names: Sequence[str]) -> set[str]:
    """The nodes of `names` that Slurm has; sinfo ignores the others."""
    which = ",".join(name for name in names if name and reasons.WORD.issuperset(name))
    return set(_ask(slurm, slurm.sinfo, "-h", "-a", "-N", "-o", "%N", "-n", which).split()) if which else set()


def jobs(slurm: settings.Slurm, name: str) -> list[tuple[str, str, float]]:
    """The jobs on a node, also those that are ending: id, user, end (seconds since the epoch; 0 without time limit)."""
    text = _ask(slurm, slurm.squeue, "-h", "-a", "-w", _name(name), "-o", "%i|%u|%e")
    rows = [line.split("|") for line in text.splitlines() if line.count("|") == 2]
    return [(job, user, float(end) if end.isdigit() else 0.0) for job, user, end in rows]


def hostnames(slurm: settings.Slurm, names: str) -> list[str]:
    """The nodes of a hostlist, `n[1-3],n7`, each once. Does not ask slurmctld."""
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
        # Standard output may have records with users' texts. Only standard error is the program's own message.
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
    """`name` if it can mean only one node: for scontrol, `ALL` and `n[1-500]` are many. Raises ValueError."""
    if not name or not reasons.WORD.issuperset(name) or name.upper() in ("ALL", "DEFAULT"):
        raise ValueError(f"{name!r} is not the name of one node")
    return name
