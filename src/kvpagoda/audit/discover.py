"""What a server has: fields, log-probabilities, token ids, the unit of hits, how a prompt is made cold, how much fills it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import gcd
from typing import Any

from kvpagoda.audit.prompts import FIRST_ID, LETTERS, Ask, Draw, PromptPart
from kvpagoda.audit.server import Server, ServerAnswer, ServerProfile, Unanswered, answer_of, counter_of, picture_of
from kvpagoda.errors import BadInput, unknown_name

Asked = Callable[[Ask], ServerAnswer]
LONGEST = 4096
"""The most tokens of a prompt that is asked."""
_WHOLE = 0.7  # the share of the expected tokens from which on a prompt of letters is taken to be whole
_EXTRAS: dict[str, Any] = dict(ignore_eos=True, return_tokens_as_token_ids=True, return_token_ids=True)
_COMPLETIONS: tuple[dict[str, Any], ...] = (
    {"logprobs": 20},
    {"logprobs": 5},
    {"logprobs": True, "top_logprobs": 10},
    {"logprobs": 1},
    {},
)
_CHATS: tuple[dict[str, Any], ...] = (*({"logprobs": True, "top_logprobs": n} for n in (20, 10, 5, 1)), {})
_FILLED = (2, 4, 8, 16, 32)
FLAGS = {
    "vllm": "vLLM: --enable-prompt-tokens-details",
    "sglang": "SGLang: --enable-cache-report",
}
"""Owner of a model -> the flag with which its server says how many tokens were cached."""


def find_interface(server: Server, model: str | None) -> Draw:
    """Find which requests the server takes and fill its profile; return where symbols come from, without a seed.

    Args:
        server: the server.
        model: the name of the model; None: the first that is no adapter.

    Raises:
        BadInput: nobody answers there, there is no such model, or it answers neither completions nor chats.
        OutOfRequests: no more may be sent.
    """
    server.profile = _named(server, model)
    text = "".join(f" {letter}" for letter in LETTERS[:8])
    found = _first_that_works(server, "/v1/completions", {"prompt": text}, _COMPLETIONS)
    if found is not None:
        fields, extras, top, counter = found
        reply = _try(server, "/v1/completions", {"prompt": [*range(FIRST_ID - 8, FIRST_ID)], **fields, **extras})
        as_ids = reply is not None and (reply.get("usage") or {}).get("prompt_tokens") in (8, 9)
        if extras and not as_ids:
            extras = {"ignore_eos": True}
        server.learn(completions=fields, extras=extras, top=top, counter=counter, as_ids=as_ids)
    chat = {"messages": [{"role": "user", "content": text.strip()}]}
    found = _first_that_works(server, "/v1/chat/completions", chat, _CHATS)
    if found is not None:
        fields, extras, top, counter = found
        server.learn(chats=fields)
        if server.profile.is_chat:
            server.learn(extras=extras, top=top, counter=counter)
        picture = {"type": "image_url", "image_url": {"url": picture_of(1)}}
        shown = [{"role": "user", "content": [picture, {"type": "text", "text": text.strip()}]}]
        server.learn(has_images=_try(server, "/v1/chat/completions", {"messages": shown}) is not None)
    profile = server.profile
    if profile.is_chat and profile.chats is None:
        which = f"for model {profile.model!r}" if profile.model else "without a model; give --model"
        raise BadInput(f"{server.url} answers neither /v1/completions nor /v1/chat/completions {which}", field="model")
    server.learn(longest=max(16, min(LONGEST, profile.longest) - 64))
    return Draw(0, profile.as_ids)


def _named(server: Server, model: str | None) -> ServerProfile:
    """Return a profile with what ``/v1/models`` and pages of servers of a kind say. Raises BadInput."""
    try:
        said = server.get("/v1/models")
    except Unanswered as error:
        raise BadInput(f"no server answers: {error}; start one, or give its address", field="url") from None
    models = said.get("data") if isinstance(said, dict) else None
    listed = {str(one.get("id")): one for one in models or () if isinstance(one, dict)}
    base = [name for name, one in listed.items() if not one.get("parent")]
    if model is not None and listed and model not in listed:
        raise unknown_name("model", model, listed)
    name = model or (base or [*listed] or [""])[0]
    one = listed.get(name, {})
    lengths = [one.get("max_model_len"), one.get("context_length"), _at(server, "/props", "n_ctx")]
    metrics = page(server, "/metrics")
    keys = "kv_cache_size_tokens", "num_gpu_blocks", "[{,]block_size"
    tokens, blocks, size = (re.search(rf'{key}="(\d+)"', metrics) for key in keys)
    room = int(tokens[1]) if tokens else int(blocks[1]) * int(size[1]) if blocks and size else 0
    return ServerProfile(
        name,
        str(one.get("owned_by") or ""),
        adapters=[other for other, its in listed.items() if its.get("parent") and other != name],
        longest=min((int(n) for n in lengths if isinstance(n, int) and n > 0), default=2048),
        num_blocks_tokens=room,
        preemptions=num_preempted(metrics) is not None,
    )


def num_preempted(metrics: str) -> float | None:
    """Return how many requests were preempted, as ``/metrics`` says; None if it does not."""
    counts = re.findall(r"^\w+:num_(?:preemptions|retracted)\w*(?:\{.*\})? (\S+)$", metrics, re.M)
    return sum(map(float, counts)) if counts else None


def page(server: Server, path: str) -> str:
    try:
        return str(server.get(path) or "")
    except Unanswered:
        return ""


def _at(server: Server, path: str, key: str) -> Any:
    try:
        said = server.get(path)
    except Unanswered:
        return None
    settings = said.get("default_generation_settings") if isinstance(said, dict) else None
    return settings.get(key) if isinstance(settings, dict) else None


def _try(server: Server, path: str, body: dict[str, Any]) -> Any:
    try:
        reply = server.post(path, {**server.plain(), "max_tokens": 2, **body})
    except Unanswered:
        return None
    return reply if isinstance(reply, dict) and reply.get("choices") else None


def _first_that_works(
    server: Server, path: str, body: dict[str, Any], variants: tuple[dict[str, Any], ...]
) -> tuple[dict[str, Any], dict[str, Any], int, str] | None:
    """Return the fields that give log-probabilities, further ones that are taken, of how many tokens, and the counter."""
    plain = _try(server, path, body)
    if plain is None:
        return None
    extras = _EXTRAS if _try(server, path, {**body, **_EXTRAS}) is not None else {}
    for variant in variants:
        reply = _try(server, path, {**body, **variant, **extras}) if variant else plain
        if reply is None:
            continue
        top = _width(reply)
        if top or not variant:
            return variant, extras, top, counter_of(reply)
    return None


def _width(reply: Any) -> int:
    """Return of how many tokens a reply has log-probabilities at its first one."""
    tops = answer_of(reply).tops
    return len(tops[0]) if tops else 0


def prompt(draw: Draw, profile: ServerProfile, tokens: int) -> tuple[PromptPart, ...]:
    """Return a new prompt of ``tokens`` tokens, as far as whole symbols go."""
    return (PromptPart(draw.text(max(1, tokens // profile.per_symbol), head=True)),)


def find_sizes(server: Server, draw: Draw, ask: Asked) -> Iterator[str]:
    """Find tokens of a symbol and of the beginning of all prompts, the unit of hits and the shortest prompt that is found.

    Args:
        server: the server, whose profile is filled.
        draw: where symbols come from.
        ask: asks, and keeps what is noticed.

    Yields:
        what cannot be known, and what can be done about it.
    """
    profile, is_chat = server.profile, server.profile.is_chat
    for chat in [False] * (not is_chat) + [True] * (profile.chats is not None):
        short, long = (ask(Ask((PromptPart(draw.text(n, head=True)),), most=1, chat=chat)).num_prompt for n in (8, 40))
        each = max(1, round((long - short) / 32))
        space = each > 1 and not draw.as_ids  # the first letter has none before it
        profile.shared["chat" if chat else "completion"] = max(0, short - 8 * each + space)
        profile.per["chat" if chat else "completion"] = each
    while True:  # the server may take less than it says, or not say what it takes
        try:
            answer = ask(Ask(prompt(draw, profile, profile.longest), most=1, chat=is_chat))
            if not 0 < answer.num_prompt < profile.longest * (1.0 if draw.as_ids and not is_chat else _WHOLE):
                break  # of a prompt that the server cuts it knows another text than was sent
        except Unanswered:
            if profile.longest < 32:
                raise
        profile = server.learn(longest=profile.longest // 2)
    if not profile.counter:
        profile = server.learn(counter=_late_counter(ask, draw, profile))
    if not profile.counter:
        flag = FLAGS.get(profile.owner.lower(), "vLLM: --enable-prompt-tokens-details, SGLang: --enable-cache-report")
        yield f"the server does not say how many tokens were cached: set {flag}; hits and counters were not judged"
        return
    shared = profile.shared_by(Ask((), chat=is_chat))
    tokens = 256
    while True:
        tokens = min(tokens, profile.longest)
        found = [_found(ask, draw, profile, n) for n in (tokens, tokens + 1)]
        if max(found) > shared:
            break
        if tokens == profile.longest:
            yield f"no prompt of up to {tokens + 1:,} tokens was found cached when it was asked three times"
            return
        tokens *= 4
    counts = [*found, *(_found(ask, draw, profile, int(tokens * part)) for part in (0.73, 0.51))]
    units = [gcd(*(count for count in counts if count > shared)), gcd(*(max(0, count - shared) for count in counts))]
    unit = max(units)  # with what all prompts begin with, or without
    server.learn(unit=unit)
    for n in (unit - 1, unit, unit + 1, 2 * unit + 1, 3 * unit):
        if shared < n < profile.longest and _found(ask, draw, profile, n) > shared:
            server.learn(least=n)
            break


def _late_counter(ask: Asked, draw: Draw, profile: ServerProfile) -> str:
    """Return the counter of a server that says nothing where nothing is cached; empty if it has none."""
    request = Ask(prompt(draw, profile, profile.longest), most=1, chat=profile.is_chat)
    return next(filter(None, (ask(request).counter for _ in range(3))), "")


def _found(ask: Asked, draw: Draw, profile: ServerProfile, tokens: int) -> int:
    """Return how many tokens of a new prompt are cached when it is asked for the second time, or for the third."""
    request = Ask(prompt(draw, profile, tokens), most=1, chat=profile.is_chat)
    most = 0
    ask(request)
    for _ in range(2):
        most = max(most, ask(request).cached or 0)
        if most > profile.shared_by(request):
            break
    return most


def find_cold(server: Server, draw: Draw, ask: Asked, wanted: str | None) -> Iterator[str]:
    """Find how a prompt is asked so that nothing cached is used, and how many other prompts fill the cache.

    Args:
        server: the server, whose profile is filled.
        draw: where symbols come from.
        ask: asks, and keeps what is noticed.
        wanted: "salt", "off" or "churn"; None: the first that works.

    Yields:
        what does not work, and what can be done about it.
    """
    profile, is_chat = server.profile, server.profile.is_chat
    request = Ask(prompt(draw, profile, min(profile.longest, 4 * max(profile.unit, 16) + 3)), most=1, chat=is_chat)
    path, body = server.body(Ask(prompt(draw, profile, 16), most=1, chat=is_chat))  # not the prompt that is asked below
    takes = _refuses(server, path, {**body, "cache_salt": 7})  # it looks at the field, and wants a text
    server.learn(takes_salts=takes)
    for _ in range(2):
        ask(request)
    shared, ways, is_sure = (
        profile.shared_by(request),
        {"salt": takes, "off": False, "churn": True},
        bool(profile.counter),
    )
    if profile.counter or takes:
        cached = _cached(ask, replace(request, salt=draw.salt()))
        takes = takes and cached is not None  # a server that refuses all fields that it does not know has none
        is_sure |= wanted == "salt" and cached is None
        server.learn(takes_salts=takes)
        ways["salt"] = cached is not None and cached <= shared
    if profile.counter:
        if takes and not ways["salt"]:
            yield "cache_salt is taken, but a prompt with a salt that was never used reports cached tokens"
            for _ in range(2):  # never one case
                other = replace(request, parts=prompt(draw, profile, min(profile.longest, 5 * max(profile.unit, 16))))
                ask(other)
                ask(replace(other, salt=draw.salt()))
        if not ways["salt"] or wanted == "off":
            cached = _cached(ask, replace(request, cold=True))
            ways["off"] = cached is not None and cached <= shared
    if wanted is not None and not ways[wanted] and is_sure and not (takes and wanted == "salt"):
        works = [way for way, is_it in ways.items() if is_it]
        raise BadInput(
            f"--cold {wanted} does not make prompts cold here; what does: {', '.join(works)}",
            needed=wanted,
            available=works,
        )
    server.learn(
        takes_salts=takes or ways["salt"], has_salts=ways["salt"],
        cold=wanted or next(way for way, works in ways.items() if works),
    )  # fmt: skip
    yield from _find_churn(server, draw, ask, is_chat)


def _refuses(server: Server, path: str, body: dict[str, Any]) -> bool:
    try:
        server.post(path, body)
    except Unanswered as error:
        return error.is_refused
    return False


def _cached(ask: Asked, request: Ask) -> int | None:
    """Return how many tokens of ``request`` are cached, 0 if that is not said; None if the server refuses it."""
    try:
        return ask(request).cached or 0
    except Unanswered as error:
        if error.is_refused:
            return None
        raise


def _find_churn(server: Server, draw: Draw, ask: Asked, is_chat: bool) -> Iterator[str]:
    profile = server.profile
    if not profile.counter or not profile.unit:
        server.learn(churn=12, churn_length=profile.longest)
        return
    lengths = (min(profile.longest, n * max(profile.unit, 16) + 3) for n in (4, 8))
    marks = [Ask(prompt(draw, profile, n), most=1, chat=is_chat) for n in lengths]
    for mark in marks:
        ask(mark)
    # a cache of so many prompts, whatever their lengths, is filled by short ones in no time
    sizes = (min(profile.longest, 64), profile.longest) if profile.cold == "churn" else (profile.longest,)
    most = server.max_requests // (5 if profile.cold == "churn" else 10)
    for size in sizes:
        left = most
        for more in _FILLED:
            left -= more + len(marks)
            if left < 0:
                break
            for _ in range(more):
                ask(Ask(prompt(draw, profile, size), most=1, chat=is_chat))
            server.learn(churn=more, churn_length=size)
            if max((ask(mark).cached or 0) - profile.shared_by(mark) for mark in marks) <= 0:
                server.learn(churn=more + (more + 1) // 2, evicts=True)
                return
    said = (
        f"after {server.profile.churn} other prompts of {server.profile.churn_length:,} tokens a prompt was still found"
    )
    yield f"{said}, so that no prompt is cold" if profile.cold == "churn" else said
