"""Cache managers with the interfaces of other engines, over this library's core, for the engines' own schedulers.

Each file or folder is named after the engine whose interface it implements. None imports that engine, but for the parts
of ``vllm`` that run inside it: arguments are duck-typed, so a simulator or a test may pass its own objects.
"""
