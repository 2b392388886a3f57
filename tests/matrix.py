"""`make matrix`: the tests on releases of Debian and Ubuntu, with their Slurms and Pythons; one line each. Needs root.

Each release is a root below /srv/gpuhealth-roots (GPUHEALTH_ROOTS), made once with debootstrap, and entered with
processes and mounts of its own; this clone is copied there anew each time. For newer packages remove the root's folder.
ROOTS="trixie forky" chooses the releases, SUITES=unit or SUITES=integration the tests; PYTEST_ADDOPTS="-k reboot" is
pytest's own. Ends with 1 where a test failed.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

CLONE = Path(__file__).resolve().parent.parent
ROOTS = Path(os.environ.get("GPUHEALTH_ROOTS", "/srv/gpuhealth-roots"))
RELEASES = {
    "bullseye": ("unit",),  # Python 3.9; its Slurm, 20.11, is older than what we need
    "jammy": ("unit",),  # Python 3.10; Slurm 21.08, likewise
    "bookworm": ("unit", "integration"),
    "noble": ("unit", "integration"),
    "trixie": ("unit", "integration"),
    "resolute": ("unit", "integration"),
    "forky": ("unit", "integration"),
}
UBUNTU = {"jammy", "noble", "resolute"}
ARCHIVE = "archive.ubuntu.com/ubuntu"
PLACE = "/srv/gpuhealth"
"""The clone's, in a root."""
OURS = ("etc/resolv.conf", "etc/hosts", "etc/pip.conf", "etc/ssl/certs/ca-certificates.crt")
"""What a root takes over from this machine, to reach the same package indexes."""
HANDED_ON = ("PIP_", "PYTEST_", "GPUHEALTH_", "http_proxy", "https_proxy", "no_proxy")
PRIVATE = ("unshare", "--mount", "--pid", "--fork", "--kill-child")
"""With it end its daemons and its mounts."""
ENTER = """
root=$1; shift
mount -t proc proc "$root/proc"
for folder in /sys /dev /opt; do mkdir -p "$root$folder"; mount --rbind "$folder" "$root$folder"; done
chroot "$root" "$@"
"""  # /opt: where a package index of this machine may be; no exec: what is orphaned inside is the shell's to reap


def main():
    names = os.environ.get("ROOTS", " ".join(RELEASES)).split()
    unknown = set(names) - set(RELEASES)
    if unknown or os.geteuid() != 0:
        print(f"matrix: needs root, and knows only ROOTS={' '.join(RELEASES)}", file=sys.stderr)
        return 2
    ROOTS.mkdir(parents=True, exist_ok=True)
    return max([one_root(name) for name in names], default=0)


def one_root(name):
    """Run the release's suites and print its line: 0, or 1 where something failed."""
    began, root, results, failed = time.monotonic(), ROOTS / name, [], False
    with (ROOTS / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (root / ".complete").exists():
            make_root(root, name)
        renew(root)
        for suite in RELEASES[name]:
            if suite in os.environ.get("SUITES", "unit integration").split():
                log = ROOTS / f"{name}-{suite}.log"
                status = run(root, log, "make", "-C", PLACE, suite)
                failed |= status != 0
                results.append(f"{suite} {counts(log.read_text(errors='replace'))}")
        versions = f"Slurm {version(root, 'slurmctld')} Python {version(root, 'python3')}"
    results.append(f"{(time.monotonic() - began) / 60:.0f} min, logs {ROOTS}/{name}-*.log")
    print(f"matrix: {name} {versions} {', '.join(results)}", flush=True)
    return int(failed)


def make_root(root, name):
    """A minimal system, in which nothing starts a service."""
    half, script = root.with_suffix(".half"), Path("/usr/share/debootstrap/scripts", name)
    ubuntu = name in UBUNTU
    shutil.rmtree(root, ignore_errors=True)
    shutil.rmtree(half, ignore_errors=True)
    print(f"matrix: making {root}", file=sys.stderr, flush=True)
    make = [*PRIVATE, "debootstrap", "--variant=minbase", "--include=ca-certificates,make"]
    if ubuntu:  # Debian has no keyring of Ubuntu's: here HTTPS vouches for the archive, later the root's own apt
        make += ["--no-check-gpg", "--components=main,universe"]
    make += [name, str(half), f"https://{ARCHIVE}" if ubuntu else mirror()]
    if not script.exists():  # this machine's debootstrap may not know a newer release
        make.append(str(script.with_name("gutsy" if ubuntu else "sid")))
    with (ROOTS / f"{name}.log").open("w") as log:
        subprocess.run(make, stdout=log, check=True)
    (half / "usr/sbin/policy-rc.d").write_text("#!/bin/sh\nexit 101\n")
    (half / "usr/sbin/policy-rc.d").chmod(0o755)
    # A mirror's copy of a testing release may be old.
    (half / "etc/apt/apt.conf.d/99matrix").write_text('Acquire::Check-Valid-Until "false";\n')
    (half / ".complete").touch()
    half.rename(root)


def mirror():
    """Where this machine gets Debian from."""
    files = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]
    text = "\n".join(file.read_text() for file in files if file.is_file())
    found = re.findall(r"^(?:URIs:|deb(?: \[.*\])?) *(https?://\S+/debian/?)(?:\s|$)", text, re.MULTILINE)
    return found[0] if found else "http://deb.debian.org/debian"


def renew(root):
    """This clone as it is now, without what is built."""
    for file in OURS:
        if os.path.exists(f"/{file}"):
            shutil.copyfile(f"/{file}", root / file)
    place = root / PLACE[1:]
    shutil.rmtree(place, ignore_errors=True)
    built = shutil.ignore_patterns(
        ".git", ".venv", ".*cache", ".hypothesis", "build", "__pycache__", "*.egg-info", "*.so*"
    )
    shutil.copytree(CLONE, place, symlinks=True, ignore=built)


def run(root, log, *argv):
    """Run a program in the root, its words into the file `log`: its exit status."""
    handed = {
        key: value for key, value in os.environ.items() if key.lower().startswith(tuple(map(str.lower, HANDED_ON)))
    }
    env = {**handed, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LC_ALL": "C.UTF-8"}
    with log.open("w") as file:
        argv = [*PRIVATE, "sh", "-euc", ENTER, "sh", str(root), *argv]
        return subprocess.run(argv, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file).returncode


def version(root, program):
    """ "slurm-wlm 24.11.5" → "24.11.5"."""
    log = ROOTS / f".{root.name}.version"
    return "?" if run(root, log, program, "-V") else log.read_text().split()[-1]


def counts(text):
    """pytest's last line, "2 failed, 190 passed in 91.25s", as "190 passed 2 failed"."""
    lines = re.findall(r"^(?:=+ )?(\d+ [a-z].*) in [\d.]+s\b", text, re.MULTILINE)
    words = [word for word in (lines or ["broke off"])[-1].split(", ") if "warning" not in word]
    return " ".join(sorted(words, key=lambda word: "passed" not in word))


if __name__ == "__main__":
    sys.exit(main())
