"""The cluster record's tables, the same on SQLite and PostgreSQL. JSON and lists are text; times are UTC seconds.

The nodes' records (`SHIPPED`) have the key (node, journal, id, sub): a row that comes again, or after a newer state of
itself, changes nothing (`seq` decides). `taken` numbers the rows in order of arrival: the correlator's cursor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import BigInteger, Column, Float, Index, Integer, MetaData, Table, Text, text

if TYPE_CHECKING:
    from typing import Any

VERSION = 4
BEGIN_NEAR = 60.0
END_NEAR = 3600.0
"""A node's prolog and epilog write their record within so many seconds around a run: clocks differ, epilogs last."""

ABOUT = ("gpuhealth", "config", "mode", "driver", "dcgm")
"""What nodes may differ in. `config`: how the SHA-256 of the configuration begins. "": not known, or an older node."""

IN_SQL = 500
"""The most nodes that are named in a query; SQLite takes 999 values."""
OPEN = "cleared IS NULL AND severity <> 'info'"
"""The findings that may still be true."""

metadata = MetaData()
Big = BigInteger().with_variant(Integer, "sqlite")
"""64 bits on both databases; SQLite numbers rows by itself only in a column of type INTEGER."""


def _text(name: str, key: bool = False) -> Column[str]:
    return Column(name, Text, primary_key=key, nullable=False, server_default="")


def _shipped(name: str, *columns: Column[Any]) -> Table:
    """`columns` after the key. `sub`: the row's time in microseconds; for a job, its restart count. `clock`: how many
    seconds the node's clock was ahead when it first shipped the row."""
    return Table(
        name,
        metadata,
        Column("node", Text, primary_key=True),
        Column("journal", Text, primary_key=True),
        Column("id", Big, primary_key=True, autoincrement=False),
        Column("sub", Big, primary_key=True, autoincrement=False),
        Column("seq", Big, nullable=False),
        Column("taken", Big, nullable=False),
        Column("clock", Float),
        *columns,
    )


version = Table("schema_version", metadata, Column("version", Integer, primary_key=True))

# What the nodes ship.
node = Table(
    "node",
    metadata,
    Column("node", Text, primary_key=True),
    Column("journal", Text, primary_key=True),
    Column("position", Big, nullable=False, server_default="0"),  # the last seq taken in
    Column("clock_offset", Float),  # seconds ahead, the median of the last `clocks`
    Column("clocks", Text, nullable=False, server_default="[]"),
    Column("last_shipped", Float),  # by the controller's clock
    Column("dropped", Big, nullable=False, server_default="0"),  # records that its full outbox lost: how many,
    Column("dropped_from", Float),  # and from which time
    Column("dropped_to", Float),
    *(_text(name) for name in ABOUT),
)
gpu = Table(  # which GPUs a node has had, and from when to when
    "gpu",
    metadata,
    Column("node", Text, primary_key=True),
    Column("uuid", Text, primary_key=True),
    Column("gpu", Integer),
    Column("pci", Text),
    Column("serial", Text),
    Column("first", Float, nullable=False),
    Column("last", Float, nullable=False),
    Column("taken", Big, nullable=False),
    _text("replaces"),  # the UUID that was in its slot before
)
finding = _shipped(
    "finding",
    Column("time", Float, nullable=False),
    Column("seen", Float),
    _text("source"),
    _text("code"),
    _text("severity"),
    _text("rung"),
    _text("mode"),
    Column("uuid", Text),
    Column("pci", Text),
    Column("gpu", Integer),
    Column("serial", Text),
    _text("message"),
    Column("standing", Integer),
    Column("count", Big),
    _text("details"),
    Column("job", Big),
    Column("uid", Big),
    Column("cleared", Float),
    Column("acted", Big),
    Column("acked", Float),
)
run = _shipped(  # a job as its node's prolog and epilog saw it; `id` is the job
    "run",
    Column("uid", Big),
    _text("user"),
    Column("nodes", Big),
    _text("gpus"),
    Column("started", Float, nullable=False),
    Column("ended", Float),
    Column("exit_code", Big),
    Column("signal", Big),
    Column("derived", Big),
    Column("outcome", Text),
)
diagnostic = _shipped(
    "diagnostic",
    Column("time", Float, nullable=False),
    Column("level", Integer),
    Column("uuid", Text),
    _text("outcome"),
    Column("seconds", Float),
    _text("program"),
    _text("detail"),
)
decision = _shipped(
    "decision",
    Column("time", Float, nullable=False),
    _text("program"),
    _text("action"),
    _text("reason"),
    _text("result"),
    _text("was"),
    Column("job", Big),
)
step = _shipped(
    "step",
    Column("time", Float, nullable=False),
    Column("seconds", Float),
    _text("fact"),
    Column("gpu", Integer),
    Column("uuid", Text),
    _text("rung"),
    Column("attempt", Integer),
    _text("outcome"),
    _text("follows"),
    _text("test"),
    _text("code"),
    _text("message"),
    _text("bundle"),
)
joblog = _shipped(  # what the epilog read in a job's log (outcomes.Reading as JSON); `id` is the job
    "joblog", Column("time", Float, nullable=False), _text("reading")
)
figure = _shipped(  # what tests measured; `uuid` null: the node's own
    "figure",
    Column("time", Float, nullable=False),
    _text("tool"),
    _text("version"),
    Column("uuid", Text),
    Column("gpu", Integer),
    _text("model"),
    _text("name"),
    Column("value", Float),
    _text("unit"),
)
jobuse = _shipped(  # how a job used its node's GPUs (UUID → measure.use.summary, as JSON); `id` is the job
    "jobuse", Column("time", Float, nullable=False), _text("gpus")
)
SHIPPED = {
    "finding": finding,
    "run": run,
    "diagnostic": diagnostic,
    "decision": decision,
    "step": step,
    "log": joblog,
    "figure": figure,
    "use": jobuse,
}
"""Kind of a shipped record → its table."""

inbox = Table(  # PostgreSQL: the nodes insert here; their role needs no other right
    "inbox",
    metadata,
    Column("node", Text, primary_key=True),
    Column("journal", Text, primary_key=True),
    Column("seq", Big, primary_key=True, autoincrement=False),
    _text("line"),
)
file = Table(  # SQLite: how far each of the nodes' files has been read; `first` identifies it by its first line
    "file",
    metadata,
    Column("node", Text, primary_key=True),
    Column("first", Text, primary_key=True),
    _text("name"),
    Column("position", Big, nullable=False),
    Column("lines", Big, nullable=False),
)
skipped = Table(  # lines that are not valid records
    "skipped",
    metadata,
    Column("id", Big, primary_key=True),
    Column("time", Float, nullable=False),
    _text("node"),
    _text("file"),
    Column("line", Big),
    _text("why"),
    _text("text"),
)

# What accounting has.
attempt = Table(
    "attempt",
    metadata,
    _text("cluster", key=True),
    Column("job", Big, primary_key=True, autoincrement=False),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    _text("user"),
    _text("account"),
    _text("partition"),
    _text("qos"),
    _text("reservation"),
    Column("timelimit", Float),
    _text("constraint"),
    _text("name"),
    Column("array", Big),
    _text("state"),
    Column("exit_code", Integer),
    Column("signal", Integer),
    Column("start", Float),
    Column("end", Float),
    Column("nodes", Text, nullable=False, server_default="[]"),
    Column("gpus", Text),
    Column("failed_node", Text),
    Column("log", Text),
    Column("log_class", Text),
    Column("reading", Text),
    _text("submit"),
    Column("gpu_seconds", Float),
    Column("fed", Float),  # `fed`: when the correlator had it
)
attempt_node = Table(
    "attempt_node",
    metadata,
    _text("cluster", key=True),
    Column("job", Big, primary_key=True, autoincrement=False),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("node", Text, primary_key=True),
    Column("start", Float),
    Column("end", Float),
)
outside = Table(  # drains and downs that are not ours; `code`: drain, down, fail
    "outside",
    metadata,
    _text("cluster", key=True),
    Column("node", Text, primary_key=True),
    Column("time", Float, primary_key=True),
    _text("code", key=True),
    Column("until", Float),
    _text("reason"),
    _text("user"),
)

# What the correlator keeps.
verdict = Table(
    "verdict",
    metadata,
    _text("cluster", key=True),
    Column("job", Big, primary_key=True, autoincrement=False),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    _text("cause"),
    Column("confidence", Float),
    Column("node", Text),
    Column("gpu", Text),
    Column("scored", Float, nullable=False),
    _text("fingerprint"),
    _text("data"),
)
suspicion = Table(
    "suspicion",
    metadata,
    Column("node", Text, primary_key=True),
    Column("time", Float, primary_key=True),
    Column("p_lemon", Float),
    _text("data"),
)
state = Table("state", metadata, _text("kind", key=True), _text("key", key=True), _text("data"))
cursor = Table("cursor", metadata, _text("name", key=True), _text("value"))
certificate = Table(  # what gpuhealth accept found
    "certificate",
    metadata,
    Column("node", Text, primary_key=True),
    Column("time", Float, primary_key=True),
    _text("data"),
)
action = Table(
    "action",
    metadata,
    Column("id", Big, primary_key=True),
    Column("time", Float, nullable=False),
    _text("kind"),
    Column("job", Big),
    Column("attempt", Integer),
    Column("node", Text),
    _text("detail"),
    _text("result"),
)

for _name, _columns in {
    "finding_node": (finding.c.node, finding.c.time),
    "finding_taken": (finding.c.taken,),
    "gpu_taken": (gpu.c.taken,),
    "run_time": (run.c.started,),
    "run_open": (run.c.ended, run.c.node),
    "run_job": (run.c.id,),
    "run_taken": (run.c.taken,),
    "joblog_job": (joblog.c.id,),
    "joblog_taken": (joblog.c.taken,),
    "jobuse_job": (jobuse.c.id,),
    "diagnostic_node": (diagnostic.c.node, diagnostic.c.time),
    "diagnostic_taken": (diagnostic.c.taken,),
    "decision_time": (decision.c.time,),
    "step_node": (step.c.node, step.c.time),
    "step_taken": (step.c.taken,),
    "figure_name": (figure.c.name, figure.c.time),
    "figure_taken": (figure.c.taken,),
    "attempt_end": (attempt.c.end,),
    "attempt_fed": (attempt.c.fed, attempt.c.end),
    "attempt_job": (attempt.c.job,),
    "attempt_node_end": (attempt_node.c.node, attempt_node.c.end),
    "outside_time": (outside.c.time,),
    "verdict_cause": (verdict.c.cause, verdict.c.scored),
    "verdict_node": (verdict.c.node, verdict.c.scored),
    "action_job": (action.c.job,),
    "action_time": (action.c.time,),
}.items():
    Index(_name, *_columns)
Index("finding_open", finding.c.node, sqlite_where=text(OPEN), postgresql_where=text(OPEN))

MIGRATIONS: dict[int, tuple[str, ...]] = {
    2: ("CREATE INDEX run_taken ON run (taken)", "CREATE INDEX joblog_taken ON joblog (taken)"),
    3: (
        *(f"ALTER TABLE attempt ADD COLUMN {name} TEXT NOT NULL DEFAULT ''" for name in ("qos", "reservation")),
        "ALTER TABLE attempt ADD COLUMN timelimit FLOAT",
        "ALTER TABLE attempt ADD COLUMN \"constraint\" TEXT NOT NULL DEFAULT ''",
        "DELETE FROM cursor WHERE name = 'accounting'",  # read it again, which fills the new columns
    ),
    4: (
        *(f"ALTER TABLE node ADD COLUMN {name} TEXT NOT NULL DEFAULT ''" for name in ABOUT),
        f"CREATE INDEX finding_open ON finding (node) WHERE {OPEN}",
    ),
}
"""Version → the statements that upgrade the version before. New tables and their indexes are created without them."""
