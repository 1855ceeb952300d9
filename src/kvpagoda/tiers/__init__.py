"""Tiers below the device: records in host memory, on disk and in shared stores. Any fault is a miss."""

from typing import TYPE_CHECKING

from kvpagoda.abc import Driver, DriverStats, Lease, Status
from kvpagoda.loading import load_when_used
from kvpagoda.tiers.health import Histogram, TierStats
from kvpagoda.tiers.keys import layout_fingerprint, prefix_hashes, prefix_root, record_key
from kvpagoda.tiers.level import CallStats, LevelStats
from kvpagoda.tiers.records import RecordBuffer
from kvpagoda.tiers.spec import TierSpec, disk_tier, host_tier, mooncake_tier, redis_tier, tier_from_text
from kvpagoda.tiers.tier import Tier

if TYPE_CHECKING:
    from kvpagoda.tiers.disk import disk_driver
    from kvpagoda.tiers.mooncake import mooncake_driver
    from kvpagoda.tiers.redis import redis_driver
    from kvpagoda.tiers.slots import host_driver

__all__ = [
    "CallStats", "Driver", "DriverStats", "Histogram", "Lease", "LevelStats", "RecordBuffer", "Status", "Tier",
    "TierSpec", "TierStats", "disk_driver", "disk_tier", "host_driver", "host_tier", "layout_fingerprint",
    "mooncake_driver", "mooncake_tier", "prefix_hashes", "prefix_root", "record_key", "redis_driver", "redis_tier",
    "tier_from_text",
]  # fmt: skip

_DRIVERS = {"disk": "disk_driver", "mooncake": "mooncake_driver", "redis": "redis_driver", "slots": "host_driver"}
if not TYPE_CHECKING:
    __getattr__ = load_when_used(__name__, {f"{__name__}.{module}": (name,) for module, name in _DRIVERS.items()})
