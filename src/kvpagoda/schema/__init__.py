"""What a model keeps: layer kinds, fields, records, and the plan that divides a budget. Needs no torch."""

from kvpagoda.formats.encoding import MXFP4, NVFP4, RAW, Encoding
from kvpagoda.schema.fields import FULL, STATE, Field, Growth, Rows
from kvpagoda.schema.kinds import Attention, Compressed, IndexKeys, Latent, LayerKind, Recurrent, Shared
from kvpagoda.schema.layers import Group, Layer
from kvpagoda.schema.layout import Page, Place, RowLayout
from kvpagoda.schema.plan import Plan
from kvpagoda.schema.schema import Schema

__all__ = [
    "FULL", "MXFP4", "NVFP4", "RAW", "STATE", "Attention", "Compressed", "Encoding", "Field", "Group", "Growth",
    "IndexKeys", "Latent", "Layer", "LayerKind", "Page", "Place", "Plan", "Recurrent", "RowLayout", "Rows", "Schema", "Shared",
]  # fmt: skip
