"""What may be done to a node, and what is done, against a stand-in scontrol that keeps one node's record."""

import time
from pathlib import Path

import pytest

from slurm_gpuhealth import deadline
from slurm_gpuhealth.config import settings
from slurm_gpuhealth.slurm import control, hold
from slurm_gpuhealth.slurm.node import Event, NodeRecord
from slurm_gpuhealth.slurm.reason import Reason, write

ANSWERS = Path(__file__).parents[1] / "corpus/slurm/26.05/scontrol_json_show_job.jsonl"
WANTED = Reason("Xid79", 3, "L1", "fail", job=1842, next="L3")
OURS = write(WANTED)
SCONTROL = """#!/bin/sh
# One node's record in files; `update` writes what it is told, as scontrol does, whatever was there.
cd {folder} || exit 1
echo "$*" >> calls
[ -e sabotage ] && . ./sabotage
case "$*" in
*show*) read -r state < state; reason=$(cat reason)
  echo "NodeName=n1 State=$state BootTime=1 AllocTRES= ${{reason:+Reason=$reason [root@1795211587]}}" ;;
*UNDRAIN*) echo IDLE > state; : > reason ;;
*State=DRAIN*) echo IDLE+DRAIN > state; echo "${{4#Reason=}}" > reason ;;
*update*) echo "${{3#Reason=}}" > reason ;;
esac
"""


class Stand:
    def __init__(self, folder):
        self.folder = folder
        program = folder / "scontrol"
        program.write_text(SCONTROL.format(folder=folder))
        program.chmod(0o755)
        self.slurm = settings.Slurm(scontrol=str(program), timeout=5.0)
        self.set("IDLE", "")

    def set(self, state, reason):
        (self.folder / "state").write_text(state + "\n")
        (self.folder / "reason").write_text(reason)

    def sabotage(self, script):
        (self.folder / "sabotage").write_text(script)

    @property
    def reason(self):
        return (self.folder / "reason").read_text().strip()

    @property
    def writes(self):
        return [line for line in (self.folder / "calls").read_text().splitlines() if line.startswith("update")]


@pytest.fixture
def stand(tmp_path):
    return Stand(tmp_path)


def plan(base="IDLE", flags="", reason=""):
    return hold.plan_drain(NodeRecord("n1", base, frozenset(flags.split()), reason))


@pytest.mark.parametrize("base", ["IDLE", "MIXED", "ALLOCATED"])
def test_a_node_in_service_is_drained(base):
    assert plan(base).action == "drain"


@pytest.mark.parametrize("flag", sorted(hold.HARMLESS.keys() - {"DRAIN"}))
def test_flags_that_do_not_forbid_a_drain(flag):
    assert plan(flags=flag).action == "drain"


@pytest.mark.parametrize("flag", [*hold.LEFT_ALONE, "SOMETHING_NEW"])
def test_flags_that_say_somebody_else_has_it(flag):
    found = plan(flags=flag)
    assert found.action == "leave"
    assert flag in found.why


@pytest.mark.parametrize("base", ["FUTURE", "UNKNOWN", "ERROR"])
def test_a_node_that_is_not_there_is_left_alone(base):
    assert plan(base).action == "leave"


def test_our_own_reboot_is_still_our_hold():
    assert plan("DOWN", "DRAIN REBOOT_ISSUED", f"{OURS} : reboot issued").action == "ours"


@pytest.mark.parametrize("reason", ["admin: PSU", "", f"{OURS} JD: waiting for the part"])
def test_an_admins_drain_is_left_alone(reason):
    found = plan(flags="DRAIN", reason=reason)
    assert found.action == "leave"
    assert "admin" in found.why


def test_an_admins_down_without_a_drain_is_left_alone():
    assert plan("DOWN", "", OURS).action == "leave"


@pytest.mark.parametrize("reason", ["Prolog error", "gres/gpu count reported lower than configured (7 < 8)"])
def test_slurms_drain_is_adopted_where_a_gpu_fault_explains_it(reason):
    assert plan(flags="DRAIN INVALID_REG", reason=reason).action == "adopt"


def test_slurms_drain_for_something_else_is_left_alone():
    assert plan(flags="DRAIN", reason="Low TmpDisk").action == "leave"
    assert plan("DOWN", "NOT_RESPONDING", "Not responding").action == "leave"


def test_taking_a_node_drains_it_with_our_reason(stand):
    change = hold.take(stand.slurm, "n1", WANTED)
    assert change.done
    assert (change.plan.action, change.before.reason, change.after.reason) == ("drain", "", OURS)


def test_a_node_that_we_hold_is_not_written_to_again(stand):
    stand.set("IDLE+DRAIN", OURS)
    assert hold.take(stand.slurm, "n1", WANTED).done
    assert stand.writes == []


def test_an_admins_reason_is_not_written_over(stand):
    stand.set("IDLE+DRAIN", "admin: PSU")
    assert not hold.take(stand.slurm, "n1", WANTED).done
    assert (stand.reason, stand.writes) == ("admin: PSU", [])


def test_an_admin_who_comes_while_we_look_is_not_written_over(stand):
    def an_admin_drains(*_):
        stand.set("IDLE+DRAIN", "admin: PSU")
        return True

    change = hold.take(stand.slurm, "n1", WANTED, an_admin_drains)
    assert (change.done, change.plan.action) == (False, "leave")
    assert (stand.reason, stand.writes) == ("admin: PSU", [])


def test_the_old_text_is_noted_before_it_is_replaced(stand):
    stand.set("IDLE+DRAIN", "Prolog error")
    seen = []
    hold.take(stand.slurm, "n1", WANTED, lambda before, plan: seen.append((before.reason, stand.reason)) or True)
    assert seen == [("Prolog error", "Prolog error")]
    assert stand.reason == OURS


def test_over_budget_nothing_is_written(stand):
    assert not hold.take(stand.slurm, "n1", WANTED, lambda *_: False).done
    assert stand.writes == []


def test_a_write_that_another_overwrote_is_not_called_done(stand):
    stand.sabotage('case "$*" in *State=DRAIN*) echo IDLE+DRAIN > state; echo admin > reason; exit 0 ;; esac\n')
    change = hold.take(stand.slurm, "n1", WANTED)
    assert not change.done
    assert change.after.reason == "admin"


@pytest.mark.parametrize(
    ("text", "kept", "whose"),
    [
        ("fan, Bob", "fan, Bob", "known"),
        ("ファン故障 Bob", "????? Bob", "known"),
        ("long " * 80, ("long " * 80)[:255], "known"),
        ("fan, Bob", "????? Bob", "said meanwhile"),
        ("long " * 80, "fan, Bob", "said meanwhile"),
    ],
)
def test_only_what_was_said_meanwhile_is_put_back_and_no_known_text_as_slurmdbd_has_it(
    stand, monkeypatch, text, kept, whose
):
    monkeypatch.setattr(control, "events", lambda *_: [Event("n1", 1795211588.0, 0.0, "DRAIN", kept)])
    stand.set("IDLE+DRAIN", text)
    before = NodeRecord("n1", "IDLE", frozenset({"DRAIN"}), text.strip(), reason_time=1795211587.0)
    hold._order(stand.slurm, before, lambda: control.drain(stand.slurm, "n1", WANTED), OURS)
    assert stand.reason == (OURS if whose == "known" else kept)


def test_our_reason_is_reworded_only_when_it_changes(stand):
    stand.set("IDLE+DRAIN", OURS)
    assert hold.reword(stand.slurm, "n1", WANTED).done
    assert stand.writes == []
    assert hold.reword(stand.slurm, "n1", Reason("Xid79", 3, "L3", "running")).done
    assert stand.reason == "gpuhealth:Xid79 GPU3 L3 running"


@pytest.mark.parametrize("change", [hold.give_back, lambda slurm, name: hold.reword(slurm, name, WANTED)])
@pytest.mark.parametrize("reason", ["admin: PSU", "Prolog error", ""])
def test_what_is_not_ours_is_neither_given_back_nor_reworded(stand, change, reason):
    stand.set("IDLE+DRAIN", reason)
    assert not change(stand.slurm, "n1").done
    assert stand.writes == []


def test_our_hold_is_given_back_with_undrain(stand):
    stand.set("IDLE+DRAIN", OURS)
    assert hold.give_back(stand.slurm, "n1").done
    assert stand.writes == ["update NodeName=n1 State=UNDRAIN"]


@pytest.mark.parametrize("name", ["", "ALL", "all", "n[1-500]", "n1,n2", "n1 State=DOWN", "-x\n"])
def test_a_name_that_means_more_than_one_node_is_never_sent(stand, name):
    with pytest.raises(ValueError, match="not the name of one node"):
        control.undrain(stand.slurm, name)


def slurm_that(tmp_path, script, **more):
    program = tmp_path / "scontrol"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return settings.Slurm(scontrol=str(program), **more)


def test_a_scontrol_that_hangs_is_a_silent_controller(tmp_path):
    with pytest.raises(control.ControllerDown, match=r"no answer in 0\.2 s"):
        control.show_node(slurm_that(tmp_path, "exec sleep 60", timeout=0.2), "n1")


def test_a_hook_that_had_less_time_left_says_how_long_it_waited(tmp_path, monkeypatch):
    monkeypatch.setattr(deadline, "ends", time.monotonic() + 1.5)
    with pytest.raises(control.ControllerDown, match=r"no answer in (0|1)(\.\d)? s"):
        control.show_node(slurm_that(tmp_path, "exec sleep 60", timeout=10.0), "n1")


def test_a_controller_that_is_away_is_told_from_a_refusal(tmp_path):
    with pytest.raises(control.ControllerDown):
        control.show_node(
            slurm_that(tmp_path, "echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1"), "n1"
        )
    with pytest.raises(control.Refused) as refused:
        control.drain(slurm_that(tmp_path, "echo 'slurm_update error: Invalid user id' >&2; exit 1"), "n1", WANTED)
    assert (refused.value.rc, refused.value.text) == (1, "slurm_update error: Invalid user id")


def test_another_slurms_scontrol_is_refused_with_its_words(tmp_path):
    with pytest.raises(control.Refused, match="Insane message length"):
        control.show_job(slurm_that(tmp_path, "echo 'slurm_load_jobs error: Insane message length' >&2; exit 1"), 5)


def test_only_slurms_own_words_say_that_a_job_is_gone(tmp_path):
    gone = "slurm_load_jobs error: Invalid job id specified"
    with pytest.raises(control.NoSuchJob):
        control.show_job(slurm_that(tmp_path, f"echo '{gone}' >&2; exit 1"), 5)
    for forged in (
        f"echo 'JobId=5 JobName={gone}'; exit 1",
        f"echo 'JobId=5 JobName={gone}'; echo '{gone}' >&2; exit 1",
        f"echo 'JobId=5 JobName={gone} JobState=RUNNING JobState=RUNNING'",
        f"echo '{gone}'",
        f"echo '{gone}' >&2; exit 2",
    ):
        with pytest.raises(control.Refused) as refused:
            control.show_job(slurm_that(tmp_path, forged), 5)
        assert not isinstance(refused.value, control.NoSuchJob), forged


def test_slurm_that_knows_no_expedited_requeue_is_not_asked_about_it(tmp_path):
    script = f"[ $1 = -V ] && {{ echo slurm-wlm {{}}; exit 0; }}; [ $1 = --json ] && /usr/bin/head -n1 {ANSWERS}"
    assert control.is_expedited(slurm_that(tmp_path, script.replace("{}", "26.05.5")), 1)
    assert not control.is_expedited(slurm_that(tmp_path, script.replace("{}", "24.11.5")), 1)
    with pytest.raises(control.Unreadable, match="no record of it in JSON"):
        control.is_expedited(slurm_that(tmp_path, "echo slurm 25.11.0"), 1)


def test_a_jobs_name_is_no_silence_of_the_controller_and_in_no_error(tmp_path):
    for forged in ("echo 'JobId=5 JobName=Connection refused'; exit 1", "echo 'JobId=5 JobName=Connection refused'"):
        with pytest.raises(control.Refused) as refused:
            control.show_job(slurm_that(tmp_path, forged), 5)
        assert "Connection" not in str(refused.value)


def test_an_answer_that_is_no_record_is_refused(tmp_path):
    with pytest.raises(control.Refused, match="not the record of node n1"):
        control.show_node(slurm_that(tmp_path, "echo hello"), "n1")


@pytest.mark.parametrize("path", ["/nonexistent/scontrol", "/etc/passwd"])
def test_a_missing_scontrol_says_what_to_do(path):
    with pytest.raises(control.NoProgram, match=r"gpuhealth\.toml"):
        control.show_node(settings.Slurm(scontrol=path), "n1")


def test_slurms_programs_get_path_and_slurm_conf_from_us_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_CONF", "/evil.conf")
    monkeypatch.setenv("SINFO_FORMAT", "evil")
    slurm = slurm_that(tmp_path, "env", conf="/etc/slurm/x.conf")
    env = dict(line.split("=", 1) for line in control._ask(slurm, slurm.scontrol).splitlines())
    assert env["SLURM_CONF"] == "/etc/slurm/x.conf"
    assert env["PATH"].startswith("/usr/")
    assert "SINFO_FORMAT" not in env
