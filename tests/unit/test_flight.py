"""PyTorch's flight recorder: which call a job hangs in, from dumps that anybody may have written."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import struct
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from slurm_gpuhealth.commands.explain import explain
from slurm_gpuhealth.logs import flight, hang, pickled
from slurm_gpuhealth.logs.read import read_files, read_text
from slurm_gpuhealth.logs.reading import from_dict, read_reading, to_dict, validated
from slurm_gpuhealth.outcomes import Flight, Reading
from tests import flights

REAL = Path(__file__).parents[1] / "corpus/flight"
VERSIONS = ("2.2", "2.4", "2.7", "2.10")
WORLD = {"0": ("default_pg", list(range(8)))}
WATCHDOG = (
    "[rank0]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=21, OpType=ALLREDUCE) ran for 600 ms\n"
)
ECC = "[rank3]: RuntimeError: CUDA error: uncorrectable ECC error encountered\n"
HOSTS = ("n1", "n2")


def ring(
    version: str = "2.10", *more: dict[str, Any], last: int = 20, group: tuple[str, str] = ("0", "default_pg")
) -> list[dict[str, Any]]:
    """A rank that has completed `last` calls, then `more`."""
    return [flights.entry(version, 100 + seq, seq, group=group) for seq in range(1, last + 1)] + list(more)


def waits(seq: int = 21, op: str = "all_reduce", version: str = "2.10", **more: Any) -> dict[str, Any]:
    return flights.entry(version, 100 + seq, seq, op, state=more.pop("state", "scheduled"), **more)


def taken(
    rows: dict[int, list[dict[str, Any]]], groups: Any = None, version: str = "2.10", form: str = "pickle"
) -> Any:
    dumps = flight.Dumps()
    for rank, entries in rows.items():
        given = WORLD if groups is None else {name: one for name, one in groups.items() if rank in one[1]}
        assert dumps.add(f"/x/nccl_trace_rank_{rank}", flights.dump(version, entries, given, form))
    return dumps


def judged(rows: dict[int, list[dict[str, Any]]], groups: Any = None, **how: Any) -> Flight:
    return hang.judge(taken(rows, groups, **how), {}, HOSTS)


def told(found: Flight) -> str:
    return "; ".join(hang.sentences(found))


def plain(value: Any, memo: dict[int, Any]) -> Any:
    """A value without packed dicts."""
    if type(value) is bytes:
        return plain(pickled.unpacked(value, memo), memo)
    if type(value) is dict:
        return {key: plain(one, memo) for key, one in value.items()}
    return type(value)(plain(one, memo) for one in value) if type(value) in (list, tuple) else value


def pythons(data: bytes) -> Any:
    return pickle.loads(data)  # noqa: S301 - our own


def loaded(data: bytes) -> Any:
    return plain(*pickled.load(data))


# ---- what PyTorch 2.14 wrote


def test_real_dumps_name_the_rank_that_never_came() -> None:
    reading = read_files([str(path) for path in sorted((REAL / "absent").glob("*_[0-3]"))], hosts=HOSTS)
    assert reading.flight is not None
    assert (reading.flight.found, reading.flight.ranks, reading.flight.hosts) == ("absent", (2,), ("n2",))
    assert (reading.verdict, reading.hosts, reading.rank, reading.frame) == ("unknown", ("n2",), 2, "train.py:step")
    assert reading.evidence[0] == (
        "rank 2 (n2) never entered all_reduce #21 of group 0 (default_pg); 3 ranks wait since 2026-11-22 11:02:54 UTC"
    )


def test_real_dumps_name_the_rank_that_called_something_else() -> None:
    reading = read_files([str(path) for path in sorted((REAL / "mismatch").iterdir())])
    assert (reading.verdict, reading.kind, reading.hosts) == ("application", "application", ())
    assert "rank 1 calls broadcast where others call all_reduce #21 of group 0" in reading.evidence[0]


def test_a_real_dump_in_json_says_the_same_as_the_pickle() -> None:
    name = "comm_lib_trace_rank_0"
    one, other = (flight.read(name, (REAL / f"absent/{name}{end}").read_bytes()) for end in ("", ".json"))
    assert one
    assert other
    assert one.calls.keys() == other.calls.keys()
    assert [call.waits for call in one.calls.values()] == [call.waits for call in other.calls.values()]


def test_the_generator_of_these_tests_writes_each_byte_as_pytorch_does() -> None:
    for path in REAL.glob("*/*_[0-3]"):
        assert flights.pickled(pythons(path.read_bytes())) == path.read_bytes()


def test_real_dumps_are_read_as_python_reads_them() -> None:
    for path in REAL.glob("*/*_[0-3]"):
        value, _ = pickled.load(path.read_bytes())
        assert sum(type(one) is bytes for one in value["entries"]) > 10, "most calls stay packed"
        assert loaded(path.read_bytes()) == pythons(path.read_bytes())


# ---- what the dumps say together


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("form", ["pickle", "json"])
def test_every_version_names_the_rank_its_host_the_call_and_how_many_wait(version: str, form: str) -> None:
    rows = {rank: ring(version, waits(version=version)) for rank in range(8)}
    rows[5] = ring(version)
    found = judged(rows, version=version, form=form)
    since = (flights.BEGAN + 121 * flights.STEP) / 1e9
    frame = "part_0.py:layer_0" if form == "pickle" else ""
    assert found == Flight(
        "absent", "all_reduce", "", "0 (default_pg)", 21, 8, 7, since, (5,), (), ("n2",), frame, 8, 8
    )


def test_a_rank_without_a_dump_may_be_the_one_that_died() -> None:
    found = judged({rank: ring("2.10", waits()) for rank in range(8) if rank != 5})
    assert (found.found, found.ranks, found.silent, found.hosts) == ("absent", (), (5,), ("n2",))
    assert "rank 5 (n2) leaves no dump, and may have died" in told(found)


def test_where_most_dumps_are_elsewhere_nobody_is_named() -> None:
    found = judged({rank: ring("2.10", waits()) for rank in range(3)})
    assert (found.found, found.ranks, found.silent) == ("unclear", (), ())
    assert "3 of 8 ranks have left a dump here" in told(found)


def test_a_whole_node_may_be_missing_but_not_half_of_the_job() -> None:
    world = {"0": ("default_pg", list(range(32)))}
    hosts = [f"n{number}" for number in range(8)]
    for gone, named in ((range(8, 12), ("n2",)), (range(10, 14), ()), (range(16), ())):
        rows = {rank: ring("2.10", *([] if rank in gone else [waits()]), last=3) for rank in range(32)}
        dumps = taken(rows, world)
        assert hang.judge(dumps, {}, hosts).ranks == tuple(gone), "they are told"
        assert read_text("", hosts, dumps).hosts == named, "but not singled out"
        silent = taken({rank: row for rank, row in rows.items() if rank not in gone}, world)
        assert read_text("", hosts, silent).hosts == named


def test_a_dump_that_cannot_be_read_is_no_missing_dump() -> None:
    dumps = taken({rank: ring("2.10", waits()) for rank in range(7)})
    dumps.add("nccl_trace_rank_7", flights.dump("2.10", ring(), WORLD)[:-9])
    found = hang.judge(dumps, {})
    assert (found.found, found.silent) == ("unclear", ())
    assert found.unread == ("nccl_trace_rank_7: damaged or cut short",)


def test_who_belongs_to_a_group_that_no_dump_describes_is_not_known() -> None:
    """Gloo does not record its groups' ranks."""
    found = judged({rank: ring("2.10", waits()) for rank in (0, 1, 3)}, {})
    assert (found.found, found.waiting) == ("unclear", 3)


def test_all_ranks_entered_and_none_came_back() -> None:
    found = judged({rank: ring("2.10", waits(state="started")) for rank in range(8)})
    assert (found.found, found.ranks) == ("stuck", ())
    assert "all 8 ranks entered all_reduce #21" in told(found)
    assert "the network, or a kernel that is stuck" in told(found)


def test_nothing_waits() -> None:
    assert "no rank waits" in told(judged({rank: ring() for rank in range(8)}))


@pytest.mark.parametrize("odd", [{"op": "broadcast"}, {"sizes": [[4096, 512]]}])
def test_ranks_that_call_something_else_are_the_programs_mistake(odd: dict[str, Any]) -> None:
    rows = {rank: ring("2.10", waits()) for rank in range(8)}
    rows[3] = ring("2.10", waits(**odd))
    found = judged(rows)
    assert (found.found, found.ranks) == ("mismatch", (3,))
    assert hang.joined(Reading(), found).verdict == "application"


def test_ranks_may_pass_other_sizes_where_nccl_allows_it() -> None:
    rows = {rank: ring("2.10", waits(op="all_to_all", sizes=[[rank + 1, 4]])) for rank in range(8)}
    assert judged(rows).found == "stuck"
    rows = {rank: ring("2.10", waits(sizes=[[4, 2] if rank else [8]])) for rank in range(8)}
    assert judged(rows).found == "stuck", "as many elements in another shape"


def test_who_waits_elsewhere_is_not_the_one() -> None:
    """Rank 0 waits in its own group for rank 1, which is gone; that rank 0 is missing in the world is a consequence."""
    groups = {**WORLD, "3": ("tp", [0, 1])}
    inside = ("3", "tp")
    rows = {rank: ring("2.10", waits(time=flights.BEGAN)) for rank in range(2, 8)}
    rows[0] = [*ring(), *ring(group=inside), waits(group=inside)]
    rows[1] = [*ring(), *ring(group=inside)]
    found = judged(rows, groups)
    assert (found.found, found.ranks) == ("absent", (1,))
    del rows[1]
    found = judged(rows, groups)
    assert (found.found, found.ranks, found.silent) == ("absent", (), (1,))


def test_ranks_that_wait_for_each_other_in_two_calls_are_the_programs_mistake() -> None:
    groups = {"1": ("a", [0, 1]), "2": ("b", [0, 1])}
    one, two = ("1", "a"), ("2", "b")
    before = [*ring(group=one), *ring(group=two)]
    found = judged({0: [*before, waits(group=one)], 1: [*before, waits(group=two)]}, groups)
    assert found.found == "circle"
    assert hang.joined(Reading(), found).verdict == "application"


def test_two_groups_of_the_same_name_are_told_apart_by_their_ranks() -> None:
    """PyTorch's split groups have one name and different ranks."""
    rows = {rank: [*ring(group=("5", "dp")), waits(group=("5", "dp"))] for rank in (0, 1, 2)}
    rows[3] = ring(group=("5", "dp"), last=21)
    dumps = flight.Dumps()
    for rank, entries in rows.items():
        ranks = [0, 1] if rank < 2 else [2, 3]
        dumps.add(f"r{rank}", flights.dump("2.10", entries, {"5": ("dp", ranks)}))
    found = hang.judge(dumps, {})
    assert (found.found, found.size, found.ranks) == ("stuck", 2, ())


def test_a_stage_of_a_pipeline_that_never_sends() -> None:
    def receive(peer: int, seq: int) -> dict[str, Any]:
        return waits(20, f"recv {peer + 1}<-{peer}", p2p=seq)

    rows = {0: ring(), 1: [*ring(), receive(0, 3)], 2: [*ring(), receive(1, 9)]}
    found = judged(rows, {"0": ("default_pg", [0, 1, 2])})
    assert (found.found, found.op, found.ranks) == ("absent", "send/recv 0->1", (0,))


def test_the_parts_of_a_coalesced_call_have_its_state() -> None:
    parts = [waits(20, f"send 0->{peer}", p2p=4, time=flights.BEGAN + peer) for peer in (1, 2)]
    done = flights.entry("2.10", 130, 20, "coalesced", p2p=4)
    assert judged({0: [*ring(), *parts, done], 1: ring(), 2: ring()}).found == ""
    open_ = flights.entry("2.10", 130, 20, "coalesced", p2p=4, state="started")
    assert judged({rank: [*ring(), *parts, open_] if not rank else ring() for rank in range(8)}).ranks == (1,)


def test_gloo_retires_what_it_has_completed_and_nccl_what_timed_out() -> None:
    late = {**waits(), "retired": True}
    assert judged({rank: [*ring(), late] for rank in range(8)}).found == "stuck"
    late["profiling_name"] = "gloo:all_reduce"
    assert judged({rank: [*ring(), late] for rank in range(8)}).found == ""


def test_what_the_ring_has_forgotten_is_not_missing() -> None:
    """Rank 5 has gone on by more calls than are looked at, in other groups."""
    groups = {**WORLD, "4": ("own", [5])}
    rows = {rank: ring("2.10", waits(time=flights.BEGAN)) for rank in range(8)}
    rows[5] = [
        flights.entry("2.10", 5000 + seq, seq, group=("4", "own"), time=flights.BEGAN + seq * flights.STEP)
        for seq in range(1, 200)
    ]
    assert judged(rows, groups).found == "unclear"
    rows[5] = [{**one, "time_created_ns": one["time_created_ns"] - 10**12} for one in rows[5]]
    assert judged(rows, groups).ranks == (5,), "its calls go back to long before, and this is not among them"


def test_the_later_of_two_dumps_of_a_rank_counts() -> None:
    dumps = taken({rank: ring("2.10", waits()) for rank in range(8) if rank != 5})
    for name, entries in (("b_5", ring("2.10", waits())), ("a_5", ring(last=3))):
        dumps.add(name, flights.dump("2.10", entries, WORLD))
    assert hang.judge(dumps, {}).found == "stuck"


def test_a_host_is_known_from_the_log_from_the_dump_or_from_slurms_order() -> None:
    rows = {rank: ring("2.10", *([] if rank == 5 else [waits()])) for rank in range(8)}
    assert hang.judge(taken(rows), {"5": "a7"}, HOSTS).hosts == ("a7",)
    assert hang.judge(taken(rows), {}, ()).hosts == ("",)
    assert hang.judge(taken(rows), {}, ("n1", "n2", "n3")).hosts == ("",), "8 ranks on 3 nodes: not in even blocks"
    dumps = taken({rank: one for rank, one in rows.items() if rank != 5})
    whole = json.loads(flights.dump("2.10", rows[5], WORLD, "json"))
    dumps.add("r5.json", json.dumps({**whole, "hostname": "b9"}).encode())
    assert hang.judge(dumps, {}).hosts == ("b9",)


# ---- with the text of the logs


def test_a_hang_that_the_text_does_not_explain_is_the_dumps() -> None:
    dumps = taken({rank: ring("2.10", *([] if rank == 5 else [waits()])) for rank in range(8)})
    reading = read_text(WATCHDOG, HOSTS, dumps)
    assert (reading.verdict, reading.rank, reading.hosts) == ("unknown", 5, ("n2",))
    assert reading.cause is not None
    assert reading.cause.text == WATCHDOG.strip()
    assert reading.evidence[0].startswith("rank 5 (n2) never entered")


def test_a_first_cause_in_the_text_stays() -> None:
    dumps = taken({rank: ring("2.10", *([] if rank == 5 else [waits()])) for rank in range(8)})
    reading = read_text(ECC + WATCHDOG, HOSTS, dumps)
    assert (reading.verdict, reading.rank) == ("node", 3)
    assert reading.evidence[0].startswith("rank 5 (n2) never entered")
    assert reading.flight


def test_dumps_that_show_nothing_change_nothing() -> None:
    text = WATCHDOG + "[rank0]: ranks 4 did not join\n"
    before = read_text(text, HOSTS)
    reading = read_text(text, HOSTS, taken({rank: ring("2.10", waits()) for rank in range(3)}))
    assert reading._replace(evidence=before.evidence, flight=None) == before


def test_dumps_alone_never_blame_a_node() -> None:
    rng = random.Random(7)  # noqa: S311
    for _ in range(200):
        rows = {
            rank: ring(
                "2.10", *[waits(rng.randrange(18, 24), rng.choice(("all_reduce", "broadcast")))][: rng.randrange(2)]
            )
            for rank in range(8)
            if rng.random() < 0.9
        }
        reading = read_text("", HOSTS, taken(rows))
        assert reading.verdict in ("unknown", "application")
        assert reading.confidence <= 0.75


def test_a_reading_with_dumps_survives_its_way_to_the_cluster() -> None:
    reading = read_text(WATCHDOG, HOSTS, taken({rank: ring("2.10", waits()) for rank in range(7)}))
    text = json.dumps(to_dict(reading))
    assert read_reading(text) == reading == validated(text.encode())
    without = to_dict(reading._replace(flight=None))
    assert "flight" not in without, "older versions refuse keys that they don't know"
    assert from_dict(without).flight is None
    for wrong in (
        {"found": "node"},
        {"since": "x"},
        {"ranks": 7},
        {"ranks": [-1]},
        {"hosts": [3]},
        {"op": None},
        {"dumps": 1 << 60},
    ):
        row = to_dict(reading)
        row["flight"].update(wrong)
        with pytest.raises(ValueError, match=r"log reader|its reader"):
            validated(json.dumps(row).encode())


def ask(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(explain, ["--log", *map(str, arguments)])
    return result.exit_code, result.output


def test_people_and_tools_get_it_from_explain(tmp_path: Path) -> None:
    files = sorted((REAL / "absent").glob("*_[0-3]"))
    status, text = ask(*files)
    assert status == 0
    assert text.startswith("Rank 2 never entered all_reduce #21 of group 0 (default_pg); 3 ranks wait since 2026")
    assert "in the user's code: train.py:step" in text
    assert "What to do: Look at what the ranks that are missing say" in text
    log = tmp_path / "train.err"
    log.write_text(WATCHDOG.replace("rank0", "rank2") + "n7:12:12 [0] NCCL INFO comm 0x1 rank 2 nranks 4\n")
    status, text = ask(*files, log, "--json")
    said = json.loads(text)
    assert (said["flight"]["found"], said["flight"]["ranks"], said["hosts"]) == ("absent", [2], ["n7"])
    assert said["cause"]["line"] == 1


def test_a_dump_is_known_by_its_content(tmp_path: Path) -> None:
    log = tmp_path / "nccl_trace_rank_3"
    log.write_text(ECC)
    assert read_files([str(log)]).verdict == "node", "a text with a dump's name"
    log.write_text('{"version": "1", "level": "info"}\n' + ECC)
    assert read_files([str(log)]).verdict == "node", "a log of JSON lines"
    log = tmp_path / "x3.log"
    log.write_bytes((REAL / "absent/comm_lib_trace_rank_0").read_bytes())
    assert read_files([str(log)]).flight


# ---- hostile files


def text_op(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def refusal(data: bytes) -> str:
    """Why a dump is not read; at once."""
    began = time.process_time()
    dumps = flight.Dumps()
    assert dumps.add("nccl_trace_rank_3", data)
    assert time.process_time() - began < 20
    assert not dumps.of
    assert read_text("", (), dumps).verdict == "unknown"
    return dumps.unread["nccl_trace_rank_3"]


class Runs:
    def __init__(self, function: Any, *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", range(2, 6))
@pytest.mark.parametrize(
    "bait",
    [
        Runs(os.system, "touch {}"),
        Runs(eval, "open('{}', 'w')"),
        Runs(exec, "open('{}', 'w')"),
        Runs(os.mkdir, "{}"),
        Runs(open, "{}", "w"),
        Runs(pickle.loads, b""),
    ],
)
def test_a_pickle_runs_nothing(tmp_path: Path, protocol: int, bait: Runs) -> None:
    flag = tmp_path / "ran"
    function, arguments = bait.call
    filled = Runs(function, *(one.format(flag) if type(one) is str else one for one in arguments))
    for value in (filled, {"version": "2.10", "entries": [filled], "pg_config": {}}, [filled]):
        assert refusal(pickle.dumps(value, protocol)) == CALLED
    assert not flag.exists()


@pytest.mark.parametrize("op", [bytes([one]) for one in sorted(pickled.CALLS)])
def test_no_operation_imports_calls_or_builds(op: bytes) -> None:
    assert refusal(b"\x80\x02}(" + op + b"os\nsystem\n" + b"\x00" * 20) == CALLED


CUT = "damaged or cut short"
PLAIN = "holds more than plain values"
CALLED = "would call code: only plain values are read"
LONG = "holds a number beyond 64 bits"
MUCH = "holds too much"
KEY = "has a key that is neither a text nor a number"
NONE = "is no dump of PyTorch's flight recorder"
BOMBS = {
    "a text of 4 GiB": (b"\x80\x02X\xff\xff\xff\xffabc.", CUT),
    "bytes of 4 GiB": (b"\x80\x03B\xff\xff\xff\xffabc.", PLAIN),
    "a byte array of 2**63": (b"\x80\x05\x96" + b"\xff" * 7 + b"\x7f.", PLAIN),
    "a text of 2**63": (b"\x80\x04\x8d" + b"\xff" * 7 + b"\x7f.", PLAIN),
    "a number of 2 GiB": (b"\x80\x02\x8b\xff\xff\xff\x7f.", PLAIN),
    "a number of 255 bytes": (b"\x80\x02\x8a\xff" + b"\xff" * 255 + b".", LONG),
    "the memo at 2**32": (b"\x80\x02}r\xff\xff\xff\xff.", NONE),
    "the memo at places that are not there": (b"\x80\x02j\xff\xff\xff\xff.", CUT),
    "nothing on the stack": (b"\x80\x02e.", CUT),
    "deep lists": (b"\x80\x02" + b"](" * 3_000_000 + b"e" * 3_000_000 + b".", MUCH),
    "many lists": (b"\x80\x02" + b"]" * 16_000_000 + b".", MUCH),
    "deep tuples": (b"\x80\x02)" + b"\x85" * 5_000_000 + b".", MUCH),
    "deep tuples as a key": (b"\x80\x02}()" + b"\x85" * 100_000 + b"Nu.", KEY),
    "twice itself, 1,000 times": (b"\x80\x02N" + b"q\x00h\x00\x86" * 1000 + b".", NONE),
    "twice itself, as a key": (b"\x80\x02}(N" + b"q\x00h\x00\x86" * 100 + b"Nu.", KEY),
    "a list in itself": (b"\x80\x02]q\x00(h\x00e.", NONE),
    "a dict in itself": (b"\x80\x02}q\x00(" + text_op("entries") + b"h\x00u.", NONE),
    "no end": (b"\x80\x02" + b"N" * 1000, CUT),
    "many marks": (b"\x80\x02" + b"(" * 5_000_000 + b".", MUCH),
    "flat dicts that do not end": (b"\x80\x02" + (b"}(" + b"h\x00" * 100_000) * 80, CUT),
    "flat lists that do not end": (b"\x80\x02" + (b"}(h\x00](" + b"](" + b"K\x01" * 600) * 12_000, CUT),
    "an odd number of texts": (b"\x80\x02}(NNNu.", KEY),
    "no UTF-8": (b"\x80\x02X\x02\x00\x00\x00\xff\xfe.", NONE),
    "not a number": (b"\x80\x02G\x7f\xf8" + b"\x00" * 6 + b".", NONE),
    "zeros": (b"\x80\x02" + bytes(1 << 24), PLAIN),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_ends_with_a_clear_word(name: str) -> None:
    data, word = BOMBS[name]
    assert refusal(data) == word


def test_a_bomb_costs_no_memory_that_it_does_not_have() -> None:
    import resource

    for name in ("a text of 4 GiB", "the memo at 2**32", "a byte array of 2**63", "twice itself, 1,000 times"):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        refusal(BOMBS[name][0])
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10, name


def test_values_of_the_wrong_kind_are_no_calls() -> None:
    odd: list[Any] = [None, True, -1, 1 << 62, 1e308, float("nan"), "x\x1b[31m\n" * 50, [], {}, [[]], [[None]], ("a",)]
    rng = random.Random(3)  # noqa: S311
    for _ in range(400):
        row = waits()
        for key in rng.sample(sorted(row), 3):
            row[key] = rng.choice(odd)
        for form in ("pickle", "json"):
            rows = {rank: [*ring(last=3), dict(row)] for rank in range(2)}
            dumps = flight.Dumps()
            for rank, entries in rows.items():
                value = {"version": "2.10", "pg_config": {"0": {"ranks": rng.choice(odd)}}, "entries": entries}
                data = pickle.dumps(value, 4) if form == "pickle" else json.dumps(value).encode()
                assert dumps.add(f"r{rank}", data)
            text = json.dumps(to_dict(read_text("", HOSTS, dumps)))
            assert validated(text.encode())
            assert "\\u001b" not in text


@pytest.mark.parametrize("version", ["1.4", "3.0", "2", "x", "2." + "9" * 50])
def test_an_unknown_version_is_said(version: str) -> None:
    assert "2.0 to 2.10 are known" in refusal(pickle.dumps({"version": version, "entries": [], "pg_config": {}}, 2))


def test_a_name_without_a_rank_is_said() -> None:
    dumps = flight.Dumps()
    dumps.add("/x/dump.pickle", flights.dump("2.10", ring(), WORLD))
    assert "the name must end with it" in dumps.unread["dump.pickle"]


@pytest.mark.parametrize(
    "data",
    [
        b'{"entries":' + b"[" * 200_000,
        b'{"entries":' + b"9" * 2_000_000 + b"}",
        b'{"entries":[],"version":NaN,"pg_config":1e999}',
        b'{"entries":"\xff\xfe',
        b'{"version": {"version": 1',
    ],
)
def test_json_that_is_no_dump_is_text_or_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "r3"
    path.write_bytes(data + b"\n" + ECC.encode())
    assert read_files([str(path)]).verdict == "node"
    path.write_bytes(data)
    assert read_files([str(path)]).verdict == "unknown"


def test_random_bytes_never_break_the_reader() -> None:
    """New ones in `make soak`."""
    seed = random.SystemRandom().randrange(1 << 30) if os.environ.get("GPUHEALTH_SOAK") else 1
    rng = random.Random(seed)  # noqa: S311
    whole = [path.read_bytes() for path in REAL.glob("*/*_[0-3]")]
    whole.append(pickle.dumps(loaded(whole[0]), 4))
    ops = b"(]}eut.\x85\x86\x87)NKMJXhjqr\x94\x88\x89Gas\x8a\x8c\x80\x95"
    for number in range(3000):
        if number % 3 == 0:
            data = b"\x80\x02" + bytes(rng.choices(ops, k=rng.randrange(200)))
        elif number % 3 == 1:
            data = b"\x80\x02" + rng.randbytes(rng.randrange(500))
        else:
            changed = bytearray(rng.choice(whole))
            for _ in range(rng.randrange(1, 6)):
                changed[rng.randrange(2, len(changed))] = rng.randrange(256)
            data = bytes(changed[: rng.randrange(2, len(changed) + 1) if number % 2 else None])
        dumps = flight.Dumps()
        dumps.add("r3", data)
        reading = read_text("", HOSTS, dumps)
        assert validated(json.dumps(to_dict(reading)).encode("utf-8", "replace")), (seed, number)


def test_plain_values_are_read_as_python_reads_them() -> None:
    rng = random.Random(5)  # noqa: S311

    def value(depth: int) -> Any:
        kind = rng.randrange(9 if depth else 6)
        if kind < 6:
            number = rng.choice(
                (
                    rng.randrange(256),
                    rng.randrange(65536),
                    rng.randrange(-(1 << 31), 1 << 31),
                    rng.randrange(-(1 << 63), 1 << 63),
                )
            )
            return (None, rng.random() < 0.5, number, rng.random(), "é" * rng.randrange(4), str(rng.randrange(20)))[
                kind
            ]
        items = [value(depth - 1) for _ in range(rng.randrange(12))]
        return (items, tuple(items), {f"key {number % 10}": one for number, one in enumerate(items)})[kind - 6]

    for _ in range(500):
        one = value(4)
        for protocol in range(2, 6):
            assert loaded(pickle.dumps(one, protocol)) == one


def test_a_packed_call_that_a_file_names_many_times_is_unpacked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    key, mark = text_op("entries"), b"(" + b"h\0K\1" * 8 + b"u"
    data = (
        b"\x80\x02}("
        + key
        + b"q\0](}"
        + mark
        + b"q\1"
        + b"h\1" * 60
        + b"e"
        + text_op("version")
        + text_op("2.4")
        + b"u."
    )
    asked = []
    whole = pickled.unpacked
    monkeypatch.setattr(pickled, "unpacked", lambda row, memo: asked.append(row) or whole(row, memo))
    assert flight.read("x_1", data) is not None
    assert asked == [b"}" + mark]


def test_a_packed_call_says_the_same_as_one_that_was_read_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    data = flights.dump("2.10", ring("2.10", *(waits(seq, sizes=[[seq, 2], [], [3]]) for seq in range(21, 300))), WORLD)
    packed = loaded(data)
    monkeypatch.setattr(pickled, "FLAT", re.compile(b"(?!)"))
    assert loaded(data) == packed == pythons(data)
