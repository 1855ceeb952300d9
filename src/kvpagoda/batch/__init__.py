"""A step's index arrays, for any set of requests, or for a set that runs step after step."""
