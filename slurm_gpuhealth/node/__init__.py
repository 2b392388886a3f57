"""What runs on a node, and the node's own record of it.

The record: journal, over journal_file and journal_schema; after damage journal_mend, journal_sound (is the file sound?)
and kernel_cursor (which part of the kernel log is new). In it: record (findings), jobs, decisions, held (our hold).
The node: watch (which source is read when), identity (which GPU, which boot), run_level (DCGM's levels), tools (other
tools' tests), figures (what they measured), slow (gpu:slow), samples (how jobs use the GPUs), lock (one at a time).
A job: hook (how each program that Slurm starts begins), environment, output (where the job's log is), joblog, rights.
"""
