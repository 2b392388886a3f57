"""The configuration as frozen values: one class for each table of gpuhealth.toml, with its defaults.

A field's annotation is its kind: `config/load.py` converts the TOML value by it ("10min" → 600.0 for `Seconds`).
etc/gpuhealth.toml explains each key to admins, and docs/configuration.md is made from it; a test keeps it complete.
"""

from __future__ import annotations

import os

from slurm_gpuhealth.frozen import frozen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Literal

    from slurm_gpuhealth.findings import Scalar

    Seconds = float
    """In TOML: a number with a unit, "30s", "10min", "6h", "7d"."""
    Share = float
    """In TOML: "5%"; here 0.05."""
    Celsius = int
    Number = float
    """In TOML: a number, 0 or more."""
    File = str
    """Absolute path; `{node}` stands for the node's name."""
    Address = str
    """`HOST`, `HOST:PORT` or `unix:///PATH`; `{node}` as in `File`."""
    Texts = tuple[str, ...]
    """In TOML: one text, or a list."""
    Argv = tuple[str, ...]
    """A program by its absolute path, and its arguments."""
    Mode = Literal["enforce", "shadow"]
    SourceMode = Literal["enforce", "shadow", "off"]

POLICY_PATH = os.path.join(os.path.dirname(os.path.dirname(__file__)), "policy", "policy.toml")
"""The built-in policy."""
TOOLS_PATH = os.path.join(os.path.dirname(os.path.dirname(__file__)), "diagnose", "tools.toml")
"""The built-in tests of other tools, and their limits."""


@frozen
class Paths:
    state: File = "/var/lib/gpuhealth"
    run: File = "/run/gpuhealth"
    """Locks, and the journal while `state` can't be written; on a tmpfs."""
    kernel_log: File = "/dev/kmsg"
    proc: File = "/proc"
    sys: File = "/sys"
    dev: File = "/dev"


@frozen
class Slurm:
    scontrol: File = "/usr/bin/scontrol"
    sinfo: File = "/usr/bin/sinfo"
    squeue: File = "/usr/bin/squeue"
    slurmd: File = "/usr/sbin/slurmd"
    conf: File = "/etc/slurm/slurm.conf"
    timeout: Seconds = 10.0
    request_poll: Seconds = 300.0


@frozen
class Sources:
    kernel: SourceMode = "enforce"
    nvml: SourceMode = "enforce"
    inventory: SourceMode = "enforce"
    dcgm: SourceMode = "enforce"
    dcgm_health: SourceMode = "shadow"
    infiniband: SourceMode = "shadow"
    host: SourceMode = "shadow"
    leftovers: SourceMode = "shadow"
    tools: SourceMode = "shadow"


@frozen
class Prolog:
    timeout: Seconds = 30.0
    reuse_pass: Seconds = 600.0
    move_job: Literal["gentle", "exit"] = "gentle"
    on_untestable: Literal["start", "drain"] = "start"


@frozen
class Epilog:
    timeout: Seconds = 300.0
    reuse_pass: Seconds = 21600.0
    max_share: Share = 0.05
    max_nodes: int = 8
    ask_slurm: bool = False
    expedite: bool = True
    kill_leftovers: bool = False
    restore_settings: bool = False


@frozen
class Command:
    """One `[[check.command]]`: a site's own check."""

    name: str
    argv: Argv
    timeout: Seconds = 10.0
    every: Seconds = 60.0
    mode: SourceMode = "shadow"


@frozen
class Check:
    interval: Seconds = 60.0
    timeout: Seconds = 45.0
    command: tuple[Command, ...] = ()


@frozen
class Gpus:
    count: int = 0
    driver: Texts = ()
    vbios: tuple[str, ...] = ()
    fabric_manager: Literal["auto", "required", "off"] = "auto"


@frozen
class Nvml:
    library: File = ""
    timeout: Seconds = 15.0
    max_temperature: Celsius = 88


@frozen
class Hang:
    after: Seconds = 600.0
    power: Share = 0.5
    start: Seconds = 7200.0


@frozen
class Slow:
    after: Seconds = 1800.0
    clock: Share = 0.9


@frozen
class DcgmModel:
    """One `[[dcgm.model]]`: DCGM's settings for one GPU model, instead of those in [dcgm]."""

    gpu: str
    """As in `Model`."""
    config: File = ""
    parameters: str = ""
    skips: tuple[str, ...] = ()


@frozen
class Dcgm:
    backend: Literal["dcgmi", "pydcgm", "off"] = "dcgmi"
    dcgmi: File = "/usr/bin/dcgmi"
    host: Address = "127.0.0.1:5555"
    pydcgm: File = "/usr/share/datacenter-gpu-manager-4/bindings/python3"
    health_every: Seconds = 300.0
    config: File = ""
    """For dcgmi's -c."""
    parameters: str = ""
    """For dcgmi's -p."""
    skips: tuple[str, ...] = ()
    """Tests that these GPUs can't run."""
    model: tuple[DcgmModel, ...] = ()


@frozen
class Host:
    full: Share = 0.95
    mounts: tuple[File, ...] = ()
    units: tuple[str, ...] = ()
    d_state_tasks: int = 20


@frozen
class Infiniband:
    ports: tuple[str, ...] = ()
    """Ports that must be active, `mlx5_0/1`; empty: every port that was once active."""
    error_growth: int = 100


@frozen
class Drain:
    budget: Share = 0.05
    floor: int = 2
    per_hour: Share = 0.05
    lost: Share = 0.05
    confirmed: Share = 0.2
    nodes: str = ""
    ack: Seconds = 604800.0


@frozen
class Model:
    """One `[[ladder.model]]`: limits of one GPU model."""

    gpu: str
    """The model as NVML names it, `*H100*`, with `*` and `?` as in file names."""
    l3: Seconds
    l4: Seconds


@frozen
class Ladder:
    tests: bool = True
    give_back: bool = True
    window: Seconds = 604800.0
    retry: Seconds = 3600.0
    l2: Seconds = 900.0
    l3: Seconds = 2100.0
    l4: Seconds = 7200.0
    model: tuple[Model, ...] = ()
    bug_report: File = "/usr/bin/nvidia-bug-report.sh"


@frozen
class Reset:
    enabled: bool = False
    together: tuple[str, ...] = ("*P100*", "*V100*")
    """Models whose NVLink peers are reset together."""
    nvidia_smi: File = "/usr/bin/nvidia-smi"
    systemctl: File = "/usr/bin/systemctl"
    services: tuple[str, ...] = ("nvidia-persistenced", "nvidia-dcgm", "nvidia-dcgm-exporter")
    timeout: Seconds = 300.0


@frozen
class Reboot:
    enabled: bool = False
    most: int = 2


@frozen
class Repair:
    command: Argv = ()
    timeout: Seconds = 3600.0


@frozen
class Sweep:
    enabled: bool = False
    interval: Seconds = 604800.0
    level: int = 2
    budget: Share = 0.02


@frozen
class Journal:
    keep: Seconds = 2592000.0


@frozen
class JobLog:
    enabled: bool = False
    timeout: Seconds = 20.0
    head_mib: int = 1
    tail_mib: int = 4
    flight: str = ""
    """The prefix of a flight recorder's dumps, with Slurm's patterns; empty: they are not read."""


@frozen
class Store:
    url: str = ""
    """`file:///FOLDER` (a shared directory) or `postgresql://…`; empty: nothing is shipped."""
    database: File = "/var/lib/gpuhealth/cluster.db"
    """With `file:///FOLDER`: the controller's SQLite file, into which it reads the nodes' files."""
    password_file: File = ""
    timeout: Seconds = 10.0
    heartbeat: Seconds = 1800.0
    outbox_mib: int = 64
    keep: Seconds = 31536000.0


@frozen
class Accounting:
    backend: Literal["sacct", "pyslurm"] = "sacct"
    sacct: File = "/usr/bin/sacct"
    sacctmgr: File = "/usr/bin/sacctmgr"
    timeout: Seconds = 120.0
    first: Seconds = 2419200.0
    """How far back the first run looks."""


@frozen
class Suspicion:
    """The constants of the correlator's method; etc/gpuhealth.toml says where each comes from."""

    hazards: tuple[Number, ...] = (0.003, 0.02, 0.06, 0.2, 0.6, 0.6, 0.6, 0.6)
    """Failures per day of allocated time, by level; the first is a good node's."""
    starts: tuple[Number, ...] = (0.0, 0.0, 0.0, 0.0, 0.0, 0.2, 0.5, 0.5)
    """Share of jobs that a node of that level kills. Failures on the last level look like the program's own."""
    priors: tuple[Number, ...] = (0.985, 0.002, 0.004, 0.005, 0.003, 0.0003, 0.0003, 0.0004)
    half_life: Seconds = 5184000.0
    horizon: Seconds = 2419200.0
    """How far back attempts are judged again."""
    before: Seconds = 60.0
    after: Seconds = 120.0
    incident: Seconds = 600.0
    storm: Seconds = 3600.0
    same_user: Seconds = 259200.0
    spared: Seconds = 600.0
    log_hardware: tuple[Number, ...] = (0.25, 0.004, 0.01, 0.01, 0.004)
    log_application: tuple[Number, ...] = (0.02, 0.75, 0.01, 0.03, 0.02)
    log_communication: tuple[Number, ...] = (0.45, 0.13, 0.88, 0.3, 0.3)
    log_infrastructure: tuple[Number, ...] = (0.01, 0.01, 0.05, 0.5, 0.02)
    log_user: tuple[Number, ...] = (0.01, 0.01, 0.01, 0.02, 0.6)
    log_memory: tuple[Number, ...] = (0.01, 0.04, 0.005, 0.08, 0.02)
    log_crash: tuple[Number, ...] = (0.1, 0.05, 0.01, 0.02, 0.1)
    log_numeric: tuple[Number, ...] = (0.01, 0.04, 0.002, 0.002, 0.002)
    log_thermal: tuple[Number, ...] = (0.02, 0.001, 0.001, 0.001, 0.001)
    log_nothing: tuple[Number, ...] = (0.3, 0.12, 0.1, 0.15, 0.3)
    log_runs: Number = 200.0
    """The application column above weighs as much as this many failures of this cluster."""
    runs: Number = 3.0
    failing: Number = 0.12
    least: Number = 0.02
    fabric: Number = 0.001
    infrastructure: Number = 0.002
    together: Number = 0.3
    leaf_window: Seconds = 900.0
    leaf_alarm: Number = 0.01
    seen_by_xid: Number = 0.5
    benign: Number = 0.002
    named: Number = 0.8
    most: Number = 200.0
    recall: tuple[Number, ...] = (0.1, 0.3, 0.5, 0.7)
    specificity: Number = 0.99
    repaired: Number = 0.1
    fresh: Number = 0.2
    l2: Number = 0.1
    l3: Number = 0.3
    l4: Number = 0.6
    rma: Number = 0.9
    clusters: int = 3
    false_discoveries: Share = 0.05


@frozen
class Metrics:
    textfile: File = ""
    """On a node; empty: none is written."""
    cluster: File = ""
    """On the controller."""


@frozen
class Correlate:
    rungs: Literal["enforce", "shadow", "off"] = "shadow"
    comment: bool = False
    requeue: bool = False
    requeue_most: int = 2
    exclude: File = ""
    hung: Literal["off", "notify", "requeue"] = "off"
    settle: Seconds = 300.0
    """An attempt is judged this long after its end: by then the nodes' findings have arrived."""


@frozen
class Place:
    """One `[[place]]`: what nodes share besides a leaf switch, and what may fail for all of them."""

    name: str
    """For people: "rack r7", "pdu 3"."""
    nodes: str
    """Hostlist."""


@frozen
class Test:
    """One `[[test]]`: another tool's test, which the ladder runs on an idle node after DCGM's level."""

    name: str
    command: Argv = ()
    """`{gpus}`: how many are tested; `{device}`, `{port}`: of an InfiniBand or RoCE port that is up, once for each."""
    environment: tuple[str, ...] = ()
    """`NAME=value`."""
    reads: Literal["pattern", "nccl", "nvbandwidth", "perftest", "gpu-burn"] = "pattern"
    """Who wrote the output."""
    pattern: str = ""
    """With `reads = "pattern"`: a regular expression with one group, the figure; the last match counts."""
    unit: str = ""
    at_least: Number = 0.0
    at_most: Number = 0.0
    """0: no limit."""
    rung: Literal["asked", "L1", "L2", "L3", "L4"] = "L4"
    """`asked`: only if somebody asks for it."""
    fails: bool = False
    """Whether the rung fails if this test fails or a figure is beyond its limit."""
    timeout: Seconds = 600.0
    gpu: str = "*"
    """As in `Model`."""
    gpus: int = 1
    """It needs at least so many."""
    server: bool = False
    """Start it as server on one port, and with the server's address as client on the next port."""


@frozen
class Limit:
    """One `[[limit]]`: what a figure of a GPU model must be."""

    figure: str
    """`nvbandwidth.*`, with `*` and `?` as in file names."""
    gpu: str
    """As in `Model`."""
    gpus: int = 0
    """Only on nodes with so many GPUs; 0: any."""
    at_least: Number = 0.0
    at_most: Number = 0.0
    unit: str = ""
    source: str = ""


@frozen
class Row:
    """One row of the policy table: which finding, how bad, which rung."""

    finding: str
    """`source:code`, with `*` and `?` as in file names."""
    severity: Literal["info", "warning", "fault"]
    rung: str = ""
    """The rung that a fault queues; empty: none."""
    when: Mapping[str, Scalar | tuple[Scalar, ...]] = {}
    """Details that the finding must have: key → value, or a list of allowed values."""
    times: int = 1
    window: Seconds = 86400.0
    distinct: str = ""
    """What must differ between the repetitions: `job` or `user`; empty: nothing."""
    passed: str = ""
    """A higher rung that follows even if this rung passes; empty: the node is given back."""
    failed: str = ""
    """The rung that follows a failure; empty: the rung's own (ladder/rungs.py)."""
    why: str = ""


@frozen
class Settings:
    mode: Mode = "shadow"
    paths: Paths = Paths()
    slurm: Slurm = Slurm()
    sources: Sources = Sources()
    prolog: Prolog = Prolog()
    epilog: Epilog = Epilog()
    check: Check = Check()
    gpus: Gpus = Gpus()
    nvml: Nvml = Nvml()
    hang: Hang = Hang()
    slow: Slow = Slow()
    dcgm: Dcgm = Dcgm()
    host: Host = Host()
    infiniband: Infiniband = Infiniband()
    drain: Drain = Drain()
    ladder: Ladder = Ladder()
    reset: Reset = Reset()
    reboot: Reboot = Reboot()
    repair: Repair = Repair()
    sweep: Sweep = Sweep()
    journal: Journal = Journal()
    joblog: JobLog = JobLog()
    store: Store = Store()
    accounting: Accounting = Accounting()
    metrics: Metrics = Metrics()
    correlate: Correlate = Correlate()
    suspicion: Suspicion = Suspicion()
    place: tuple[Place, ...] = ()
    test: tuple[Test, ...] = ()
    """The site's, then the built-in ones; the first of a name that meets the node's GPU model counts."""
    limit: tuple[Limit, ...] = ()
    policy: tuple[Row, ...] = ()
    """The site's rows first, then the built-in ones; the first that matches decides."""


ROWS: dict[str, type] = {  # a list of tables, by the field's annotation
    "tuple[Command, ...]": Command,
    "tuple[DcgmModel, ...]": DcgmModel,
    "tuple[Limit, ...]": Limit,
    "tuple[Model, ...]": Model,
    "tuple[Place, ...]": Place,
    "tuple[Row, ...]": Row,
    "tuple[Test, ...]": Test,
}


@frozen
class Problem:
    """One thing that is wrong with a configuration, and where."""

    file: str
    line: int
    """0 if it is about the whole file."""
    key: str
    message: str
    """What was expected, what is there, what to do."""

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: {self.key}: {self.message}" if self.key else f"{place}: {self.message}"


class ConfigError(Exception):
    """The configuration can't be used. `problems` holds every one that was found, in the file's order."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems
