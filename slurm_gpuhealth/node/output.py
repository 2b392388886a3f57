"""Where a batch job's output goes: its patterns filled in as slurmd fills them in (measured on 22.05 and 26.05).

The path is its user's and may hold anything. It is only ever opened with that user's rights.
"""

from __future__ import annotations

import os
import re

from slurm_gpuhealth.slurm import control

TYPE_CHECKING = False
if TYPE_CHECKING:
    from slurm_gpuhealth.config import settings
    from slurm_gpuhealth.node.environment import Job

PATTERN = re.compile(r"%(\d*)(.)", re.DOTALL)
ASKED = frozenset("Aaxb")
"""The patterns that an epilog's environment does not tell: the array's job and task, the job's name."""
NO_ARRAY = 4294967294
"""What slurmd writes for the task of a job that is no array."""
WIDEST = 10


def paths(slurm: settings.Slurm, job: Job) -> tuple[str, ...]:
    """StdErr and StdOut of a batch job on the node where its script ran, absolute, each once; none anywhere else.

    From 25.11 on `%N` is the node's name, before it the host's, and `%r` is new: where it matters both names are given,
    and one of them is of no file. One question to the controller, where the paths depend on what only it knows, as
    Slurm's default name does.
    """
    if not job.batch or (job.num_nodes > 1 and first_host(job.nodes) != job.node):
        return ()
    given = tuple(dict.fromkeys(one for one in (job.stderr or job.stdout, job.stdout) if one != os.devnull))
    # --error alone leaves the default name to stdout
    wanted = {letter for path in given for _, letter in PATTERN.findall(path)} | ({"A"} if "" in given else set())
    array, task, name = str(job.job_id), "", ""
    if wanted & ASKED:
        try:
            array, task, name = _asked(slurm, job.job_id)
        except control.SlurmError:  # the default name of a job that is no array needs none of these
            pass
    default = "slurm-%A_%a.out" if task else "slurm-%j.out"
    values = {
        "j": str(job.job_id),
        "J": str(job.job_id),
        "A": array,
        "a": task or str(NO_ARRAY),
        "b": str(int(task or NO_ARRAY) % 10),
        "x": name,
        "u": job.user,
        "N": os.uname().nodename.partition(".")[0],
        "n": "0",
        "t": "0",
        "s": "batch",
        "%": "%",
    }
    newer = {**values, "N": job.node, "r": str(job.restart)}
    found = (expand(path or default, one) for path in given for one in (values, newer))
    return tuple(dict.fromkeys(os.path.join(job.work_dir or "/", path) for path in found))


def expand(template: str, values: dict[str, str]) -> str:
    """`template` with its `%`-patterns replaced. With a backslash Slurm replaces none, and takes backslashes out."""
    if "\\" in template:
        return re.sub(r"\\(.?)", r"\1", template, flags=re.DOTALL)

    def value(found: re.Match[str]) -> str:
        text = values.get(found[2], found[0])
        wide = found[2] in "jAantbr" and found[2] in values and found[1]
        return text.zfill(min(int(found[1][:3]), WIDEST)) if wide else text

    return PATTERN.sub(value, template)


def first_host(nodes: str) -> str:
    """The first node of a hostlist, `n[01-04,7],m2` → `n01`: there slurmd runs the batch script."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0]) if first else ""


def _asked(slurm: settings.Slurm, job_id: int) -> tuple[str, str, str]:
    """The array's job, the task in it ("" where there is none), and the job's name."""
    answer = control._ask(slurm, slurm.squeue, "-h", "-a", "-t", "all", "-j", str(job_id), "-o", "%A|%F|%K|%j")
    for line in answer.splitlines():
        number, _, rest = line.partition("|")
        array, _, rest = rest.partition("|")
        task, _, name = rest.partition("|")
        if number == str(job_id) and array.isdigit():
            return array, task if task.isdigit() else "", name
    raise control.Unreadable(f"squeue -j {job_id}", 0, "no line that begins with this job")
