"""What a job's log says: the labelled samples, ranks and hosts, fingerprints, and what is in patterns.toml."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest

from slurm_gpuhealth.logs import known, python
from slurm_gpuhealth.logs.known import tomllib
from slurm_gpuhealth.logs.read import read_text
from slurm_gpuhealth.logs.reading import from_dict, to_dict
from slurm_gpuhealth.outcomes import CAUSES, Reading

ROOT = Path(__file__).parents[2]
SAMPLES = [json.loads(line) for line in (ROOT / "tests/corpus/joblogs/samples.jsonl").open()]
PATTERNS = tomllib.loads((ROOT / "slurm_gpuhealth/logs/patterns.toml").read_text())
KINDS = ("hardware", "application", "communication", "infrastructure", "user", "memory", "crash", "numeric", "thermal")


@pytest.mark.parametrize("sample", SAMPLES, ids=[sample["id"] for sample in SAMPLES])
def test_a_sample_is_read_as_its_label_says(sample: dict) -> None:
    reading = read_text(sample["text"])
    assert reading.verdict in sample["acceptable"]
    assert reading.cause is not None or reading == Reading()
    said = {**reading._asdict(), "hosts": list(reading.hosts)}
    said |= {"line": reading.cause.line, "gpu": reading.cause.gpu} if reading.cause else {}
    for key in ("rank", "hosts", "frame", "error", "iteration", "line", "gpu"):
        if key in sample:
            assert said[key] == sample[key], key


def test_text_alone_is_never_more_sure_of_a_node_than_to_have_it_tested() -> None:
    blamed = [reading for reading in (read_text(one["text"]) for one in SAMPLES) if reading.verdict == "node"]
    assert len(blamed) > 8
    assert max(reading.confidence for reading in blamed) <= 0.85
    text = "uncorrectable ECC error\nGPU is lost\nuncorrectable NVLink error\n" * 50
    assert read_text(text).confidence <= 0.85


def test_few_samples_are_unknown_and_none_blames_a_node_wrongly() -> None:
    confusion = Counter((one["acceptable"][0], read_text(one["text"]).verdict) for one in SAMPLES)
    assert sum(number for (_, said), number in confusion.items() if said == "unknown") <= 0.2 * len(SAMPLES)
    assert {label for label, said in confusion if said == "node"} <= {"node"}


def test_a_log_that_speaks_of_no_failure_says_nothing() -> None:
    ordinary = (ROOT / "tests/corpus/joblogs/ordinary.txt").read_text()
    for text in ("", "0 errors, 0 warnings\nno error\nvalidation error: 0.31\n", *ordinary.splitlines(), ordinary):
        assert read_text(text) == Reading(), text


def test_what_stands_at_the_start_of_many_logs_changes_no_verdict() -> None:
    start = "".join((ROOT / "tests/corpus/joblogs" / name).read_text() for name in ("ordinary.txt", "startup.txt"))
    lines = start.splitlines(keepends=True)
    told = [one for one in SAMPLES if read_text(one["text"]).cause is not None]
    for number, one in enumerate(told):
        at = number % 6 * 75  # each log begins with a sixth of them
        some = lines if os.environ.get("GPUHEALTH_SOAK") else lines[at : at + 75]
        text = "".join((*some, "step 7: loss 2.31\n" * 9, one["text"], "\n"))
        assert read_text(text).verdict in one["acceptable"], one["id"]


def test_the_fingerprint_is_the_same_on_every_node_rank_and_run() -> None:
    made = {
        read_text(
            f"[rank{rank}]: Traceback (most recent call last):\n"
            f'[rank{rank}]:   File "/home/{user}/r{rank}/train.py", line {line}, in step\n'
            f"[rank{rank}]: RuntimeError: shard /data/{user}/{rank}.bin at 0x7f{line:06x}, "
            f"{line} rows on n{rank}: 'mask'"
        ).fingerprint
        for rank, user, line in ((0, "kim", 12), (17, "lee", 99), (3, "o", 1024))
    }
    assert len(made) == 1
    assert "'mask'" in made.pop()


def test_another_key_or_frame_or_class_is_another_fingerprint() -> None:
    trace = 'Traceback (most recent call last):\n  File "/h/train.py", line 3, in {}\n{}: {}\n'
    made = [
        read_text(trace.format(*one)).fingerprint
        for one in (
            ("f", "KeyError", "'a'"),
            ("f", "KeyError", "'b'"),
            ("g", "KeyError", "'a'"),
            ("f", "IndexError", "'a'"),
        )
    ]
    assert len(set(made)) == 4


def test_a_data_type_stays_in_the_fingerprint() -> None:
    one, other = (python.fingerprint("RuntimeError", "", f"expected {kind} at row 7") for kind in ("float32", "int64"))
    assert one != other
    assert one.endswith("float32 at row #")


@pytest.mark.parametrize("before", ["", "[rank3]: "])
@pytest.mark.parametrize(
    ("frame", "source"),
    [
        (
            'File "<string>", line 1, in <module>',
            "raise RuntimeError('CUDA error: misaligned address')",
        ),  # from 3.13 on
        ('File "/home/u/a.py", line 7, in step', "raise RuntimeError(\n        'CUDA error: misaligned address')"),
    ],
)
def test_a_line_of_the_program_that_a_traceback_quotes_is_not_its_error(before: str, frame: str, source: str) -> None:
    error = "RuntimeError: CUDA error: misaligned address"
    text = f"Traceback (most recent call last):\n  {frame}\n    {source}\n{error}\n"
    reading = read_text("".join(f"{before}{line}\n" for line in text.splitlines()))
    assert reading.cause is not None
    assert reading.cause.text == before + error
    bare = read_text(f"Traceback (most recent call last):\n  {frame}\n{error}\n").cause  # up to 3.12, of python3 -c
    assert bare is not None
    assert bare.text == error


@pytest.mark.parametrize("said", ["RuntimeError: CUDA error: uncorrectable ECC error encountered"])
def test_an_error_that_a_logger_indents_below_a_frame_is_read(said: str) -> None:
    reading = read_text(f'  File "/home/u/a.py", line 7, in step\n    {said}\n')
    assert reading.cause is not None
    assert reading.cause.text.strip() == said


def test_library_frames_are_not_the_users() -> None:
    text = (
        'Traceback (most recent call last):\n  File "/home/kim/my.py", line 1, in go\n'
        '  File "/opt/conda/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1, in _call_impl\n'
        '  File "<frozen importlib>", line 1, in f\nValueError: bad\n'
    )
    assert read_text(text).frame == "my.py:go"


def test_the_missing_rank_is_named_and_its_host_guessed_from_the_jobs_nodes_only_where_ranks_are_in_blocks() -> None:
    text = "world_size=8\n[E] Ranks 5 failed to pass monitoredBarrier in 60000 ms\n"
    assert read_text(text, ("a", "b", "c", "d")).hosts == ("c",)
    assert read_text(text, ("a", "b", "c")).hosts == ()


def test_a_reset_that_many_pairs_see_singles_out_nobody() -> None:
    line = "g00{}:1:2 [0] NCCL WARN NET/IB : Got completion from peer g00{}<4> with status=12 opcode=0 vendor err 129"
    assert read_text("\n".join(line.format(*pair) for pair in ((1, 2), (3, 4), (5, 6)))).hosts == ()


@pytest.mark.parametrize(
    ("line", "host", "rank"),
    [
        ("The node with node id: 7a and ip: 10.3.0.9 has been marked dead because ...", "g009", None),
        ("The node with node id: 7a and address: 10.3.0.9 and node name: g009 has been marked dead", "g009", None),
        ("(raylet) A worker died or was killed while ... Worker IP address: 10.3.0.9 Worker port: 1", "g009", None),
        ("ORTE has lost communication with a remote daemon.\n\n  HNP daemon : [[1,0],0] on node g001\n"
         "  Remote daemon: [[1,0],1] on node g009", "g009", None),
        ("ORTE has lost communication with its daemon located on node:\n\n  hostname:  g009", "g009", None),
        ("UNAVAILABLE: Task /job:jax_worker/replica:0/task:6 heartbeat timeout.", "g002", 6),
        ("MPID_nem_tcp_connpoll(1845): Communication error with rank 6: Connection timed out", "g002", 6),
        ("The following tasks are unhealthy (stopped sending heartbeats):\n/job:jax_worker/task:6", "g002", 6),
    ],
)  # fmt: skip
def test_who_died_is_singled_out_and_not_who_says_so(line: str, host: str, rank: int | None) -> None:
    known = "g009:1:2 [0] NCCL INFO Bootstrap : Using ib0:10.3.0.9<0>\nworld_size=8\n"
    reading = read_text(f"{known}[rank1]: {line}", ("g00a", "g002"))
    assert (reading.hosts, reading.rank) == ((host,), rank)
    watchdog = "[rank1]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1)\n"
    assert read_text(f"{known}{watchdog}{line}", ("g00a", "g002")).hosts == (host,)


def test_a_bystander_that_only_reports_a_death_is_not_singled_out() -> None:
    for line in ("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1)", "Connection closed by peer"):
        assert read_text(f"world_size=8\n[rank1]: {line}", ("g001", "g002")).hosts == ()


def test_what_a_message_guesses_does_not_count_beside_what_it_says() -> None:
    guess = "This most likely indicates that the task was preempted."
    assert read_text(f"UNAVAILABLE: Task /job:w/task:1 heartbeat timeout. {guess}").error == "task lost"
    assert read_text(f"something went wrong. {guess}").verdict == "user"


def test_a_stop_counts_more_than_what_the_job_survived() -> None:
    steps = "".join(f"step {step} loss 2.5\n" for step in range(20))
    stopped = "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 ***"
    assert read_text(f"RuntimeError: half a batch\n{steps}{stopped}").verdict == "user"
    assert read_text(f"{steps}RuntimeError: half a batch\n{stopped}").verdict == "application"


def test_what_was_killed_before_slurm_stopped_the_rest_was_not_cancelled() -> None:
    killed, stopped = "srun: error: n1: task 0: Killed", "srun: Terminating job step 7.0"
    assert read_text(f"{killed}\n{stopped}").error == "killed"
    assert read_text(f"{stopped}\n{killed}").verdict == "user"


@pytest.mark.parametrize(
    ("said", "verdict"),
    [("1", "application"), ("2", "application"), ("12", "application"), ("127", "application"), ("255", "application"),
     ("200", "unknown"), ("130", "user"), ("134", "application"), ("135", "infrastructure"), ("137", "infrastructure"),
     ("139", "application"), ("143", "user")],
)  # fmt: skip
def test_an_exit_code_tells_whether_the_program_ended_by_itself(said: str, verdict: str) -> None:
    for line in (f"srun: error: n1: tasks 3-4: Exited with exit code {said}", f"=   EXIT CODE: {said}"):
        reading = read_text(line)
        assert reading.verdict == verdict
        assert reading.confidence < 0.5


def test_an_address_becomes_its_host_where_nccl_said_whose_it_is() -> None:
    text = (
        "g004:1:2 [0] NCCL INFO Bootstrap : Using ib0:10.0.0.4<0>\n"
        "g001:1:2 [0] NCCL WARN NET/IB : Got completion from peer 10.0.0.4<5> with status=12 opcode=0 vendor err 129\n"
    )
    assert read_text(text).hosts == ("g001", "g004")


def test_a_reading_survives_json_and_back() -> None:
    for one in SAMPLES:
        reading = read_text(one["text"])
        assert from_dict(json.loads(json.dumps(to_dict(reading)))) == reading


def test_after_an_empty_text_no_file_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    read_text("")
    monkeypatch.setattr("builtins.open", None)
    for one in SAMPLES:
        read_text(one["text"])


def test_every_known_failure_has_its_role_cause_kind_source_and_an_advice_that_is_written() -> None:
    for row in PATTERNS["known"]:
        assert row["role"] in known.ROLES
        assert row["cause"] in CAUSES
        assert row["kind"] in (("",) if row["role"] in ("noise", "weak") else KINDS)
        assert row["source"]
        assert row["advice"] in PATTERNS["advice"]
        assert row["confidence"] <= (0.85 if row["cause"] == "node" else 0.95)


def test_every_pattern_is_found_by_its_word_in_lower_case_and_stands_once() -> None:
    lines = [line for row in PATTERNS["known"] for line in row["lines"]]
    assert len(lines) == len(set(lines))
    for row in PATTERNS["known"]:
        for line in row["lines"]:
            assert line == line.lower()
            ordered = " & " not in line
            every = known.expanded(line.split(" * " if ordered else " & "), PATTERNS["words"])
            for pieces, _ in list(every)[::37]:
                written = " and ".join(pieces).encode()
                found = known.recognise(written)
                assert found is not None, written
                assert known.ROLES[found.role] >= known.ROLES[row["role"]], written


def test_a_weak_sign_at_the_start_is_no_rival_of_what_ended_the_job() -> None:
    text = "ls: cannot access '/opt/site/env.sh': No such file or directory\n[rank2]: KeyError: 'mask'\n"
    assert read_text(text).error == "KeyError"


def test_the_users_last_word_does_not_hide_what_went_wrong_before() -> None:
    stop = "slurmstepd: error: *** JOB 1 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO PREEMPTION ***"
    assert read_text(f"GPU 3 temperature exceeds its threshold\n{stop}").verdict == "user"
    assert read_text(f"{stop}\nRuntimeError: Connection reset by peer\nValueError: half a batch").verdict == "user"
    assert read_text(f"ValueError: half a batch\n{stop}").verdict == "application"


@pytest.mark.parametrize(
    "line",
    [
        "failed GPUs: 0", "gpu_lost=0", "found no uncorrectable ECC errors", "checking for Xid 79 in dmesg: nothing",
        "# If an uncorrectable ECC error occurs, the job is requeued", "faulty nodes: []", "0/8 unhealthy GPUs",
        "looking for a GPU that is lost", "Silent data corruption detected: none", "this may be a hardware problem",
        "uncorrected ECC - aggregate: 0, volatile: 0", "    DRAM Uncorrectable                : 2",
        "    SRAM Uncorrectable Parity         : 0", "    Double Bit ECC                    : 1",
        "Xid 79               root      2026-01-01T00:00:00 gpu-3", "   Reason=GPU is lost [root@2026-01-01T00:00:00]",
        "#SBATCH --exclude=gpu-3  # uncorrectable ECC", "resumed from step 1200 (previous run hit an Xid 79)",
    ],
)  # fmt: skip
def test_a_line_that_denies_a_fault_or_only_speaks_of_it_blames_no_node(line: str) -> None:
    assert read_text(line).verdict != "node"
    assert read_text(f"{line}\nNVRM: GPU 0000:c1:00.0: GPU has fallen off the bus.").verdict == "node"


def test_words_that_only_hint_at_a_cause_are_believed_when_there_is_nothing_else() -> None:
    hint = "mounting the scratch filesystem failed, trying again\n"
    reading = read_text(hint)
    assert (reading.verdict, reading.kind) == ("infrastructure", "")
    assert reading.confidence < 0.5
    assert read_text(hint + "ValueError: half a batch").verdict == "application"
    assert read_text(hint + "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1)").verdict == (
        "unknown"
    )


def test_the_faintest_words_count_only_when_nothing_else_tells_a_cause() -> None:
    assert read_text("epoch 3: test error: 0.12") == Reading()
    faint = "reader: error: bad row skipped\n" * 3
    reading = read_text(faint)
    assert (reading.verdict, reading.kind) == ("application", "")
    assert read_text(faint + "mounting the scratch filesystem failed").verdict == "infrastructure"
    assert read_text(faint + "srun: error: n1: task 0: Exited with exit code 137").verdict == "infrastructure"
    assert read_text(faint + "srun: error: n1: task 0: Exited with exit code 200").verdict == "application"


def test_a_bare_exception_ends_a_traceback_too() -> None:
    trace = 'Traceback (most recent call last):\n  File "/h/a.py", line 3, in load\n'
    assert read_text(f"{trace}Exception: half a shard").frame == "a.py:load"
    assert read_text("Exceptions: 3").verdict == "unknown"


def test_a_librarys_warning_of_the_network_yields_to_an_error() -> None:
    warning = "[17.2] ib_md.c:1 UCX  WARN  ibv_reg_mr failed: retry count exceeded\n"
    assert read_text(warning).verdict == "fabric"
    assert read_text(f"{warning}KeyError: 'mask'").verdict == "application"
    assert read_text(f"{warning.replace('WARN ', 'ERROR')}RuntimeError: stopped").verdict == "fabric"


def test_of_hints_those_at_the_end_are_believed() -> None:
    start = "site.sh: line 3: module1: command not found\nsite.sh: line 4: module2: command not found\n"
    steps = "".join(f"step {step} loss 2.5\n" for step in range(20))
    assert read_text(f"{start}{steps}the scratch filesystem is not mounted here").verdict == "infrastructure"


def test_a_word_of_a_hint_is_not_looked_for_inside_other_words() -> None:
    assert read_text("process 12 failed with progress 3").verdict == "unknown"
