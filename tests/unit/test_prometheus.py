"""A real Prometheus reads real output: each panel shows something, and each alert is tested and explained."""

import functools
import http.server
import json
import re
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.metrics import cluster, node
from slurm_gpuhealth.metrics.table import CLUSTER, NODE
from slurm_gpuhealth.node.journal import open_journal
from slurm_gpuhealth.slurm import control
from slurm_gpuhealth.store.open import open_store
from tests.daemons import Daemons, free_ports, until
from tests.unit import metered

ROOT = Path(__file__).parents[2]
RULES = ROOT / "etc/prometheus/gpuhealth.rules.yml"
TESTS = ROOT / "tests/prometheus/gpuhealth.rules.test.yml"
DASHBOARDS = sorted((ROOT / "etc/grafana").glob("*.json"))
CONFIG = """
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: ["{rules}"]
scrape_configs:
- job_name: node
  static_configs:
  - targets: [n1, n2, controller]
  relabel_configs:
  - {{source_labels: [__address__], target_label: __metrics_path__, replacement: /$1.prom}}
  - {{source_labels: [__address__], target_label: instance}}
  - {{target_label: __address__, replacement: "127.0.0.1:{port}"}}
"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    extensions_map = {".prom": "text/plain"}  # noqa: RUF012 - SimpleHTTPRequestHandler's

    def log_message(self, *_):
        pass


@pytest.fixture
def served(settings, tmp_path, monkeypatch):
    """A port that serves the files of a broken node, a healthy node and the controller."""
    now, folder = time.time(), tmp_path / "prom"
    folder.mkdir()
    for name, fill in (("n1", metered.broken), ("n2", lambda journal, _, now: metered.healthy(journal, now))):
        mine = metered.with_textfile(settings, folder / f"{name}.prom")
        mine = replace(mine, paths=replace(mine.paths, state=str(tmp_path / name), run=str(tmp_path / f"{name}-run")))
        journal = open_journal(mine.paths)
        fill(journal, mine, now)
        node.publish(mine, journal, now, 0.2)
    monkeypatch.setattr(control, "holds", lambda *_: metered.holds())
    store = metered.stored(settings, tmp_path)
    store = replace(store, metrics=replace(store.metrics, cluster=str(folder / "controller.prom")))
    engine = open_store(store)
    metered.filled(store, engine, now)
    cluster.publish(store, engine, now, 1.0, 0)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@pytest.fixture
def ask(served, tmp_path):
    """Asks a Prometheus that has read them twice: `ask(path, name=value)`."""
    for name in ("run", "log"):
        (tmp_path / name).mkdir()
    (tmp_path / "prometheus.yml").write_text(CONFIG.format(rules=RULES, port=served))
    (port,) = free_ports(1)
    daemons = Daemons(tmp_path, {})

    def ask(path, **words):
        url = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(words)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return json.load(answer)["data"]

    def ready():
        try:
            found = ask("query", query="count_over_time(up[1h])")["result"]
        except OSError:
            assert daemons.alive("prometheus"), (tmp_path / "log/prometheus.out").read_text()
            return False
        return len(found) == 3 and all(int(one["value"][1]) >= 2 for one in found)

    daemons.start(
        "prometheus",
        "prometheus",
        f"--config.file={tmp_path}/prometheus.yml",
        f"--storage.tsdb.path={tmp_path}/tsdb",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    )
    try:
        until(ready, "two scrapes of each target")
        yield ask
    finally:
        daemons.stop("prometheus")


def queries(dashboard):
    for panel in json.loads(dashboard.read_text())["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"].replace("$node", "n1").replace("$size", "16")


def test_each_panel_shows_something_and_each_metric_arrives(ask):
    assert {one["value"][1] for one in ask("query", query="up")["result"]} == {"1"}
    asked = [(board.stem, *one) for board in DASHBOARDS for one in queries(board)]
    empty = [one for one in asked if not ask("query", query=one[2])["result"]]
    assert (empty, len(DASHBOARDS)) == ([], 3)
    names = set(ask("label/__name__/values"))
    assert (NODE.keys() | CLUSTER.keys()) - names == set()
    states = ask("query", query=next(query for *_, title, query in asked if title == "Nodes"))["result"]
    assert {one["metric"]["instance"]: one["value"][1] for one in states} == {"n1": "2", "n2": "0"}
    # And the rules, as Prometheus reads them: each has a text, and a chapter in the documentation.
    chapters = re.findall(r"^### (\w+)$", (ROOT / "docs/metrics.md").read_text(), re.M)
    rules = [rule for group in ask("rules")["groups"] for rule in group["rules"]]
    assert {rule["name"] for rule in rules} == set(chapters)
    for rule in rules:
        assert rule["health"] == "ok", rule
        assert all(rule["annotations"][word] for word in ("summary", "description")), rule
        assert rule["annotations"]["runbook_url"] == f"docs/metrics.md#{rule['name'].lower()}"
        assert rule["labels"]["severity"] in ("page", "ticket")


def test_each_alert_fires_when_it_should_and_not_before():
    done = subprocess.run(["promtool", "test", "rules", TESTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    alerts = re.findall(r"alert: (\w+)", RULES.read_text())
    tests = re.findall(r'ALERTS{alertname="(\w+)".*\n.*\n    exp_samples: (\S+)', TESTS.read_text())
    fires, rests = ({name for name, seen in tests if (seen == "[]") is quiet} for quiet in (False, True))
    assert set(alerts) == fires == rests


def test_rules_and_dashboards_know_no_other_metric():
    texts = [RULES.read_text(), TESTS.read_text(), *(board.read_text() for board in DASHBOARDS)]
    named = {name for text in texts for name in re.findall(r"\bgpuhealth_\w+", text)}
    assert named <= NODE.keys() | CLUSTER.keys()
