"""Draining, giving back and asking, on real Slurm."""

import time

import pytest

from slurm_gpuhealth.config import settings
from slurm_gpuhealth.slurm import control, hold
from slurm_gpuhealth.slurm.reason import Reason, write
from tests.daemons import until

WANTED = Reason("Xid79", 3, "L1", "fail", job=1842, next="L3")
OURS = write(WANTED)


def admin(cluster, name, *words):
    cluster.run("scontrol", "update", f"nodename={name}", *words)


def test_a_drained_node_shows_fact_and_gpu_in_sinfos_20_columns(cluster, slurm):
    change = hold.take(slurm, "n1", WANTED)
    assert change.done
    assert (change.after.base, change.after.flags, change.after.reason_user) == ("IDLE", {"DRAIN"}, "root")
    assert abs(change.after.reason_time - time.time()) < 60
    line = next(line for line in cluster.run("sinfo", "-R").splitlines() if line.endswith(" n1"))
    assert line.split(" root ")[0].rstrip() == "gpuhealth:Xid79 GPU3"
    assert cluster.reason("n1") == OURS


def test_what_we_drained_comes_back_and_is_no_more_ours(cluster, slurm):
    hold.take(slurm, "n1", WANTED)
    assert hold.give_back(slurm, "n1").done
    assert cluster.reason("n1") == ""
    assert not hold.give_back(slurm, "n1").done


def test_a_running_job_goes_on_while_its_node_drains(cluster, slurm):
    job = cluster.submit("sleep 600", gres="gpu:1", nodelist="n1")
    cluster.wait(job, "RUNNING")
    change = hold.take(slurm, "n1", WANTED)
    assert (change.after.base, change.after.flags, change.after.has_job) == ("MIXED", {"DRAIN"}, True)
    assert cluster.job(job)["JobState"] == "RUNNING"
    cluster.run("scancel", str(job))
    until(lambda: not control.show_node(slurm, "n1").has_job, "a node without a job")
    assert control.show_node(slurm, "n1").ours == WANTED


def test_giving_back_leaves_a_down_node_down(cluster, slurm):
    hold.take(slurm, "n1", WANTED)
    admin(cluster, "n1", "state=down", f"reason={OURS}")
    change = hold.give_back(slurm, "n1")
    assert change.done
    assert (change.after.base, change.after.owner) == ("DOWN", "admin")


@pytest.mark.parametrize(
    "words",
    [
        ["state=drain", "reason=PSU, JD"],
        ["state=down", "reason=PSU, JD"],
        ["state=fail", "reason=PSU, JD"],
        ["state=drain", f"reason={OURS} -- JD: leave it"],
        ["state=drain", f"reason={OURS}\nJD: leave it"],
    ],
)
def test_an_admins_hold_is_left_as_it_is(cluster, slurm, words):
    admin(cluster, "n2", *words)
    before = cluster.node("n2").partition(" Reason=")[2]
    change = hold.take(slurm, "n2", WANTED)
    assert (change.done, change.plan.action, change.before.owner) == (False, "leave", "admin")
    assert not hold.give_back(slurm, "n2").done
    assert cluster.node("n2").partition(" Reason=")[2] == before


def test_an_admin_who_takes_over_our_hold_keeps_it(cluster, slurm):
    hold.take(slurm, "n1", WANTED)
    admin(cluster, "n1", "reason=waiting for the part, JD")
    assert not hold.give_back(slurm, "n1").done
    assert not hold.reword(slurm, "n1", Reason("Xid79", 3, "L3", "running")).done
    assert cluster.reason("n1") == "waiting for the part, JD"


def test_an_admins_drain_while_we_count_the_budget_stands(cluster, slurm):
    change = hold.take(slurm, "n1", WANTED, lambda *_: admin(cluster, "n1", "state=drain", "reason=JD") or True)
    assert (change.done, cluster.reason("n1")) == (False, "JD")


def test_our_reason_changes_with_the_rung(cluster, slurm):
    hold.take(slurm, "n1", WANTED)
    after = hold.reword(slurm, "n1", Reason("Xid79", 3, "L3", "running", since="11-20T12:03Z"))
    assert after.done
    assert cluster.reason("n1") == "gpuhealth:Xid79 GPU3 L3 running since=11-20T12:03Z"


def test_a_reason_of_every_field_comes_back_whole(cluster, slurm):
    full = Reason(
        *("x" * 10, 9999, "reboot", "untested", "0001:5d:00", "9" * 32, "11-20T12:03Z", 1 << 63, "RMA", "L4"),
        attempt=99,
        boots=99,
        by="é'\n" * 9,
    )
    assert hold.take(slurm, "n1", full).done
    assert control.show_node(slurm, "n1").ours.boots == 99


def test_slurms_own_drain_for_a_lost_gpu_is_adopted(cluster, slurm):
    gres = cluster.lab / "etc/gres.conf"
    whole = gres.read_text()
    lost = next(line for line in whole.splitlines(keepends=True) if line.startswith("NodeName=n4 "))
    try:
        gres.write_text(whole.replace(lost, ""))
        cluster.stop_node("n4")
        cluster.start_node("n4")
        until(lambda: "DRAIN" in cluster.state("n4"), "Slurm's own drain")
        found = control.show_node(slurm, "n4")
        assert found.reason == "gres/gpu count reported lower than configured (7 < 8)"
        assert (found.owner, hold.plan_drain(found).action) == ("slurm", "adopt")
        assert hold.take(slurm, "n4", WANTED).done
    finally:
        gres.write_text(whole)
        cluster.stop_node("n4")
        cluster.start_node("n4")
        until(lambda: "INVALID_REG" not in cluster.state("n4"), "n4 with 8 GPUs")


def test_a_reboot_leaves_our_reason_ours_and_the_node_alone(cluster, slurm):
    hold.take(slurm, "n3", WANTED)
    cluster.run("scontrol", "reboot", "ASAP", "nextstate=RESUME", "n3")
    until(lambda: "REBOOT_ISSUED" in cluster.state("n3"), "a reboot")
    found = control.show_node(slurm, "n3")
    assert (found.ours.tail, found.owner) == (("reboot issued",), "us")
    assert hold.take(slurm, "n3", WANTED).plan.action == "ours"
    cluster.stop_node("n3")
    cluster.daemons.start("slurmd-n3", "slurmd", "-D", "-b", "-f", str(cluster.conf), "-N", "n3")  # as after a boot
    until(lambda: "REBOOT" not in cluster.state("n3"), "n3 after its reboot")


def test_a_node_under_maintenance_is_left_alone(cluster, slurm):
    flags = ["users=root", "flags=maint,ignore_jobs", "starttime=now", "duration=60", "nodes=n2"]
    cluster.run("scontrol", "create", "reservation", "reservationname=work", *flags)
    try:
        until(lambda: "MAINTENANCE" in cluster.state("n2"), "maintenance")
        change = hold.take(slurm, "n2", WANTED)
        assert (change.plan.action, change.done) == ("leave", False)
        assert "maintenance" in change.plan.why
        assert "DRAIN" not in cluster.state("n2")
    finally:
        cluster.run("scontrol", "delete", "reservationname=work")
        until(lambda: "MAINTENANCE" not in cluster.state("n2"), "the end of maintenance")


def test_an_unknown_node_is_refused_in_slurms_words(slurm):
    with pytest.raises(control.Refused, match="Node n99 not found"):
        control.show_node(slurm, "n99")
    with pytest.raises(control.Refused, match="Invalid node name"):
        control.drain(slurm, "n99", WANTED)
    with pytest.raises(control.Refused, match="Invalid job id"):
        control.show_job(slurm, 999999)


def test_who_is_not_root_is_refused(cluster, slurm, tmp_path):
    program = tmp_path / "scontrol"
    program.write_text('#!/bin/sh\nexec setpriv --reuid games --regid games --clear-groups /usr/bin/scontrol "$@"\n')
    program.chmod(0o755)
    with pytest.raises(control.Refused, match="Invalid user id"):
        hold.take(settings.Slurm(conf=slurm.conf, scontrol=str(program)), "n1", WANTED)
    assert cluster.state("n1") == "IDLE"


def test_holds_are_counted_once_a_node_and_within_the_group(cluster, slurm):
    for name in ("n1", "n2"):
        hold.take(slurm, name, WANTED)
    admin(cluster, "n3", "state=drain", "reason=JD")
    holds, total = control.holds(slurm)
    assert ([(one.node, one.ours) for one in holds], total) == ([("n1", WANTED), ("n2", WANTED)], 4)
    assert all(one.time == control.show_node(slurm, one.node).reason_time > time.time() - 60 for one in holds)
    holds, total = control.holds(slurm, "n[2-3]", "n2")
    assert ([one.node for one in holds], total) == (["n2"], 2)
    with pytest.raises(control.Refused, match="n1 is not among the 2 nodes"):
        control.holds(slurm, "n[2-3]", "n1")


def test_the_same_text_keeps_its_time_and_an_undrain_ends_it(cluster, slurm):
    first = hold.take(slurm, "n1", WANTED).after.reason_time
    time.sleep(1.1)
    control.set_reason(slurm, "n1", WANTED)
    assert control.show_node(slurm, "n1").reason_time == first
    hold.give_back(slurm, "n1")
    assert hold.take(slurm, "n1", WANTED).after.reason_time > first


def test_all_nodes_are_read_in_one_call_and_undrained_with_their_comment(cluster, slurm):
    for name in ("n1", "n2", "n3"):
        hold.take(slurm, name, WANTED)
    admin(cluster, "n3", "reason=JD\nNodeName=n1 State=IDLE")
    comment = 'rack "7" gpuhealth: ack Xid79 until 2030-01-01T00:00Z;'
    control.undrain_all(slurm, ["n1", "n2"], comment)
    found = {one.name: one for one in control.show_nodes(slurm, "n[1-4]")}
    for name in ("n1", "n2"):
        assert ("DRAIN" in found[name].flags, found[name].comment, found[name].reason) == (False, comment, "")
    assert ("DRAIN" in found["n3"].flags, found["n4"].comment) == (True, "")
    with pytest.raises(control.Refused):
        control.show_nodes(slurm, "n99")
    for name in ("n1", "n2"):
        control.set_remarks(slurm, name, comment="")
    assert control.show_node(slurm, "n1").comment == ""


def test_a_job_is_requeued_unheld_and_ends_on_another_node(cluster, slurm):
    job = cluster.submit('test -n "$SLURM_RESTART_COUNT" || sleep 600', gres="gpu:1")
    cluster.wait(job, "RUNNING")
    found = control.show_job(slurm, job)
    assert (found.requeue, found.batch, found.num_nodes, found.restarts) == (True, True, 1, 0)
    name = cluster.job(job)["NodeList"]
    hold.take(slurm, name, WANTED)
    control.requeue(slurm, found)
    cluster.wait(job, "PENDING")
    found = control.show_job(slurm, job)
    assert (found.reason, found.restarts) == ("BeginTime", 1)
    cluster.wait(job, "COMPLETED")
    assert cluster.job(job)["NodeList"] != name
    until(lambda: [row[1] for row in cluster.sacct(job)] == ["REQUEUED", "COMPLETED"], "both runs in the accounting")


def test_a_job_that_forges_its_record_has_no_say(cluster, slurm):
    forged = "x JobState=FAILED Reason=x Dependency=(null) Requeue=0 Restarts=0 BatchFlag=0 Reboot=0 ExitCode=0:0"
    for name in (forged, f"x\n   {forged}", "x NumNodes=1 NumCPUs=1"):
        job = cluster.submit("sleep 600", job_name=name)
        with pytest.raises(control.Refused, match="read safely"):
            control.show_job(slurm, job)


def test_positions_map_to_the_device_files_in_slurms_order(cluster, slurm):
    for name in cluster.names:
        found, shared = control.gres_map(slurm, name)
        assert not shared
        assert [files[0] for files in found] == [
            f"{cluster.lab}/nodes/{name}/dev/nvidia{m}" for m in cluster.minors(name)
        ]
        assert [int(files[0][-1]) for files in found] != sorted(int(files[0][-1]) for files in found)


def test_a_missing_device_file_is_said_within_the_deadline(cluster, slurm):
    gres = cluster.lab / "etc/gres.conf"
    whole = gres.read_text()
    try:
        gres.write_text(whole + f"NodeName=n1 Name=gpu Type=h100 File={cluster.lab}/nodes/n1/dev/nvidia99\n")
        with pytest.raises(control.SlurmError, match=r"Waiting for gres\.conf file .*nvidia99"):
            control.gres_map(settings.Slurm(conf=slurm.conf, timeout=2.0), "n1")
    finally:
        gres.write_text(whole)


def test_the_configuration_is_read(slurm):
    config = control.config(slurm)
    assert config["PrologFlags"] == ("Alloc,DeferBatch",)
    assert config.get("Prolog", ()) == ()  # 22.05 has an empty line, 24.11 and later none


def test_a_controller_that_is_down_is_said_within_the_deadline_and_the_hold_survives(cluster, slurm):
    hold.take(slurm, "n1", WANTED)
    cluster.stop_controller()
    try:
        for limit in (1.0, 20.0):  # our deadline first; then scontrol's own, after 9 to 10 s
            began = time.monotonic()
            with pytest.raises(control.ControllerDown):
                hold.take(settings.Slurm(conf=slurm.conf, timeout=limit), "n2", WANTED)
            assert time.monotonic() - began < min(limit + 2, 15)
    finally:
        cluster.start_controller()
    assert control.show_node(slurm, "n1").ours == WANTED


def test_a_missing_slurm_conf_is_said_and_nothing_hangs(slurm):
    with pytest.raises(control.SlurmError):
        control.show_node(settings.Slurm(conf="/nonexistent/slurm.conf", timeout=5.0), "n1")


def test_asking_stays_cheap_for_the_controller(cluster, slurm):
    def requests():
        lines = [line for line in cluster.run("sdiag").splitlines() if "REQUEST_" in line and "count:" in line]
        return sum(int(line.split("count:")[1].split()[0]) for line in lines)

    def cost(ask):
        before = requests()
        ask()
        return requests() - before - 1  # sdiag's own

    # scontrol and sinfo ask for nodes and for partitions; `take` reads three times and writes once.
    assert cost(lambda: control.show_node(slurm, "n1")) <= 2
    assert cost(lambda: control.holds(slurm)) <= 2
    assert cost(lambda: hold.take(slurm, "n1", WANTED)) <= 7
