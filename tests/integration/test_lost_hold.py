"""What slurmctld loses is no admin's resume: a hold that may have been lost is made again, once, on real Slurm."""

from tests.daemons import until

LAB = {"nodes": 2, "gpus": 4, "dbd": False, "floor": 2}


def decisions(lab, node):
    """But for those that are put off: a node that slurmctld has just forgotten is UNKNOWN for a while."""
    return [row[0] for row in lab.rows(node, "SELECT action FROM decision WHERE action != 'undecided' ORDER BY id")]


def test_a_hold_that_a_restart_of_slurmctld_lost_is_made_again_once_and_then_left(lab):
    lab.inject("n1", "xid", 79, "--gpu", 3)
    lab.until_reason("n1", "gpuhealth:Xid79")
    lab.check("n1")
    restart_without_state(lab)
    lab.until_reason("n1", "gpuhealth:Xid79")
    lab.until(lambda: decisions(lab, "n1")[:3] == ["drained", "lost", "drained"], "the decisions")
    lab.check("n1")
    restart_without_state(lab)
    lab.until(lambda: "acked" in decisions(lab, "n1"), "the second loss is left")
    for _ in range(3):
        lab.check("n1")
    until(lambda: lab.state("n1") == "IDLE", "n1 in service")


def test_a_drain_that_scontrol_said_yes_to_and_did_not_make_is_made_again(lab):
    wrapper = lab.lab / "nodes/n2/bin/scontrol"
    good = wrapper.read_text()
    once = lab.lab / "nodes/n2/once"
    once.touch()
    wrapper.write_text(good.replace("exec", f'case "$*" in update*) rm {once} 2>/dev/null && exit 0 ;; esac\nexec'))
    lab.inject("n2", "xid", 79, "--gpu", 1)
    lab.until_reason("n2", "gpuhealth:Xid79")
    wrapper.write_text(good)
    lab.until(lambda: decisions(lab, "n2")[:3] == ["drained", "lost", "drained"], "the decisions")


def restart_without_state(lab):
    """slurmctld as after `systemctl restart` with `-c` in SLURMCTLD_OPTIONS, or with its state directory gone."""
    lab.stop_controller()
    lab.daemons.start("slurmctld", "slurmctld", "-D", "-c", "-f", str(lab.conf))
    until(lambda: "is UP" in lab.run("scontrol", "ping", check=False), "slurmctld")
