"""The ladder: what a drained node does by itself to prove that it is fit or broken.

How a node gets on it: drain (for a fault), ask (for a person), sweep (each node in turn). claim and budget limit the
number of holds; entry chooses the first rung; waits reports a fault for which the budget has no room.
How it climbs: climb (decides the next step, pure), rungs (the table), state (what the node knows), worker (does the
step), conclude (what follows), follow (shows the progress).
The rungs: rung_test (L1 to L4), rung_reset, rung_reboot, rung_repair, rung_rma.
"""
