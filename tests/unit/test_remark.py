"""Our part of a node's Comment and Extra: it is read back whole, the site's text is kept, hostile text is harmless."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.slurm import remark
from slurm_gpuhealth.slurm.remark import Result, Said

MINUTE = st.integers(0, 70_000_000).map(lambda minutes: minutes * 60.0)
WORD = st.from_regex(r"[A-Za-z0-9._-]{1,10}", fullmatch=True)
LINE = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=40)
SITE = LINE.filter(lambda text: remark.PREFIX.strip() not in text).map(str.strip)
SAID = st.builds(Said, acks=st.dictionaries(WORD, MINUTE, max_size=3), was=LINE)
RESULT = st.builds(
    Result,
    rung=st.sampled_from(["L3", "reset", "RMA"]),
    outcome=st.sampled_from(["pass", "fail", "untested", "cancelled"]),
    at=MINUTE,
    fact=st.just("") | WORD,
    gpu=st.none() | st.integers(0, 16),
    test=st.just("") | WORD,
    code=st.just("") | WORD,
    next=st.sampled_from(["", "back", "L4"]),
    backs=st.integers(0, 9),
    boots=st.integers(0, 9),
)


@given(SITE, SAID)
@example("", Said(was="\xa0the PSU\u2003"))
def test_what_an_admin_said_reads_back_and_the_sites_text_stays(site, said):
    comment = remark.write_said(site, said)
    assert remark.read_said(comment) == said
    assert comment.startswith(site)
    assert "\n" not in comment
    assert remark.write_said(comment, Said()) == site


@given(SITE, SITE, RESULT, RESULT)
def test_a_result_replaces_the_one_before_and_nothing_else(before, after, first, second):
    extra = f"{remark.write_result(before, first)} {after}".strip()
    assert remark.read_result(extra) == first
    extra = remark.write_result(extra, second)
    assert remark.read_result(extra) == second
    assert extra.count(remark.PREFIX) == 1
    assert before in extra
    assert after in extra


@given(SITE, SAID)
def test_writing_the_same_again_changes_nothing(site, said):
    comment = remark.write_said(site, said)
    assert remark.write_said(comment, said) == comment


@given(st.text(max_size=80))
def test_no_text_breaks_the_readers(text):
    for one in (text, f"gpuhealth: {text}", f"gpuhealth: ack {text};", f"gpuhealth: L3 pass GPU3 {text};"):
        remark.read_said(one)
        remark.read_result(one)


@pytest.mark.parametrize("hostile", ["x;", "a, ack Xid79 until 2999-01-01T00:00Z", "%3B", "gpuhealth: ack x", "a\nb"])
def test_an_admins_own_reason_can_not_forge_an_ack(hostile):
    said = remark.read_said(remark.write_said("", Said({"Xid48": 60.0}, hostile)))
    assert said == Said({"Xid48": 60.0}, hostile)


def test_a_test_name_from_a_device_is_one_harmless_word():
    found = remark.read_result(remark.write_result("", Result("L3", "fail", 60.0, test="memory; rm -rf at=x|\n")))
    assert (found.test, found.at) == ("memory--rm--rf-at-x--", 60.0)


def test_the_documented_forms():
    said = Said({"Xid79": 1795176180.0}, "PSU, JD")
    assert remark.write_said("rack 7", said) == "rack 7 gpuhealth: ack Xid79 until 2026-11-20T12:03Z, was PSU%2C JD;"
    result = Result("L3", "pass", 1795176180.0, "Xid79", 3, next="back", backs=1, boots=1)
    line = "gpuhealth: L3 pass GPU3 at=2026-11-20T12:03Z fact=Xid79 next=back backs=1 boots=1;"
    assert remark.write_result("", result) == line
    assert remark.read_result(line) == result


@pytest.mark.parametrize(
    "text",
    [
        "",
        "rack 7",
        "gpuhealth: L3 pass GPU3 at=2026-11-20T12:03Z",
        "gpuhealth: L3 pass;",
        "gpuhealth: L3 pass GPUx at=1;",
    ],
)
def test_what_is_not_whole_is_no_result(text):
    assert remark.read_result(text) is None


def test_an_ack_is_taken_back_by_writing_none():
    comment = remark.write_said("rack 7", Said({"Xid79": 60.0}))
    assert remark.write_said(comment, replace(remark.read_said(comment), acks={})) == "rack 7"
