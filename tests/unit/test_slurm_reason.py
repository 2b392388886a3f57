"""Our reason: written, read back, and distinguished from Slurm's and an admin's."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_gpuhealth.findings import RUNGS
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.slurm import reason
from slurm_gpuhealth.slurm.reason import Reason

EXAMPLES = {
    "gpuhealth:Xid79 GPU3 L1 fail job=1842 next=L3": Reason("Xid79", 3, "L1", "fail", job=1842, next="L3"),
    "gpuhealth:Xid79 GPU3 L3 running since=11-20T12:03Z": Reason("Xid79", 3, "L3", "running", since="11-20T12:03Z"),
    "gpuhealth:memory GPU3 L4 fail 0000:5d:00.0 serial=1652823055571 next=RMA": Reason(
        "memory", 3, "L4", "fail", pci="0000:5d:00", serial="1652823055571", next="RMA"
    ),
    "gpuhealth:asked GPU* L3 queued by=alice": Reason("asked", None, "L3", "queued", by="alice"),
    "gpuhealth:asked GPU* L1 queued tests=nccl,nvbandwidth by=alice": Reason(
        "asked", None, "L1", "queued", tests="nccl,nvbandwidth", by="alice"
    ),
    "gpuhealth:scratch node L1 queued": Reason("scratch", None, "L1", "queued", node=True),
    "gpuhealth:Xid79 GPU3 reboot claim": Reason("Xid79", 3, "reboot", "claim"),
    "gpuhealth:Xid79 GPU3 L3 running to=L4 try=2 boots=1": Reason(
        "Xid79", 3, "L3", "running", to="L4", attempt=2, boots=1
    ),
    "gpuhealth:Xid79 GPU3 L3 running done=reboot by=alice": Reason(
        "Xid79", 3, "L3", "running", done="reboot", by="alice"
    ),
}
WORDS = st.text(string.ascii_letters + string.digits + "._-", min_size=1, max_size=10)
REASONS = st.builds(
    Reason,
    fact=WORDS,
    gpu=st.none() | st.integers(0, 9999),
    rung=st.sampled_from(RUNGS),
    state=st.sampled_from(reason.STATES),
    pci=st.just("") | st.from_regex(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}", fullmatch=True),
    serial=st.just("") | WORDS,
    since=st.just("") | st.from_regex(r"[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}Z", fullmatch=True),
    job=st.none() | st.integers(1, (1 << 64) - 1),
    next=st.just("") | st.sampled_from(RUNGS),
    to=st.just("") | st.sampled_from(RUNGS),
    tests=st.just("") | st.from_regex(r"[A-Za-z0-9._,-]{1,32}", fullmatch=True),
    attempt=st.integers(1, 99),
    boots=st.integers(0, 99),
    done=st.just("") | st.sampled_from(RUNGS),
    by=st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
)


@pytest.mark.parametrize(("text", "value"), EXAMPLES.items())
def test_the_documented_reasons_are_what_is_written_and_read(text, value):
    assert reason.write(value) == text
    assert reason.parse(text) == value


@given(REASONS)
def test_every_reason_reads_back_and_is_safe_in_slurm(value):
    text = reason.write(value)
    assert reason.parse(text) == value
    assert len(text.encode()) <= reason.MAX_BYTES
    assert text.isascii()
    assert text.isprintable()
    assert not set(text) & set("\"|'\\")


@given(REASONS, st.lists(st.sampled_from(reason.SLURM_TAILS), max_size=3))
def test_what_slurm_appends_does_not_hide_that_it_is_ours(value, tail):
    text = " : ".join([reason.write(value), *tail])
    assert reason.parse(text) == replace(value, tail=tuple(tail))


@given(REASONS, st.text(min_size=1))
def test_what_an_admin_appends_makes_it_the_admins(value, note):
    text = reason.write(value)
    assert reason.parse(text + note) is None or reason.write(reason.parse(text + note)) == text + note


@given(st.text())
def test_no_text_breaks_the_parser(text):
    reason.parse(text)
    reason.parse(f"gpuhealth:Xid79 GPU3 L1 fail {text}")
    reason.parse(f"gpuhealth:{text} GPU3 L1 fail")


@pytest.mark.parametrize(
    "text",
    [
        "gpuhealth:Xid79 GPU3 L1 fail: JD, leave it",
        "gpuhealth:Xid79 GPU3 L1 fail\nJD, leave it",
        "gpuhealth:Xid79 GPU3 L1 fail : waiting for the part",
        "gpuhealth:Xid79 GPU3 L1 fail job=1 job=2",
        "gpuhealth:Xid79 GPU3 L1 fail next=L3 job=1",
        "gpuhealth:Xid79 GPU3 L1 fail job=01",
        "gpuhealth:Xid79 GPU3 L1 fail by=%61",
        "gpuhealth:Xid79 GPU3 L1 fail try=1",
        "gpuhealth:Xid79 GPU3 L1 fail boots=0",
        "gpuhealth:Xid79 GPU3 L1 fail boots=1 try=2",
        "gpuhealth:Xid79 GPU3 L1  fail",
        "gpuhealth:Xid79 GPU٣ L1 fail",
        "gpuhealth:Xid79 GPU3 L9 fail",
        "gpuhealth:Xid79 GPU3 L1 fail tail=x",
        "gpuhealth:L2 XID=79 GPU3 uuid=GPU-5d1b8f2e job=123",
        "gpuhealth:",
        "",
    ],
)
def test_what_is_not_exactly_as_written_is_not_ours(text):
    assert reason.parse(text) is None


@pytest.mark.parametrize(
    "bad",
    [
        {"fact": ""}, {"fact": "row-remap-failed"}, {"fact": "a b"}, {"gpu": -1}, {"rung": "L5"}, {"state": "odd"},
        {"pci": "0000:5D:00"}, {"pci": "x"}, {"serial": "a|b"}, {"since": "now"}, {"job": 0}, {"next": "L5"},
        {"to": "L5"}, {"attempt": 0}, {"attempt": 100}, {"boots": -1}, {"boots": 100},
    ],
)  # fmt: skip
def test_what_does_not_fit_the_format_is_not_written(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        reason.write(replace(Reason("Xid79", 3, "L1", "fail"), **bad))


def test_fact_and_gpu_fit_in_the_20_columns_of_sinfo():
    assert reason.write(Reason("Xid79", 3, "L1", "fail"))[:20] == "gpuhealth:Xid79 GPU3"


@pytest.mark.parametrize(
    ("source", "code", "short"),
    [
        ("xid", "79", "Xid79"),
        ("sxid", "12028", "SXid12028"),
        ("nvml", "row-remap-failed", "row-remap"),
        ("site", "a b|c", "a-b-c"),
        ("site", "|||", "site"),
    ],
)
def test_a_findings_name_becomes_a_fact_that_fits(source, code, short):
    assert reason.fact(source, code) == short


def test_a_hostile_users_name_stays_one_harmless_word():
    text = reason.write(Reason("asked", None, "L3", "queued", by='bob\n[root@x] State=IDLE|"' + "é" * 100))
    assert text.count(" ") == 4
    assert len(text) < 120
    assert reason.parse(text).by.startswith('bob\n[root@x] State=IDLE|"é')


def test_a_time_is_utc_to_the_minute():
    assert reason.stamp(1795176183.9) == "11-20T12:03Z"


OURS = "gpuhealth:Xid79 GPU3 L1 fail"


@pytest.mark.parametrize(
    ("base", "flags", "text", "whose"),
    [
        ("IDLE", "", "", "none"),
        ("MIXED", "PLANNED", "", "none"),
        ("IDLE", "DRAIN", OURS, "us"),
        ("MIXED", "DRAIN", OURS, "us"),
        ("DOWN", "DRAIN", OURS, "us"),
        ("DOWN", "DRAIN REBOOT_ISSUED", f"{OURS} : reboot issued", "us"),
        ("DOWN", "", f"{OURS} : reboot issued : reboot complete", "us"),
        ("DOWN", "", OURS, "admin"),
        ("IDLE", "FAIL", OURS, "admin"),
        ("IDLE", "DRAIN", "", "admin"),
        ("DOWN", "", "", "admin"),
        ("IDLE", "DRAIN", "admin: PSU", "admin"),
        ("IDLE", "DRAIN", f"{OURS} JD: leave", "admin"),
        ("DOWN", "", "admin: PSU : reboot issued", "admin"),
        ("IDLE", "DRAIN", "Prolog error", "slurm"),
        ("IDLE", "DRAIN", "Epilog error", "slurm"),
        ("IDLE", "DRAIN", "Kill task failed", "slurm"),
        ("IDLE", "DRAIN", "batch job complete failure", "slurm"),
        ("IDLE", "DRAIN INVALID_REG", "gres/gpu count reported lower than configured (7 < 8)", "slurm"),
        ("IDLE", "DRAIN", "gres/gpu count changed and jobs are using them (8 != 7)", "slurm"),
        ("IDLE", "DRAIN", "gres/gpu count too low (7 < 8)", "slurm"),
        ("IDLE", "DRAIN", "Low RealMemory (reported:7681 < 100.00% of configured:8000)", "slurm"),
        ("IDLE", "DRAIN", "Low socket*core*thread count, Low CPUs", "slurm"),
        ("DOWN", "NOT_RESPONDING", "Not responding", "slurm"),
        ("DOWN", "", "Node unexpectedly rebooted", "slurm"),
        ("DOWN", "", "reboot timed out", "slurm"),
        # An admin's words that begin like Slurm's.
        ("DOWN", "", "Not responding, JD swaps the PSU", "admin"),
        ("IDLE", "DRAIN", "gres/gpu looks odd", "admin"),
        ("IDLE", "DRAIN", "Prolog error?", "admin"),
        ("IDLE", "DRAIN", "gres/gpu GPU3 taken out by hand, count reported lower than configured (7 < 8)", "admin"),
    ],
)
def test_a_node_has_one_owner(base, flags, text, whose):
    assert reason.owner(base, set(flags.split()), text) == whose


@pytest.mark.parametrize(
    ("text", "explained"),
    [
        ("Prolog error", True),
        ("Kill task failed", True),
        ("gres/gpu count reported lower than configured (7 < 8)", True),
        ("Low RealMemory (reported:1 < 100.00% of configured:2)", False),
        ("Node unexpectedly rebooted", False),
        ("Prolog error, says JD", False),
        ("", False),
    ],
)
def test_a_gpu_fault_explains_some_of_slurms_reasons(text, explained):
    assert reason.explains(text) == explained
