"""Evidence from the host: growth counts, not totals; a hung file server can't delay it."""

import os
from types import SimpleNamespace

import pytest

from slurm_gpuhealth import child
from slurm_gpuhealth.config.settings import Host, Paths, Settings
from slurm_gpuhealth.evidence import host
from slurm_gpuhealth.frozen import replace

NOW = 1_800_000_000.0


@pytest.fixture
def node(tmp_path, monkeypatch):
    """A node whose proc and sysfs are folders; `write` sets a file, `look` collects."""

    def write(path: str, text: object) -> None:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def look(previous=None, **keys):
        paths = Paths(proc=str(tmp_path / "proc"), sys=str(tmp_path / "sys"))
        return host.collect(replace(Settings(), paths=paths, host=Host(**keys)), previous or {}, NOW)

    write("proc/mounts", "/dev/sda1 / ext4 rw,relatime 0 0")
    write("proc/loadavg", "0.50 0.40 0.30 1/900 4242")
    write("proc/vmstat", "nr_free_pages 1\noom_kill 4")
    blocks = {"/": (100, 50, 50)}

    def statvfs(path):
        size, free, inodes = blocks[path]
        return SimpleNamespace(f_blocks=size, f_bfree=free, f_bavail=free, f_files=100, f_ffree=inodes)

    monkeypatch.setattr(os, "statvfs", statvfs)
    return SimpleNamespace(write=write, look=look, blocks=blocks)


def codes(found):
    return [(one.code, one.severity) for one in found[0]]


def test_a_well_node_has_no_findings(node):
    assert codes(node.look()) == []


def test_a_node_without_anything_to_read_says_what_is_missing_and_raises_nothing(tmp_path):
    settings = replace(Settings(), paths=Paths(proc=str(tmp_path), sys=str(tmp_path)))
    findings, _ = host.collect(settings, {}, NOW)
    assert {(one.code, one.severity) for one in findings} == {("unreadable", "info")}


@pytest.mark.parametrize(
    ("name", "code", "severity"), [("ue", "memory", "warning"), ("ce", "memory-corrected", "info")]
)
def test_memory_errors_count_by_growth(node, name, code, severity):
    counter = f"sys/devices/system/edac/mc/mc1/{name}_count"
    node.write(counter, 7)
    found, state = node.look()
    assert found == []
    assert node.look(state)[0] == []
    node.write(counter, 9)
    found, state = node.look(state)
    assert [(one.code, one.severity, one.count, one.standing) for one in found] == [(code, severity, 2, False)]
    assert "mc1" in found[0].message
    assert node.look(state)[0] == []
    node.write(counter, 1)  # the node was booted
    assert node.look(state)[0][0].count == 1


def test_tasks_killed_for_lack_of_memory_are_news_once(node):
    _, state = node.look()
    node.write("proc/vmstat", "oom_kill 6")
    found, state = node.look(state)
    assert [(one.code, one.severity, one.count) for one in found] == [("oom", "info", 2)]
    assert node.look(state)[0] == []


def test_a_file_system_that_turned_read_only_stands_until_it_is_writable_again(node):
    _, state = node.look()
    node.write("proc/mounts", "/dev/sda1 / ext4 ro,relatime,errors=remount-ro 0 0")
    for _ in range(2):
        found, state = node.look(state)
        assert [(one.code, one.standing) for one in found] == [("read-only", True)]
    node.write("proc/mounts", "/dev/sda1 / ext4 rw 0 0")
    assert codes(node.look(state)) == []


def test_a_file_system_that_is_meant_to_be_read_only_is_none_of_our_business(node):
    node.write("proc/mounts", "/dev/sda1 / ext4 ro 0 0")
    found, state = node.look()
    assert found == []
    assert node.look(state)[0] == []


def test_space_and_inodes_are_both_counted_and_a_device_once(node):
    node.write("proc/mounts", "/dev/sda1 / ext4 rw 0 0\n/dev/sda1 /bind ext4 rw 0 0\n/dev/sdb /a\\040b xfs rw 0 0")
    node.blocks.update({"/": (100, 3, 2), "/a b": (1000, 51, 100)})
    (finding,), _ = node.look()
    assert finding.code == "full"
    assert "/ 97%, / 98% of inodes (" in finding.message
    node.blocks["/a b"] = (1000, 49, 100)
    assert "/a b 95%" in node.look()[0][0].message


@pytest.mark.parametrize(
    "mounts",
    [
        "server:/x /data nfs4 rw 0 0",
        "o2ib:/x /data lustre rw 0 0",
        "/dev/fuse /data fuse.sshfs rw 0 0",
        "tmpfs /data tmpfs rw 0 0",
        "server:/x /nfs nfs rw 0 0\n/dev/sdb /nfs/local ext4 rw 0 0",
        "/etc/auto /nfs autofs rw 0 0\n/dev/sdb /nfs/a/local ext4 rw 0 0",
        "/dev/sdb /data ext4 rw 0 0\nserver:/x /data nfs rw 0 0",
    ],
)
def test_no_path_that_a_file_server_could_hold_up_is_touched(node, mounts):
    node.write("proc/mounts", "/dev/sda1 / ext4 rw 0 0\n" + mounts)  # statvfs of another path than / would raise
    assert codes(node.look()) == []


def test_a_required_mount_is_looked_up_in_the_table_only(node):
    node.write("proc/mounts", "/dev/sda1 / ext4 rw 0 0\nserver:/home /home nfs rw 0 0")
    assert codes(node.look(mounts=("/home/", "/"))) == []
    (finding,), _ = node.look(mounts=("/home", "/scratch"))
    assert (finding.code, finding.severity, finding.standing) == ("mount", "warning", True)
    assert "/scratch" in finding.message
    assert "/home" not in finding.message


def test_many_tasks_that_can_not_be_killed_are_one_finding_with_harmless_names(node):
    node.write("proc/loadavg", "40.10 20.00 9.00 3/900 4242")
    for pid in range(100, 130):
        node.write(f"proc/{pid}/stat", f"{pid} (my) R (job\x1b[2J) D 1 1")
    node.write("proc/99/stat", "99 (well) S 1 1")
    (finding,), _ = node.look()
    assert (finding.code, finding.severity) == ("hung", "warning")
    assert finding.message.startswith("30 tasks in uninterruptible sleep (my) R (job?[2J)")
    assert codes(node.look(d_state_tasks=31)) == []


def test_the_process_table_is_not_walked_while_the_load_is_explained_by_runnable_tasks(node, monkeypatch):
    node.write("proc/loadavg", "200.10 20.00 9.00 192/9000 4242")
    monkeypatch.setattr(os, "listdir", None)
    assert codes(node.look()) == []


class TestUnits:
    @pytest.fixture
    def systemctl(self, monkeypatch):
        asked = []
        answer = {"stdout": b"", "rc": 0}

        def run(argv, **_):
            asked.append(argv)
            return child.Completed(**{"stderr": b"", "seconds": 0.0, **answer})

        monkeypatch.setattr(child, "run", run)
        return SimpleNamespace(asked=asked, answer=answer)

    def test_no_program_is_started_where_no_unit_is_named(self, node, systemctl):
        node.look()
        assert systemctl.asked == []

    def test_units_that_are_not_active_are_named(self, node, systemctl):
        systemctl.answer.update(stdout=b"active\nfailed\nactivating\n", rc=3)
        (finding,), _ = node.look(units=("a.service", "b.service", "c.service"))
        assert systemctl.asked == [["/usr/bin/systemctl", "is-active", "--", "a.service", "b.service", "c.service"]]
        assert (finding.code, finding.severity) == ("unit", "warning")
        assert finding.message == "not active: b.service (failed) (host.units)"

    @pytest.mark.parametrize(
        "answer",
        [
            {"rc": 127, "stderr": b"/usr/bin/systemctl: No such file or directory"},
            {"rc": 1, "stderr": b"System has not been booted with systemd"},
            {"rc": None, "timed_out": True, "stdout": b"active\n"},
        ],
    )
    def test_a_systemctl_that_does_not_answer_is_no_fault(self, node, systemctl, answer):
        systemctl.answer.update(answer)
        assert codes(node.look(units=("a.service",))) == [("unreadable", "info")]

    def test_a_systemctl_that_can_not_be_killed_is_not_joined_by_a_second_one(self, node, systemctl, monkeypatch):
        systemctl.answer.update(rc=None, timed_out=True, stuck=child.Child(77, 5))
        _, state = node.look(units=("a.service",))
        monkeypatch.setattr(child, "alive", lambda one: one == child.Child(77, 5))
        found, state = node.look(state, units=("a.service",))
        assert len(systemctl.asked) == 1
        assert [(one.code, one.severity) for one in found] == [("unreadable", "info")]
        monkeypatch.setattr(child, "alive", lambda one: False)
        systemctl.answer.update(rc=0, timed_out=False, stuck=None, stdout=b"active\n")
        assert codes(node.look(state, units=("a.service",))) == []
