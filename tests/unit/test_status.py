"""gpuhealth status: a node at a glance."""

import time

from slurm_gpuhealth.commands import status
from slurm_gpuhealth.node import samples


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


def test_of_each_gpu_with_a_job_it_says_what_it_does_now(settings, journal, capsys):
    now = time.time()
    journal.put("gpus", [gpu(0, "GPU-a"), gpu(1, "GPU-b"), gpu(2, "GPU-c")])
    sample = {"power": 121_000, "limit": 700_000, "clock": 1980, "memory": 61_440, "processes": 1, "temperature": 55}
    seen = [{"uuid": "GPU-a", "errors": {}, "utilization": 100, **sample}, {"uuid": "GPU-b", "errors": {}, "mig": 1}]
    journal.put("nvml", {"time": now, "gpus": seen})
    for when in (now - 720, now - 360, now):
        held = [(7, 0, ["GPU-a"]), (8, 0, ["GPU-b"])]
        for key, value in samples.take(settings, journal, held, seen, when)[1].items():
            journal.put(key, value)
    facts = status.gather("n1", settings, journal)
    assert [one["doing"] and one["doing"]["does"] for one in facts["gpus"]] == ["spinning", "unknown", None]
    status.show(facts)
    said = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "0 7 spinning 12 min 100 % 121 W of 700 W - 1980 MHz 60 GiB 55 °C" in said
    assert any(line.startswith("1 8 not judged: it is in MIG mode 12 min - - ") for line in said)
