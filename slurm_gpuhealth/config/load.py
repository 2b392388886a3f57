"""Reads gpuhealth.toml into `Settings`: usually from a cache; through `config.check` if the file has changed.

stat(gpuhealth.toml) ─▶ gpuhealth.toml.cache has the same key? ─yes─▶ Settings
                                    │ no
                                    ▼
                      check.parse ─▶ ConfigError, or cache it ─▶ Settings
"""

from __future__ import annotations

import marshal
import os
import stat
import sys
import time
import zlib

from slurm_gpuhealth.config.settings import POLICY_PATH, ROWS, TOOLS_PATH, ConfigError, Problem, Settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    Data = Mapping[str, Any]
    """The file's content, checked and converted, as `marshal` can keep it: table → key → value, without defaults."""

DEFAULT_PATH = "/etc/gpuhealth/gpuhealth.toml"
HERE = os.path.dirname(__file__)
CODE = (POLICY_PATH, TOOLS_PATH, *(os.path.join(HERE, one) for one in ("settings.py", "check.py", "kinds.py")))
NODE_KINDS = ("File", "tuple[File, ...]", "Address")  # kinds in which `{node}` stands for the node's name
CACHE_LIMIT = 4 << 20
SETTLED = 2.0
"""Seconds that a file must be unchanged before it is cached: stat can't see two edits within one clock tick."""


def load(path: str | None = None, node: str | None = None) -> Settings:
    """The settings of `path` ($GPUHEALTH_CONFIG, or /etc/gpuhealth/gpuhealth.toml) for `node`; raises ConfigError.

    `node` is Slurm's name of this node ($SLURMD_NODENAME, or the host's short name).
    """
    path = path or config_path()
    try:
        key = _key(path)
    except OSError as error:
        raise ConfigError([Problem(path, 0, "", f"can't be read: {error.strerror}; copy etc/gpuhealth.toml")]) from None
    data = _recall(path + ".cache", key)
    if data is None:
        from slurm_gpuhealth.config.check import parse

        data = parse(path)
        _remember(path + ".cache", key, data)
    return build(data, path, node)


def config_path() -> str:
    """The configuration's path, if the caller gives none."""
    return os.environ.get("GPUHEALTH_CONFIG") or DEFAULT_PATH


def build(data: Data, path: str, node: str | None = None) -> Settings:
    """Settings from checked data, with `{node}` filled in."""
    name = node or os.environ.get("SLURMD_NODENAME") or os.uname().nodename.partition(".")[0]
    plain = name.replace(".", "").replace("-", "").replace("_", "")
    if not (plain.isascii() and plain.isalnum()) or name[0] in ".-":
        # The name becomes part of paths that root writes to.
        raise ConfigError(
            [Problem(path, 0, "", f"{name!r} is not a node name: only letters, digits, '.', '_' and '-' are allowed")]
        )
    values = {}
    for key, value in data.items():
        default = Settings.__dict__[key]
        kind = Settings.__annotations__[key]
        values[key] = _table(type(default), value, name) if isinstance(value, dict) else _rows(kind, value, name)
    return Settings(**values)


def _table(cls: type, data: Data, node: str) -> Any:
    values = {}
    for key, value in data.items():
        kind = cls.__annotations__[key]
        if kind in NODE_KINDS:
            if isinstance(value, tuple):
                value = tuple(one.replace("{node}", node) for one in value)
            else:
                value = value.replace("{node}", node)
        values[key] = _rows(kind, value, node)
    return cls(**values)


def _rows(kind: str, value: Any, node: str) -> Any:
    return tuple(_table(ROWS[kind], row, node) for row in value) if kind in ROWS else value


# The cache is beside the file. So each configuration has its own cache, no key has to name its path, and the programs
# that run as root have already refused a folder that others can write. Parsing TOML takes as long as two starts of
# Python, reading the cache a hundredth of that. If the folder is read-only, TOML is parsed each time.


def _key(path: str) -> tuple[Any, ...]:
    """What a cached result depends on: the file, the built-in policy, our code that reads them, this Python.

    It includes the change time, because `cp -p` and `tar` keep the modification time.
    """
    stats = [os.stat(one) for one in (path, *CODE)]
    return (sys.hexversion, *((one.st_ctime_ns, one.st_mtime_ns, one.st_size, one.st_ino) for one in stats))


def _recall(cache: str, key: tuple[Any, ...]) -> Data | None:
    """The cached data for `key`; None if there is no complete cache that we wrote ourselves."""
    try:
        fd = os.open(cache, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        known = os.fstat(fd)
        if not stat.S_ISREG(known.st_mode) or known.st_uid != os.geteuid() or known.st_mode & 0o077:
            return None
        blob = os.read(fd, CACHE_LIMIT)
        # marshal may crash on damaged bytes, so the checksum comes first.
        if zlib.crc32(blob[4:]) != int.from_bytes(blob[:4], "big"):
            return None
        cached, data = marshal.loads(blob[4:])  # noqa: S302 - our own file, mode 0600, with the right checksum
    except (OSError, ValueError, TypeError, EOFError):
        return None
    finally:
        os.close(fd)
    return data if cached == key else None


def _remember(cache: str, key: tuple[Any, ...], data: Any) -> None:
    """Keep `data` for the next load, if the folder can be written."""
    if time.time() - key[1][0] / 1e9 < SETTLED:
        return
    blob = marshal.dumps((key, data))
    own = f"{cache}.{os.getpid()}"
    try:
        fd = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        return
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(zlib.crc32(blob).to_bytes(4, "big") + blob)
        os.rename(own, cache)
    except OSError:
        try:
            os.unlink(own)
        except OSError:
            pass


def refuse_if_writable_by_others(path: str, top: str = "/") -> None:
    """Raise ConfigError if anybody but root and us could change or replace the file `path`, which root uses.

    Checks every folder from `top` down, and follows symbolic links one by one. Also refuses a sticky folder such as
    /tmp: there the first user owns the name.
    """
    found = unsafe(path, top)
    if found:
        raise ConfigError([Problem(path, 0, "", one) for one in found])


def unsafe(path: str, top: str = "/", sticky: bool = False) -> list[str]:
    """Why root can't use `path` safely, each with the command that mends it; empty if it is safe.

    `sticky`: allow a sticky folder, because others can't replace root's files in it.
    """
    found: list[str] = []
    for part in _steps(os.path.abspath(path), 40):
        if not part.startswith(top):
            continue
        try:
            status = os.lstat(part)
        except OSError as error:
            return [*found, f"{part} can't be checked: {error.strerror}"]
        if status.st_uid not in (0, os.geteuid()):
            found.append(f"{part} belongs to uid {status.st_uid}, who can change it: chown root {part}")
        elif sticky and status.st_mode & stat.S_ISVTX and stat.S_ISDIR(status.st_mode):
            continue
        elif status.st_mode & 0o022 and not stat.S_ISLNK(status.st_mode):
            remedy = "keep it elsewhere" if status.st_mode & stat.S_ISVTX else f"chmod go-w {part}"
            found.append(f"{part} can be written by others (mode {status.st_mode & 0o7777:04o}): {remedy}")
    return found


def unsafe_command(argv: Sequence[str], environment: Sequence[str] = (), top: str = "/") -> list[str]:
    """Why root can't run `argv` safely: its program, or what its other words and NAME=value name.

    A script, a library or a configuration there decides as much as the program. A sticky folder such as /scratch
    may be named: tests write there. Devices are not judged.
    """
    found = unsafe(argv[0], top)
    words = " ".join([*argv[1:], *environment]).replace("=", " ").replace(":", " ").split()
    for path in dict.fromkeys(words):
        if path.startswith("/") and path != argv[0] and (os.path.isfile(path) or os.path.isdir(path)):
            found += unsafe(path, top, sticky=os.path.isdir(path))
    return found


def _steps(path: str, links: int) -> Iterator[str]:
    """Every folder on the way to `path`, `path` itself, and the same for the target of each symbolic link."""
    part = "/"
    yield part
    for name in path.strip("/").split("/"):
        part = os.path.join(part, name)
        yield part
        if links and os.path.islink(part):
            yield from _steps(os.path.abspath(os.path.join(os.path.dirname(part), os.readlink(part))), links - 1)
