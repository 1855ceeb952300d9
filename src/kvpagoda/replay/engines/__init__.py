"""The caches of engines, as a replay and a simulation serve a trace with them, without memory.

profiles.py     what engines do with cached blocks, in a few settings each
settings.py     what else an engine is set to: its options, by the names of our calls
groups.py       which blocks a kind of layers needs, and keeps for others
pool.py         how an engine divides memory into blocks
chains.py       the whole blocks of a trace's requests, by key
driver.py       the order of admission and of chunks, one for all managers
run.py          a trace served with the cache of an engine

block_queue.py  blocks in the order in which they are used again: vLLM's and Dynamo's
queued.py       a manager over it; moved_states.py: with a state that moves along
text_tree.py    texts as a tree of edges: SGLang's
edge_lru.py     a manager over it; edge_windows.py: with windows; edge_states.py: with states
own_manager.py  our own cache behind the same calls
"""
