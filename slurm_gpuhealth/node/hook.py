"""What the programs that Slurm starts have in common: their node, the configuration, the journal, a safe exit."""

from __future__ import annotations

import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from signal import SIGTERM
    from signal import signal as set_handler
    from typing import NoReturn

    from slurm_gpuhealth.config.settings import Settings
    from slurm_gpuhealth.node.environment import Job
    from slurm_gpuhealth.node.journal import Journal
else:  # see child.py
    from _signal import SIGTERM
    from _signal import signal as set_handler

BY_HAND = """
Slurm starts it; it takes no options. To run it by hand, as root on a node: SLURMD_NODENAME=$(hostname -s) PROGRAM
Its configuration: $GPUHEALTH_CONFIG, or /etc/gpuhealth/gpuhealth.toml. What it saw: gpuhealth status.
"""
_journal: Journal | None = None
"""This program's journal, for `run` to record a failure in."""


def job() -> tuple[Job, Settings, Journal] | None:
    """The job that slurmd started us for, settings and journal; None if there is nothing to do."""
    from slurm_gpuhealth.node import environment

    try:
        found = environment.read(os.environ)
    except ValueError as error:
        _say(f"{error}; nothing done")
        return None
    opened = start(found.node) if found.has_gpus else None
    return (found, *opened) if opened else None


def start(node: str) -> tuple[Settings, Journal] | None:
    """Settings and journal for `node`. If the configuration is broken: None, and syslog says so; then do nothing."""
    from slurm_gpuhealth.config.load import config_path, load, refuse_if_writable_by_others
    from slurm_gpuhealth.config.settings import ConfigError
    from slurm_gpuhealth.node.journal import open_journal

    os.umask(0o077)
    try:
        refuse_if_writable_by_others(config_path())
        settings = load(node=node)
    except ConfigError as error:
        _say(f"configuration not used, nothing checked: {error}")
        return None
    global _journal
    _journal = journal = open_journal(settings.paths)
    if journal.trouble:
        _say(f"{journal.trouble}; using {settings.paths.run} instead")
    if journal.get("corrupt"):
        _say(f"journal was corrupt: {journal.get('corrupt')}")
        journal.put("corrupt", None)
    return settings, journal


def run(body: Callable[[], int]) -> NoReturn:
    """Exit with what `body` returns. If it is ended or fails unexpectedly: exit with 0, and log that.

    If a prolog exits with another code than 0, Slurm drains the node. A bug of ours must not cause that.
    """
    set_handler(SIGTERM, _terminated)
    if len(sys.argv) > 1 and sys.argv[1] in ("-h", "--help"):  # Slurm gives no arguments
        print(f"{sys.modules[body.__module__].__doc__}{BY_HAND}")
        sys.exit(0)
    try:
        code = body()
    except SystemExit:
        _say("a signal ended this program before it was done; the job goes on")
        code = 0
    except Exception as error:  # only here: the top of a program that must never stop jobs
        import traceback

        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({os.path.basename(where.filename)}:{where.lineno})"
        _say(f"{text}; this is a bug of this program, which ends here; the job goes on")
        if _journal:
            _last_words(_journal, error, text)
        code = 0
    sys.exit(code)


def _last_words(journal: Journal, error: Exception, text: str) -> None:
    try:
        if journal.doubt(error):
            _say("the journal was corrupt and is set aside: the next run begins a new one")
        journal.put("failure", {"time": time.time(), "program": os.path.basename(sys.argv[0]), "error": text})
    except Exception as failure:  # this must not stop jobs either
        _say(f"this could not be recorded: {type(failure).__name__}: {failure}")


def _terminated(*_: object) -> NoReturn:
    raise SystemExit(0)


def _say(message: str) -> None:
    from slurm_gpuhealth.say import say

    say(message, error=True)
