"""The index arrays of one step: for any set of sequences, or for a set that runs together for many steps."""
