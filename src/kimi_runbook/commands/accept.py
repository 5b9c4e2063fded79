"""``kimi-runbook accept``: judge a running vLLM endpoint by the chain's steps that need no host.

Exit code 0: accepted; 1: the answer is no; 2: wrong usage, no vLLM answers there, or the disk takes no files;
3: inconclusive; 130 after Ctrl-C, 143 after SIGTERM, with the record of what was found until then.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kimi_runbook.acceptance.chain import Chain
from kimi_runbook.acceptance.context import Context
from kimi_runbook.acceptance.endpoint import (
    REQUEST_SETS,
    Options,
    Seen,
    api_key,
    checked,
    plan_json,
    plan_of,
    scope_lines,
)
from kimi_runbook.acceptance.endpoint_look import look
from kimi_runbook.acceptance.interrupt import Interrupts
from kimi_runbook.acceptance.plan import Ability, Access, GeometryOptions
from kimi_runbook.acceptance.progress import Pace
from kimi_runbook.acceptance.progress_lines import Lines, Teller, wants_live
from kimi_runbook.acceptance.requests import requests_of
from kimi_runbook.commands import Commands
from kimi_runbook.errors import RunbookError
from kimi_runbook.reading import data_file
from kimi_runbook.record import Record
from kimi_runbook.report import headline, verdict_of, what_next, write_reports
from kimi_runbook.report.text import clean
from kimi_runbook.runs import new_run_id
from kimi_runbook.verdict import Verdict, VerdictName

PLAN_FILE = "acceptance.json"

_SHORTEST_SECRET = 6  # a key as short as a word would blot out words; "EMPTY" is a usual key of servers without one
_BLOT = "[API key]"
_DEFAULTS = Options(endpoint="")
_RUNS_DIR = Path("runs")


def register(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("accept", help="judge a running vLLM endpoint", description=__doc__)
    ask = parser.add_argument_group("what to ask")
    ask.add_argument("--endpoint", required=True, metavar="URL", help="base URL of vLLM's API server")
    ask.add_argument(
        "--metrics",
        action="append",
        default=[],
        metavar="URL",
        help="metrics of an API server, once for each; default: ENDPOINT/metrics",
    )
    ask.add_argument("--model", default="", metavar="NAME", help="served model; default: the only one")
    ask.add_argument("--request-set", default=_DEFAULTS.request_set, metavar="SET", help=", ".join(REQUEST_SETS))
    ask.add_argument(
        "--require",
        type=_abilities,
        default=(),
        metavar="ABILITY,...",
        help=f"abilities whose absence fails the run, of {', '.join(Ability)}; the others are only told",
    )
    ask.add_argument("--max-tokens", type=_count, default=_DEFAULTS.max_tokens, metavar="N", help="asked per request")
    ask.add_argument(
        "--chat-template-kwargs",
        type=_mapping,
        default={},
        metavar="JSON",
        help="what the chat template is told, e.g. '{\"thinking\": false}'",
    )
    load = parser.add_argument_group("how much")
    load.add_argument(
        "--concurrency", type=_count, default=_DEFAULTS.concurrency, metavar="N", help="streams at once, nominal load"
    )
    load.add_argument("--peak", type=_count, metavar="N", help="streams at once, peak load; default: nominal")
    load.add_argument("--observe", type=_count, default=0, metavar="SECONDS", help="add step 6 of so many seconds")
    reach = parser.add_argument_group("how it is reached")
    reach.add_argument("--api-key-env", default="", metavar="NAME", help="environment variable that holds the API key")
    reach.add_argument("--ca-file", default="", metavar="FILE", help="certificates to trust in place of the system's")
    reach.add_argument("--proxy", default="", metavar="URL", help="http://host:port; the environment's is not used")
    cache = parser.add_argument_group("what the engine does not tell itself")
    cache.add_argument("--engine-log", default="", metavar="FILE", help="the engine's log, on this machine")
    cache.add_argument("--engines", type=_count, metavar="N", help="engines that must report metrics")
    cache.add_argument("--block-size", type=_count, metavar="N", help="tokens per block of the KV cache")
    cache.add_argument("--match-unit", type=_count, metavar="N", help="tokens a prefix hit may land on")
    cache.add_argument("--retention", type=_retention, metavar="N|dense", help="retention interval")
    cache.add_argument(
        "--cache-mode", choices=("none", "align"), help="none: layers are all attention; align: recurrent state is kept"
    )
    parser.add_argument("--runs-dir", type=Path, default=_RUNS_DIR, metavar="DIR", help="default: runs")
    parser.add_argument("--json", action="store_true", help="print the record as JSON, and nothing else")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Look, say what will be done, do it, and return the verdict's exit code."""
    options = checked(options_of(arguments), os.environ)
    secret = api_key(options.access, os.environ)
    seen = seen_without(secret, look(options))
    run_id = new_run_id()
    run_dir: Path = arguments.runs_dir / run_id
    plan = plan_of(options, seen, run_id, run_dir)
    requests = requests_of(plan)
    count = sum(batch.requests for batches in requests.values() for batch in batches)
    lines = Lines(plan.steps, Pace(requests, observe_s=plan.observe_s))
    teller = Teller(sys.stderr, lines, live=wants_live(sys.stdout, sys.stderr, os.environ))
    chain = Chain(Context.of(plan, {}, listener=teller))

    def record() -> Record:
        return without(secret, for_endpoint(chain.record(), options, run_dir))

    def keep() -> None:
        _publish(run_dir, lambda folder: [record().write(folder)])

    with Interrupts() as interrupts:
        try:
            try:
                _make_folder(run_dir, plan_json(options, seen, run_id, run_dir))
                for line in scope_lines(plan, seen, count):
                    print(line, file=sys.stderr)
                with teller:
                    _replay(chain, plan.steps, keep, secret)
            finally:
                interrupts.hold()
        except KeyboardInterrupt:
            interrupts.hold()
            _skip_the_rest(chain, plan.steps)
        final = record()
        try:
            written = _publish(run_dir, lambda folder: [final.write(folder), *write_reports(final, folder)])
        except RunbookError:
            # The disk is full or gone: what was found is told all the same, before the error says what is not on it.
            _say(_closing(final, ()), run_dir)
            raise
    _say(final.dumps() if arguments.json else _closing(final, written), run_dir)
    return interrupts.exit_code if interrupts.received else verdict_of(final).name.exit_code


def options_of(arguments: argparse.Namespace) -> Options:
    """Return what the command line says."""
    return Options(
        endpoint=arguments.endpoint,
        metrics=tuple(dict.fromkeys(arguments.metrics)),
        model=arguments.model,
        request_set=arguments.request_set,
        access=Access(api_key_env=arguments.api_key_env, ca_file=arguments.ca_file, proxy=arguments.proxy),
        engine_log=arguments.engine_log,
        geometry=GeometryOptions(
            block_size=arguments.block_size,
            match_unit=arguments.match_unit,
            retention=arguments.retention or "",
            cache_mode=arguments.cache_mode or "",
        ),
        engines=arguments.engines,
        concurrency=arguments.concurrency,
        peak=arguments.peak,
        required=arguments.require,
        observe_s=arguments.observe,
        max_tokens=arguments.max_tokens,
        chat_template_kwargs=arguments.chat_template_kwargs,
    )


def for_endpoint(record: Record, options: Options, run_dir: Path) -> Record:
    """Return the record with a next command that needs no inventory: the rules' own are playbooks of a site.

    Nobody completes the observation of an endpoint later, so one that was left out is not pending.
    """
    verdict = verdict_of(record)
    if verdict.name is not VerdictName.ACCEPT:
        command = command_line(_mended(options, verdict), run_dir.parent)
    elif options.observe_s:
        command = shlex.join(["kimi-runbook", "report", str(run_dir)])
    else:
        command = command_line(
            replace(options, observe_s=data_file("observation.yml").fields("watch").integer("proposed_s")),
            run_dir.parent,
        )
    observation = record.observation if options.observe_s else "not planned"
    return replace(record, observation=observation, verdict=replace(verdict, next_command=command))


def _mended(options: Options, verdict: Verdict) -> Options:
    """Return the options without what made the answer what it is, so that the same is not asked again in vain."""
    watch = data_file("observation.yml").fields("watch")
    for reason in verdict.reasons:
        if reason.check == "geometry":
            untold = asdict(GeometryOptions())
            wrong = {name: value for name, value in untold.items() if f": {name} was given as" in reason.text}
            options = replace(options, geometry=replace(options.geometry, **wrong))
        elif reason.step == 6 and reason.rule == "" and options.observe_s < watch.integer("proposed_s"):
            options = replace(options, observe_s=watch.integer("proposed_s"))
    return options


def without(secret: str, record: Record) -> Record:
    """Return the record with a secret taken out wherever an answer repeated it; a few letters are no secret."""
    if len(secret) < _SHORTEST_SECRET:
        return record
    return Record.from_json(_blotted(record.to_json(), secret))


def seen_without(secret: str, seen: Seen) -> Seen:
    """Return what the endpoint said of itself, without a secret it repeated: it is printed before the run."""
    return seen if len(secret) < _SHORTEST_SECRET else replace(seen, version=seen.version.replace(secret, _BLOT))


def command_line(options: Options, runs_dir: Path) -> str:
    """Return the command that asks the same again."""
    access, geometry = options.access, options.geometry
    told: list[tuple[str, object, object]] = [
        *(("--metrics", url, f"{options.endpoint}/metrics") for url in options.metrics),
        ("--model", options.model, _DEFAULTS.model),
        ("--request-set", options.request_set, _DEFAULTS.request_set),
        ("--require", ",".join(options.required), ""),
        ("--max-tokens", options.max_tokens, _DEFAULTS.max_tokens),
        ("--chat-template-kwargs", json.dumps(options.chat_template_kwargs), "{}"),
        ("--concurrency", options.concurrency, _DEFAULTS.concurrency),
        ("--peak", options.peak, None),
        ("--observe", options.observe_s, 0),
        ("--api-key-env", access.api_key_env, ""),
        ("--ca-file", access.ca_file, ""),
        ("--proxy", access.proxy, ""),
        ("--engine-log", options.engine_log, ""),
        ("--engines", options.engines, None),
        ("--block-size", geometry.block_size, None),
        ("--match-unit", geometry.match_unit, None),
        ("--retention", geometry.retention, ""),
        ("--cache-mode", geometry.cache_mode, ""),
        ("--runs-dir", runs_dir, _RUNS_DIR),
    ]
    words = ["kimi-runbook", "accept", "--endpoint", options.endpoint]
    for option, value, default in told:
        if value != default:
            words += [option, str(value)]
    return shlex.join(words)


def _replay(chain: Chain, steps: Sequence[int], keep: Callable[[], object], secret: str) -> None:
    """Run every step, and keep the record after each: a run that is killed leaves what it had found."""
    for step in steps:
        try:
            chain.run(step)
        except Exception:  # a defect of a step; the chain has noted it, and runs nothing on top of it
            print(_blotted(traceback.format_exc(), secret), end="", file=sys.stderr)
        keep()


def _skip_the_rest(chain: Chain, steps: Sequence[int]) -> None:
    """Note why the steps behind the interrupted one were not run; asks nothing of the endpoint."""
    for step in steps:
        before = [result for result in chain.record().steps if result.step < step]
        if before and not before[-1].state.lets_next_layer_run:
            chain.run(step)


def _make_folder(run_dir: Path, plan: Mapping[str, Any]) -> None:
    """Make the run's folder with its plan; leaves no folder when the plan cannot be written."""
    with _writing(run_dir):
        run_dir.mkdir(parents=True)
        try:
            text = json.dumps(plan, indent=2, ensure_ascii=False) + "\n"
            (run_dir / PLAN_FILE).write_text(text, encoding="utf-8")
        except OSError:
            shutil.rmtree(run_dir)
            raise


def _publish(run_dir: Path, write: Callable[[Path], Sequence[Path]]) -> list[Path]:
    """Let files be written into a folder of their own, then move them into the run's: each is whole or not there."""
    with _writing(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=run_dir, prefix=".writing-") as folder:
            return [path.replace(run_dir / path.name) for path in write(Path(folder))]


@contextmanager
def _writing(run_dir: Path) -> Iterator[None]:
    """Turn a disk that does not take the run's files into a RunbookError."""
    try:
        yield
    except OSError as error:
        raise RunbookError(
            where=str(run_dir),
            observed=f"cannot be written ({error.strerror or error})",
            expected="a folder for the run's record and reports",
            next_step="Name one with --runs-dir DIR.",
        ) from error


def _say(text: str, run_dir: Path) -> None:
    """Print the result; raises RunbookError where standard output takes none, BrokenPipeError where nobody reads."""
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
        raise RunbookError(
            where="standard output",
            observed=f"cannot be written ({error.strerror or error})",
            expected="room for the result",
            next_step=f"What was found is in {run_dir}: kimi-runbook report {run_dir}",
        ) from error


def _closing(record: Record, written: Sequence[Path]) -> str:
    """Return what a person reads at the end."""
    verdict = verdict_of(record)
    lines = [f"step {step.step} {step.name:<14} {step.state}  {step.note}".rstrip() for step in record.steps]
    lines += ["", headline(record)]
    lines += [f"  because {reason.text}" for reason in verdict.reasons]
    lines += [str(path) for path in written]
    return clean("\n".join([*lines, what_next(record), ""]))


def _blotted(value: Any, secret: str) -> Any:
    if len(secret) < _SHORTEST_SECRET:
        return value
    if isinstance(value, str):
        return value.replace(secret, _BLOT)
    if isinstance(value, Mapping):
        return {str(key).replace(secret, _BLOT): _blotted(item, secret) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_blotted(item, secret) for item in value]
    return value


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def _retention(text: str) -> str:
    if text != "dense" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of tokens nor dense")
    return text


def _abilities(text: str) -> tuple[Ability, ...]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in set(Ability)]
    if unknown or not names:
        known = ", ".join(Ability)
        raise argparse.ArgumentTypeError(f"{', '.join(unknown) or 'nothing'} is not among {known}")
    return tuple(dict.fromkeys(Ability(name) for name in names))


def _mapping(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"no JSON ({error})") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("no JSON object")
    return value
