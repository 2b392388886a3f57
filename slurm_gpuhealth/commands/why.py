"""gpuhealth why: explains a reason of sinfo -R, or a finding's code: what it means, what follows, what to do."""

from __future__ import annotations

import json
import os
import re

import click

from slurm_gpuhealth.commands import common
from slurm_gpuhealth.policy import runbook
from slurm_gpuhealth.policy.judge import SOURCE_OF
from slurm_gpuhealth.policy.runbook import Code
from slurm_gpuhealth.slurm import reason as reasons

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    from slurm_gpuhealth.config.settings import Row, Settings

COLUMNS = 20
"""Width of a reason in `sinfo -R`; USER TIMESTAMP NODELIST follow."""
LISTED = re.compile(r"(.*?)\s+(\S+)\s+(?:\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d|Unknown)\s+(\S+)")
SHOWN = re.compile(r"(?:.*\bReason=)?(.*?)(?: \[[^\s@\]]+@[^\s\]]+\])?", re.S)
CUT = re.compile(r"gpuhealth:([\w.-]{1,10})(?: G?P?U?(\d+|\*)?)?(?: .*)?", re.A)
YOURS = ("manual", "untested", "end", "pass")
"""States in which the node waits for a person."""
MODES = {
    "enforce": "a fault drains",
    "shadow": 'a fault is recorded as "would-drain", and the node stays in service',
    "off": "not looked at",
}


@click.command()
@click.argument("text", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_obj
def why(node: str | None, text: tuple[str, ...], as_json: bool) -> None:
    """Explain TEXT: a reason from sinfo -R, whole or cut, or a finding's code (Xid79, nvml:lost, dcgm 45).

    Says what it means, what the policy does, what to do, and how the node comes back. Exit 1 when TEXT is unknown.
    """
    told = explain(" ".join(text), node or "")
    if as_json:
        click.echo(json.dumps(told))
    else:
        lines = ("".join(c if c.isprintable() else "?" for c in line) for line in _lines(told))
        click.echo("\n".join(lines).lstrip("\n"))
    raise SystemExit(0 if told["owner"] or told["codes"] else 1)


def explain(text: str, node: str) -> dict[str, Any]:
    """Everything that `why` shows, as its JSON."""
    settings, policy_from = _settings(node)
    reason, nodes = _pasted(" ".join(text.split()))
    ours = _ours(reason)
    slurms = None if ours else runbook.of_slurm(reason)
    found = _codes_of(ours, settings) if ours else [] if slurms else runbook.codes(reason)
    found = sorted(found, key=lambda one: not _can_drain(one, settings))
    seen = _seen(settings, node, reason, nodes, ours, found)
    gpu = {**(ours or {}), **{k: v for k, v in (seen["findings"] or [{}])[0].items() if v is not None}}
    names = {
        "node": nodes if reasons.WORD.issuperset(nodes) and nodes else node if seen["this_node"] else None,
        "index": gpu.get("gpu"),
        "uuid": gpu.get("uuid"),
        "pci": f"{gpu['pci']}.0" if gpu.get("pci") else None,
    }
    return {
        "text": text,
        "owner": _owner(reason, ours, bool(slurms), bool(found)),
        "reason": ours,
        "says": _says(ours) if ours else None,
        "state": _state(ours, names) if ours else None,
        "slurm": {"means": slurms.means, "do": [_fill(step, names) for step in slurms.do]} if slurms else None,
        "here": {"node": node, **seen},
        "policy_from": policy_from,
        "codes": [_told(one, settings, names) for one in found],
        "nearest": [] if ours or slurms or found else runbook.nearest(reason),
    }


def _settings(node: str) -> tuple[Settings, str]:
    """The settings in force, or the built-in policy if there is no configuration; and which of the two it is."""
    from slurm_gpuhealth.config import load as configuration
    from slurm_gpuhealth.config.check import built_in
    from slurm_gpuhealth.config.settings import ConfigError, Row, Settings

    path = configuration.config_path()
    try:
        return configuration.load(path, node or None), path
    except ConfigError as error:
        rows = tuple(Row(**row) for row in built_in())
        why_not = str(error).splitlines()[0] if os.access(path, os.R_OK) else f"no {path} that you may read here"
        return Settings(policy=rows), f"the built-in policy ({why_not})"


def _pasted(text: str) -> tuple[str, str]:
    """The reason in a line of `sinfo -R` or of `scontrol show node`, and the node list if the line has one."""
    listed = LISTED.fullmatch(text)
    if listed:
        return listed[1], listed[3]
    shown = SHOWN.fullmatch(text)
    return (shown[1].strip() if shown else text), ""


def _ours(text: str) -> dict[str, Any] | None:
    """The fields of our reason, as far as the text goes; `changed` if somebody has added to it."""
    whole = reasons.parse(text)
    if whole:
        return {**whole.__dict__, "tail": list(whole.tail), "cut": False, "changed": False}
    begins = CUT.fullmatch(text)
    if not begins:
        return None
    gpu = int(begins[2]) if (begins[2] or "").isdigit() else None
    cut = len(text) <= COLUMNS
    return {"fact": begins[1], "gpu": gpu, "cut": cut, "changed": not cut}


def _codes_of(ours: dict[str, Any], settings: Settings) -> list[Code]:
    """The codes that a reason's fact may stand for: those that can drain; if a test failed, DCGM's."""
    fact = ours["fact"]
    if re.fullmatch(r"S?Xid\d+", fact):
        return runbook.codes(fact)
    sites = [f"site:{one.name}" for one in settings.check.command if reasons.fact("site", one.name) == fact]
    sites += [f"tool:{one}" for one in {test.name for test in settings.test} if reasons.fact("tool", one) == fact]
    found = [runbook.of_key(key) for key in (*runbook.of_fact(fact), *sites)]
    if ours.get("rung", "")[:1] == "L" and ours.get("state") == "fail":
        found = [one for one in found if one.source == "dcgm"] or found or [runbook.of_key(f"dcgm:{fact}")]
    return [one for one in found if _can_drain(one, settings)] or found


def _can_drain(one: Code, settings: Settings) -> bool:
    return any(row.severity == "fault" for row in runbook.rows(settings.policy, one))


def _owner(reason: str, ours: dict[str, Any] | None, slurms: bool, known: bool) -> str | None:
    """Who owns the reason: `us`, `slurm`, `admin`; None for a code, and for a single unknown word."""
    if ours:
        return "admin" if ours["changed"] else "us"
    return "slurm" if slurms else "admin" if " " in reason and not known else None


def _says(ours: dict[str, Any]) -> str:
    """A reason of ours as sentences."""
    gpu = "the node as a whole" if ours["gpu"] is None else f"GPU {ours['gpu']} (its index in nvidia-smi)"
    text = f"gpuhealth drained the node: {ours['fact']}, {gpu}."
    if ours.get("node"):
        text = f"gpuhealth drained the node: {ours['fact']}, which concerns no GPU."
    if ours["gpu"] is None and ours["cut"]:
        text = f"gpuhealth drained the node: {ours['fact']}."
    if ours["cut"]:
        return f"{text} sinfo cuts at {COLUMNS} columns, perhaps inside a GPU number: see `scontrol show node`."
    if ours["changed"]:
        return f"{text} Somebody has added to this reason: an admin owns the node now, and gpuhealth leaves it alone."
    return f"{text} {runbook.sentence(ours)}"


def _state(ours: dict[str, Any], names: dict[str, Any]) -> dict[str, str] | None:
    """What happens now, and what the reader should do; None if the reason is cut or no longer ours."""
    if ours["cut"] or ours["changed"]:
        return None
    name, now, do = runbook.stage(ours["rung"], ours["state"], ours["next"])
    return {"name": name, "now": _fill(now, names), "do": _fill(do, names)}


def _seen(
    settings: Settings, node: str, reason: str, nodes: str, ours: dict[str, Any] | None, found: Sequence[Code]
) -> dict[str, Any]:
    """What this node's journal knows: whether the reason is about this node, and the newest findings."""
    nothing: dict[str, Any] = {"journal": False, "this_node": False, "findings": []}
    if not os.access(os.path.join(settings.paths.state, "journal.db"), os.R_OK | os.W_OK):
        return nothing
    from slurm_gpuhealth.node.journal import open_journal
    from slurm_gpuhealth.slurm.node import expand

    journal = open_journal(settings.paths)
    if journal.trouble:
        return nothing
    keys = [one.key for one in found]
    where = f"source || ':' || code IN ({', '.join('?' * len(keys))})"
    index = ours["gpu"] if ours and not ours["cut"] else None
    findings = [one for one in common.findings(journal, where, *keys) if index in (None, one["gpu"])] if keys else []
    hold = (journal.get("hold") or {}).get("reason", "")
    mine = node in expand(nodes) if nodes else bool(findings) or hold.startswith(reason)
    return {"journal": True, "this_node": mine, "findings": findings[:3] if mine else []}


def _told(one: Code, settings: Settings, names: dict[str, Any]) -> dict[str, Any]:
    """One code with its meaning, the policy's rows and the runbook's steps."""
    from slurm_gpuhealth.xid import catalog

    entry = runbook.entry(one.key, {**one.details, **one.says})
    known = one.source in ("xid", "sxid")
    action = str(one.says.get("action") or "")
    return {
        "finding": one.key,
        "means": " ".join(
            part for part in (f"{one.means}." if one.means else "", entry.means if entry else "") if part
        ),
        "class": one.says.get("class"),
        "nvidia": f"{action}: {catalog.advice(action)}" if known and action else None,
        "policy": [_row(row, one) for row in runbook.rows(settings.policy, one)] if one.source != "request" else [],
        "mode": _mode(one, settings),
        "do": [_fill(step, names) for step in entry.do] if entry else [],
        "gives_back": _fill(entry.gives_back, names) if entry else "",
    }


def _row(row: Row, one: Code) -> dict[str, Any]:
    keys = ("severity", "rung", "times", "window", "distinct", "why")
    return {"words": row_words(row, one), "when": dict(row.when), **{key: getattr(row, key) for key in keys}}


def _mode(one: Code, settings: Settings) -> dict[str, str]:
    """What its source may do here, and the keys of the configuration that say so."""
    if one.source == "site":
        own = {command.name: command.mode for command in settings.check.command}.get(one.code, "shadow")
        key = f"check.command {one.code}"
    else:
        name = SOURCE_OF.get(one.source, "")
        own, key = getattr(settings.sources, name, "shadow"), f"sources.{name}"
    shadow = own == "enforce" and settings.mode == "shadow"
    return {"mode": "shadow" if shadow else own, "by": 'mode = "shadow"' if shadow else f'{key} = "{own}"'}


def _fill(text: str, names: dict[str, Any]) -> str:
    for name, value in names.items():
        text = text.replace("{" + name + "}", name.upper() if value is None else str(value))
    return text


def _lines(told: dict[str, Any]) -> Iterator[str]:
    if told["says"]:
        yield told["says"]
        yield from _state_lines(told["state"])
    elif told["owner"] == "slurm":
        yield f"Slurm wrote this reason. {told['slurm']['means']}"
        yield from _steps(told["slurm"]["do"])
        yield "  gpuhealth replaces such a reason only if its journal has a fault that explains it."
    elif told["owner"] == "admin":
        yield "An admin or another tool wrote this reason, not gpuhealth or Slurm. gpuhealth leaves such a node alone."
    elif not told["codes"]:
        near = f" Similar: {', '.join(told['nearest'])}." if told["nearest"] else ""
        yield f"{told['text']}: neither a finding's code nor a reason that gpuhealth or Slurm writes.{near}"
    if told["owner"] == "us" and not told["codes"]:
        yield "  This version has no finding of that name. A check of the site or another version may have it."
    here = told["here"]
    for one in here["findings"]:
        yield f"  {here['node']}, {common.utc(one['seen'])} UTC: {_seen_line(one)}"
    if told["owner"] == "us" and told["reason"]["gpu"] is not None and not here["this_node"]:
        yield "  For PCI address, UUID and serial number run this as root on the drained node."
    waits = not told["state"] or told["state"]["name"] in YOURS
    for one in told["codes"]:
        yield ""
        yield from _code_lines(one, told["policy_from"], "do" if waits else "if the node waits for you later")


def _state_lines(state: dict[str, str] | None) -> Iterator[str]:
    if state:
        yield f"  now: {state['now']}"
        yield f"  you: {state['do']}"


def _seen_line(one: dict[str, Any]) -> str:
    who = [f"GPU {one['gpu']}" if one["gpu"] is not None else "", one["pci"], one["uuid"]]
    who += [f"serial {one['serial']}" if one["serial"] else "", f"job {one['job']}" if one["job"] else ""]
    done = (one.get("decision") or {}).get("action") or ("mended" if one["cleared"] else "no decision")
    judged = f"{one['severity']} {one['rung']}".strip()
    return f"{', '.join(part for part in who if part) or 'the node'}: {judged}, {one['mode']}, {done}: {one['message']}"


def _code_lines(one: dict[str, Any], policy_from: str, head: str) -> Iterator[str]:
    yield f"{one['finding']}: {one['means']}"
    if one["nvidia"]:
        yield f"  NVIDIA: {one['nvidia']} (class {one['class']})"
    for row in one["policy"]:
        yield f"  policy: {row['words']}: {row['why']}"
    if one["policy"]:
        yield f"  here: {one['mode']['mode']} ({one['mode']['by']}): {MODES[one['mode']['mode']]}. From {policy_from}."
    yield from _steps(one["do"], head)
    yield f"  back: {one['gives_back']}"


def _steps(do: Sequence[str], head: str = "do") -> Iterator[str]:
    yield f"  {head}:"
    for number, step in enumerate(do, 1):
        yield f"  {number:>3}. {step}"


def row_words(row: Row, one: Code) -> str:
    """A row of the policy in words: `fault, rung L3, seen 3 times in 7 d on one GPU by different users`."""
    text: str = row.severity
    if text == "fault":
        text += f", rung {row.rung}" if row.rung else ", no rung"
        text += f" (then {row.passed} even if it passes)" if row.passed else ""
        text += f" (failed: {row.failed})" if row.failed else ""
    for key, value in row.when.items():
        if key in one.details:  # true of every finding of this code
            continue
        wanted = " or ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        text += f", where {key} is {wanted.lower() if isinstance(value, bool) else wanted}"
    if row.times > 1:
        unit, size = ("d", 86400) if row.window % 86400 == 0 else ("min", 60)
        text += f", seen {row.times} times in {row.window / size:g} {unit} on one GPU"
        text += f" by different {row.distinct}s" if row.distinct else ""
    return text
