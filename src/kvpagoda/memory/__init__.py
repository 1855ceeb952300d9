"""Memory that a user gives to a cache: ``kvpagoda.memory.virtual``."""
