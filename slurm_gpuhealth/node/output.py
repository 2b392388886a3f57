"""Where a batch job's output goes: fills in its patterns as slurmd does (measured on 22.05 and 26.05).

The user chooses the path, which may be anything. It is only opened with that user's rights.
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
"""The patterns that an epilog's environment does not have: the array's job and task, the job's name."""
NO_ARRAY = 4294967294
"""What slurmd writes for the task of a job without an array."""
WIDEST = 10


def paths(slurm: settings.Slurm, job: Job) -> tuple[str, ...]:
    """The absolute paths of StdErr and StdOut of a batch job, each once, on the node where its script ran; else none.

    From 25.11 on `%N` is the node's name, before that the host's, and `%r` is new. If this makes a difference, both
    paths are returned, and one of them is no file. Asks the controller once, if only it knows what the paths contain,
    as for Slurm's default name.
    """
    if not runs_here(job):
        return ()
    # --error alone leaves the default name to stdout
    given = dict.fromkeys(one for one in (job.stderr or job.stdout, job.stdout) if one != os.devnull)
    return filled(slurm, job, tuple(given))


def runs_here(job: Job) -> bool:
    """Whether this is the node where a batch job's script ran."""
    return job.batch and (job.num_nodes <= 1 or first_host(job.nodes) == job.node)


def filled(slurm: settings.Slurm, job: Job, given: tuple[str, ...]) -> tuple[str, ...]:
    """The paths in `given` with their patterns replaced, "" by Slurm's default name."""
    wanted = {letter for path in given for _, letter in PATTERN.findall(path)} | ({"A"} if "" in given else set())
    array, task, name = str(job.job_id), "", ""
    if wanted & ASKED:
        try:
            array, task, name = control.job_names(slurm, job.job_id)
        except control.SlurmError:  # without an array, the default name needs none of these
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
    """`template` with its `%` patterns replaced. If it has a backslash, Slurm replaces none and removes backslashes."""
    if "\\" in template:
        return re.sub(r"\\(.?)", r"\1", template, flags=re.DOTALL)

    def value(found: re.Match[str]) -> str:
        text = values.get(found[2], found[0])
        wide = found[2] in "jAantbr" and found[2] in values and found[1]
        return text.zfill(min(int(found[1][:3]), WIDEST)) if wide else text

    return PATTERN.sub(value, template)


def hosts(job: Job) -> tuple[str, ...]:
    """The job's nodes in Slurm's order; none if their names have several ranges, `r[1-2]n[1-8]`."""
    from slurm_gpuhealth.slurm.node import expand as expand_list

    try:
        names = () if re.search(r"\][^,]", job.nodes) else expand_list(job.nodes)
    except ValueError:
        return ()
    return names if len(names) == job.num_nodes else ()


def first_host(nodes: str) -> str:
    """The first node of a hostlist, `n[01-04,7],m2` → `n01`: the batch script runs there."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0]) if first else ""
