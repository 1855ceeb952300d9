"""``python -m kvpagoda``: the ``kvpagoda`` command, for shells that do not have it on the path."""

from kvpagoda.cli import main

main()
