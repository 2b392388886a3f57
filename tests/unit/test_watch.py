"""Sources: one that breaks, one that hangs in two programs at once, and what is recorded together."""

import os
import subprocess
import time

import pytest

from slurm_gpuhealth import child
from slurm_gpuhealth.child import Child, Ended, Probed
from slurm_gpuhealth.config.settings import Row, Sources, Store
from slurm_gpuhealth.findings import Finding
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.hooks import check
from slurm_gpuhealth.ladder import conclude
from slurm_gpuhealth.node import identity, lock, watch
from slurm_gpuhealth.node.journal import open_journal
from slurm_gpuhealth.policy.judge import SOURCE_OF
from slurm_gpuhealth.ship import outbox

NOW = time.time()


def give(monkeypatch, look):
    monkeypatch.setitem(watch.SOURCES, "host", (("host",), 0, look))


def test_a_source_that_breaks_is_noted_and_keeps_nothing_else_from_being_done(settings, journal, monkeypatch):
    give(monkeypatch, lambda *_: {}["no such key"])
    assert watch.source(settings, journal, "host", NOW, 5) == []
    assert "KeyError" in journal.get("sources")["host"]["error"]


def test_a_count_and_the_finding_that_tells_of_it_are_kept_together_or_not_at_all(settings, journal, monkeypatch):
    seen = [Finding(NOW, "host", "ecc", "one more", standing=False)]
    give(monkeypatch, lambda *_: (seen, True, {"baseline": 1}))
    pid = os.fork()
    if pid == 0:
        monkeypatch.setattr("slurm_gpuhealth.node.record.keep", lambda *_: os._exit(9))
        watch.source(settings, open_journal(settings.paths), "host", NOW, 5)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert journal.get("baseline") is None


def test_while_one_program_asks_the_driver_no_other_starts_a_child(settings, journal):
    turn = lock.take(settings, "nvml")
    started = []
    with pytest.raises(TimeoutError, match="another program"):
        lock.guarded(settings, journal, "nvml", 0.2, started.append)
    os.close(turn)
    assert started == []


def test_a_child_that_may_be_stuck_when_we_are_ended_is_remembered(settings, journal):
    def ended(seconds):
        end = Ended(143)
        end.child = Child(os.getpid(), 1)
        raise end

    with pytest.raises(Ended):
        lock.guarded(settings, journal, "nvml", 1, ended)
    assert journal.get("stuck") == {"nvml": ("boot", os.getpid(), 1)}
    done = Probed({}, None, 0.0)  # pid and start time are not those of a process: it is gone
    assert lock.guarded(settings, journal, "nvml", 1, lambda seconds: done) is done
    assert not journal.get("stuck")


def test_a_lock_goes_to_the_journals_folder_where_run_can_not_be_written(settings, tmp_path):
    (tmp_path / "r").write_text("no folder")
    first = lock.take(settings, "check")
    assert lock.take(settings, "check") is None
    os.close(first)


def test_where_no_lock_can_be_had_the_work_is_done_without(settings, tmp_path):
    for name in ("r", "s"):
        (tmp_path / name).write_text("no folder")
    os.close(lock.take(settings, "check"))


def test_each_source_has_a_switch_that_governs_its_findings_too():
    for name, (sources, _, _) in watch.SOURCES.items():
        if name != "site":  # each of its checks has its own
            assert name in Sources.__annotations__
            own = {SOURCE_OF.get(source) for source in sources if source != "gpu"}  # which has tests and jobs behind it
            assert own == {name}


def test_a_child_that_was_killed_a_moment_ago_is_no_evidence_yet(settings, journal, monkeypatch):
    sleeper = subprocess.Popen(["/bin/sleep", "60"])
    try:
        start = child._stat(sleeper.pid)[1]
        journal.put("stuck", {"nvml": ("boot", sleeper.pid, start)})
        with pytest.raises(TimeoutError, match="not ended yet"):
            lock.guarded(settings, journal, "nvml", 1, None)
        monkeypatch.setattr(child, "age", lambda which: settings.nvml.timeout + lock.SETTLE + 1)
        assert lock.guarded(settings, journal, "nvml", 1, None) is None
        assert journal.get("stuck") == {"nvml": ("boot", sleeper.pid, start)}
    finally:
        sleeper.kill()
        sleeper.wait()


def test_where_no_lock_can_be_had_a_look_goes_on_and_a_worker_does_not(settings):
    nowhere = replace(settings, paths=replace(settings.paths, run="/proc/nowhere", state="/proc/nowhere"))
    os.close(lock.take(nowhere, "check"))
    assert lock.take(nowhere, "worker", real=True) is None


def test_a_source_that_somebody_else_had_is_looked_at_again_before_a_node_is_called_unread(
    settings, journal, monkeypatch
):
    tries = []

    def source(settings, journal, name, now, timeout):
        tries.append(name)
        whole = name != "nvml" or tries.count("nvml") > until
        journal.put("sources", {**journal.get("sources", {}), name: {"error": "" if whole else "hung", "whole": whole}})

    settings = replace(settings, policy=(Row("nvml:lost", "fault", "L3"),))
    monkeypatch.setattr(watch, "kernel", lambda *_: [])
    monkeypatch.setattr(watch, "source", source)
    monkeypatch.setattr(conclude.time, "sleep", lambda _: None)
    until = 1
    assert (conclude.look(settings, journal), tries.count("nvml")) == ("", 2)
    tries.clear()
    until = 9
    assert (conclude.look(settings, journal), tries.count("nvml")) == ("nvml hung", 3)


def test_an_xid_that_the_kernel_printed_while_a_source_was_read_is_known_before_anything_is_decided(
    settings, journal, monkeypatch
):
    order = []
    monkeypatch.setattr(watch, "kernel", lambda *_: order.append("kernel") or [])
    monkeypatch.setattr("slurm_gpuhealth.ladder.drain.act", lambda *_: order.append("act"))
    for name in watch.SOURCES:
        monkeypatch.setitem(watch.SOURCES, name, ((name,), 0, lambda *_: ([], True, {})))
    seen = [Finding(NOW, "nvml", "remap-pend", "pending", standing=True)]
    monkeypatch.setitem(watch.SOURCES, "nvml", (("nvml",), 0, lambda *_: (seen, True, {})))
    journal.put("inventory-boot", identity.boot_id(settings))
    rules = replace(settings, mode="enforce", policy=(Row("nvml:*", "fault", rung="reset"),))
    check.look(rules, journal, "n1", time.monotonic() + 20)
    assert order == ["kernel", "kernel", "act"]


def test_a_quiet_check_ships_once_in_each_heartbeat_and_nodes_at_different_times(settings, journal, monkeypatch):
    beats = {"n1": [], "n2": []}

    def ship(settings, journal, node, seconds, beat, lives):
        assert not lives
        beats[node].append(clock[0])
        if int(clock[0]) not in away:
            journal.put("beat", beat)

    monkeypatch.setattr("slurm_gpuhealth.ship.outbox.ship", ship)
    monkeypatch.setattr(watch, "kernel", lambda *_: [])
    monkeypatch.setattr(check, "_poll", lambda *_: None)
    for name in watch.SOURCES:
        monkeypatch.setitem(watch.SOURCES, name, ((name,), 0, lambda *_: ([], True, {})))
    store = Store(url="file:///shared")
    shipping = replace(settings, store=store)
    journal.put("ships", outbox.mark(store.url))
    journal.put("inventory-boot", identity.boot_id(settings))
    clock, away = [NOW], range(0)
    monkeypatch.setattr(check.time, "time", lambda: clock[0])
    for node in beats:
        for minute in range(121):
            clock[0] = NOW + 60 * minute
            check.look(shipping, journal, node, time.monotonic() + 20)
        assert len(beats[node]) in (4, 5)
        assert {later - one for one, later in zip(beats[node][1:], beats[node][2:])} == {store.heartbeat}
        journal.put("beat", None)
    assert beats["n1"][1:4] != beats["n2"][1:4]
    first, second, third = beats.pop("n1")[1:4]
    beats["n1"], away = [], range(int(second), int(second) + 599)
    for minute in range(121):
        clock[0] = NOW + 60 * minute
        check.look(shipping, journal, "n1", time.monotonic() + 20)
    assert beats["n1"][1:6] == [first, *(second + 300 * number for number in range(3)), third]
