"""Which requests run, wait or are preempted, for engines without a scheduler: a queue of jobs on one cache."""

from kvpagoda.core.scheduling import (
    Costs,
    Job,
    LeastComputed,
    PreemptionMode,
    PreemptionPolicy,
    QueueStats,
    RunQueue,
    Youngest,
    cheapest,
)

__all__ = [
    "Costs",
    "Job",
    "LeastComputed",
    "PreemptionMode",
    "PreemptionPolicy",
    "QueueStats",
    "RunQueue",
    "Youngest",
    "cheapest",
]
