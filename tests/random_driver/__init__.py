"""Random traffic over the public calls of a cache, with every row that it shows compared with what its text says.

python -m random_driver SCHEMA SEED      one run, from the folder ``tests``; see ``__main__``

schemas       small float32 models of every layer kind
caches        settings drawn from a seed, and the one place where a cache is made
fingerprints  a text and a field -> the numbers that its rows must hold
texts         what the driver knows of each request, and where prompts come from
oracle        writes and reads rows and states through the views of a batch
driver        one run: attempts calls, compares what must not have changed, tells the last operations
life, steps, keeping, wrong    the operations
"""
