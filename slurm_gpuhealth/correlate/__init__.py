"""What a failed job died of, and which nodes are lemons: verdicts and suspicion, from outcomes, events and logs.

In: lines and history (recorded files, for replay), engine (attempts and events, one by one).
A failure: cases (as it is judged), testimony (the evidence), fleet (what fails at the same time), verdict, terms and
words (as people read it), judging (what a verdict changes).
A node: memory (what it remembers), suspicion and tally (how likely it is bad), suspects (the list).
Beneath: state (what is kept), weights (the settings' constants).
"""
