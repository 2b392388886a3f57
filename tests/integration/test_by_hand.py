"""The default ladder on real Slurm: what it asks of hands, done by hand, and what becomes of the node then."""

import tarfile

from slurm_gpuhealth.slurm import remark
from slurm_gpuhealth.slurm.reason import parse
from tests.fakes import node as fakes

LAB = {"nodes": 2, "dbd": False, "floor": 2}


def test_a_gpu_that_is_gone_for_good_ends_at_rma_after_one_reboot_by_hand(lab):
    gone = fakes.load(str(lab.lab / "nodes/n1"))["gpus"][3]
    lab.inject("n1", "xid", 79, "--gpu", 3, "--for-good")
    lab.until_reason("n1", "reboot manual")
    lab.check("n1")  # which notes the boot that this was asked in
    lab.stop_node("n1")
    lab.inject("n1", "reboot")
    lab.start_node("n1", "-b")
    ours = parse(lab.until_reason("n1", "next=RMA"))
    assert (ours.fact, ours.gpu, ours.done, ours.serial) == ("Xid79", 3, "reboot", gone["serial"])
    assert f"{ours.pci}." in gone["pci"].lower() or ours.pci == gone["pci"].lower()
    last = lab.until(
        lambda: (one := remark.read_result(lab.node("n1").partition(" Extra=")[2])) and one.bundle and one, "evidence"
    )
    with tarfile.open(lab.lab / "nodes/n1/state/bundles" / last.bundle) as tar:
        inside = {name.rpartition("/")[2]: tar.extractfile(name).read() for name in tar.getnames()}
    assert gone["serial"].encode() in inside["gpus.json"]
    assert "DRAIN" in lab.state("n1") or "DOWN" in lab.state("n1")
