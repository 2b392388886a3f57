"""The configuration on disk: what is cached beside it, and who may have write access."""

import marshal
import os
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from slurm_gpuhealth.config import check
from slurm_gpuhealth.config import load as configuration
from slurm_gpuhealth.config.settings import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "gpuhealth.toml"
        path.write_text(text)
        return str(path)

    return write


class TestCache:
    def settle(self, monkeypatch):
        monkeypatch.setattr(configuration, "SETTLED", -1e9)

    def test_the_second_load_parses_nothing(self, write, monkeypatch):
        self.settle(monkeypatch)
        path = write('mode = "enforce"\n[[policy]]\nfinding = "a:1"\nseverity = "info"\nwhen = { x = [1, 2] }')
        first = configuration.load(path, "n1")
        monkeypatch.setattr(check, "parse", None)
        assert configuration.load(path, "n1") == first
        assert os.stat(path + ".cache").st_mode & 0o777 == 0o600

    def test_a_change_of_the_same_size_and_time_is_seen(self, write, monkeypatch):
        self.settle(monkeypatch)
        assert configuration.load(write("[gpus]\ncount = 1"), "n1").gpus.count == 1
        assert configuration.load(write("[gpus]\ncount = 2"), "n1").gpus.count == 2

    def test_a_file_just_written_is_not_cached(self, write):
        path = write("")
        configuration.load(path, "n1")
        assert not os.path.exists(path + ".cache")

    def test_a_broken_configuration_is_not_hidden_by_the_cache(self, write, monkeypatch):
        self.settle(monkeypatch)
        configuration.load(write(""), "n1")
        with pytest.raises(ConfigError):
            configuration.load(write("x = 1"), "n1")

    @pytest.mark.parametrize("damage", ["cut", "flip", "empty", "zeros", "writable", "directory", "fifo", "link"])
    def test_a_cache_that_is_damaged_or_not_ours_is_passed_over(self, write, monkeypatch, damage):
        self.settle(monkeypatch)
        path = write('mode = "enforce"')
        configuration.load(path, "n1")
        cache = Path(path + ".cache")
        blob = cache.read_bytes()
        if damage in ("cut", "flip", "empty", "zeros"):
            flipped = blob[:40] + bytes([blob[40] ^ 1]) + blob[41:]
            cache.write_bytes({"cut": blob[:-9], "flip": flipped, "empty": b"", "zeros": bytes(len(blob))}[damage])
        elif damage == "writable":
            lie = marshal.dumps((marshal.loads(blob[4:])[0], {"mode": "shadow"}))
            cache.write_bytes(zlib.crc32(lie).to_bytes(4, "big") + lie)
            cache.chmod(0o602)
        else:
            cache.unlink()
            {"directory": cache.mkdir, "fifo": lambda: os.mkfifo(cache), "link": lambda: cache.symlink_to(path)}[
                damage
            ]()
        assert configuration.load(path, "n1").mode == "enforce"

    def test_the_hot_path_imports_neither_toml_nor_regular_expressions(self, write, monkeypatch):
        self.settle(monkeypatch)
        path = write("")
        configuration.load(path, "n1")
        code = (
            f"import sys; from slurm_gpuhealth.config.load import load; load({path!r}, 'n1');"
            "print(sorted({'re', 'json', 'tomllib', 'typing', 'dataclasses', 'enum'} & sys.modules.keys()))"
        )
        done = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "[]"


class TestOwnership:
    def refused(self, path, top) -> str:
        with pytest.raises(ConfigError) as caught:
            configuration.refuse_if_writable_by_others(str(path), str(top))
        return str(caught.value)

    @pytest.fixture
    def file(self, tmp_path):
        folder = tmp_path / "etc"
        folder.mkdir(mode=0o755)
        file = folder / "gpuhealth.toml"
        file.touch(mode=0o644)
        return file

    def test_a_file_that_only_we_can_write_is_accepted(self, file, tmp_path):
        configuration.refuse_if_writable_by_others(str(file), str(tmp_path))  # raises nothing
        assert configuration.unsafe(str(file), str(tmp_path)) == []

    def test_a_file_that_others_can_write_is_refused_with_the_remedy(self, file, tmp_path):
        file.chmod(0o664)
        assert f"chmod go-w {file}" in self.refused(file, tmp_path)

    @pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775])
    def test_a_folder_that_others_can_write_is_refused_with_the_remedy(self, file, tmp_path, mode):
        file.parent.chmod(mode)
        remedy = "keep it elsewhere" if mode == 0o1777 else f"chmod go-w {file.parent}"
        assert f"{file.parent} can be written by others (mode {mode:04o}): {remedy}" in self.refused(file, tmp_path)

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
    def test_a_file_of_somebody_else_is_refused_with_the_remedy(self, file, tmp_path):
        os.chown(file, 12345, -1)
        assert f"chown root {file}" in self.refused(file, tmp_path)

    def test_a_link_is_followed_to_the_folder_that_others_can_write(self, file, tmp_path):
        open_folder = tmp_path / "open"
        open_folder.mkdir()
        (open_folder / "link").symlink_to(file)
        link = file.parent / "link.toml"
        link.symlink_to("../open/link")
        configuration.refuse_if_writable_by_others(str(link), str(tmp_path))
        open_folder.chmod(0o777)
        assert str(open_folder) in self.refused(link, tmp_path)

    @pytest.mark.parametrize(
        ("argv", "environment"),
        [
            (("@",), ()),
            (("/usr/bin/env", "-C", "/usr", "@"), ()),
            (("/usr/bin/python3", "--config=@"), ()),
            (("/bin/sh", "-c", "exec @ -x"), ()),
            (("/bin/true",), ("LD_PRELOAD=/lib/none.so:@",)),
            (("/bin/true",), ("LD_LIBRARY_PATH=/usr/lib:FOLDER",)),
        ],
    )
    def test_what_the_words_of_a_command_name_counts_as_its_program_does(self, file, tmp_path, argv, environment):
        def told(word):
            return word.replace("@", str(file)).replace("FOLDER", str(file.parent))

        words = [told(one) for one in argv], [told(one) for one in environment]
        base = configuration.unsafe_command(*words, str(tmp_path))
        file.chmod(0o777)
        file.parent.chmod(0o777)
        assert base == []
        assert f"{file.parent} can be written by others" in configuration.unsafe_command(*words, str(tmp_path))[0]

    def test_a_command_may_name_a_device_a_scratch_folder_and_what_is_not_there(self, tmp_path):
        scratch = tmp_path / "scratch"
        scratch.mkdir()
        scratch.chmod(0o1777)
        words = ["/bin/true", "/dev/null", str(scratch), "/none/such"]
        assert configuration.unsafe_command(words, (), str(tmp_path)) == []
        scratch.chmod(0o777)
        assert configuration.unsafe_command(words, (), str(tmp_path)) != []

    def test_a_loop_of_links_ends(self, tmp_path):
        (tmp_path / "a").symlink_to(tmp_path / "a")
        configuration.unsafe(str(tmp_path / "a"), str(tmp_path))

    def test_the_folders_up_to_the_root_count(self, tmp_path):
        within = tmp_path / "anybodys" / "within"
        within.mkdir(parents=True)
        within.parent.chmod(0o1777)
        (within / "gpuhealth.toml").write_text("")
        found = configuration.unsafe(str(within / "gpuhealth.toml"))
        assert any(one.startswith(f"{within.parent} can be written by others") for one in found)
