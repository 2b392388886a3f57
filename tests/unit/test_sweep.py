"""The sweep: which node tests itself when, and that it never delays a job."""

import pytest

from slurm_gpuhealth.config.settings import Dcgm, Paths, Settings, Sources, Sweep
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.ladder import claim, sweep
from slurm_gpuhealth.node.journal import open_journal
from slurm_gpuhealth.slurm import control, hold, reason, remark
from slurm_gpuhealth.slurm.node import NodeRecord, parse_pending

NOW = 1_800_000_000.0
DAY = 86400.0
ON = Settings(mode="enforce", sweep=Sweep(enabled=True))
IDLE = NodeRecord("n1", "IDLE", frozenset(), partitions=("gpu", "all"))
# As squeue 22.05.8 prints them, `%P|%a|%r`.
WANTED = (
    "gpu|lab|Resources",
    "gpu|lab|Priority",
    "gpu|lab|None",
    "gpu,all|lab|Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions",
    "gpu|lab|ReqNodeNotAvail, UnavailableNodes:n2",
    "other,all|lab|Priority",
    "gpu|lab|Licenses",
    "gpu|lab|SomethingOfTomorrow",
    "gpu|(null)|InvalidAccount",
)
NOT_WANTED = (
    "cpu|lab|Resources",
    "gpu|lab|Dependency",
    "gpu|lab|DependencyNeverSatisfied",
    "gpu|lab|BeginTime",
    "gpu|lab|JobHeldUser",
    "gpu|lab|JobHeldAdmin",
    "gpu|lab|AssocGrpGRES",
    "gpu|lab|QOSMaxGRESPerUser",
    "gpu|lab|launch failed requeued held",
    "gpu|lab|PartitionTimeLimit",
    "gpu|lab|InvalidAccount",
)


@pytest.fixture
def journal(tmp_path):
    journal = open_journal(Paths(state=str(tmp_path / "state"), run=str(tmp_path / "run")))
    journal.put("gpus", [{"uuid": "GPU-0"}, {"uuid": "GPU-1"}])
    return journal


@pytest.fixture
def queue(monkeypatch):
    """What squeue prints; `asked` counts the questions."""

    class Queue:
        text, asked = "", 0

        def pending(self, slurm):
            self.asked += 1
            if self.text is None:
                raise control.ControllerDown("no answer")
            return parse_pending(self.text)

    queue = Queue()
    monkeypatch.setattr(control, "pending", queue.pending)
    return queue


def was_tested(journal, level=2, age=0.0, outcome="pass", uuids=("GPU-0", "GPU-1")):
    for uuid in uuids:
        journal.write(
            "INSERT INTO diagnostic (time, level, uuid, outcome, seconds, program, detail)"
            " VALUES (?, ?, ?, ?, 1, '', '')",
            *(NOW - age, level, uuid, outcome),
        )


def old(journal):
    """Never tested, and its turn has come."""
    journal.put("sweep", {"from": NOW - 8 * DAY})


def due(journal, settings=ON, record=IDLE, now=NOW, node="n1"):
    return sweep.due(settings, journal, node, record, now)


def test_a_node_whose_last_test_is_an_interval_ago_is_due(journal, queue):
    old(journal)
    was_tested(journal, age=7 * DAY)
    assert due(journal)
    assert queue.asked == 1


@pytest.mark.parametrize(("level", "outcome"), [(2, "pass"), (3, "pass"), (2, "warn"), (2, "fail")])
def test_a_node_that_was_tested_since_is_not_and_nobody_is_asked(journal, queue, level, outcome):
    old(journal)
    was_tested(journal, level=level, age=7 * DAY - 60, outcome=outcome)
    assert not due(journal)
    assert queue.asked == 0


def test_what_is_shallower_or_no_result_or_of_one_gpu_alone_is_no_test(journal, queue):
    old(journal)
    was_tested(journal, level=1)
    was_tested(journal, outcome="not-testable")
    was_tested(journal, uuids=("GPU-0",))
    assert due(journal)


def test_a_node_that_could_not_be_tested_waits_an_interval_all_the_same(journal, queue):
    old(journal)
    journal.write(
        "INSERT INTO step (time, fact, rung, attempt, outcome, follows, test, code, message, bundle)"
        " VALUES (?, 'sweep', 'L2', 1, 'untested', 'back', '', '', '', '')",
        NOW - DAY,
    )
    assert not due(journal)


def test_a_node_without_its_journal_knows_from_slurm_that_it_was_tested(journal, queue):
    old(journal)
    extra = remark.write_result("site's own", remark.Result("L3", "pass", NOW - DAY))
    assert not due(journal, record=replace(IDLE, extra=extra))
    extra = remark.write_result("", remark.Result("L1", "pass", NOW - DAY))
    assert due(journal, record=replace(IDLE, extra=extra))


def test_a_clock_that_was_set_back_neither_stops_the_sweep_nor_repeats_it(journal, queue):
    journal.put("sweep", {"from": NOW + 30 * DAY, "asked": NOW + 30 * DAY})
    was_tested(journal, age=-30 * DAY)
    assert due(journal)
    was_tested(journal)
    assert not due(journal, now=NOW + 2 * sweep.RETRY)


def test_nodes_of_a_fresh_cluster_take_turns_within_the_first_interval(tmp_path, queue):
    firsts = []
    for number in range(40):
        journal = open_journal(Paths(state=str(tmp_path / f"s{number}"), run=str(tmp_path / f"r{number}")))
        journal.put("gpus", [{"uuid": "GPU-0"}])
        days = (day for day in range(9) if due(journal, now=NOW + day * DAY, node=f"gpu{number:03d}"))
        firsts.append(next(days, None))
    assert None not in firsts
    assert len(set(firsts)) >= 6
    assert max(firsts.count(day) for day in firsts) < 15


@pytest.mark.parametrize(
    "settings",
    [
        Settings(mode="enforce"),
        replace(ON, mode="shadow"),
        replace(ON, sources=Sources(dcgm="shadow")),
        replace(ON, dcgm=Dcgm(backend="off")),
    ],
)
def test_it_is_off_until_turned_on_and_where_a_test_would_have_no_consequence(journal, queue, settings):
    old(journal)
    assert not due(journal, settings)
    assert queue.asked == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"base": "MIXED", "alloc_cpus": 1},
        {"base": "DOWN", "reason": "x"},
        {"flags": frozenset({"DRAIN"}), "reason": "an admin's"},
        {"flags": frozenset({"COMPLETING"})},
        {"flags": frozenset({"PLANNED"})},
        {"flags": frozenset({"RESERVED"})},
        {"flags": frozenset({"MAINTENANCE"})},
        {"flags": frozenset({"NOT_RESPONDING"})},
        {"flags": frozenset({"A_FLAG_OF_TOMORROW"})},
        {"partitions": ()},
    ],
)
def test_only_an_idle_node_that_is_in_nobodys_hands_sweeps(journal, queue, changes):
    old(journal)
    assert not due(journal, record=replace(IDLE, **changes))
    assert queue.asked == 0


def test_a_node_with_a_fault_that_waits_or_a_hold_does_not_sweep(journal, queue):
    old(journal)
    journal.put("hold", {"reason": "gpuhealth:Xid79 GPU3 L3 queued", "since": NOW})
    assert not due(journal)


@pytest.mark.parametrize("line", WANTED)
def test_a_pending_job_that_could_start_here_comes_first(journal, queue, line):
    old(journal)
    queue.text = "cpu|lab|Resources\n" + line + "\n"
    assert not due(journal)


def test_jobs_that_wait_for_something_else_are_in_nobodys_way(journal, queue):
    old(journal)
    queue.text = "\n".join(NOT_WANTED)
    assert due(journal)


def test_a_controller_that_is_silent_means_no_and_is_not_asked_again_at_once(journal, queue):
    old(journal)
    queue.text = None
    assert not due(journal)
    queue.text = ""
    assert not due(journal, now=NOW + sweep.RETRY - 1)
    assert queue.asked == 1
    assert due(journal, now=NOW + sweep.RETRY)


@pytest.mark.parametrize(("jobs", "outcome"), [(0, "drained"), (1, "given back")])
def test_a_job_that_came_in_the_last_moment_goes_first(journal, tmp_path, monkeypatch, jobs, outcome):
    given_back = []
    settings = replace(ON, paths=Paths(state=str(tmp_path / "state"), run=str(tmp_path / "run")))
    monkeypatch.setattr(claim, "take", lambda *_: ("drained", ""))
    monkeypatch.setattr(
        control, "show_node", lambda *_: replace(IDLE, base="MIXED" if jobs else "IDLE", alloc_cpus=jobs)
    )
    monkeypatch.setattr(hold, "give_back", lambda _, node: given_back.append(node))
    assert sweep.begin(settings, journal, "n1", IDLE, NOW) == outcome
    assert given_back == ["n1"] * jobs


def test_the_claim_is_written_only_on_the_node_as_it_was_seen(journal, tmp_path, monkeypatch):
    settings = replace(ON, paths=Paths(state=str(tmp_path / "state"), run=str(tmp_path / "run")))
    seen = []

    def take(settings, journal, node, wanted, write):
        seen.append(reason.write(wanted))
        return ("drained", "") if write() else ("stopped", "")

    def seize(slurm, name, wanted, before, plan):
        assert (before, plan.action) == (IDLE, "drain")
        return hold.Change(hold.Plan("leave", "an admin was faster"), before, before, done=False)

    monkeypatch.setattr(claim, "take", take)
    monkeypatch.setattr(hold, "seize", seize)
    assert sweep.begin(settings, journal, "n1", IDLE, NOW) == "stopped"
    assert seen == ["gpuhealth:sweep GPU* L2 claim since=01-15T08:00Z"]
    assert journal.get("hold") is None
