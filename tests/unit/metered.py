"""Journals with something of everything that metrics are made of."""

from slurm_gpuhealth.config.settings import Metrics
from slurm_gpuhealth.findings import Finding, Gpu
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.node import record, watch

GPUS = [
    {
        "uuid": f"GPU-{one}",
        "pci": f"0000:{one:02x}:00",
        "serial": f"16{one}",
        "minor": one,
        "name": "H100",
        "index": one,
    }
    for one in range(8)
]
HELD = "gpuhealth:Xid79 GPU3 L3 running since=11-20T12:03Z"


def with_textfile(settings, path):
    return replace(settings, metrics=Metrics(textfile=str(path)))


def healthy(journal, now):
    """8 GPUs, all read and tested."""
    journal.put("gpus", GPUS)
    journal.put("gres", {"boot": "boot", "error": "", "uuids": [one["uuid"] for one in GPUS], "time": now})
    journal.put("nvml", {"time": now, "gpus": GPUS})
    source = {"time": now, "seconds": 0.05, "error": "", "whole": True}
    journal.put("sources", dict.fromkeys(watch.SOURCES, source))
    tested(journal, now, "pass", 2)


def tested(journal, now, outcome, level):
    row = "(time, level, uuid, outcome, seconds, program, detail) VALUES (?, ?, ?, ?, 9, 'check', '{}')"
    for one in GPUS:
        journal.write(f"INSERT INTO diagnostic {row}", now, level, one["uuid"], outcome)


def see(journal, settings, code, now, gpu=3, source="nvml", standing=True):
    about = None if gpu is None else Gpu(f"GPU-{gpu}", f"0000:{gpu:02x}:00", gpu)
    record.keep(journal, settings, [Finding(now, source, code, "m", about, "fault", standing)], now)


def broken(journal, settings, now):
    """GPU 3 is lost, the node is held and a job still runs; and it can't ship."""
    healthy(journal, now)
    journal.put("nvml", {"time": now, "gpus": [one for one in GPUS if one["index"] != 3]})
    see(journal, settings, "lost", now)
    see(journal, settings, "79", now, source="xid", standing=False)
    journal.put("hold", {"reason": HELD, "since": now - 60, "seen": now})
    journal.put("waits", "Xid79 GPU3 L3")
    journal.write("INSERT INTO outbox (kind, id, sub, time, bytes) VALUES ('finding', 1, 1, ?, 400)", now)


def values(text):
    """`name{labels}` → value, of a text in Prometheus' format."""
    rows = [line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in rows}
