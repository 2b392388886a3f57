"""Small worlds whose truth is plain: each is one function, and its docstring says what gives the bad node away, or why
nobody is to blame. `world` has the values and the table, `site` runs jobs, `apps` says what is submitted and what
breaks, `ends` how it shows, `score` judges. The worlds of `kept_*` are kept from whoever tunes the correlator.
"""
