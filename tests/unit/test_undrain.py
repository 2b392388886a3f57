"""Which holds an undrain selects, and what the ack does to a node's Comment."""

import pytest
from click.testing import CliRunner

from slurm_gpuhealth.commands import undrain
from slurm_gpuhealth.config.settings import Settings
from slurm_gpuhealth.slurm import remark
from slurm_gpuhealth.slurm.node import NodeRecord
from slurm_gpuhealth.slurm.reason import Reason, stamp, write

NOW = 1795176000.0
XID = Reason("Xid79", 3, "reboot", "queued", since=stamp(NOW - 1800))
ANY = undrain.Which(None, (), None, None, False)


def record(ours=XID, comment="", flags=("DRAIN",)):
    text = ours if isinstance(ours, str) else write(ours)
    return NodeRecord("n1", "IDLE", frozenset(flags), text, reason_time=NOW - 60, comment=comment)


def meets(ours=XID, **wanted):
    return undrain.meets(undrain.Which(**{**ANY.__dict__, **wanted}), record(ours), NOW)


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        ("Xid79", True), ("xid79", True), ("gpuhealth:Xid79", True), ("Xid*", True), ("Xid79 GPU3", True), ("*", True),
        ("gpuhealth:xid79 gpu*", True), ("xid:79", True), ("Xid7", False), ("Xid79 GPU4", False), ("dcgm*", False),
        ("gpuhealth:Xid79 GPU[3]", True), ("", False),
    ],
)  # fmt: skip
def test_a_fact_is_meant_as_an_admin_sees_or_knows_it(pattern, meant):
    assert meets(facts=(pattern,)) == meant


def test_what_dcgm_found_is_meant_by_its_name_and_by_dcgm():
    tested = Reason("memory_ban", 1, "L1", "fail", next="L3")
    for pattern in ("DCGM*", "dcgm:memory_bandwidth", "memory*"):
        assert meets(tested, facts=(pattern,))
    assert meets(tested, check="dcgm")
    assert not meets(tested, check="xid")
    assert meets(Reason("brandnew", 1, "L2", "fail", next="L3"), check="dcgm")


@pytest.mark.parametrize(("since", "meant"), [(3600.0, True), (1740.0, True), (1000.0, False)])
def test_since_is_when_the_hold_began_not_when_it_was_reworded(since, meant):
    assert meets(since=NOW - since) == meant


def test_what_a_diagnosis_confirmed_is_left_out_unless_asked_for():
    for ours in (Reason("memory", 3, "L4", "fail", next="RMA"), Reason("dead", 3, "RMA", "queued")):
        assert (meets(ours), meets(ours, confirmed=True)) == (False, True)


def test_what_is_not_ours_is_never_meant():
    for one in (record("PSU, JD"), record("Prolog error"), record(f"{write(XID)} JD: leave it"), record(flags=())):
        assert not undrain.meets(undrain.replace(ANY, facts=("*",), confirmed=True), one, NOW)


def test_an_ack_keeps_the_sites_text_and_what_holds_still_and_forgets_what_is_over():
    before = remark.Said({"lost": NOW + 600, "Xid48": NOW - 60}, "PSU, JD")
    comment = undrain._acknowledged(record(comment=remark.write_said("rack 7", before)), ["Xid79"], NOW + 6000, NOW)
    assert comment.startswith("rack 7 ")
    assert remark.read_said(comment) == remark.Said({"lost": NOW + 600, "Xid79": NOW + 6000}, "PSU, JD")


@pytest.mark.parametrize(
    ("one", "until"),
    [(record(), 0.0), (record(comment="a\nb"), NOW), (record(Reason("asked", None, "L3", "queued")), NOW)],
)
def test_no_ack_where_none_is_wanted_or_can_be_kept(one, until):
    assert undrain._acknowledged(one, undrain._facts([one]), until, NOW) is None


def test_everywhere_acknowledges_on_nodes_that_are_not_held_in_few_orders(monkeypatch):
    orders = []
    monkeypatch.setattr(undrain.control, "comment_all", lambda slurm, names, comment: orders.append((names, comment)))
    others = [undrain.replace(record(""), name=f"n{n}", comment="rack 7" if n > 2 else "") for n in range(1, 5)]
    undrain._acknowledge(Settings(), others, ["rollout"], NOW + 6000, NOW)
    assert [names for names, _ in orders] == [["n1", "n2"], ["n3", "n4"]]
    assert all(remark.read_said(comment).acks == {"rollout": NOW + 6000} for _, comment in orders)
    assert orders[1][1].startswith("rack 7 ")


@pytest.mark.parametrize(("boots", "order"), [(1, "resume"), (0, "undrain")])
def test_only_the_down_of_our_own_reboot_is_ended(monkeypatch, boots, order):
    one = undrain.replace(record(undrain.replace(XID, state="manual", boots=boots)), base="DOWN")
    orders = []
    monkeypatch.setattr(undrain.control, "show_node", lambda slurm, name: one)
    monkeypatch.setattr(undrain.control, "set_remarks", lambda slurm, name, comment: orders.append("ack"))
    monkeypatch.setattr(undrain.control, "resume", lambda slurm, name: orders.append("resume"))
    monkeypatch.setattr(undrain.control, "undrain", lambda slurm, name: orders.append("undrain"))
    undrain._give_back(Settings(), [one], NOW + 6000, NOW)
    assert orders == ["ack", order]


@pytest.fixture
def cluster(monkeypatch):
    """n1 is held for a lost GPU, n2 for something else; for n3's fault there was no room."""
    nodes = {
        "n1": record(XID),
        "n2": record(Reason("Xid48", 1, "reset", "queued")),
        "n3": record("", flags=()),
    }
    nodes = {name: undrain.replace(one, name=name) for name, one in nodes.items()}
    nodes["n3"] = undrain.replace(nodes["n3"], extra=remark.write_waits("", "lost GPU3 L3"))

    def change(names, comment, **more):
        for name in names:
            nodes[name] = undrain.replace(
                nodes[name], comment=nodes[name].comment if comment is None else comment, **more
            )

    control = undrain.control
    monkeypatch.setattr(control, "show_nodes", lambda slurm, names: list(nodes.values()))
    monkeypatch.setattr(control, "comment_all", lambda slurm, names, comment: change(names, comment))
    free = {"flags": frozenset(), "reason": ""}
    monkeypatch.setattr(control, "undrain_all", lambda slurm, names, comment: change(names, comment, **free))
    monkeypatch.setattr(undrain, "settings_or_defaults", lambda here: (Settings(), []))
    return nodes


def run(*argv):
    done = CliRunner().invoke(undrain.undrain, [*argv, "--yes"], obj="n1")
    assert done.exit_code == 0, done.output
    return done.output


def test_everywhere_is_also_where_another_fact_holds_the_node_and_says_no_more_than_it_does(cluster):
    told = run("--fact", "Xid79", "--everywhere")
    assert all("Xid79" in remark.read_said(one.comment).acks for one in cluster.values())
    assert cluster["n2"].ours is not None
    assert "Xid79: drains no node until " in told
    assert "any other fact still does" in told


def test_that_a_lost_gpu_is_lost_still_and_who_is_drained_next_are_said(cluster):
    told = run("--fact", "*", "--confirmed")
    assert "still broken, as far as is known, and jobs will start there: n1 (Xid79)\n" in told
    assert "these are drained next: n3 (lost GPU3 L3)" in told


def test_a_node_that_slurm_keeps_drained_does_not_keep_the_others_from_coming_back(cluster, monkeypatch):
    cluster["n1"] = undrain.replace(cluster["n1"], flags=frozenset({"DRAIN", "INVALID_REG"}))
    given, order = [], undrain.control.undrain_all

    def refuse(slurm, names, comment):  # Slurm carries it out on the other nodes
        given.extend(names)
        order(slurm, [name for name in names if name != "n1"], comment)
        if "n1" in names:
            raise undrain.control.Refused("scontrol", 1, "slurm_update error: Invalid node state specified")

    monkeypatch.setattr(undrain.control, "undrain_all", refuse)
    done = CliRunner().invoke(undrain.undrain, ["--fact", "*", "--yes"], obj="n1")
    assert (done.exit_code, given, cluster["n2"].ours) == (1, ["n1", "n2"], None)
    assert "n1: still drained: " in done.output
    assert "slurmd reports fewer GPUs than configured" in done.output
    assert "1 of 2 nodes are back in service" in done.output
