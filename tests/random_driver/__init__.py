"""Random traffic over the public calls of a cache. Every row that the cache shows is compared with what its text
requires.

python -m random_driver SCHEMA SEED      one run, from the folder ``tests``; see ``__main__``

schemas       small float32 models of every layer kind
caches        settings drawn from a seed, and the one place where a cache is made
fingerprints  a text and a field -> the numbers that its rows must hold
texts         the driver's record of each request, and the source of prompts
oracle        writes and reads rows and states through the views of a batch
driver        one run: attempts calls, compares what a failed call must not change, reports the last operations
life, steps, keeping, wrong    the operations
"""
