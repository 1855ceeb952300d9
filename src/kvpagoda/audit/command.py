"""``kvpagoda audit``: runs an audit, with progress on a terminal, and writes its reports."""

from __future__ import annotations

import json
import os
import random
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import sleep
from typing import Any

from kvpagoda import console
from kvpagoda.audit.findings import find, replay
from kvpagoda.audit.judge import Audit
from kvpagoda.audit.report import Report, as_json
from kvpagoda.audit.server import OutOfRequests, Server, Unanswered
from kvpagoda.errors import BadInput, unknown_name
from kvpagoda.text import json_of, text_in

WAYS = ("salt", "off", "churn")
"""How a cold twin can be made."""
_WAIT = 600  # seconds for a server to come back


@dataclass(frozen=True)
class AuditOptions:
    """What ``kvpagoda audit`` is given; the command line says what each is."""

    url: str
    model: str | None = None
    api_key_env: str | None = None
    max_requests: int = 400
    report: Path | None = None
    json: str | None = None
    replay: Path | None = None
    remote: bool = False
    cold: str | None = None
    after: str | None = None
    save: Path = Path()
    seed: int | None = None
    timeout: float = 120.0


def audit(
    url: str,
    *,
    model: str | None = None,
    api_key: str | None = None,
    max_requests: int = 400,
    remote: bool = False,
    cold: str | None = None,
    seed: int | None = None,
    timeout: float = 120.0,
) -> Report:
    """Audit the server at ``url`` from outside, as ``kvpagoda audit`` does. It fills the server's cache, and takes minutes.

    Args:
        url: the address of a server with the OpenAI interface, such as ``http://127.0.0.1:8000``.
        model: the name of the model; None: the first that the server lists.
        api_key: the key that is sent with each request.
        max_requests: the most requests to send.
        remote: allow an address that is not of this machine.
        cold: how a cold twin is made: "salt", "off" or "churn"; None: the first that works.
        seed: of the prompts; None: another one each time, so that none is cached.
        timeout: seconds to wait for an answer.

    Returns:
        The report: ``code`` (0 clean, 1 findings, 2 cannot be judged), ``findings``, ``to_dict()``, ``page()`` (HTML) and
        ``lines()``.

    Raises:
        BadInput: an argument or the server is of no use; no server answers.
        MissingExtra: httpx is not installed.
    """
    seed = _checked(cold, max_requests, seed)
    with Server(url, api_key, max_requests=max_requests, is_remote=remote, timeout=timeout) as server:
        judge = Audit(server, seed, model=model, cold=cold)
        judge.run()
        return Report(judge, _findings(judge))


def _checked(cold: str | None, max_requests: int, seed: int | None) -> int:
    """Return ``seed``, or another one each time for None. Raises BadInput for the others."""
    if cold not in (None, *WAYS):
        raise unknown_name("way to make a prompt cold", cold, WAYS)
    if max_requests < 1:
        raise BadInput(f"--max-requests must be at least 1, got {max_requests}", field="--max-requests")
    return random.SystemRandom().randrange(1 << 32) if seed is None else seed


def run(options: AuditOptions) -> int:
    """Audit, print and write what was found. Return the exit code: 0 clean, 1 findings, 2 cannot be judged, 130 after Ctrl-C
    where nothing was found.

    Args:
        options: what is audited, and how.

    Raises:
        BadInput: an option, a file or the server is of no use; no server answers.
        MissingExtra: httpx is not installed.
        OSError: a file cannot be written.
    """
    seed = _checked(options.cold, options.max_requests, options.seed)
    if not options.save.is_dir():
        raise BadInput(f"--save names {options.save}, which is no folder", field="--save", needed=str(options.save))
    data = None if options.replay is None else json_of(text_in(options.replay), f"{options.replay}: ")
    for path in (options.report, None if options.json in (None, "-") else Path(str(options.json))):
        if path is not None:
            path.open("a").close()
    with (
        Server(
            options.url, _key(options.api_key_env), max_requests=options.max_requests, is_remote=options.remote,
            timeout=options.timeout,
        ) as server,
        console.progress(options.max_requests, "requests", quiet=options.json == "-") as moved,
    ):  # fmt: skip
        if moved is not None:
            server.on_request = lambda done: moved(done, "")
        audit = Audit(
            server, seed, model=options.model, cold=options.cold, after=options.after, wait=partial(_wait, server), say=_say
        )  # fmt: skip
        if data is not None:
            return _replay(audit, data)
        audit.run()
        report = Report(audit, _findings(audit))
    _write(report, options)
    return 130 if server.is_stopped and not report.findings else report.code


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _key(name: str | None) -> str | None:
    if name is None:
        return None
    if not (key := os.environ.get(name)):
        raise BadInput(f"--api-key-env names {name}, which is not set", field="--api-key-env")
    return key


def _findings(audit: Audit) -> Any:
    try:
        return find(audit)
    except KeyboardInterrupt:
        audit.server.stop()  # no more smallest cases
        audit.results.is_partial = True
        return find(audit)


def _replay(audit: Audit, data: Any) -> int:
    try:
        seen, runs, text = replay(audit, data)
    except Unanswered as error:
        raise BadInput(f"no server answers: {error}") from None
    except OutOfRequests as error:
        raise BadInput(str(error)) from None
    console.say(text)
    console.say(f"seen in {seen} of {runs} runs, each with new prompts")
    if runs and not seen:
        share = 1 - 0.05 ** (1 / runs)
        console.say(f"If it is there still, it shows in less than {share:.0%} of the runs (with 95 % certainty).")
    return 1 if seen > 1 else 0 if runs else 2


def _write(report: Report, options: AuditOptions) -> None:
    names = (re.fullmatch(r"finding-(\d{1,9})\.json", path.name) for path in options.save.iterdir())
    last = max((int(name[1]) for name in names if name), default=0)  # those of earlier audits stay
    for number, finding in enumerate(report.findings, last + 1):
        path = options.save / f"finding-{number}.json"
        with path.open("x", encoding="utf-8") as file:
            file.write(json.dumps(finding.replay(report.audit.server.profile), indent=1) + "\n")
        finding.file = str(path)
    if options.report is not None:
        options.report.write_text(report.page(), "utf-8")
    if options.json == "-":
        print(as_json(report))
        return
    if options.json is not None:
        Path(options.json).write_text(as_json(report) + "\n", "utf-8")
    for line in report.lines():
        if line.lstrip().startswith(("curl", "timeout")):
            console.output().print(line, soft_wrap=True)  # a line for a shell is not broken
        else:
            console.say(line, indent=3)


def _wait(server: Server, what: str) -> None:
    """Ask the user to do ``what``, and return when a line is typed and the server answers."""
    _say(f"\nNow: {what}. Then press Enter; the audit goes on when the server answers.")
    sys.stdin.readline()
    for _ in range(_WAIT):
        with suppress(Unanswered):
            if server.get("/v1/models") is not None:
                return
        sleep(1)
    raise Unanswered(f"no server answered for {_WAIT} seconds after the wait")
