"""What people type: one file a command, thin; gpuhealth lists them, common and dates are what they share.

The cluster: nodes.
A node: status (of another one: record), findings, why, diag, xid, doctor, config.
Held nodes: resume, undrain, ladder, escalate (of its own name: gpuhealth-escalate), accept (new ones).
Jobs, on the controller: explain (explain_job, explain_log), jobs, hung, lemons, correlate, metrics, import_.
To try what would be: simulate, replay.
prolog and epilog are for copies of the scripts from before hooks/.
"""
