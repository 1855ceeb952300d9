"""The command line: ``kvpagoda plan``, ``layout``, ``generate``, ``replay``, ``bench``, ``router``, ``tier`` and others.

The exit code is 0, or 2 on bad input and where the output is full, with one line on standard error; 1 where nobody reads the
output any more; 130 after Ctrl-C. ``doctor`` exits with 1 if something is broken; ``audit`` if it found something, and with 2
if it could not judge.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from shutil import get_terminal_size
from typing import Annotated, Any, TypeVar

from kvpagoda.compat.deepseek_v4 import PRESETS
from kvpagoda.errors import BadInput, KVPagodaError, SchemaError, unknown_name
from kvpagoda.schema import Schema
from kvpagoda.schema.config_source import config_named
from kvpagoda.schema.families import known_types
from kvpagoda.schema.kv_format import KVFormatNames, as_text, parsed
from kvpagoda.schema.presets import presets
from kvpagoda.text import json_of, numbers_of, text_in, words_of
from kvpagoda.units import format_bytes
from kvpagoda.version import installed

try:
    import typer
except ImportError:
    if sys.argv[1:2] == ["--version"]:
        print(json.dumps(installed().to_dict(), indent=2) if "--json" in sys.argv else installed())
        raise SystemExit(0) from None
    print("kvpagoda: the command line needs the cli extra: pip install 'kvpagoda[cli]'", file=sys.stderr)
    raise SystemExit(2) from None

F = TypeVar("F", bound=Callable[..., None])
UsageError: Any = typer.BadParameter.__base__  # of click, or of the copy of click inside newer versions of typer
CONFIG = "config.json, a folder that holds one, or a preset such as qwen3-8b ('kvpagoda plan --presets' lists them)"
ENGINES = "kvpagoda, vllm-0.33, sglang-0.5.23, dynamo-1.6.1, dynamo-1.6.1-trtllm"
KV_FORMAT = "raw; or fp8, int8, nvfp4 and others, for all layers, or by layer kind: full=fp8,window=raw"
model_option = partial(typer.Option, rich_help_panel="Model")
memory_option = partial(typer.Option, rich_help_panel="Memory and requests")
rank_option = partial(typer.Option, rich_help_panel="Ranks")
answer_option = partial(typer.Option, rich_help_panel="Prompts and answers")
cache_option = partial(typer.Option, rich_help_panel="Cache")
trace_option = partial(typer.Option, rich_help_panel="Which requests")
blocks_option = partial(typer.Option, rich_help_panel="A cache of blocks")
layers_option = partial(typer.Option, rich_help_panel="A cache with a model's layers")
file_option = partial(typer.Option, rich_help_panel="Files to write")
lines_option = partial(typer.Option, rich_help_panel="Requests one by one")
worker_option = partial(typer.Option, rich_help_panel="Workers and their steps")
Tiers = Annotated[
    list[str] | None, cache_option(help="host:4GiB, disk:FOLDER:50GiB or redis://HOST:PORT; repeat for several tiers")
]
Limit = Annotated[int | None, trace_option(help="run only this many requests, the first of the file")]
TokensPerId = Annotated[
    int | None, trace_option(help="tokens that an id of the trace stands for (default: what the trace says, or 512)")
]
SkipBad = Annotated[bool, trace_option("--skip-bad", help="leave out lines that cannot be read, and say so")]
AsJson = Annotated[bool, typer.Option("--json", help="print the results as JSON")]
WIDTH = get_terminal_size().columns
app_settings: dict[str, Any] = {
    "add_completion": False, "pretty_exceptions_enable": False,
    "rich_markup_mode": "rich" if WIDTH >= 80 else None, "context_settings": {"terminal_width": WIDTH},
}  # fmt: skip
app, gpu_app = typer.Typer(**app_settings), typer.Typer(**app_settings)
"""Rich's framed help cuts the names of options on a narrow terminal, so below 80 columns the help has no frame."""


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn an error of this library, of a file or of an output into one line on standard error and exit code 2; where nobody
    reads standard output any more, into exit code 1 alone."""
    try:
        yield
        _flush()
    except BrokenPipeError:
        _drop_output()
        raise SystemExit(1) from None
    except (KVPagodaError, OSError, UnicodeError) as error:
        said = str(error)
    except RecursionError:
        said = "the input is nested too deeply"
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        said = "this command needs torch; pip install 'kvpagoda[torch]'"
    else:
        return
    _drop_output()
    with suppress(OSError):
        typer.echo(f"kvpagoda: {' '.join(said.split())}", err=True)
    raise SystemExit(2)


def _flush() -> None:
    if sys.stdout is not None:  # it is where standard output is closed
        sys.stdout.flush()


def _drop_output() -> None:
    """Drop what standard output has not taken, if it takes nothing more: else the interpreter complains at its end."""
    try:
        _flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="print the version, the commit and the installed extras, and exit")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="with --version: print them as JSON")] = False,
) -> None:
    """The KV-cache memory system for LLM inference engines."""
    if version:
        typer.echo(json.dumps(installed().to_dict(), indent=2) if as_json else str(installed()))
        raise typer.Exit
    if as_json:
        raise typer.BadParameter("--json before a command goes with --version; else write it after the command")
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _list_presets(wanted: bool) -> None:
    if wanted:
        typer.echo("\n".join([*PRESETS, *presets()]))
        raise typer.Exit


def command(name: str | None = None, to: typer.Typer = app, **settings: Any) -> Callable[[F], F]:
    """As ``to.command``; the help is the docstring, with its lines joined: Rich breaks them again."""

    def added(function: F) -> F:
        paragraphs = (function.__doc__ or "").split("\n\n")
        text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
        return to.command(name, help=text, **settings)(function)

    return added


@command()
def plan(
    config: Annotated[str, typer.Argument(help=CONFIG)],
    dtype: Annotated[str | None, model_option(help="dtype of the cached rows (default: the config's)")] = None,
    kv_format: Annotated[
        str, model_option(help="auto (what the config's quantisation says, else raw); " + KV_FORMAT)
    ] = "auto",
    layout: Annotated[str | None, model_option(help="layouts by name, e.g. flashmla-v32,deepgemm-indexer")] = None,
    draft: Annotated[
        str | None, model_option(help="layers of a draft: mtp (the model's own), or a config as CONFIG")
    ] = None,
    kernel: Annotated[list[str] | None, model_option(help="a kernel to plan for, e.g. flashmla-sparse-sm100")] = None,
    kernel_page: Annotated[int | None, model_option(help="tokens per kernel page (default: a block)")] = None,
    budget: Annotated[str, memory_option(help="memory for the cache, e.g. 40GiB")] = "40GiB",
    max_requests: Annotated[int, memory_option(help="the most requests that run at once")] = 256,
    block_size: Annotated[int | None, memory_option(help="tokens per block (default: what the layers need)")] = None,
    lengths: Annotated[str, memory_option(help="request lengths in tokens")] = "1024,8192,32768,131072",
    tp: Annotated[int, rank_option(help="number of tensor-parallel ranks")] = 1,
    pp: Annotated[int, rank_option(help="number of pipeline stages")] = 1,
    stage: Annotated[int, rank_option(help="the pipeline stage to plan, from 0")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="print the plan as JSON")] = False,
    list_presets: Annotated[
        bool, typer.Option("--presets", help="list the presets and exit", is_eager=True, callback=_list_presets)
    ] = False,
) -> None:
    """Print what a budget holds: bytes per token and request, blocks, states, and how many requests of a length fit."""
    from kvpagoda import console

    schema = _schema(config, dtype, parsed(kv_format), draft)
    schema = (schema if layout is None else schema.laid_out(words_of(layout))).split(tp=tp, pp=pp, rank=stage)
    sizes: dict[str, Any] = {"block_size": block_size, "kernel_page": kernel_page, "kernels": kernel or ()}
    try:
        made = schema.plan(budget, max_requests, lengths=numbers_of(lengths, "--lengths", "tokens"), **sizes)
    except SchemaError as error:
        text, fits, _ = str(error).partition("it fits with layout=")
        raise SchemaError(f"{text}it fits with --layout {','.join(error.available)}" if fits else text) from None
    typer.echo(json.dumps(made.to_dict(), indent=2) if as_json else made.text(console.output().width))
    preset = presets().get(schema.name, {})
    if (why := preset.get("unverified")) is not None:
        typer.echo(f"{schema.name} is unverified: {why}", err=True)
    model_type = preset.get("config", {}).get("model_type", schema.name)
    if (remark := known_types().get(model_type, {}).get("remark")) is not None:
        typer.echo(f"{schema.name}: {remark}", err=True)


def _schema(config: str, dtype: str | None, kv_format: KVFormatNames, draft: str | None = None) -> Schema:
    """Return the schema of ``config``: a config file, a folder that holds one, or a preset; with the layers of ``draft``.
    Raises BadInput."""
    if config.lower() not in PRESETS or Path(config).exists():
        name, data = config_named(config, PRESETS)
        schema = Schema.from_hf_config(data, dtype=dtype, kv_format=kv_format, draft=draft)
        return schema if name is None else replace(schema, name=name)
    kv_format = "raw" if kv_format == "auto" else kv_format
    if dtype is not None and kv_format != "raw":
        raise BadInput(
            f"--dtype {dtype} is for raw rows: those of --kv-format {as_text(kv_format)} have dtypes of their own"
        )
    if draft is not None:
        raise BadInput(f"--draft needs a config of the model, which the preset {config} has not; give its config.json")
    schema = PRESETS[config.lower()](kv_format)
    return schema if dtype is None else schema.cast(dtype)


@command()
def layout(
    source: Annotated[
        str, typer.Argument(help="a layout: NAME[,size=number..][,tp=ranks][,pp=stages], or a JSON file")
    ],
    target: Annotated[str | None, typer.Argument(help="a second layout of the same content to copy to")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the layouts and the copy as JSON")] = False,
) -> None:
    """Print where the bytes of a layout are, and what a copy from one layout to another costs.

    kvpagoda layout vllm-flashinfer,page_size=16,layers=32,tp=2 trtllm,page_size=32,layers=32
    """
    from kvpagoda.layouts import read, reshard

    sides = {name: read(text) for name, text in (("source", source), ("target", target)) if text is not None}
    made = reshard(sides["source"], sides["target"]) if target is not None else None
    if as_json:
        figures: dict[str, Any] = {name: [rank.to_dict() for rank in ranks] for name, ranks in sides.items()}
        typer.echo(json.dumps(figures if made is None else {**figures, "copy": made.to_dict()}, indent=2))
        return
    for name, ranks in sides.items():
        typer.echo(f"{name}, rank 0 of {len(ranks)}: {ranks[0]}\n" if len(ranks) > 1 else f"{name}: {ranks[0]}\n")
    if made is not None:
        typer.echo(f"copy: {made}")


@command()
def generate(
    model: Annotated[
        str | None, model_option(help="name or folder of a transformers model (default: the package's own)")
    ] = None,
    prompts: Annotated[Path | None, answer_option(help="a file, one prompt per line (default: built-in ones)")] = None,
    max_new_tokens: Annotated[int, answer_option(help="the most tokens to generate for each prompt")] = 64,
    budget: Annotated[str, cache_option(help="memory for the cache")] = "64MiB",
    max_requests: Annotated[int, cache_option(help="the most requests that run at once; others wait")] = 4,
    prefill_chunk: Annotated[int, cache_option(help="the most prompt tokens of one request in one step")] = 256,
    samples: Annotated[int, answer_option(help="answers for each prompt; the prompt is computed once")] = 1,
    temperature: Annotated[float, answer_option(help="0 takes the likeliest token; above 0 tokens are sampled")] = 0.0,
    seed: Annotated[int, answer_option(help="seed of the sampled tokens")] = 0,
    lookup: Annotated[int, answer_option(help="the most tokens to propose by prompt lookup in a step")] = 0,
    kv_format: Annotated[str, model_option(help=KV_FORMAT)] = "raw",
    tier: Tiers = None,
    dtype: Annotated[str, model_option(help="dtype in which to load --model")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="print results and counters as JSON")] = False,
) -> None:
    """Generate text for many prompts at once, with the model's whole cache in kvpagoda.

    The package's own model shows the time to the first token: cold, warm, and in a new process that finds the cached
    prompts on a disk, in a temporary folder.

    Give several tiers in the order of their speed, the fastest first.
    """
    from kvpagoda import console

    try:
        with console.waiting("loading torch and transformers"):
            from kvpagoda.hf import Sampling, report
        from kvpagoda.tiers import tier_from_text
    except ImportError as error:
        raise BadInput(f"'generate' needs the hf extra: pip install 'kvpagoda[hf]' ({error})") from None
    report.run(
        model, prompts, as_json,
        dict(
            budget=budget, max_requests=max_requests, prefill_chunk=prefill_chunk, lookup=lookup,
            kv_format=parsed(kv_format),
            tiers=[tier_from_text(text) for text in tier or ()],
        ),
        dict(max_new_tokens=max_new_tokens, n=samples, sampling=Sampling(temperature, seed=seed)), dtype,
    )  # fmt: skip


@command("replay")
def replay_trace(
    trace: Annotated[
        list[Path] | None,
        typer.Argument(help="traces, plain or gzip, or folders (default: a synthetic workload)", show_default=False),
    ] = None,
    capacity: Annotated[
        str | None, blocks_option(help="blocks, with commas (default: 1 to 50 % of the different ones)")
    ] = None,
    policy: Annotated[
        str | None,
        blocks_option(
            help="lru, fifo, lfu, lfuda, sieve, s3fifo, arc, auto, block-fifo, opt, with commas; your own: FILE.py:CLASS "
            "(default: lru,s3fifo,opt; with --schema: lru,s3fifo; with --workers: lru)"
        ),
    ] = None,
    engine: Annotated[
        str | None,
        blocks_option(
            help=f"with --capacity: another engine's cache, {ENGINES}; settings follow, e.g. vllm-0.33,block_size=64"
        ),
    ] = None,
    hints: Annotated[
        bool, blocks_option("--hints", help="also run LRU that is told what the application knew")
    ] = False,
    schema: Annotated[str | None, layers_option(help="the model: " + CONFIG)] = None,
    budget: Annotated[str | None, layers_option(help="memory of the cache, with commas (default: 40GiB)")] = None,
    max_requests: Annotated[int | None, layers_option(help="the most requests that run at once (default: 64)")] = None,
    checkpoint_every: Annotated[
        str | None, layers_option(help="blocks between two checkpoints of states, with commas (default: none added)")
    ] = None,
    workers: Annotated[
        int | None,
        layers_option(help="caches that share the trace, each in a process; without --schema the same as --jobs"),
    ] = None,
    store: Annotated[str | None, layers_option(help="with --workers: the shared store: redis://HOST:PORT, ..")] = None,
    limit: Limit = None,
    warm_up: Annotated[
        float, trace_option(help="share of the requests that run first and are not counted, 0 to 1")
    ] = 0.0,
    file_order: Annotated[
        bool, trace_option("--file-order", help="leave requests in the order of the file (default: sorted by arrival)")
    ] = False,
    skip_bad: SkipBad = False,
    tokens_per_id: TokensPerId = None,
    seed: Annotated[int, trace_option(help="seed of the synthetic workload")] = 0,
    plot: Annotated[Path | None, file_option(help="a plot of the hit rates, e.g. rates.png")] = None,
    requests: Annotated[Path | None, file_option(help="the hits of each request, as lines of JSON")] = None,
    timeline: Annotated[Path | None, file_option("--trace", help="trace events of one replay, for Perfetto")] = None,
    page: Annotated[Path | None, file_option("--report", help="a page of figures, e.g. out.html")] = None,
    json_lines: Annotated[
        Path | None, lines_option("--json-lines", help="answer requests as they come, from this file or pipe; -: stdin")
    ] = None,
    strict: Annotated[bool, lines_option("--strict", help="with --json-lines: end at the first bad line")] = False,
    jobs: Annotated[int | None, typer.Option(help="replays at once, each in a process (default: one per core)")] = None,
    as_json: AsJson = False,
) -> None:
    """Print the hit rate of a prefix cache at each capacity, evictions, reuse distances and the working set of a trace.

    The policy opt is a bound: it knows the future. With --schema it takes seconds, and runs if it is named.

    With --schema a cache with the model's layers serves the trace, without memory behind it.

    With --schema --workers several caches share the requests of the trace, and the store below them.

    Several traces, capacities, budgets and policies are replayed at once. Ctrl-C prints those that are done; the exit code is
    130 then.

    With --json-lines each line of standard input is a request, and is answered by a line at once.
    """
    given = locals()
    from kvpagoda.replay.command import Options, run

    layers = None if schema is None else _schema(schema, None, "auto")
    is_partial = run(Options(**{**given, "schema": layers}))
    if is_partial:
        raise typer.Exit(130)


@command("simulate")
def simulate_trace(
    trace: Annotated[
        Path | None, typer.Argument(help="a trace, plain or gzip (default: a synthetic workload)", show_default=False)
    ] = None,
    schema: Annotated[str, cache_option(help="the model's layers: " + CONFIG)] = "llama-3.1-8b",
    budget: Annotated[str, cache_option(help="memory of each worker's cache, with commas")] = "40GiB",
    costs: Annotated[
        str, worker_option(help="h100, h100:MODEL, 4xh100:MODEL (MODEL: default --schema), a JSON file, or none")
    ] = "h100",
    workers: Annotated[str, worker_option(help="number of caches, with commas")] = "1",
    routing: Annotated[str, worker_option(help="round-robin, random, prefix-aware, with commas")] = "round-robin",
    policy: Annotated[str, cache_option(help="lru, fifo, lfu, lfuda, sieve, s3fifo, arc, auto, with commas")] = "lru",
    engine: Annotated[
        str,
        cache_option(
            help=f"whose cache, with commas: {ENGINES}; settings follow, e.g. vllm-0.33,watermark=0.1,retention=none"
        ),
    ] = "kvpagoda",
    tier: Annotated[
        list[str] | None, cache_option(help="below each cache: host:400GiB, disk:4TiB, ..; repeat, the fastest first")
    ] = None,
    max_requests: Annotated[int, worker_option(help="the most requests that run at once on a worker")] = 64,
    step_tokens: Annotated[int, worker_option(help="the most tokens that a step computes")] = 2048,
    block_size: Annotated[int | None, cache_option(help="tokens per block (default: what the layers need)")] = None,
    tokens_per_id: TokensPerId = None,
    limit: Limit = None,
    skip_bad: SkipBad = False,
    seed: Annotated[int, trace_option(help="seed of random routing, and of the synthetic workload")] = 0,
    as_json: AsJson = False,
) -> None:
    """Serve a trace at its times of arrival with caches that have a clock, and print hits and times to tokens.

    Steps take what --costs says; nothing of a GPU is modelled. Ctrl-C prints what is done so far, and exits with 130.
    """
    from kvpagoda.replay import report
    from kvpagoda.replay.engine_sheet import engines_from_text
    from kvpagoda.replay.fleet import report as fleet_report
    from kvpagoda.replay.fleet.costs import Costs
    from kvpagoda.replay.setup import Fleet, Setup

    layers = _schema(schema, None, "auto")
    source = partial(report.read, trace, limit, False, seed, tokens_per_id, skip_bad)
    counts = numbers_of(workers, "--workers", "workers")
    cases = list(product(words_of(budget), words_of(policy), engines_from_text(engine), counts, words_of(routing)))
    tiers = {kind: size for kind, _, size in (text.partition(":") for text in tier or ())}
    setup = Setup(layers, budget, max_requests=max_requests, step_tokens=step_tokens, block_size=block_size)
    fleet = Fleet(Costs.read(costs, layers.name), tiers=tiers, seed=seed)
    is_partial = fleet_report.run(source, setup, fleet, cases, tokens_per_id, as_json)
    if is_partial:
        raise typer.Exit(130)


@command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)
def bench(context: typer.Context) -> None:
    """Measure the host path beside other installed engines (in a source checkout; --help there lists the options), or a GPU:
    bench gpu, which needs no checkout."""
    if context.args[:1] == ["gpu"]:
        raise typer.Exit(gpu_app(context.args[1:], "kvpagoda bench gpu", standalone_mode=False) or 0)
    root = Path(__file__).parents[2]
    if not (root / "benchmarks" / "__main__.py").exists():
        if "--help" not in context.args:
            raise BadInput(
                f"the benchmarks are in the repository, not in the package: no {root / 'benchmarks'}; "
                "'kvpagoda bench gpu' measures a GPU from here too"
            )
        typer.echo(context.get_help())
        return
    raise typer.Exit(subprocess.run([sys.executable, "-m", "benchmarks", *context.args], cwd=root).returncode)


@command(to=gpu_app)
def bench_gpu(
    save: Annotated[
        bool,
        typer.Option("--save", help="keep the figures in gpu_CARD.json: in benchmarks/results of a checkout, or here"),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Measure this library on the GPU of this machine, in about a minute (the first time kernels are compiled, too): decode
    steps, appends and gathers of every format, copies of blocks, a host tier, suspend and resume.

    Figures are shares of what the card itself does in the same run, or times of the host; each stands beside its bound.

    The exit code is 1 if a case failed, 2 without a GPU, and 130 after Ctrl-C, which prints what is done.
    """
    from kvpagoda import console
    from kvpagoda.bench_gpu import report
    from kvpagoda.bench_gpu.card import Card
    from kvpagoda.bench_gpu.measure import result
    from kvpagoda.bench_gpu.rows import RowSizes

    card = Card()
    if not as_json:
        console.say(report.title(card.facts()))
    rows, is_partial = report.bench(card, RowSizes())
    found = result(card, rows)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        out = console.output()
        out.print("\n" + report.text(rows, out.width), soft_wrap=True)
    if save and not is_partial:
        typer.echo(f"saved as {report.save(found)}", err=True)
    if is_partial or any(row.failed for row in rows):
        raise typer.Exit(130 if is_partial else 1)


@command()
def router(
    worker: Annotated[
        list[str] | None,
        typer.Argument(help="NAME=ENDPOINT,REPLAY of an engine's publisher, e.g. a=tcp://a:5557,tcp://a:5558"),
    ] = None,
    workers: Annotated[
        Path | None, typer.Option(help='a JSON file with more: {"NAME": ["ENDPOINT", "REPLAY"]}')
    ] = None,
    host: Annotated[str, typer.Option(help="the address to serve on; there is no authentication")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="the port to serve on; 0: a free one")] = 8470,
    topic: Annotated[str, typer.Option(help="the topic of the publishers")] = "",
    secret_file: Annotated[
        Path | None, typer.Option(help="a file with the secret of the caches' Identity, at most 64 bytes")
    ] = None,
    engine: Annotated[
        str, typer.Option(help="who publishes: kvpagoda, or vllm (its own events, from --kv-events-config)")
    ] = "kvpagoda",
    drafts: Annotated[
        bool, typer.Option("--drafts", help="the vLLM engines speculate with EAGLE or MTP: scores are at most")
    ] = False,
) -> None:
    """Serve over HTTP how many tokens of a prompt each engine could resume: POST /score, GET /health.

    The engines publish with kvpagoda.events.Publisher, or with vLLM's own publisher (--engine vllm).
    """
    with suppress(KeyboardInterrupt):
        from kvpagoda.events import Follower, Router, RouterServer, VllmFollower

        secret = b"" if secret_file is None else secret_file.read_bytes()
        makers: dict[str, Callable[[], Follower | VllmFollower]] = {
            "kvpagoda": partial(Follower, secret),
            "vllm": partial(VllmFollower, drafts=drafts),
        }
        if engine not in makers:
            raise unknown_name("engine", engine, makers)
        followed = Router(_workers(worker or [], workers), topic=topic, follower=makers[engine])
        with followed, RouterServer(followed, host, port) as server:
            typer.echo(f"{len(followed.workers)} workers at {server.url}/score")
            server.wait()


def _workers(given: list[str], file: Path | None) -> dict[str, tuple[str, str]]:
    """Return name -> (endpoint, replay endpoint) of the workers on the command line and in ``file``. Raises BadInput."""
    try:
        listed: Any = {} if file is None else json_of(text_in(file))
        pairs = [(name, *ends) for name, ends in listed.items()]
    except (ValueError, AttributeError, TypeError) as error:
        raise BadInput(f'{file} must hold JSON like {{"NAME": ["ENDPOINT", "REPLAY"]}}: {error}') from None
    for text in given:
        name, _, rest = text.partition("=")
        pairs.append((name, *rest.split(",")))
    found = dict[str, tuple[str, str]]()
    for name, *ends in pairs:
        if len(ends) != 2 or not all(isinstance(end, str) and end for end in (name, *ends)):
            raise BadInput(f"a worker is NAME=ENDPOINT,REPLAY, got {name!r} with {len(ends)} endpoints: {ends}")
        if name in found:
            raise BadInput(f"two workers are named {name!r}")
        found[name] = (ends[0], ends[1])
    return found


@command()
def top(
    source: Annotated[
        list[str],
        typer.Argument(help="addresses that serve metrics, e.g. localhost:9100, or files; several: one table"),
    ],
    every: Annotated[float, typer.Option(help="seconds between two updates")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="print one table and exit")] = False,
    vllm: Annotated[str, typer.Option(help="prefix of vLLM's metric names, see CacheCollector")] = "vllm:",
    as_json: Annotated[bool, typer.Option("--json", help="print a line of JSON each time")] = False,
) -> None:
    """Show the metrics of running caches: blocks by state, hits and what limited them, tiers, requests.

    A kvpagoda.metrics.CacheCollector in the serving process exports these metrics.
    """
    with suppress(KeyboardInterrupt):
        from kvpagoda.metrics.top import run

        run(source, every, once=once, as_json=as_json, vllm=vllm)


@command("dashboard")
def print_dashboard() -> None:
    """Print a dashboard for Grafana, as JSON to import, of the metrics that a CacheCollector exports."""
    from kvpagoda.metrics import dashboard

    typer.echo(dashboard())


@command()
def tier(
    folder: Annotated[Path, typer.Argument(help="the FOLDER of disk:FOLDER:SIZE")],
    clean: Annotated[bool, typer.Option("--clean", help="delete the files; refused while a process uses one")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the files as JSON")] = False,
) -> None:
    """Show what tiers on a disk keep in a folder, for each engine and rank, and delete it."""
    from kvpagoda.tiers.disk import delete_tier_files, tier_files

    files = tier_files(folder)
    freed = delete_tier_files(folder) if clean else 0
    if as_json:
        shown = [{**asdict(file), "path": str(file.path)} for file in files]
        typer.echo(json.dumps({"files": shown, "deleted_nbytes": freed}, indent=2))
        return
    for file in files:
        held = f"{file.num_records:,} records of {format_bytes(file.record_nbytes)} in {format_bytes(file.nbytes)}"
        typer.echo(f"{file.path}: {held}{', in use' if file.is_in_use else ''}")
    if clean or not files:
        typer.echo(f"deleted {format_bytes(freed)}" if files else f"no disk tier in {folder}")


@command()
def doctor(
    tier: Tiers = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the findings as JSON")] = False,
) -> None:
    """Test what works on this machine: every device, every optional package, and the tiers of --tier.

    The exit code is 1 if something is broken.
    """
    from kvpagoda import console
    from kvpagoda.doctor import examine

    found = []
    for finding in examine(tier or ()):
        found.append(finding)
        if not as_json:
            console.say(f"{finding.state:7} {finding.name}: {finding.detail}", indent=8)
    broken = [finding.name for finding in found if finding.state == "broken"]
    if as_json:
        typer.echo(json.dumps({"broken": broken, "findings": [finding.to_dict() for finding in found]}, indent=2))
    if broken:
        raise typer.Exit(1)


@command()
def audit(
    url: Annotated[str, typer.Argument(help="the server's address, e.g. http://127.0.0.1:8000")],
    model: Annotated[str | None, typer.Option(help="name of the model (default: the first that is listed)")] = None,
    api_key_env: Annotated[str | None, typer.Option(help="the environment variable that holds the API key")] = None,
    max_requests: Annotated[int, typer.Option(help="the most requests to send")] = 400,
    remote: Annotated[bool, typer.Option("--remote", help="allow an address that is not of this machine")] = False,
    cold: Annotated[
        str | None,
        typer.Option(help="how a cold twin is made: salt, off or churn (default: the first that works)"),
    ] = None,
    after: Annotated[
        str | None, typer.Option(help="wait in the middle until you have done this, e.g. restart, and look again")
    ] = None,
    replay: Annotated[Path | None, typer.Option(help="run the case of a finding again, from finding-N.json")] = None,
    report: Annotated[Path | None, file_option(help="a page of what was found, e.g. audit.html")] = None,
    json_file: Annotated[
        str | None, file_option("--json", help="the results as JSON, e.g. audit.json; -: print them")
    ] = None,
    save: Annotated[
        Path, file_option(help="the folder for finding-1.json, .. (default: this one)", show_default=False)
    ] = Path(),
    seed: Annotated[
        int | None, typer.Option(help="seed of the prompts (default: another one each time, so that none is cached)")
    ] = None,
    timeout: Annotated[float, typer.Option(help="seconds to wait for an answer")] = 120.0,
) -> None:
    """Look for wrong cached tokens in a server with the OpenAI interface, from outside: vLLM, SGLang, mlx-lm, llama.cpp, ..

    It asks prompts again, longer, shorter, at the same moment, after others, and compares the log-probabilities with those of
    runs that use nothing that is cached. It fills the server's cache. It takes minutes.

    The exit code is 0 if nothing was found, 1 if something was, 2 if it cannot be judged. Ctrl-C reports what was seen so far,
    and exits with 130 if that is nothing.
    """
    from kvpagoda.audit.command import AuditOptions, run

    made = AuditOptions(
        url, model=model, api_key_env=api_key_env, max_requests=max_requests, report=report, json=json_file, replay=replay,
        remote=remote, cold=cold, after=after, save=save, seed=seed, timeout=timeout,
    )  # fmt: skip
    if code := run(made):
        raise typer.Exit(code)


def main() -> None:
    """Run the ``kvpagoda`` command. Errors of typer about wrong arguments are printed in one line too."""
    try:
        with one_line_errors():
            code = app(standalone_mode=False)
    except UsageError as error:
        typer.echo(f"kvpagoda: {' '.join(error.format_message().split())}", err=True)
        code = error.exit_code
    except (typer.Abort, KeyboardInterrupt):
        code = 130
    raise SystemExit(code)


if __name__ == "__main__":
    main()
