"""InfiniBand and RoCE ports: state, speed and error counters in sysfs.

Source: Linux Documentation/ABI/stable/sysfs-class-infiniband.
"""

from __future__ import annotations

import os

from slurm_gpuhealth.findings import Finding

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from slurm_gpuhealth.config.settings import Settings

READ_TIMEOUT = 5.0
FORGET = 7 * 86400.0
"""A port that has not been active for so many seconds counts as out of use."""
REFRESH = 3600.0
"""Seconds between two notes that a port is active: an unchanged baseline is not written."""
ONCE = ("link_downed", "link_error_recovery")  # counters that are reported if they grow by one
MANY = (  # counters that are reported if they grow by settings.infiniband.error_growth
    "symbol_error",
    "port_rcv_errors",
    "port_rcv_remote_physical_errors",
    "port_xmit_discards",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
    "VL15_dropped",
)


def collect(settings: Settings, baseline: dict[str, Any], now: float) -> tuple[list[Finding], dict[str, Any]]:
    """Findings about the ports, and the baseline for the next call ({} at first). A node without ports has none.

    A port should be active if the configuration names it; if it names none, if the port was active in the last 7 days.
    Counters are judged by their growth since `baseline`: old errors don't count. Raises nothing.
    """
    root = f"{settings.paths.sys}/class/infiniband"
    known: dict[str, dict[str, Any]] = baseline.get("ports", {})
    wanted = settings.infiniband.ports or tuple(port for port in known if now - known[port]["active"] < FORGET)
    if not wanted and not os.path.isdir(root):
        return [], {}
    from slurm_gpuhealth import child

    stuck = baseline.get("stuck")
    if stuck and child.alive(child.Child(*stuck)):
        return [_unreadable("an earlier reading hangs in the adapter's driver, so none is started", now)], baseline
    # In a child: a read asks the adapter's firmware, and waits a minute if that has died.
    probed = child.probe(lambda: read_ports(root), timeout=READ_TIMEOUT)
    if probed.error is not None:
        left = {"stuck": [probed.stuck.pid, probed.stuck.start]} if probed.stuck else {}
        return [_unreadable(probed.error, now)], {"ports": known, **left}
    ports: dict[str, dict[str, Any]] = probed.value
    found = [
        Finding(now, "ib", code, f"{what}: {', '.join(names)}; {remedy}", None, "warning", standing)
        for code, what, names, remedy, standing in _judge(settings, ports, wanted, known)
        if names
    ]
    kept = {port: one for port, one in known.items() if port in wanted}
    return found, {"ports": {**kept, **_remember(ports, known, now)}}


def _unreadable(why: str, now: float) -> Finding:
    message = f"InfiniBand ports could not be read: {why}; see dmesg for the adapter's driver"
    return Finding(now, "ib", "unreadable", message, None, "info", True)


def read_ports(root: str) -> dict[str, dict[str, Any]]:
    """`mlx5_0/1` → state, phys, rate (Gb/s) and counters, as far as they can be read. Empty without InfiniBand."""
    return {
        f"{device}/{port}": {
            "state": _word(f"{root}/{device}/ports/{port}/state"),
            "phys": _word(f"{root}/{device}/ports/{port}/phys_state"),
            "rate": _number(f"{root}/{device}/ports/{port}/rate"),
            "counters": {
                name: value
                for name in ONCE + MANY
                if (value := _number(f"{root}/{device}/ports/{port}/counters/{name}")) is not None
            },
        }
        for device in _list(root)
        for port in _list(f"{root}/{device}/ports")
    }


def _judge(
    settings: Settings, ports: dict[str, Any], wanted: tuple[str, ...], known: dict[str, Any]
) -> Iterator[tuple[str, str, list[str], str, bool]]:
    """(code, what, which ports, what to do, standing) for each condition; no ports if it does not hold."""
    missing = [port for port in wanted if port not in ports]
    yield (
        "port-missing",
        "InfiniBand port missing",
        missing,
        "is the adapter there (lspci), is its driver loaded?",
        True,
    )
    down = [
        f"{port} ({ports[port]['state'] or 'unknown'}, {ports[port]['phys'] or 'unknown'})"
        for port in wanted
        if port in ports and ports[port]["state"] != "ACTIVE"
    ]
    yield "port-down", "InfiniBand port not active", down, "check cable, switch port and subnet manager", True
    slow = [
        f"{port} ({one['rate']:g} instead of {known[port]['rate']:g} Gb/s)"
        for port, one in ports.items()
        if one["state"] == "ACTIVE" and one["rate"] and one["rate"] < known.get(port, {}).get("rate", 0)
    ]
    yield "rate", "InfiniBand port slower than it was", slow, "reseat or replace the cable", True
    for name in ONCE + MANY:
        limit = 1 if name in ONCE else settings.infiniband.error_growth
        grown = [
            f"{port} (+{more})"
            for port, one in ports.items()
            if (more := _growth(one["counters"].get(name), known.get(port, {}).get("counters", {}).get(name))) >= limit
        ]
        yield (
            name,
            f"InfiniBand {name} grew",
            grown,
            "a bad cable or transceiver, or a switch that was restarted",
            False,
        )


def _growth(value: float | None, before: float | None) -> int:
    """Growth since the last look. A smaller counter was reset; a counter seen for the first time is history."""
    if value is None or before is None:
        return 0
    return int(value - before if value >= before else value)


def _remember(ports: dict[str, Any], known: dict[str, Any], now: float) -> dict[str, Any]:
    """When each port was last active, its best rate, its counters now. Leaves out ports that were never active."""
    new = {}
    for port, one in ports.items():
        before = known.get(port, {"active": 0.0, "rate": 0.0})
        up = one["state"] == "ACTIVE"
        active = before["active"] if not up or 0 <= now - before["active"] < REFRESH else now
        if now - active < FORGET:
            rate = max(before["rate"], one["rate"] or 0.0) if up else before["rate"]
            new[port] = {"active": active, "rate": rate, "counters": one["counters"]}
    return new


def _list(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _word(path: str) -> str | None:
    """`ACTIVE` of `4: ACTIVE`."""
    text = _text(path)
    return text.rpartition(":")[2].strip() if text else None


def _number(path: str) -> float | None:
    """The number at the beginning of a file; None if there is none: `N/A (no PMA)`, a counter that a model lacks."""
    text = _text(path)
    try:
        return float(text.split()[0]) if text else None
    except ValueError:
        return None


def _text(path: str) -> str | None:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read(256).strip()
    except OSError:
        return None
