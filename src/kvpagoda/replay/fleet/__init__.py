"""Simulates workers that serve a trace at its times of arrival.

simulation.py     one clock for all workers: ``simulate``
costs.py          seconds of steps, tokens, bytes and tiers; costs.json: public defaults, with sources
routing.py        which worker gets a request
worker.py         a worker with a cache of ours, its steps added up in closed form
engine_worker.py  a worker with an engine's cache, step by step
report.py         what ``kvpagoda simulate`` prints
"""
