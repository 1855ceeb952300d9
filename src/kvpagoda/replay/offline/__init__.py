"""What a cache could find that knew the whole trace: a bound for models with windows and states beside full attention.

lives.py     when requests run, and how much of them is in memory
demand.py    what each reuse takes from the memory, and for how long
prices.py    the bound: no choice of reuses is worth more
bound.py     both for a trace, a schema and a budget
"""
