"""One decode step of 256 requests: allocate a token for each, and make the index arrays where the host makes them.

``staggered``: a sixteenth of the requests begins a block in every step; otherwise all begin one in the same step.
Enough steps are run that work which is spread over steps, or done once for several blocks, is done for all requests.
"""

from __future__ import annotations

from benchmarks.compare import compare
from benchmarks.timing import Options, Row, tell

QUESTION = "What does a decode step of 256 requests cost the host, at short and at long context?"


def measure(options: Options) -> list[Row]:
    requests, contexts = (16, (256,)) if options.quick else (256, (1024, 131_072))
    cases = [
        (
            f"{requests} requests of {context:,} tokens{', staggered' if staggered else ''}",
            {"context": context, "requests": requests, "block_size": 16, "staggered": staggered},
        )
        for context in contexts
        for staggered in (False, True)
    ]
    return compare(
        Options(options.quick, options.peers, options.only, max(32 if options.quick else 512, options.runs)),
        "step",
        cases,
        needs="step",
    )


if __name__ == "__main__":
    tell("step", QUESTION, measure)
