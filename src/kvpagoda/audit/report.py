"""What an audit says: lines for a terminal, plain data for JSON, and one page of HTML that needs no network."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from shlex import quote
from typing import Any

import kvpagoda
from kvpagoda.audit.findings import Finding
from kvpagoda.audit.judge import Audit
from kvpagoda.audit.probes import KINDS
from kvpagoda.audit.verdict import ERROR, LEAST, MOST_ROUNDING, RATIO

_ALSO = 4
"""Lines of what else was seen, on a terminal; a page and JSON have all."""


@dataclass
class Report:
    """The report of an audit.

    Args:
        audit: it has run.
        findings: what it found.
    """

    audit: Audit
    findings: list[Finding]

    @property
    def code(self) -> int:
        """The exit code: 0 clean, 1 findings, 2 cannot be judged."""
        return 1 if self.findings else 2 if self.audit.results.why_not() else 0

    @property
    def verdict(self) -> str:
        """The verdict in a word or two."""
        return ("clean", "findings", "cannot be judged")[self.code]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data; ``docs/json/audit.json`` describes it."""
        audit, results, server = self.audit, self.audit.results, self.audit.server
        noise = results.noise
        return {
            "version": kvpagoda.__version__, "url": server.url, "verdict": self.verdict, "why_not": results.why_not(),
            "is_partial": results.is_partial, "seed": audit.seed, "num_requests": server.num_requests,
            "max_requests": server.max_requests, "seconds": round(results.seconds, 1),
            "findings": [finding.to_dict() for finding in self.findings],
            "noise": {
                "pairs": len(noise.same), "in_pieces": len(noise.pieces), "beside": len(noise.beside),
                "largest": noise.most, "limit": noise.limit, "step": noise.step,
                "by_tokens": noise.by_tokens,
            },
            "hits": {
                "unit": server.profile.unit, "least": server.profile.least, "share_found": self._share(),
                "counted": results.num_counted, "miscounted": len(results.miscounts),
            },
            "judged": [*self._judged()], "skipped": results.skipped, "notes": results.notes,
            "server": server.profile.to_dict(),
        }  # fmt: skip

    def _judged(self) -> Iterator[dict[str, Any]]:
        results = self.audit.results
        for kind in KINDS:
            if trials := results.of_kind(kind):
                yield {
                    "kind": kind, "answers": len(trials), "wrong": sum(bool(trial.is_wrong) for trial in trials),
                    "hits": sum(bool(trial.answer.cached) for trial in trials),
                    "largest": max(trial.distance for trial in trials),
                    "evidence": results.evidence(kind),
                    "is_sure": results.is_sure(kind),
                }  # fmt: skip

    def _share(self) -> float | None:
        """Return the share found of what had been sent before, over all judged requests whose counter is known."""
        pairs = [
            (trial.answer.cached, trial.answer.common)
            for trial in self.audit.results.trials
            if trial.answer.cached is not None and trial.answer.common is not None and trial.answer.common > 2
        ]
        most = sum(common for _, common in pairs)
        return min(1.0, sum(cached for cached, _ in pairs) / most) if most else None

    def lines(self) -> Iterator[str]:
        """Yield the lines for a terminal: findings first, then what was measured."""
        results = self.audit.results
        judged = len(results.of_kind(*KINDS))
        if results.is_partial:
            yield "Interrupted: what follows is what was seen until then."
        if not self.findings:
            why = results.why_not()
            yield (
                f"Cannot be judged: {why}." if why
                else f"Clean: {judged} answers with cached tokens, or beside others, are those of cold runs."
            )  # fmt: skip
        for number, finding in enumerate(self.findings, 1):
            yield f"{number}. {finding.text}."
            yield from (f"   also: {line}" for line in finding.also[:_ALSO])
            if len(finding.also) > _ALSO:
                yield f"   also: {len(finding.also) - _ALSO} more kinds of requests, which are counted below"
            seen = f"   (seen in {finding.seen} of {finding.runs} runs)" if finding.runs else ""
            if finding.file:
                yield f"   again: {self._again(finding)}{seen}"
            yield from (f"   {line}" for line in finding.lines)
            yield ""
        yield ""
        yield from (f"{name}: {value}" for name, value in self.measured())
        yield from (f"not tried: {name}: {why}" for name, why in results.skipped.items())
        yield from (f"note: {note}" for note in results.notes)

    def _again(self, finding: Finding) -> str:
        return f"kvpagoda audit {self.audit.server.url} --replay {quote(finding.file)}"

    def measured(self) -> Iterator[tuple[str, str]]:
        """Yield (name, value) of what was measured, in words."""
        results, server, profile = self.audit.results, self.audit.server, self.audit.server.profile
        noise, share = results.noise, self._share()
        crowds = noise.of_crowds.limit
        beside = "" if crowds == noise.limit else f", beside others over {crowds:.2g}"
        yield "server", f"{server.url}, model {profile.model}" + (f" of {profile.owner}" if profile.owner else "")
        yield (
            "noise",
            "no cold runs were compared"
            if not noise.same
            else f"{len(noise.same)} pairs of cold runs and {len(noise.pieces) or len(noise.beside)} "
            + ("computed in other pieces" if noise.pieces else "beside others")
            + " differ by at most "
            + (f"{noise.most:.2g}" if not noise.by_tokens else f"{noise.most:.0f} answer")
            + ("" if noise.by_tokens else f" nats; an answer counts as wrong over {noise.limit:.2g}{beside}"),
        )
        yield "cold twins", {
            "salt": "a cache_salt that was never used", "off": "cache_prompt: false",
            "churn": f"{profile.churn} other prompts before each",
        }.get(profile.cold, "none")  # fmt: skip
        if profile.unit:
            least = f", the shortest prompt that was found has {profile.least:,}" if profile.least else ""
            yield (
                "hits",
                f"in units of {profile.unit:,} tokens{least}"
                + ("" if share is None else f"; {share:.0%} of what had been sent before was found"),
            )
        if profile.counter and profile.churn:
            filled = f"{profile.churn} other prompts of {profile.churn_length:,} tokens"
            yield "life", f"a prompt was {'gone' if profile.evicts else 'still found'} after {filled}"
        for row in self._judged():
            largest = "" if noise.by_tokens else f", largest difference {row['largest']:.2g}"
            yield row["kind"], f"{row['wrong']} of {row['answers']} wrong, {row['hits']} with cached tokens{largest}"
        counted = f"{results.num_counted} looked at, {len(results.miscounts)} too high"
        yield "counters", counted if profile.counter else "the server has none"
        sent = f"{server.num_requests} of at most {server.max_requests}"
        yield "requests", f"{sent}, {results.seconds:.0f} s, seed {self.audit.seed}, kvpagoda {kvpagoda.__version__}"

    def page(self) -> str:
        """Return a page of HTML, which needs no network."""
        text = (files(__package__) / "page.html").read_text("utf-8")
        results = self.audit.results
        head = {
            "clean": "No wrong cached tokens were found.", "findings": f"{len(self.findings)} found.",
            "cannot be judged": f"Cannot be judged: {results.why_not()}.",
        }[self.verdict]  # fmt: skip
        parts = [f'<p class="verdict {self.verdict.split()[0]}">{escape(head)}</p>']
        if results.is_partial:
            parts.append("<p>Interrupted: this is what was seen until then.</p>")
        for number, finding in enumerate(self.findings, 1):
            also = "".join(f"<li>{escape(line)}</li>" for line in finding.also)
            parts.append(
                f"<section><h2>{number}. {escape(finding.text)}.</h2>"
                + (f"<p>Also:</p><ul>{also}</ul>" if also else "")
                + (f"<p>Again: <code>{escape(self._again(finding))}</code></p>" if finding.file else "")
                + f"<pre>{escape(chr(10).join(finding.lines))}</pre></section>"
            )
        rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in self.measured())
        parts.append(f"<section><h2>Differences</h2>{self._dots()}</section>")
        parts.append(f"<section><h2>What was measured</h2><table>{rows}</table></section>")
        rest = [f"{name} was not tried: {why}" for name, why in results.skipped.items()] + results.notes
        if rest:
            items = "".join(f"<li>{escape(line)}</li>" for line in rest)
            parts.append(f"<section><h2>Not tried, and notes</h2><ul>{items}</ul></section>")
        parts.append(
            f"<p>A judged answer counts as wrong if it differs from two cold twins by more than {RATIO:g} times the largest "
            f"noise and {LEAST:g} nats, beside others {MOST_ROUNDING:g}. A finding has an error of at most {ERROR:g} (a "
            "sequential test over prompts).</p>"
        )
        return text.replace("<!--title-->", escape(f"Audit of {self.audit.server.url}")).replace(
            "<!--body-->", "\n".join(parts)
        )

    def _dots(self) -> str:
        """Return a drawing: a row for each kind, a dot for each answer, at its difference from a cold twin."""
        results = self.audit.results
        noise = results.noise
        rows = [
            ("cold runs", [(one, False) for one in noise.same]),
            ("other pieces", [(one, False) for one in noise.pieces]),
        ]
        for kind in KINDS:
            rows.append((kind, [(trial.distance, bool(trial.is_wrong)) for trial in results.of_kind(kind)]))
        rows = [(name, dots) for name, dots in rows if dots]
        left, right, height = 150, 700, 20

        def x(value: float) -> float:
            return left + (right - left) * (math.log10(min(max(value, 1e-7), 10.0)) + 7) / 8

        parts = [
            f'<svg viewBox="0 0 720 {height * len(rows) + 34}" role="img" aria-label="differences from cold twins, in nats">'
        ]
        for power in range(-7, 2):
            place = f"{x(10.0**power):.0f}"
            parts.append(
                f'<line x1="{place}" x2="{place}" y1="4" y2="{height * len(rows) + 6}" class="grid"/>'
                f'<text x="{place}" y="{height * len(rows) + 22}" text-anchor="middle">'
                f"{'0' if power == -7 else f'1e{power}' if power else '1'}</text>"
            )
        parts.append(
            f'<line x1="{x(noise.limit):.0f}" x2="{x(noise.limit):.0f}" y1="4" y2="{height * len(rows) + 6}" class="limit"/>'
        )
        for number, (name, dots) in enumerate(rows):
            y = height * number + 18
            parts.append(f'<text x="0" y="{y}">{escape(name)}</text>')
            parts += [
                f'<circle cx="{x(value):.1f}" cy="{y - 4}" r="3.5" class="{"wrong" if bad else "right"}"/>'
                for value, bad in dots
            ]
        return "".join(parts) + "</svg><p>Nats, on a logarithmic axis. The line is the limit.</p>"


def as_json(report: Report) -> str:
    """Return the report as JSON text."""
    return json.dumps(report.to_dict(), indent=2)
