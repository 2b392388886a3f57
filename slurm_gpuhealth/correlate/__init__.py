"""What a failed job died of, and which nodes are lemons: verdicts and suspicion, from outcomes, events and logs.

In: lines and history (recorded files, for replay), engine (attempts and events, one by one).
A failure: cases (as it is judged), testimony (the evidence), fleet (what fails at the same time), verdict, terms and
words (as people read it), judging (what a verdict changes). context: what is usual where jobs are sent; place: what a
rack or a switch does to several nodes at once; harmless: what an event's code is worth here.
A node: memory (what it remembers), suspicion and tally (how likely it is bad), slots (each GPU by itself), suspects
(the list).
slow: GPUs that measure less than the same model elsewhere. hung: running jobs that stand still, and who is different.
Beneath: state (what is kept), weights (the settings' constants).
"""
