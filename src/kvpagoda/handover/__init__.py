"""Running requests that another cache continues: tickets, leases, and transfers of their blocks between processes."""

from typing import TYPE_CHECKING

from kvpagoda.abc import Transfer
from kvpagoda.handover.ticket import Ticket
from kvpagoda.loading import load_when_used

if TYPE_CHECKING:
    from kvpagoda.core.handover.sender import Sender
    from kvpagoda.handover.mooncake import MooncakeEngine
    from kvpagoda.handover.nixl import NixlAgent
    from kvpagoda.handover.shared_memory import SharedMemory

__all__ = ["MooncakeEngine", "NixlAgent", "Sender", "SharedMemory", "Ticket", "Transfer"]

_LOADED = {
    "kvpagoda.core.handover.sender": ("Sender",),
    "kvpagoda.handover.mooncake": ("MooncakeEngine",),
    "kvpagoda.handover.nixl": ("NixlAgent",),
    "kvpagoda.handover.shared_memory": ("SharedMemory",),
}
if not TYPE_CHECKING:
    __getattr__ = load_when_used(__name__, _LOADED)
