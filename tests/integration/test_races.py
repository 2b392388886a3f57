"""An admin who drains a node between our last look and our order, on real Slurm with accounting: his word stands."""

import pytest

LAB = {"nodes": 1, "gpus": 2, "floor": 2}

TEXT = "PSU, JD | bay 7"
FIRST = """\
case "$*" in
*"{order}"*) if mv {home}/once {home}/done 2>/dev/null; then
  /usr/bin/scontrol update NodeName=n1 State={state} Reason="{text}"
fi ;;
esac
exec"""


@pytest.mark.parametrize("state", ["DRAIN", "DOWN"])
@pytest.mark.parametrize("order", ["L3 running", "State=UNDRAIN"])
def test_an_admin_who_takes_the_node_just_before_our_order_keeps_it(lab, order, state):
    home = lab.lab / "nodes/n1"
    wrapper = home / "bin/scontrol"
    plain = wrapper.read_text()
    (home / "once").touch()
    wrapper.write_text(plain.replace("exec", FIRST.format(order=order, home=home, state=state, text=TEXT)))
    try:
        lab.run("scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=gpuhealth:asked GPU* L3 queued by=alice")
        lab.until(lambda: (home / "done").exists(), f"our {order}", "n1")
        lab.until(lambda: lab.reason("n1") == TEXT, "his words")
        for _ in range(2):
            lab.check("n1")
        assert lab.reason("n1") == TEXT
        assert state in lab.state("n1")
    finally:
        wrapper.write_text(plain)
        (home / "done").unlink(missing_ok=True)
