"""The envelope of vLLM 0.33 and SGLang 0.5.23 (``KvHintsEnvelope``), and the payloads of the actions defined here.

{"protocol_version": "0.1", "message_id": .., "actions": [
    {"action_id": .., "action_type": "kv.retain", "action_version": "1.0", "payload": {..}}, ..]}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from kvpagoda.errors import BadInput, shown
from kvpagoda.units import MOST

VERSION = "1.0"
"""Of all actions here. Any 1.x is read: later ones only add fields that may be left out."""
TYPES = ("kv.retain", "kv.pin", "kv.release", "kv.demote", "kv.prefetch", "kv.checkpoint", "kv.session")
DEFAULT_PRIORITY, MOST_PRIORITY = 35, 100
"""0 to 100, as in TensorRT-LLM's ``KvCacheRetentionConfig``; 0: no promise at all."""


@dataclass(frozen=True)
class Action:
    """One action of an envelope.

    Args:
        action_id: of the action, in its envelope.
        action_type: such as ``kv.retain``.
        action_version: of that type.
        payload: not looked at yet.
    """

    action_id: str
    action_type: str
    action_version: str
    payload: Any


def read_envelope(envelope: object, most_actions: int = 64, most_nbytes: int = 1 << 20) -> tuple[str, list[Action]]:
    """Return (message id, actions) of an envelope.

    An action that is malformed has an ``action_id`` and a type as far as these can be read.

    Args:
        envelope: a mapping, JSON as text or bytes, or an object of an engine's class.
        most_actions: that are read.
        most_nbytes: of JSON that is read.

    Raises:
        BadInput: there are no actions to be read.
    """
    if isinstance(envelope, str | bytes | bytearray):
        if len(envelope) > most_nbytes:
            raise BadInput(
                f"an envelope of {len(envelope)} bytes; expected at most {most_nbytes}",
                needed=len(envelope),
                available=most_nbytes,
            )
        try:
            envelope = json.loads(envelope)
        except (ValueError, RecursionError) as error:
            raise BadInput(f"an envelope of hints is JSON; {error}") from None
    actions = field_of(envelope, "actions")
    if not isinstance(actions, list | tuple):
        raise BadInput(f"an envelope of hints has a list of actions, got {shown(envelope)}")
    if len(actions) > most_actions:
        raise BadInput(
            f"{len(actions)} actions in an envelope; expected at most {most_actions}",
            needed=len(actions),
            available=most_actions,
        )
    return _text(field_of(envelope, "message_id")), [_action(action) for action in actions]


def _action(action: Any) -> Action:
    identity, kind, version = (_text(field_of(action, f"action_{name}")) for name in ("id", "type", "version"))
    return Action(identity, kind, version, field_of(action, "payload"))


def is_known(action: Action) -> str | None:
    """Return None for an action that is defined here in its version, else what is wrong with it."""
    if action.action_type not in TYPES:
        return f"no such action; known: {', '.join(TYPES)}"
    if action.action_version.split(".")[0] != VERSION.split(".")[0]:
        return f"{action.action_type} is known in version {VERSION}, not {action.action_version!r}"
    return None


def field_of(what: Any, name: str) -> Any:
    """Return the field ``name`` of a mapping or an object; None if there is none."""
    return what.get(name) if isinstance(what, Mapping) else getattr(what, name, None)


def _text(value: Any) -> str:
    return value[:256] if isinstance(value, str) else ""


class Payload:
    """The fields of an action's payload. Every method raises BadInput, which names the field."""

    def __init__(self, payload: Any) -> None:
        if payload is not None and not isinstance(payload, Mapping):
            raise BadInput(f"a payload is an object, got {shown(payload)}")
        self._fields: Mapping[str, Any] = payload or {}

    def __contains__(self, name: str) -> bool:
        return self._fields.get(name) is not None

    def get(self, name: str) -> Any:
        """Return the field as it is; None if there is none."""
        return self._fields.get(name)

    def part(self, name: str) -> Payload:
        """Return the object in field ``name``."""
        try:
            return Payload(self._fields.get(name))
        except BadInput:
            raise BadInput(f"{name} is an object, got {shown(self._fields[name])}") from None

    def text(self, name: str) -> str | None:
        """Return a text of 1 to 256 characters, or None."""
        value = self._fields.get(name)
        if value is None or (isinstance(value, str) and 0 < len(value) <= 256):
            return value
        raise BadInput(f"{name} is a text of 1 to 256 characters, got {shown(value)}")

    def one_of(self, name: str, known: tuple[str, ...]) -> str:
        """Return one of the texts ``known``."""
        value = self._fields.get(name)
        if not isinstance(value, str) or value not in known:
            raise BadInput(f"{name} is one of {', '.join(known)}, got {shown(value)}")
        return str(value)

    def seconds(self, default: float | None) -> float | None:
        """Return the field ``seconds``: a finite number above 0."""
        value = self._fields.get("seconds")
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
            raise BadInput(f"seconds is a finite number above 0, got {shown(value)}")
        return float(min(value, MOST))

    def priority(self, default: int) -> int:
        """Return the field ``priority``, 0 to 100."""
        value = self._fields.get("priority")
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST_PRIORITY:
            raise BadInput(f"priority is a whole number, 0 to {MOST_PRIORITY}, got {shown(value)}")
        return value

    def span(self) -> tuple[int, int | None]:
        """Return the field ``range``, [first token, end or null]; the whole text without it."""
        value = self._fields.get("range")
        if value is None:
            return 0, None
        if isinstance(value, list | tuple) and len(value) == 2:
            begin, end = value
            numbers = (begin,) if end is None else (begin, end)
            is_whole = all(not isinstance(n, bool) and isinstance(n, int) and n >= 0 for n in numbers)
            if is_whole and (end is None or begin < end):
                return begin, end
        raise BadInput(f"range is [first token, end or null], the end above the first, got {shown(value)}")
