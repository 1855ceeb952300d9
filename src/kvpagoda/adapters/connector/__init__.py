"""The parts of ``kvpagoda.adapters.vllm_connector``: what they need of vLLM is passed to them, so none imports it.

scheduler.py   which records could be loaded, which blocks are stored      in the scheduler's process
worker.py      looks records up, loads and stores them                     in each worker's process
messages.py    what the one sends to the other with each step
"""
