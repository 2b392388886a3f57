"""A drain wave on a real cluster: the budget stops it, one command undoes it, and it stays undone."""

import json
import subprocess
import time

import pytest

from slurm_gpuhealth.slurm import reason, remark
from slurm_gpuhealth.slurm.reason import Reason, write
from tests.cluster import USER
from tests.daemons import PATIENCE
from tests.lab import BIN

NODES = 8
LAB = {"nodes": NODES, "dbd": False, "floor": 2}
OURS = Reason("Xid48", 3, "L3", "queued", since="11-20T12:03Z")


@pytest.fixture
def lab(lab):
    change(lab, "[ladder]\n", "[ladder]\ntests = false\n")  # holds stay as they are
    for node in lab.names:
        admin(lab, node, "comment=")
    return lab


def change(lab, old, new):
    text = lab.config.read_text()
    assert old in text
    lab.config.write_text(text.replace(old, new))
    lab.stale.update(lab.names)


def admin(lab, node, *words):
    lab.run("scontrol", "update", f"nodename={node}", *words)


def undrain(lab, *words, config="/nowhere", stdin="", **options):
    """Exit code and all that it says, as on a login node."""
    env = {**lab.env, "GPUHEALTH_CONFIG": str(config), "COLUMNS": "200"}
    argv = [str(BIN / "gpuhealth"), "--node", "login1", "undrain", *words]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=PATIENCE, input=stdin, **options)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout + done.stderr


def held(lab):
    """Nodes with a reason of ours: name → state in the reason."""
    return {node: ours.state for node in lab.names if (ours := reason.parse(lab.reason(node)))}


def at_rest(lab):
    """What is held once every node has made a check of its own, and no claim is left."""
    lab.check(*lab.names)
    return lab.until(lambda: (found := held(lab)) and "claim" not in found.values() and found, "no claims")


def wave(lab, nodes=None):
    for node in nodes or lab.names:
        lab.inject(node, "xid", 79, "--gpu", 3)


def test_a_wave_stops_at_the_budget_is_undone_by_one_command_and_stays_undone(lab):
    admin(lab, "n1", "comment=rack 7, JD")
    admin(lab, "n8", "state=drain", "reason=PSU, JD")
    wave(lab)
    found = at_rest(lab)
    assert len(found) == 2
    decisions = {
        node: [row[0] for row in lab.rows(node, "SELECT action FROM decision ORDER BY id")] for node in lab.names
    }
    assert sum("over-budget" in made for made in decisions.values()) == NODES - 3
    assert not any("acked" in made for made in decisions.values())  # an undo of ours is no admin's ack
    code, text = undrain(lab, "--since", "1h", "--fact", "xid*", "--yes")
    assert (code, "2 of 2 nodes that gpuhealth holds" in text) == (0, True)
    assert "2 of 2 nodes are back in service" in text
    for node in found:
        assert lab.state(node).startswith("IDLE")
        assert "gpuhealth: ack Xid79 until " in lab.node(node)
        lab.check(node)
        lab.check(node)
        assert lab.reason(node) == ""  # NVML misses the GPU still
    assert lab.reason("n8") == "PSU, JD"


def test_an_ack_outlives_the_journal_and_keeps_the_sites_own_comment(lab):
    admin(lab, "n2", "comment=rack 7, JD")
    wave(lab, ["n2"])
    lab.until_reason("n2", "gpuhealth:")
    lab.until(lambda: lab.rows("n2", "SELECT 1 FROM finding WHERE code = 'lost'"), "NVML to miss it too")
    lab.until(lambda: held(lab).get("n2") not in (None, "claim"), "a confirmed hold")
    facts = ("Xid79", "lost")
    comment = remark.write_said("rack 7, JD", remark.Said({fact: time.time() + 86400 for fact in facts[1:]}))
    admin(lab, "n2", f"comment={comment}")
    assert undrain(lab, "--nodes", "n2", "--yes", "--for", "2h")[0] == 0
    line = lab.node("n2")
    assert " Comment=rack 7, JD gpuhealth: ack Xid79 until " in line
    assert ", ack lost until " in line
    lab.forget("n2")
    lab.until(lambda: lab.rows("n2", "SELECT 1 FROM finding WHERE mode = 'acked' AND code = 'lost'"), "the ack found")
    lab.check("n2")
    assert lab.reason("n2") == ""


def test_what_is_shown_chosen_and_left_out(lab):
    reasons = {
        "n1": OURS,
        "n2": Reason("memory", 1, "L1", "fail", next="L3", since=reason.stamp(time.time())),
        "n3": Reason("row-remap", 0, "RMA", "queued", since=reason.stamp(time.time())),
        "n4": Reason("Xid79", 3, "reboot", "claim", since=reason.stamp(time.time())),
    }
    lab.touched.update(lab.names)
    for node, ours in reasons.items():
        admin(lab, node, "state=drain", f"reason={write(ours)}")
    for words, wanted in {
        ("--fact", "Xid48"): ["n1"],
        ("--fact", "gpuhealth:xid79 GPU3"): ["n4"],
        ("--fact", "DCGM*"): ["n2"],
        ("--fact", "nonsense"): [],
        ("--check", "xid"): ["n1", "n4"],
        ("--rung", "l3"): ["n1", "n2"],
        ("--rung", "RMA"): ["n3"],
        ("--since", "1h"): ["n2", "n4"],
        ("--since", "1h", "--confirmed"): ["n2", "n3", "n4"],
        ("--nodes", "n[1-3]"): ["n1", "n2"],
        ("--nodes", "n[1-4]", "--since", "1h", "--rung", "reboot"): ["n4"],
    }.items():
        code, text = undrain(lab, *words, "--dry-run", "--json")
        found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        assert (code, [one["node"] for one in found]) == (0, wanted), words
        assert not any(one["given_back"] for one in found)
    code, text = undrain(lab, "--fact", "*", "--dry-run")
    assert "left out: 1 more" in text
    assert "gpuhealth:Xid48 GPU3 L3 " in text
    assert sorted(held(lab)) == sorted(reasons)


def test_who_is_not_asked_and_who_has_no_right_changes_nothing(lab):
    admin(lab, "n1", "state=drain", f"reason={write(OURS)}")
    code, text = undrain(lab, "--fact", "*")
    assert (code, "can't ask here: --yes" in text) == (2, True)
    code, text = undrain(lab, "--yes")
    assert (code, "say which" in text) == (2, True)
    code, text = undrain(lab, "--fact", "*", "--yes", user=USER)
    assert (code, "Slurm does not let you change nodes" in text) == (1, True)
    code, text = undrain(lab, "--nodes", "n99", "--yes")
    assert (code, "n99" in text) == (1, True)
    for evil in ("n1;reboot", "-x", "n1 State=DOWN"):
        assert undrain(lab, f"--nodes={evil}", "--yes")[0] == 2
    assert lab.reason("n1").startswith("gpuhealth:Xid48 GPU3 L3 ")


def test_a_dead_controller_is_said(lab):
    lab.stop_controller()
    try:
        code, text = undrain(lab, "--fact", "*", "--yes")
    finally:
        lab.start_controller()
    assert (code, "slurmctld does not answer" in text) == (1, True)


def test_a_node_outside_of_the_group_that_the_budget_counts_is_not_drained(lab):
    change(lab, "[drain]\n", '[drain]\nnodes = "n[1-4]"\n')
    wave(lab, ["n3", "n7"])
    lab.until_reason("n3", "gpuhealth:")
    lab.until(lambda: lab.rows("n7", "SELECT 1 FROM decision WHERE action = 'refused'"), "a refusal")
    assert lab.reason("n7") == ""


def test_a_check_that_is_killed_over_its_claim_is_finished_by_the_next(lab):
    admin(lab, "n5", "state=drain", f"reason={write(Reason('Xid48', 3, 'L3', 'claim', since='11-20T12:03Z'))}")
    lab.touched.add("n5")
    lab.until(lambda: held(lab).get("n5") not in (None, "claim"), "a settled claim")
