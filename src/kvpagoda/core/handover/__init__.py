"""Both ends of a hand-over inside a cache: what reads a request's blocks, and what fills those of another."""
