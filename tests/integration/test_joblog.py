"""Job logs on real Slurm: what a failed job wrote is read in its epilog, as its user, wherever Slurm put it."""

import json
import os
import pwd

import pytest

from tests.daemons import until

LAB = {"nodes": 2, "gpus": 2, "dbd": False, "poll": "1h", "health_interval": 600}
JOBLOG = "\n[joblog]\nenabled = true\n"
FAILING = """\
#!/usr/bin/python3
import os
def forward(batch):
    raise {error}
print("attempt", os.environ.get("SLURM_RESTART_COUNT", 0), flush=True)
forward(1)
"""
REQUEUED = """\
#!/bin/sh
if [ -z "$SLURM_RESTART_COUNT" ]; then
  echo "ValueError: old" >&2
  scontrol requeue $SLURM_JOB_ID
  sleep 60
fi
exec /usr/bin/python3 -c "raise KeyError('new')"
"""


@pytest.fixture
def lab(lab):
    lab.configure(JOBLOG)
    return lab


@pytest.fixture
def home(lab):
    """A folder that nobody but the user games can enter."""
    games = pwd.getpwnam("games")
    folder = lab.lab / "out" / "home"
    folder.mkdir(exist_ok=True)
    os.chown(folder, games.pw_uid, games.pw_gid)
    folder.chmod(0o700)
    return folder


def submit(lab, script, *options, home, node="n1", user="games"):
    who = pwd.getpwnam(user)
    return int(
        lab.run(
            "sbatch", f"--uid={user}", f"--gid={who.pw_gid}", "--parsable", "--gres=gpu:1", f"--chdir={home}",
            f"--nodelist={node}", *options, stdin=script,
        )
    )  # fmt: skip


def ended(lab, node, job, restart=0):
    """Wait for the epilog of that run, which reads the log before it tests."""
    done = "SELECT 1 FROM job WHERE job = ? AND restart = ? AND ended IS NOT NULL"
    until(lambda: lab.rows(node, done, job, restart), f"the epilog of job {job}")
    until(lambda: "JobState=COMPLETING" not in lab.run("scontrol", "-o", "show", "job", str(job)), "its end")


def reading(lab, node, job, restart=0):
    """What the node's journal says of the job's log; None where it says nothing."""
    ended(lab, node, job, restart)
    found = lab.rows(node, "SELECT reading FROM joblog WHERE job = ? AND restart = ?", job, restart)
    return json.loads(found[0][0]) if found else None


def test_a_traceback_in_the_default_file_of_a_closed_folder_is_read(lab, home):
    job = submit(lab, FAILING.format(error='ValueError("no such shape")'), home=home)
    said = reading(lab, "n1", job)
    assert (said["verdict"], said["cause"]["text"]) == ("application", "ValueError: no such shape")
    assert f"slurm-{job}.out" in os.listdir(home)
    lines = (home / f"slurm-{job}.out").read_text().splitlines()
    assert lines[said["cause"]["line"] - 1] == "ValueError: no such shape"


def test_each_task_of_an_array_has_its_own_file(lab, home):
    job = submit(lab, FAILING.format(error='ValueError(os.environ["SLURM_ARRAY_TASK_ID"])'), "--array=3-4", home=home)
    read = "SELECT reading FROM joblog WHERE reading LIKE ?"
    for task in (3, 4):
        until(lambda: lab.rows("n1", read, f'%ValueError: {task}"%'), f"the log of {job}_{task}")  # noqa: B023


@pytest.mark.parametrize(
    "options",
    [
        ("--output=%x-%u-%4j-%a.out", "--job-name=a job; $(id)"),
        ("--output=out-%j\nStdErr=x", "--error=e%%rr\n-%j"),
        ("--output=/dev/null", "--error=%N/%j"),
    ],
)
def test_a_name_with_patterns_spaces_and_newlines_is_found(lab, home, options):
    here = home / os.uname().nodename.partition(".")[0]
    here.mkdir(exist_ok=True)
    os.chown(here, pwd.getpwnam("games").pw_uid, -1)
    job = submit(lab, FAILING.format(error="ValueError(7)"), *options, home=home)
    assert reading(lab, "n1", job)["cause"]["text"] == "ValueError: 7"


def test_of_a_requeued_job_whose_file_is_appended_to_the_last_run_counts(lab, home):
    job = submit(lab, REQUEUED, "--requeue", "--open-mode=append", "--output=again", home=home)
    said = reading(lab, "n1", job, restart=1)
    lines = (home / "again").read_text().splitlines()
    assert lines[0] == "ValueError: old"
    assert said["cause"]["text"] == "KeyError: 'new'"
    assert lines[said["cause"]["line"] - 1] == "KeyError: 'new'"
    assert reading(lab, "n1", job, restart=0) is None, "as far as its epilog could see it ended well"


def test_of_several_nodes_only_the_one_where_the_script_ran_reads(lab, home):
    job = submit(lab, FAILING.format(error="ValueError(2)"), "--nodes=2", home=home, node="n[1-2]")
    assert reading(lab, "n1", job)["cause"]["text"] == "ValueError: 2"
    assert reading(lab, "n2", job) is None


def test_what_a_job_can_not_read_itself_is_not_read_for_it(lab, home):
    script = "#!/bin/sh\nrm -f steal; ln -s /etc/shadow steal; exit 1\n"
    job = submit(lab, script, "--output=steal", home=home)
    assert reading(lab, "n1", job) is None
    secret = home / "secret"
    secret.write_text("Traceback (most recent call last):\nValueError: secret\n")
    secret.chmod(0o600)
    job = submit(lab, "#!/bin/sh\nmv -f secret gift; exit 1\n", "--output=gift", home=home)
    assert reading(lab, "n1", job) is None


def test_roots_jobs_and_those_without_files_are_left_alone(lab, home):
    job = submit(lab, "#!/bin/sh\necho ValueError: root; exit 1\n", "--output=root", home=home, user="root")
    assert reading(lab, "n1", job) is None
    job = submit(lab, "#!/bin/sh\nexit 1\n", "--output=/dev/null", home=home)
    assert reading(lab, "n1", job) is None


def test_a_job_that_ends_well_has_no_log_read_and_no_question_asked(lab, home):
    lab.calls("n1")
    job = submit(lab, "#!/bin/sh\necho ValueError: caught\n", home=home)
    assert reading(lab, "n1", job) is None
    assert lab.calls("n1") == []
