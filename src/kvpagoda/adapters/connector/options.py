"""The options of the connector, as ``kv_connector_extra_config`` gives them, checked before anything is made of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from inspect import signature
from typing import Any, Literal, get_args

from kvpagoda.errors import BadInput, shown, unknown_name
from kvpagoda.tiers import TierSpec, tier_from_text
from kvpagoda.tiers.keys import prefix_root
from kvpagoda.units import parse_bytes, utf8, whole_number

Loads = Literal["async", "layerwise"]
_FIXED = ("write", "record_nbytes")
_SHARED = ("redis", "rediss", "unix", "mooncake")
OF_THE_SCHEDULER = ("policy", "checkpoint_every", "promised", "memory")
"""Options of the scheduler, which stand elsewhere."""


@dataclass(frozen=True)
class ConnectorOptions:
    """What a user of the connector may set.

    ``tiers``: the fastest first, each as ``tier_from_text`` reads it, or a mapping with that text as ``tier`` and
    settings of the tier. ``weights``: a name of the weights; None: a digest of the model's files. ``record_nbytes``:
    the least bytes of a record (None: one block, or 1 MiB with a shared store). ``checkpoint_tokens``: a prompt can be
    resumed at multiples of this many tokens, and at its end, in models with windows; 0: only at its end. ``load``:
    ``"async"``, the request waits until all is loaded; ``"layerwise"``, its first step begins while layers are copied,
    if staging memory holds the whole text. ``secret``: without it nobody can compute the keys of a prompt. Raises
    BadInput.
    """

    tiers: tuple[str | Mapping[str, Any], ...] = ()
    weights: str | None = None
    record_nbytes: int | str | None = None
    checkpoint_tokens: int = 1024
    load: Loads = "async"
    secret: str = ""

    def __post_init__(self) -> None:
        is_listed = isinstance(self.tiers, list | tuple)
        object.__setattr__(self, "tiers", tuple(self.tiers) if is_listed else (self.tiers,))
        whole_number(self.checkpoint_tokens, "checkpoint_tokens")
        if self.load not in get_args(Loads):
            raise unknown_name("load", self.load, get_args(Loads))
        if self.weights is not None and not (isinstance(self.weights, str) and self.weights):
            text = f"weights are named by a text that is not empty, got {shown(self.weights)}"
            raise BadInput(text, field="weights", needed=self.weights)
        prefix_root(b"", utf8(self.secret, "secret"))
        if self.record_nbytes is not None:
            parse_bytes(self.record_nbytes)
        if not self.tiers:
            raise BadInput(
                "KvpagodaConnector stores nothing without tiers: give kv_connector_extra_config "
                '{"tiers": ["disk:FOLDER:50GiB"]}, or host:4GiB, redis://HOST:PORT, mooncake://HOST:PORT',
                field="tiers", needed=1, available=0,
            )  # fmt: skip
        self.specs()

    @property
    def least_record_nbytes(self) -> int:
        """The least bytes of a record."""
        if self.record_nbytes is not None:
            return parse_bytes(self.record_nbytes)
        is_shared = any(text.partition(":")[0].partition("+")[0] in _SHARED for text, _ in self._described())
        return 1 << 20 if is_shared else 1

    def _described(self) -> list[tuple[str, dict[str, Any]]]:
        """Return each tier as its text and its settings. Raises BadInput."""
        made = []
        for tier in self.tiers:
            settings = dict(tier) if isinstance(tier, Mapping) else {"tier": tier}
            text = settings.pop("tier", None)
            if not isinstance(text, str):
                raise BadInput(
                    f"a tier is a text such as 'host:4GiB', or has one as its 'tier'; got {shown(tier)}",
                    field="tier", needed=type(text).__name__,
                )  # fmt: skip
            if "record_nbytes" in settings:
                raise BadInput(
                    f"tier {text!r}: record_nbytes is one number for all tiers; give it beside tiers",
                    field="record_nbytes", needed=text,
                )  # fmt: skip
            if settings.get("write", "commit") != "commit":
                raise BadInput(
                    f"tier {text!r}: vLLM does not say which blocks it evicts or reuses; leave write out, or 'commit'",
                    field="write", needed=settings["write"], available="commit",
                )  # fmt: skip
            made.append((text, {**settings, "write": "commit", "record_nbytes": 1}))
        return made

    def specs(self, part: str = "") -> list[TierSpec]:
        """Return the tiers of one worker. ``part``: a folder inside those of tiers on a disk. Raises BadInput."""
        made = list[TierSpec]()
        for text, settings in self._described():
            if part and text.startswith("disk:"):
                folder, _, nbytes = text.removeprefix("disk:").rpartition(":")
                text = f"disk:{folder}/{part}:{nbytes}"
            try:
                made.append(tier_from_text(text, **settings))
            except TypeError as error:
                known = [name for name in signature(TierSpec).parameters if name not in ("name", "make", *_FIXED)]
                raise BadInput(
                    f"tier {text!r}: {error}; a tier's settings are {', '.join(known)}", needed=text
                ) from None
        return made


def options_of(extra: Mapping[str, Any]) -> ConnectorOptions:
    """Return the options in ``extra``. Raises BadInput for one that is unknown or wrong."""
    known = [field.name for field in fields(ConnectorOptions)]
    for name in extra:
        if name in OF_THE_SCHEDULER:
            raise BadInput(
                f"KvpagodaConnector has no option {name!r}; it is the scheduler's: "
                """give it in --additional-config '{"kvpagoda": {..}}', with --scheduler-cls""",
                needed=name, available="scheduler",
            )  # fmt: skip
        if name not in known:
            raise unknown_name("option of KvpagodaConnector", name, known)
    return ConnectorOptions(**extra)
