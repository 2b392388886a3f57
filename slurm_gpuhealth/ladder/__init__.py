"""The ladder: what a drained node does by itself to prove that it is fit, or broken.

On to it: drain (a fault decides), ask (a person does), sweep (the nodes by turns); claim and budget keep the number of
holds; entry says which rung is the first; waits tells of a fault for which there is no room.
Up it: climb (what is next, pure), rungs (the table), state, worker (does it), conclude (what follows), follow (for
people).
The rungs: rung_test (L1 to L4), rung_reset, rung_reboot, rung_repair, rung_rma.
"""
