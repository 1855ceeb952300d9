"""Replays traces through the prefix tree, without memory behind it, and returns hit rates. Needs numpy alone."""

from typing import TYPE_CHECKING

from kvpagoda.loading import load_when_used
from kvpagoda.replay.engines.driver import Schedule
from kvpagoda.replay.engines.groups import Group
from kvpagoda.replay.engines.profiles import PROFILES, Profile
from kvpagoda.replay.engines.run import EngineResult, replay_engine
from kvpagoda.replay.engines.settings import EngineSettings
from kvpagoda.replay.readers import Request, read_requests
from kvpagoda.replay.reuse import Reuse, lru_hits, reuse_distances, reuse_histogram, working_set
from kvpagoda.replay.run import POLICIES, ReplayResult, hit_rate_curve, replay
from kvpagoda.replay.trace import Trace
from kvpagoda.replay.workload import synthetic, workload

if TYPE_CHECKING:
    from kvpagoda.replay.fleet.costs import Costs, TierCosts
    from kvpagoda.replay.fleet.simulation import SimulateResult, simulate
    from kvpagoda.replay.offline.bound import HitBound, hit_bound
    from kvpagoda.replay.serving import ServeResult, serve, serve_multi_worker

__all__ = [
    "POLICIES", "PROFILES", "Costs", "EngineResult", "EngineSettings", "Group", "HitBound", "Profile", "ReplayResult",
    "Request", "Reuse", "Schedule", "ServeResult", "SimulateResult", "TierCosts", "Trace", "hit_bound", "hit_rate_curve",
    "lru_hits", "read_requests", "replay", "replay_engine", "reuse_distances", "reuse_histogram", "serve",
    "serve_multi_worker", "simulate", "synthetic", "working_set", "workload",
]  # fmt: skip

_LATER = {
    "kvpagoda.replay.fleet.costs": ("Costs", "TierCosts"),
    "kvpagoda.replay.fleet.simulation": ("SimulateResult", "simulate"),
    "kvpagoda.replay.offline.bound": ("HitBound", "hit_bound"),
    "kvpagoda.replay.serving": ("ServeResult", "serve", "serve_multi_worker"),
}  # imported when they are first used: they import a whole cache
if not TYPE_CHECKING:
    __getattr__ = load_when_used(__name__, _LATER)
