"""What a cache that knew the future could find: a bound for hybrid models, and the best places for checkpoints.

schedule.py    when requests run, and how much of them is in memory
demand.py      what each reuse takes from the memory, and for how long
prices.py      the bound: no choice of reuses is worth more
placement.py   the best places for a number of checkpoints
"""
