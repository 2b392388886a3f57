"""gpuhealth status: a node at a glance."""

from slurm_gpuhealth.commands import status


def gpu(index, uuid):
    return {"index": index, "uuid": uuid, "pci": f"0000:{index}0:00", "serial": "1"}


def test_after_a_boot_a_lost_gpu_has_no_number_that_another_one_has_now(settings, journal, capsys):
    journal.put("gpus", [gpu(0, "GPU-a"), gpu(1, "GPU-lost"), gpu(1, "GPU-c")])
    journal.put("nvml", {"time": 0.0, "gpus": [{"uuid": "GPU-a"}, {"uuid": "GPU-c"}]})
    facts = status.gather("n1", settings, journal)
    assert [(one["uuid"], one["index"], one.get("was")) for one in facts["gpus"]] == [
        *(("GPU-a", 0, None), ("GPU-lost", None, 1), ("GPU-c", 1, None))
    ]
    status.show(facts)
    assert "\nwas 1  " in capsys.readouterr().out


def test_before_the_boot_it_keeps_its_own(settings, journal):
    journal.put("gpus", [gpu(0, "GPU-a"), gpu(1, "GPU-lost"), gpu(2, "GPU-c")])
    journal.put("nvml", {"time": 0.0, "gpus": [{"uuid": "GPU-a"}, {"uuid": "GPU-c"}]})
    assert [one["index"] for one in status.gather("n1", settings, journal)["gpus"]] == [0, 1, 2]
