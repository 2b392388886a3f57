"""What an event means: its class, NVIDIA's action bucket and its meaning, from the catalogue and the line's own words.

For these Xids more than the number counts: 45 (what came before it), 48 (always ends in a reset), 74 (register
words), 144-150 (intrInfo and errorStatus) and 154 (the words in its last parentheses; its numbers differ by driver).
"""

from __future__ import annotations

import re
from functools import cache, lru_cache

from slurm_gpuhealth.xid import catalog

TYPE_CHECKING = False
if TYPE_CHECKING:
    from slurm_gpuhealth.findings import Scalar
    from slurm_gpuhealth.xid.catalog import Row

    Details = dict[str, Scalar]
    Advice = tuple[str, str | None, str, Details]
    """class, action, meaning, details"""

NVLINK5 = re.compile(
    r"(?P<unit>\S.*?),? (?P<severity>Fatal|Non-?fatal)\b"
    r"(?:.*?\((?P<info>0x[0-9a-f]{1,8}),? (?P<status>0x[0-9a-f]{1,8})\b)?",
    re.I,
)
NVLINK4 = re.compile(r"\blink \d+ ?\((0x[0-9a-f]+(?:,? ?0x[0-9a-f]+)*)\)", re.I)
RECOVERY = re.compile(r"\(([^()]*(?:\([^()]*\))?[^()]*)\)\s*\.?\s*$")

# What the words of Xid 154 ask for. The first row that is found counts ("Drain and Reset" is a reset). Drivers have
# written "GPU Reset Required" and "PF FLR" (a function level reset), "Node Reboot Required" and "OS Reboot".
RECOVERIES = (
    ("reboot", "RESTART_BM"),
    ("reset", "RESET_GPU"),
    ("flr", "RESET_GPU"),
    ("drain", "DRAIN_P2P"),
    ("none", "IGNORE"),
)
# Groups of Xid 74's register bits, worst first, with what to look at later. None: the other end's error, or no error.
NVLINK4_BITS = {
    "possible_hw_reseat_then_diag": "CHECK_MECHANICALS",
    "ecc_parity_hw_if_gt2_same_link": "CONTACT_SUPPORT",
    "field_diag_if_repeated": "CONTACT_SUPPORT",
    "report_if_repeated": "CONTACT_SUPPORT",
    "not_in_production": "CONTACT_SUPPORT",
    "marginal_signal_integrity": "INVESTIGATE_LINK_SI",
    "unlisted": "CONTACT_SUPPORT",
    "sympathetic_fabric_reset": "IGNORE (sympathetic)",
    "sympathetic": None,
    "ecc_threshold_only_continue": None,
    "ignore": None,
}
BUILT_BY = {"HW": "hardware", "HW/SW": "hardware", "FW": "driver", "SW": "driver"}  # who is at fault, in nvlink5.json


@lru_cache(maxsize=512)
def on_xid(code: int, message: str, previous: int | None) -> Advice:
    """`message`: the line's text after number, pid and name."""
    row = catalog.xid(code)
    if row is None:
        return "driver", None, f"Xid {code} is not in this catalogue", {}
    details: Details = {"name": row["name"]}
    if row.get("investigate"):
        details["investigate"] = row["investigate"]
    cls, action, meaning = row["class"], row["action"], row["meaning"]
    if code == 45:
        action = "IGNORE" if previous is not None else action
    elif code == 48:
        action = "RESET_GPU"  # WORKFLOW_XID_48 ends there with and without 63/64; they only add a drain before it
    elif code == 74:
        action, more = _nvlink4(message, action)
        details.update(more)
    elif code == 154:
        words = RECOVERY.search(message)
        details["recovery"] = words[1] if words else None
        lower = words[1].lower() if words else ""
        action = next((bucket for word, bucket in RECOVERIES if word in lower), action)
    elif cls == "decode":
        cls, action, more = _nvlink5(code, message)
        details.update(more)
        meaning = f"{meaning.split(':')[0]} ({more['unit']})" if more.get("unit") else meaning
    return cls, action, meaning, details


@lru_cache(maxsize=512)
def on_sxid(code: int, fatal: bool | None) -> Advice:
    """The line's own "Fatal" or "Non-fatal" decides; without it (`fatal` is None) the severity in NVIDIA's guide."""
    row = catalog.sxid(code)
    if row is None:
        row = {"meaning": f"SXid {code} is not in this catalogue", "kind": "", "name": None}
    severity = row.get("severity", "")
    if fatal is None:
        fatal = severity in ("fatal", "always_fatal")
    details: Details = {"name": row["name"], "suspect": row.get("suspect")}
    if fatal:  # the guide: a fatal error ends with a reset of the switch and of every GPU on it
        return "hardware", "RESTART_BM", row["meaning"], details
    # ECC, parity, link and thermal events come from the hardware. A protocol error that is not fatal (a refused
    # access) follows from what the peer or the software asked for.
    return ("information" if row["kind"] in ("", "protocol/other") else "hardware"), "IGNORE", row["meaning"], details


def _nvlink4(message: str, action: str) -> tuple[str, Details]:
    """Xid 74. NVIDIA's table of bits says what to look at later. After a fatal error the link is down until a reset."""
    words = NVLINK4.search(message)
    regs = re.findall(r"0x[0-9a-f]+", words[1], re.I) if words else []
    groups = set()
    for name, table in catalog.load("xids")["xid74_bits"].items():
        number = int(name[3:]) - 1
        value = int(regs[number], 16) if number < len(regs) else 0
        for bit in range(value.bit_length()):
            if value >> bit & 1:
                groups.add(next((group for group, bits in table.items() if bit in bits), "unlisted"))
    worst = next((group for group in NVLINK4_BITS if group in groups), None)
    details: Details = {"regs": " ".join(regs)} if regs else {}
    if worst is None:
        return ("RESET_GPU" if "fatal" in message and "non-fatal" not in message else action), details
    details["bits"] = worst
    if NVLINK4_BITS[worst] is None:
        return "IGNORE", details
    details["investigate"] = NVLINK4_BITS[worst]
    return "RESET_GPU", details


def _nvlink5(code: int, message: str) -> tuple[str, str, Details]:
    """Xid 144-150: the rule that matches the unit bits and errorStatus; without those words, what all rules share."""
    line = NVLINK5.match(message)
    if line is None:
        return "hardware", "WORKFLOW_NVLINK5_ERR", {}
    unit, fatal = line["unit"], line["severity"].lower() == "fatal"
    rules = [rule for rule in catalog.load("nvlink5")["rules"] if rule["xid"] == code]
    known = line["info"] is not None
    if known:
        info, status = int(line["info"], 16), int(line["status"], 16)
        rules = [rule for rule in rules if _matches(rule, info, status)]
    rules = [rule for rule in rules if unit in (rule["unit"], *rule["unit"].split("/"))] or (rules if known else [])
    rules = [rule for rule in rules if ("Non" not in rule["severity"]) == fatal] or rules
    details: Details = {"unit": unit}
    if known and not rules:  # from NVIDIA's how-to: a Nonfatal line that no table describes is no fault of the node
        return ("hardware" if fatal else "driver"), "CONTACT_SUPPORT", details
    if not rules or len({rule["action"] for rule in rules}) > 1:
        return "hardware", "WORKFLOW_NVLINK5_ERR", details
    rule = rules[0]
    details.update(unit=rule["unit"] if known else unit, investigate=rule["investigate"])
    return BUILT_BY.get(rule["by"], "information"), rule["action"], details


def _matches(rule: Row, info: int, status: int) -> bool:
    wanted = rule["status"]
    if wanted is not None and status not in [int(one, 16) for one in wanted.split("/")]:
        return False
    # Drivers before and from R575 lay intrInfo out differently; only one of the two patterns fits a line.
    return any(_bits(pattern)[0] & info == _bits(pattern)[1] for pattern in rule["patterns"])


@cache
def _bits(pattern: str) -> tuple[int, int]:
    """Mask and value of `------000001---`, bit 31 first."""
    return int(re.sub("[01]", "1", pattern).replace("-", "0"), 2), int(pattern.replace("-", "0"), 2)
