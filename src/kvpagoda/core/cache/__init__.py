"""The life of requests: admission, prefix reuse, commit, fork, suspension, tiers. No torch."""
