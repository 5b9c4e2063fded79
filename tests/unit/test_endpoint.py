"""An endpoint somebody else runs: options that are refused early, and the plan that comes of what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kimi_runbook.acceptance.endpoint import Options, Seen, api_key, checked, model_of, plan_json, plan_of, scope_lines
from kimi_runbook.acceptance.plan import Ability, AcceptancePlan, Access, GeometryOptions, Wanted
from kimi_runbook.errors import RunbookError

URL = "http://127.0.0.1:8000"
SEEN = Seen(models=("moonshotai/Kimi-K3",), version="0.32.0", engines=1)


def plan(seen: Seen = SEEN, **options: Any) -> AcceptancePlan:
    return plan_of(checked(Options(endpoint=URL, **options), {}), seen, "run", Path("runs/run"))


@pytest.mark.parametrize(
    ("given", "endpoint"),
    [
        (URL, URL),
        (f"{URL}/", URL),
        (f"{URL}/v1", URL),
        (f"{URL}/v1/", URL),
        ("https://[::1]:8443/llm/v1", "https://[::1]:8443/llm"),
        ("http://v1/v1", "http://v1"),
    ],
)
def test_a_base_url_with_v1_is_the_same_endpoint(given: str, endpoint: str) -> None:
    options = checked(Options(endpoint=given), {})
    assert (options.endpoint, options.metrics) == (endpoint, (f"{endpoint}/metrics",))


def test_metrics_that_are_named_replace_the_default() -> None:
    urls = ("http://127.0.0.1:8001/metrics", "http://127.0.0.1:8002/metrics")
    assert checked(Options(endpoint=URL, metrics=urls), {}).metrics == urls


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"endpoint": "127.0.0.1:8000"}, "--endpoint: '127.0.0.1:8000' is no such URL"),
        ({"endpoint": "ftp://127.0.0.1"}, "--endpoint: 'ftp://127.0.0.1' is no such URL"),
        ({"endpoint": "http://127.0.0.1:99999"}, "--endpoint: Port out of range"),
        ({"endpoint": "http://[::1"}, "--endpoint: Invalid IPv6 URL"),
        ({"endpoint": "http://user:hunter2@127.0.0.1"}, "--endpoint: has a user, a password"),
        ({"endpoint": f"{URL}?key=hunter2"}, "--endpoint: has a user, a password, a query"),
        ({"metrics": ("http://hunter2@127.0.0.1/metrics",)}, "--metrics: has a user"),
        ({"access": Access(proxy="http://user:hunter2@127.0.0.1:3128")}, "--proxy: has a user"),
        ({"access": Access(proxy="https://127.0.0.1:3128")}, "expected a URL such as http://host:8000"),
        ({"access": Access(proxy="http://127.0.0.1:3128/x")}, "--proxy: has the path /x"),
        ({"access": Access(ca_file="absent.pem")}, "--ca-file: absent.pem cannot be read (No such file"),
        ({"engine_log": "."}, "--engine-log: . cannot be read (Is a directory)"),
        ({"request_set": "agent"}, "--request-set: agent; expected one of smoke"),
        ({"concurrency": 8, "peak": 4}, "--peak: 4; expected at least --concurrency 8"),
        ({"access": Access(api_key_env="KEY")}, "--api-key-env: KEY is not set"),
        ({"access": Access(api_key_env="EMPTY")}, "--api-key-env: EMPTY is empty"),
        ({"access": Access(api_key_env="LINES")}, "--api-key-env: LINES holds spaces or control"),
    ],
)
def test_options_that_cannot_be_used(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RunbookError) as caught:
        checked(Options(**({"endpoint": URL} | options)), {"EMPTY": "", "LINES": "hunter2\nx"})
    assert message in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_a_key_is_read_from_the_environment_only() -> None:
    assert api_key(Access(api_key_env="KEY"), {"KEY": "sk-1"}) == "sk-1"
    assert api_key(Access(), {"KEY": "sk-1"}) == ""


def test_the_only_model_is_taken_and_of_several_one_has_to_be_named() -> None:
    options = checked(Options(endpoint=URL), {})
    several = Seen(models=("k3", "k3-lora"), version="0.32.0", engines=1)
    assert model_of(options, SEEN) == "moonshotai/Kimi-K3"
    with pytest.raises(RunbookError, match=r"serves k3, k3-lora; expected one model\. Name it with --model"):
        model_of(options, several)
    with pytest.raises(RunbookError, match="serves nothing"):
        model_of(options, Seen(models=(), version="0.32.0", engines=1))
    assert model_of(Options(endpoint=URL, model="k3-lora"), several) == "k3-lora"
    with pytest.raises(RunbookError, match="serves k3, k3-lora; expected k4"):
        model_of(Options(endpoint=URL, model="k4"), several)


def test_a_plan_without_hosts_has_the_steps_that_need_none() -> None:
    made = plan()
    assert (made.steps, made.not_planned, made.hosts, made.lock) == ((2, 3, 4), (0, 1, 5, 6), (), None)
    assert (made.concurrency, made.peak_concurrency, made.engine.engines) == (4, 4, 1)
    assert set(made.abilities.values()) == {Wanted.PROBE}
    assert made.site == "127.0.0.1:8000"


def test_every_option_reaches_the_plan(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("", encoding="utf-8")
    made = plan(
        access=Access(proxy="http://127.0.0.1:3128"),
        engine_log=str(log),
        geometry=GeometryOptions(block_size=1536, match_unit=128, retention="dense"),
        engines=2,
        concurrency=8,
        peak=16,
        required=(Ability.TOOLS,),
        observe_s=60,
        max_tokens=64,
        chat_template_kwargs={"thinking": False},
    )
    assert made.steps == (2, 3, 4, 6)
    assert made.access == Access(proxy="http://127.0.0.1:3128")
    assert made.geometry == GeometryOptions(block_size=1536, match_unit=128, retention="dense")
    assert list(made.engine.logs.values()) == [str(log)]
    assert (made.engine.engines, made.concurrency, made.peak_concurrency, made.observe_s) == (2, 8, 16, 60)
    assert made.abilities[Ability.TOOLS] is Wanted.REQUIRED
    assert made.abilities[Ability.IMAGES] is Wanted.PROBE
    assert (made.max_tokens, made.chat_template_kwargs) == (64, {"thinking": False})


def test_a_plan_names_the_variable_of_a_key_and_not_the_key() -> None:
    options = checked(Options(endpoint=URL, access=Access(api_key_env="KEY")), {"KEY": "sk-hunter2"})
    text = json.dumps(plan_json(options, SEEN, "run", Path("runs/run")))
    assert '"api_key_env": "KEY"' in text and "hunter2" not in text


@pytest.mark.parametrize(
    ("seen", "options", "told"),
    [
        pytest.param({"engines": 1}, {}, "1 engine reports on 1 metrics URL", id="one"),
        pytest.param(
            {"engines": 2}, {}, "2 engines report on 1 metrics URL; step 3 can judge the cache of one", id="two"
        ),
        pytest.param({"engines": 1}, {"engines": 4}, "1 engine reports on 1 metrics URL, 4 required", id="required"),
        pytest.param({"engines": 0}, {}, "no engine reports yet on 1 metrics URL, engines assumed: 1", id="none-yet"),
        pytest.param(
            {"engines": None, "metrics_problem": "HTTP 500"},
            {},
            "metrics cannot be read (HTTP 500), engines assumed: 1",
            id="metrics-broken",
        ),
    ],
)
def test_the_scope_says_what_will_be_done(seen: dict[str, Any], options: dict[str, Any], told: str) -> None:
    looked = Seen(models=SEEN.models, version="0.32.0", **seen)
    first, second, third = scope_lines(plan(looked, **options), looked, 32)
    assert first == (
        "steps 2 short request, 3 shared prefix, 4 concurrency; not planned: 0 host, 1 start, 5 multi-node, "
        "6 observation"
    )
    assert second == f"moonshotai/Kimi-K3 at {URL}, vLLM 0.32.0; {told}"
    assert third.startswith("about 32 requests for 16 tokens each, up to 4 at once; other traffic")


def test_the_scope_says_how_long_an_observation_takes() -> None:
    made = plan(observe_s=60)
    first, _, third = scope_lines(made, SEEN, 8)
    assert "4 concurrency, 6 observation; not planned" in first
    assert "then 60 s of watching" in third
