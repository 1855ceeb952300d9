"""A process that publishes: ``publishing.py ENDPOINT REPLAY SCHEMA SEED``. It works until it is told ``go`` again or killed.

After each ``go`` on its standard input it does some operations, sends what happened, and prints what its cache says of some
texts: one line of JSON, a list of [tokens, cached, resumable].
"""

from __future__ import annotations

import json
import sys

from traffic import Traffic

from kvpagoda.events import Publisher


def main(endpoint: str, replay: str, schema: str, seed: str) -> None:
    traffic = Traffic(schema, int(seed))
    with Publisher(traffic.log, endpoint, replay, bind=True) as publisher:
        print(json.dumps([publisher.endpoint, publisher.replay_endpoint]), flush=True)
        for _ in sys.stdin:
            for _ in range(60):
                traffic.step()
            assert publisher.flush()
            texts = [traffic.text()[0] for _ in range(40)]
            found = [(text.tolist(), traffic.cache.lookup(text)) for text in texts]
            print(json.dumps([(text, one.cached, one.resumable) for text, one in found]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
