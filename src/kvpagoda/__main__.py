"""``python -m kvpagoda``: the command line, where the command itself is not on the path."""

from kvpagoda.cli import main

main()
