"""Below the device: records in host memory, on disk, in shared stores; one Protocol for drivers, and any fault is a miss."""

from kvpagoda.tiers.disk import disk_driver
from kvpagoda.tiers.driver import Driver, DriverStats, Lease, Status
from kvpagoda.tiers.host import host_driver
from kvpagoda.tiers.keys import layout_fingerprint, prefix_hashes, prefix_root, record_key
from kvpagoda.tiers.mooncake import mooncake_driver
from kvpagoda.tiers.records import RecordBuffer
from kvpagoda.tiers.redis import redis_driver
from kvpagoda.tiers.tier import Tier, TierStats

__all__ = [
    "Driver",
    "DriverStats",
    "Lease",
    "RecordBuffer",
    "Status",
    "Tier",
    "TierStats",
    "disk_driver",
    "host_driver",
    "layout_fingerprint",
    "mooncake_driver",
    "prefix_hashes",
    "prefix_root",
    "record_key",
    "redis_driver",
]
