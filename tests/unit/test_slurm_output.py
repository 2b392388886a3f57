"""Where a batch job's output goes: the names that real slurmd made, with no more calls to Slurm than needed."""

import os

import pytest

from slurm_gpuhealth.config import settings
from slurm_gpuhealth.node import environment, output
from slurm_gpuhealth.node.environment import Job
from slurm_gpuhealth.slurm import control

SLURM = settings.Slurm()
HOST = os.uname().nodename.partition(".")[0]
LONE = "12|12|N/A|my job\n"
TASK = "12|6|3|my job\n"
EACH = "/w/o-%j-%x-%u-%N-%n-%a-%A-%t-%J-%s-%%.out"


@pytest.fixture
def asked(monkeypatch):
    """What squeue was asked; it answers `.answer`."""

    class Asked(list):
        answer = LONE

        def __call__(self, slurm, *argv, streams=1):
            self.append(argv)
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer

    found = Asked()
    monkeypatch.setattr(control, "_ask", found)
    return found


def paths(**more):
    given = {"batch": True, "nodes": "n1", "user": "games", "work_dir": "/w", **more}
    return output.paths(SLURM, Job(12, "n1", **given))


def test_where_slurms_releases_fill_in_otherwise_both_names_are_given(asked):
    older = f"/w/o-12-my job-games-{HOST}-0-4294967294-12-0-12-batch-%.out"  # 22.05 wrote exactly this
    assert paths(stdout=EACH) == (older, older.replace(HOST, "n1"))  # and 26.05 this
    assert paths(stdout="/w/%j-%2r", restart=3) == ("/w/12-%2r", "/w/12-03")


@pytest.mark.parametrize(
    ("template", "answer", "name"),
    [
        ("", LONE, "/w/slurm-12.out"),
        ("", TASK, "/w/slurm-6_3.out"),
        ("/w/%A/%3a", TASK, "/w/6/003"),
        ("/w/p-%4j-%04j.out", LONE, "/w/p-0012-0012.out"),
        ("/w/%99999j", LONE, "/w/0000000012"),
        ("/w/back\\%j.out", LONE, "/w/back%j.out"),
        ("/w/%q %", LONE, "/w/%q %"),
        ("a\nStdErr=/etc/shadow %j", LONE, "/w/a\nStdErr=/etc/shadow 12"),
        ("/w/\udcff", LONE, "/w/\udcff"),
        ("/w/%x", "12|12|N/A|a|b /%j\n13|13|N/A|c\n", "/w/a|b /%j"),
    ],
)
def test_patterns_are_filled_in_as_slurmd_does(asked, template, answer, name):
    asked.answer = answer
    assert paths(stdout=template) == (name,)


def test_stderr_comes_first_and_what_is_the_same_file_once(asked):
    assert paths(stdout="/w/o", stderr="/w/e") == ("/w/e", "/w/o")
    assert paths(stdout="/w/o", stderr="/w/o") == ("/w/o",)
    assert paths(stderr="/w/e") == ("/w/e", "/w/slurm-12.out")


def test_what_was_thrown_away_is_not_looked_for(asked):
    assert paths(stdout="/dev/null") == ()
    assert paths(stdout="/dev/null", stderr="/w/e") == ("/w/e",)
    assert paths(stdout="/w/o", stderr="/dev/null") == ("/w/o",)


def test_slurm_is_asked_once_and_only_where_the_environment_does_not_tell(asked):
    assert paths(stdout="/w/%j-%u", stderr="/w/%J") == ("/w/12", "/w/12-games")
    assert asked == []
    paths(stdout="/w/%x", stderr="/w/%A")
    assert [argv[-3:] for argv in asked] == [("12", "-o", "%A|%F|%K|%j")]


@pytest.mark.parametrize("answer", [control.ControllerDown("x"), "", "slurm_load_jobs error\n", "13|13|N/A|other\n"])
def test_without_an_answer_the_default_name_of_a_lone_job_is_tried(asked, answer):
    asked.answer = answer
    assert paths() == ("/w/slurm-12.out",)


def test_only_the_node_where_the_script_ran_has_the_files(asked):
    assert paths(num_nodes=2, nodes="n[1-2]") == ("/w/slurm-12.out",)
    assert paths(num_nodes=2, nodes="n[01-2]") == ()
    assert paths(num_nodes=2, nodes="m7,n1") == ()
    assert paths(batch=False) == ()


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"), ("n[01-04,7],m2", "n01"), ("n1,n[2-3]", "n1"), ("r[3,5-6]n[07-09]x,y", "r3n07x"),
        ("a-1[2-3]", "a-12"), ("", ""), ("[1-2]", "1"),
    ],
)  # fmt: skip
def test_the_first_node_of_a_hostlist(nodes, first):
    assert output.first_host(nodes) == first


def test_a_job_without_output_option_is_a_batch_job_too():
    """22.05 sets SLURM_JOB_STDOUT only with --output, and SLURM_JOB_STDIN always."""
    given = {"SLURM_JOB_ID": "1", "SLURMD_NODENAME": "n1", "SLURM_JOB_WORK_DIR": "/w"}
    job = environment.read({**given, "SLURM_JOB_STDIN": "/dev/null"})
    assert (job.batch, job.stdout, job.stderr, job.work_dir) == (True, "", "", "/w")
    assert not environment.read(given).batch


@pytest.mark.parametrize(
    ("nodes", "count", "hosts"),
    [
        ("n[08-10],m2", 4, ("n08", "n09", "n10", "m2")), ("n1", 1, ("n1",)), ("n[1-3]", 2, ()), ("n[1-", 1, ()),
        ("r[1-2]n[3-4]", 4, ()), ("n[1-99999]", 99999, ()),
    ],
)  # fmt: skip
def test_a_jobs_nodes_in_slurms_order_or_none(nodes, count, hosts):
    assert output.hosts(Job(12, "n1", nodes=nodes, num_nodes=count)) == hosts


def test_the_sites_pattern_of_dumps_is_filled_in_as_slurm_does(asked):
    given = {"user": "games", "uid": 5, "batch": True, "nodes": "n1"}
    assert output.filled(SLURM, Job(12, "n1", **given), ("/fr/%u/%j/rank_",)) == ("/fr/games/12/rank_",)
