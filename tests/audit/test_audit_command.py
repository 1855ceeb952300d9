"""``kvpagoda audit`` as a person uses it: exit codes, files, replays, refusals."""

from __future__ import annotations

import html
import io
import json
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("httpx", reason="no httpx: the extra audit")
import httpx
from fake_server import FakeServer
from planted import PLANTED

from browser import chromium
from json_schema import schema_of, violations
from kvpagoda.audit import audit, command, findings
from kvpagoda.audit.findings import Finding
from kvpagoda.audit.judge import Audit
from kvpagoda.audit.probes import ProbeTexts
from kvpagoda.audit.prompts import Ask, Case, PromptPart, one
from kvpagoda.audit.results import Trial
from kvpagoda.audit.server import Server, ServerAnswer
from kvpagoda.errors import BadInput

Command = Callable[..., "subprocess.CompletedProcess[str]"]
BLATANT, RESTART = "hit one token too long", "wrong after a restart"
READS, SPOILS = "one too short, wrong position", "a layer of another text"


@contextmanager
def served(name: str | None = None, dialect: str = "vllm, text alone", **options: Any) -> Iterator[FakeServer]:
    fault = None if name is None else PLANTED[name](1)
    with FakeServer(fault, dialect, seed=1, **options) as fake:
        yield fake


def test_a_server_that_is_right_is_clean(here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with served() as fake:
        done = here("audit", fake.url, "--max-requests", "120", "--json", "audit.json", "--report", "audit.html")
        assert done.returncode == 0, done.stdout
        assert fake.num_requests <= 120
    assert done.stdout.startswith("Clean: ") and "which fill the server's cache" in done.stderr
    assert not [*tmp_path.glob("finding*")]
    data = json.loads((tmp_path / "audit.json").read_text())
    assert violations(data, schema_of("audit")) == []
    assert (data["verdict"], data["hits"]["unit"], data["hits"]["least"]) == ("clean", 16, 17)
    assert data["findings"] == [] and data["noise"]["largest"] < 1e-9 and data["hits"]["share_found"] > 0.5
    assert "No wrong cached tokens were found." in (tmp_path / "audit.html").read_text()


def test_a_fault_is_found_shown_again_and_gone_when_it_is_mended(
    here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with served(BLATANT) as fake:
        done = here("audit", fake.url, "--max-requests", "120", "--json", "-", "--save", str(tmp_path))
        assert done.returncode == 1
        again = here("audit", fake.url, "--replay", "finding-1.json")
        assert again.returncode == 1 and "seen in 2 of 2 runs" in again.stdout
    data = json.loads(done.stdout)
    assert violations(data, schema_of("audit")) == []
    (finding,) = data["findings"]
    assert finding["sort"] == "rows" and finding["kind"] == "repeat" and finding["wrong"] == finding["judged"]
    curls = [line for line in finding["lines"] if line.startswith("curl")]
    assert len(curls) == 3  # the prompt, the prompt again, and its cold twin: the smallest case
    assert "cache_salt" in curls[2] and "cache_salt" not in curls[1]
    assert (finding["seen"], finding["runs"]) == (2, 2) and "was wrong again in 4 of 4" in finding["also"][0]
    assert finding["lines"][-1].startswith("# seen, at token ")
    with served() as mended:
        good = here("audit", mended.url, "--replay", "finding-1.json")
        assert good.returncode == 0 and "seen in 0 of 20 runs" in good.stdout
        assert "it shows in less than 14% of the runs" in good.stdout


def test_findings_of_an_earlier_audit_stay(here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "a folder"
    folder.mkdir()
    (folder / "finding-3.json").write_text("of an earlier audit")
    with served(BLATANT) as fake:
        saved = ("--save", "a folder", "--json", "audit.json", "--report", "audit.html")
        done = here("audit", fake.url, "--max-requests", "120", *saved)
        command = f"kvpagoda audit {fake.url} --replay 'a folder/finding-4.json'"
        assert (
            command in " ".join(done.stdout.split()) and html.escape(command) in (tmp_path / "audit.html").read_text()
        )
        (finding,) = json.loads((tmp_path / "audit.json").read_text())["findings"]
        assert here("audit", fake.url, "--replay", finding["file"]).returncode == 1
    assert (folder / "finding-3.json").read_text() == "of an earlier audit"
    assert sorted(path.name for path in folder.iterdir()) == ["finding-3.json", "finding-4.json"]


@pytest.mark.parametrize(
    ("name", "seed", "again"),
    [
        (READS, 5, "what is cached is right, and is read wrongly now and then"),
        (SPOILS, 4, "what is cached was spoiled, and stays so"),
    ],
)
def test_a_fault_of_one_hit_in_some_is_shown_as_often_as_it_takes(name: str, seed: int, again: str) -> None:
    fault = PLANTED[name](seed, 0.25)
    with FakeServer(fault, "vllm, text alone", seed=1) as fake, Server(fake.url) as server:
        judge = Audit(server, 4)
        judge.prepare()
        judge.measure_noise(6)
        texts = ProbeTexts(judge.runner.draw, server.profile)
        ask = texts.ask(texts.new(40))
        finding = Finding("rows", "repeat", "", 1, 1, 1.0, Case("hits", one(ask, replace(ask, kind="repeat"))), [])
        trial = findings._seen_again(judge, finding)
        assert trial is not None and again in finding.also[0]
        assert 0 < finding.seen < finding.runs <= 6
        finding.lines = findings._lines(judge, trial.case, trial.answers, "compare")
        (often,) = findings._how_often(finding)
        times = int(re.search(r"up to (\d+) times", often)[1])  # type: ignore[index]
        curls = [json.loads(shlex.split(line)[-1]) for line in finding.lines if line.startswith("curl")]
        answers = [
            httpx.post(f"{fake.url}/v1/completions", json=body).json() for body in [curls[1]] * times + [curls[2]]
        ]
    values = [answer["choices"][0]["logprobs"]["token_logprobs"] for answer in answers]
    assert any(value != values[-1] for value in values[:-1])


def test_values_are_those_of_the_nearer_twin() -> None:
    """The other one is shorter, or has no log-probabilities: it has no token there."""
    tops = [{"a": -1.0}, {"b": -1.0}, {"c": -1.0}]
    wrong = ServerAnswer("abc", ("a", "b", "c"), tuple(tops))
    near = replace(wrong, tops=(*tops[:2], {"c": -3.0}))
    far = replace(wrong, tops=({"a": -9.0},), tokens=("a",))
    ask = Ask((PromptPart((1,)),), "repeat")
    trial = Trial(Case("hits", one(ask)), 0, ask, [], wrong, "key")
    trial.at, trial.twins = 3, [far, near]
    assert findings._values(trial) == ["# seen, at token 3: 'c' -1; cold: 'c' -3"]
    trial.twins = [replace(far, tops=())]
    assert findings._values(trial) == ["# seen: 'abc'; cold: 'abc'"]


def test_a_program_may_call_it() -> None:
    with served(BLATANT) as fake:
        report = audit(fake.url, max_requests=120, seed=3)
        assert not any("--replay" in line for line in report.lines()), "nothing is saved"
        assert report.code == 1 and fake.num_requests <= 120
        assert violations(report.to_dict(), schema_of("audit")) == []
    with pytest.raises(BadInput) as raised:
        audit("http://127.0.0.1:1", cold="never")
    assert raised.value.needed == "never"


def test_after_the_user_has_done_something(here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with served(RESTART, disk=str(tmp_path / "disk")) as fake:

        class Keyboard(io.StringIO):
            def readline(self, *_: Any) -> str:
                fake.restart()
                return "\n"

        monkeypatch.setattr("sys.stdin", Keyboard())
        done = here("audit", fake.url, "--after", "restart", "--max-requests", "260")
    assert done.returncode == 1 and "After the wait, the same prompt" in done.stdout and "Now: restart" in done.stderr


def test_what_a_server_lacks_is_named(here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with served(dialect="vllm, no counter") as fake:
        done = here("audit", fake.url, "--max-requests", "120")
    assert done.returncode == 0 and "--enable-prompt-tokens-details" in done.stdout
    with served(caches=False) as fake:
        done = here("audit", fake.url, "--max-requests", "150")
    assert done.returncode == 2 and "is prefix caching on?" in done.stdout


def test_too_few_requests_judge_nothing(here: Command) -> None:
    with served() as fake:
        done = here("audit", f"{fake.url}/v1/completions", "--max-requests", "30")
    assert done.returncode == 2 and done.stdout.startswith("Cannot be judged: only 0 answers")
    assert "raise --max-requests" in " ".join(done.stdout.split())
    assert "no cold runs were compared" in done.stdout


def test_a_way_to_be_cold_that_does_not_work_is_refused(here: Command) -> None:
    with served() as fake:
        done = here("audit", fake.url, "--cold", "off")
    assert done.returncode == 2 and "does not make prompts cold here; what does: salt" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["http://10.1.2.3:8000"], "--remote"),
        (["http://127.0.0.1:1"], "no server answers"),
        (["http://127.0.0.1:80a"], "an address such as"),
        (["http://127.0.0.1:99999"], "an address such as"),
        (["http://127.0.0.1:1", "--api-key-env", "NO_SUCH_KEY"], "NO_SUCH_KEY"),
        (["http://127.0.0.1:1", "--cold", "sald"], "did you mean 'salt'?"),
        (["http://127.0.0.1:1", "--max-requests", "0"], "--max-requests"),
        (["http://127.0.0.1:1", "--replay", "nothing.json"], "nothing.json"),
        (["http://127.0.0.1:1", "--report", "no/folder.html"], "no/folder.html"),
        (["http://127.0.0.1:1", "--save", "no-folder"], "no-folder, which is no folder"),
    ],
)
def test_bad_input_is_one_line(
    here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = here("audit", *arguments)
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1 and not done.stdout


def test_a_model_that_is_not_there_is_named(here: Command) -> None:
    with served() as fake:
        done = here("audit", fake.url, "--model", "fake-hibrid")
    assert done.returncode == 2 and "did you mean 'fake-hybrid'?" in done.stderr


@pytest.mark.parametrize("data", ["{}", "[1]", '{"version": 9, "profile": {}, "case": {}, "sort": "rows"}', "not JSON"])
def test_what_is_no_replay_is_refused(here: Command, tmp_path: Path, data: str) -> None:
    path = tmp_path / "finding.json"
    path.write_text(data)
    done = here("audit", "http://127.0.0.1:1", "--replay", str(path))
    assert done.returncode == 2 and done.stderr.count("\n") == 1


def test_the_key_is_sent_and_shown_nowhere(here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KEY_OF_TESTS", "sesame")
    keys = []
    monkeypatch.setattr(command, "Server", lambda *given, **options: keys.append(given[1]) or _raise())
    done = here("audit", "http://127.0.0.1:1", "--api-key-env", "KEY_OF_TESTS")
    assert keys == ["sesame"] and "sesame" not in done.stdout + done.stderr


def _raise() -> None:
    raise command.BadInput("enough")


def test_ctrl_c_reports_what_was_seen(here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rounds = Audit._rounds

    def interrupted(audit: Audit) -> None:
        def on_request(done: int) -> None:
            if done == 100:
                raise KeyboardInterrupt

        audit.server.on_request = on_request
        rounds(audit)

    monkeypatch.setattr(Audit, "_rounds", interrupted)
    with served() as fake:
        done = here("audit", fake.url, "--json", "audit.json")
        assert fake.num_requests < 110
    assert done.returncode == 130 and done.stdout.startswith("Interrupted")
    assert json.loads((tmp_path / "audit.json").read_text())["is_partial"]
    with served(BLATANT) as fake:
        done = here("audit", fake.url)
    assert done.returncode == 1 and "The same prompt, asked again," in done.stdout


def test_a_server_that_goes_away_cannot_be_judged(
    here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rounds = Audit._rounds
    with served() as fake:

        def gone(audit: Audit) -> None:
            audit.server.url = "http://127.0.0.1:1"
            rounds(audit)

        monkeypatch.setattr(Audit, "_rounds", gone)
        done = here("audit", fake.url)
    assert done.returncode == 2 and "Cannot be judged: the server does not answer any more" in done.stdout


def test_the_page_is_shown_without_network(here: Command, tmp_path: Path) -> None:
    page = tmp_path / "audit.html"
    with served(BLATANT) as fake:
        here("audit", fake.url, "--max-requests", "200", "--report", str(page), "--save", str(tmp_path))
    text = page.read_text()
    assert "http" not in text.replace(fake.url, "") and "<script" not in text
    with chromium() as browser:
        tab = browser.new_page(offline=True)
        asked: list[str] = []
        tab.on("request", lambda request: asked.append(request.url))
        tab.goto(page.as_uri())
        assert asked == [page.as_uri()]
        assert tab.locator("h2").first.inner_text().startswith("1. The same prompt, asked again,")
        assert tab.locator("circle.wrong").count() > 3 and tab.locator("svg").bounding_box()["height"] > 100
        width = tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert width <= 0
