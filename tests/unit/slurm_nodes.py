"""A stand-in for Slurm: records of nodes, changed by the calls of `control`."""

from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.ladder import ask, follow
from slurm_gpuhealth.slurm import control
from slurm_gpuhealth.slurm.node import Hold, NodeRecord
from slurm_gpuhealth.slurm.reason import Reason, parse, write

NOW = 1_795_220_000.0
FAULT = Reason("Xid79", 3, "L3", "queued", since="11-20T12:03Z")
L3 = ask.Request("L3", by="alice")


class Slurm:
    """Records of nodes, and the orders given. `then`: events for the next pauses, one at each."""

    def __init__(self, monkeypatch):
        self.nodes, self.orders, self.then = {}, [], []
        for name in (
            "show_node",
            "show_nodes",
            "drain",
            "set_reason",
            "undrain",
            "set_remarks",
            "set_text",
            "holds",
            "counted",
            "jobs",
            "known",
        ):
            monkeypatch.setattr(control, name, getattr(self, name))
        monkeypatch.setattr(follow.time, "sleep", lambda _: self.then.pop(0)() if self.then else None)

    def add(self, name, base="IDLE", flags="", reason="", **more):
        text = write(reason) if isinstance(reason, Reason) else reason
        self.nodes[name] = NodeRecord(
            name, base, frozenset(flags.split()), text, "root", NOW, **{"gres": "gpu:h100:8", **more}
        )

    def change(self, name, order="", **fields):
        self.nodes[name] = replace(self.nodes[name], **fields)
        if order:
            self.orders.append(order)

    def show_node(self, slurm, name):
        if name not in self.nodes:
            raise control.NoSuchNode("show", 1, f"Node {name} not found")
        return self.nodes[name]

    def show_nodes(self, slurm, names=""):
        return [one for name, one in self.nodes.items() if not names or name in names.split(",")]

    def drain(self, slurm, name, reason):
        self.change(name, "drain", flags=self.nodes[name].flags | {"DRAIN"}, reason=write(reason))

    def set_reason(self, slurm, name, reason):
        self.change(name, "reason", reason=write(reason))

    def set_text(self, slurm, name, text):
        self.change(name, "text", reason=text)

    def undrain(self, slurm, name):
        self.change(name, "undrain", flags=frozenset(), reason="")

    def set_remarks(self, slurm, name, **texts):
        self.change(name, "remarks", **texts)

    def holds(self, slurm, group="", name=""):
        held = [(one.name, parse(one.reason), one.reason_time) for one in self.nodes.values()]
        return [Hold(*one) for one in held if one[1]], 100

    def counted(self, slurm, group=""):
        return frozenset(name for name, one in self.nodes.items() if group or "gpu" in one.gres)

    def known(self, slurm, names):
        return set(names) & set(self.nodes)

    def jobs(self, slurm, name):
        return [("7", "bob", NOW)]

    def ask(self, settings, name="n1", request=L3):
        return ask.ask(settings, name, request, *self.holds(None), NOW)
