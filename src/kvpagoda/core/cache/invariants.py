"""Proves that every block, slot, row and byte of a cache has one owner."""

from __future__ import annotations

import numpy as np

from kvpagoda.core.cache.core import Core
from kvpagoda.core.cache.request import DecodeRows, RequestState, State
from kvpagoda.errors import CheckFailed


def check(core: Core) -> None:
    """Prove everything from scratch. Raises CheckFailed naming the ids that break it. O(blocks)."""
    _check_slots(core)
    for request in (*core.running.values(), *core.suspended):
        _check_request(core, request)
    core.swap.check(core.suspended.values())
    _check_prefix(core)
    core.capacity.check()
    core.tiers.check()


def _check_slots(core: Core) -> None:
    if sorted([*core.running, *core.free_slots]) != list(range(core.plan.max_requests)):
        raise CheckFailed(f"slots {sorted(core.running)} run, {sorted(core.free_slots)} are free")
    for slot, request in core.running.items():
        if request.slot != slot or request.state not in (State.RUNNING, State.CLOSING):
            raise CheckFailed(f"slot {slot} runs a request that is {request.state.value} in slot {request.slot}")
    for request in core.suspended:
        if request.slot != -1 or request.state is not State.SUSPENDED or request.rows is not None:
            raise CheckFailed(f"a suspended request is {request.state.value} in slot {request.slot}")
    if core.states is not None:
        running = {id(request) for request in core.running.values()}
        for stepping, blocks in core.states.named.items():
            if id(stepping) not in running or not core.states.wrote.get(stepping, set()) <= {*blocks}:
                raise CheckFailed(
                    f"a request that does not run, or did not write them, has blocks {[*blocks]} of a step"
                )
    for group in core.groups:
        idle = [slot for slot in np.flatnonzero(np.array(group.end)).tolist() if slot not in core.running]
        idle += [slot for slot in np.flatnonzero(np.array(group.reserved)).tolist() if slot not in core.running]
        if idle:
            raise CheckFailed(f"{group.name}: slots {idle} hold or reserve blocks but do not run")


def _check_prefix(core: Core) -> None:
    """Prove that tree, windows, checkpoints, pins and the leases of requests agree."""
    prefix, tree, holdings = core.prefix, core.prefix.tree, [pin.holding for pin in core.prefix.pins_of()]
    if tree.num_leases != len(core.running) + len(holdings):
        raise CheckFailed(
            f"{tree.num_leases} leases are open: {len(core.running)} requests and {len(holdings)} pins have one each"
        )
    missing = {request.namespace for request in core.running.values()} - tree.namespaces()
    if missing:
        raise CheckFailed(f"{len(missing)} namespaces in which requests run are not in the tree")
    if tree.checkpoints.by_state.keys() != prefix.kept.keys() or len(prefix.kept) > prefix.most_checkpoints:
        raise CheckFailed(
            f"checkpoints: {len(tree.checkpoints.by_state)} in the tree, {len(prefix.kept)} kept, at most "
            f"{prefix.most_checkpoints} asked for"
        )
    held = {name for name in prefix.kept if tree.checkpoints.is_held(name)}
    if held != {holding.checkpoint for holding in holdings if holding.checkpoint is not None}:
        raise CheckFailed(f"checkpoints {sorted(held)[:16]} are held, and not by pins alone")
    readers = [[group.shared_names(slot) for group in prefix.windows] for slot in core.running]
    prefix.check([*readers, *(one.windows for one in holdings)])


def _check_request(core: Core, request: RequestState) -> None:
    """Prove that its lengths, its rows in the tables, its lease, its fences and its place in a batch agree."""
    if request.rows is not None:
        _check_row(request, request.rows)
    where = f"slot {request.slot} ({request.length} tokens)"
    if request.num_fences < 0 or (request.state is State.CLOSING and not request.num_fences):
        raise CheckFailed(f"{where}: {request.num_fences} fences")
    if not 0 <= request.own_length <= len(request.tokens):
        raise CheckFailed(f"{where}: more tokens than its text of {len(request.tokens)}")
    most = request.length // core.block_size
    if len(request.records.block_hashes) > 1 + max(most, request.prompt_length // core.block_size):
        raise CheckFailed(f"{where}: names of {len(request.records.block_hashes) - 1} blocks, more than its text has")
    if request.state is State.SUSPENDED:
        return
    if not request.lease.is_open or request.lease.num_blocks > request.own_length // core.block_size:
        text = f"its lease covers {request.lease.num_blocks} blocks, it has {request.own_length} tokens itself"
        raise CheckFailed(f"{where}: {text}", needed=request.lease.num_blocks, available=request.own_length)
    for group in core.groups:
        first, end = group.first[request.slot], group.end[request.slot]
        if first * group.block_size > group.growth.first_needed(
            request.length
        ) or end * group.block_size < request.length * (group.places > 0):
            raise CheckFailed(f"{where}: {group.name} has only blocks {first}..{end - 1} of its text")
        if group.places and end % group.places:
            raise CheckFailed(f"{where}: {group.name} has {end} blocks for states, which take {group.places}")
    if request.capacity != min(
        [core.max_context, *(group.end[request.slot] * group.block_size for group in core.groups if group.places)]
    ):
        raise CheckFailed(f"{where}: its blocks do not have room for the {request.capacity} tokens that it counts")
    full = core.full
    if full is not None and full.shared[request.slot] != request.lease.num_blocks:
        raise CheckFailed(
            f"{where}: {full.shared[request.slot]} blocks shared, {request.lease.num_blocks} in its lease"
        )
    _check_published(core, request, where)


def _check_row(request: RequestState, rows: DecodeRows) -> None:
    """Prove that ``rows``, of the persistent batch that commits for ``request``, have all tokens that it lacks.

    The tokens that both have must be equal: those that an interrupted ``flush`` appended, and those of the prompt."""
    row, own = rows.row_of.get(request), request.own_length
    if row is None or request in rows.alone:
        text = f"slot {request.slot}: its persistent batch does not know it, or has still to read it"
        raise CheckFailed(text, needed="row", available=request.slot)
    known, length, width = int(rows.known[row]), int(rows.lengths[row]), rows.newest.shape[1]
    if not known <= own <= length <= known + width:
        raise CheckFailed(
            f"slot {request.slot}: row {row} of its persistent batch has tokens {known} .. {length - 1} in {width} "
            f"columns, and the request has {own}",
            needed=own, available=(known, length),
        )  # fmt: skip
    both = max(own, min(length, request.prompt_length))
    if not np.array_equal(rows.newest[row, : both - known], request.tokens[known:both]):
        text = f"slot {request.slot}: row {row} of its persistent batch has other tokens from {known} to {both - 1}"
        raise CheckFailed(text, needed="newest tokens", available=request.slot)


def _check_published(core: Core, request: RequestState, where: str) -> None:
    """Prove that what its lease covers is its own text, in its namespace, and in the blocks that it reads. O(tokens)."""
    node, end, size = request.lease.node, request.lease.num_blocks, core.block_size
    while node.parent is not None:
        first, n = node.start, end - node.start
        if not np.array_equal(node.tokens[: n * size], request.keys(first * size, end * size)):
            text = f"{where}: its blocks {first} .. {end - 1} are published under other tokens than it has"
            raise CheckFailed(text, needed="published tokens", available=(first, end))
        if core.full is not None:
            published, read = node.ids[0, :n], core.full.names_between(request.slot, first, end)
            if not np.array_equal(published, read):
                text = f"{where}: it reads blocks {read.tolist()}, published are {published.tolist()}"
                raise CheckFailed(text, needed=published.tolist(), available=read.tolist())
        node, end = node.parent, first
    if node.root is None or node.root[1] != request.namespace:
        raise CheckFailed(f"{where}: its lease is in another namespace, {node.root}", needed=request.namespace)
