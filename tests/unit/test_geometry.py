"""The engine's cache geometry: which source has each value, and what happens when none has or two differ."""

from typing import Any

import pytest

from kimi_runbook.acceptance.geometry import (
    ContradictedGeometryError,
    Geometry,
    UnknownGeometryError,
    read_geometry,
)
from kimi_runbook.acceptance.geometry_log import marks, read_geometry_log
from kimi_runbook.acceptance.launch_options import LaunchOptions
from kimi_runbook.acceptance.metrics import Reading, parse
from kimi_runbook.acceptance.plan import GeometryOptions

TEXT = "text/plain; version=1.0.0; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

# The labels vLLM 0.32 writes on CPU for an engine whose layers are all attention.
PLAIN = {
    "block_size": "128",
    "enable_prefix_caching": "True",
    "mamba_cache_mode": "none",
    "mamba_block_size": "None",
    "effective_attention_block_size": "128",
    "num_gpu_blocks": "4096",
    "kv_cache_size_tokens": "524288",
    "prefix_match_unit": "None",
    "prefix_cache_retention_interval": "0",
    "sliding_window": "None",
    "hash_block_size": "None",
    "cache_hit_alignment_tokens": "None",
}
# Kimi K3, TP8, fp8: block from vllm#50235, match unit from vllm-project/recipes#861.
K3 = PLAIN | {
    "block_size": "1536",
    "mamba_cache_mode": "align",
    "mamba_block_size": "1536",
    "effective_attention_block_size": "1536",
    "prefix_match_unit": "128",
}
DRAFTING = '# TYPE vllm:spec_decode_num_drafts_total counter\nvllm:spec_decode_num_drafts_total{engine="0"} 7\n'
# Lines of vLLM 0.32, hybrid, GPU; composed from the sources (platforms/interface.py, v1/core/kv_cache_utils.py).
HYBRID_LOG = """\
(APIServer pid=1) INFO 11-30 14:53:03 [api_utils.py:286] non-default args: {'model': 'm', 'prefix_match_unit': 128, \
'speculative_config': {'method': 'mtp', 'num_speculative_tokens': 3}, 'enable_prefix_caching': True}
(APIServer pid=1) INFO 11-30 14:53:11 [config.py:690] Mamba cache mode is set to 'align' for KimiK3 by default when \
prefix caching is enabled
(APIServer pid=1) INFO 11-30 14:53:12 [scheduler.py:308] Chunked prefill is enabled with max_num_batched_tokens=8192.
(Worker pid=3) INFO 11-30 14:53:27 [interface.py:1096] Setting attention block size to 1536 tokens to ensure that \
attention page size is >= mamba page size.
(EngineCore pid=2) INFO 11-30 14:53:27 [kv_cache_utils.py:853] kv cache group sizes (1536, 1536)
(EngineCore pid=2) INFO 11-30 14:53:27 [kv_cache_utils.py:854] kv lcm block sizes 1536
(EngineCore pid=2) INFO 11-30 14:53:27 [kv_cache_utils.py:2327] GPU KV cache size: 2,359,296 tokens, Maximum concurrency
""".splitlines()


def reading(*engines: dict[str, str], more: str = "") -> Reading:
    """One endpoint with so many engines, written as vLLM's Python front end does."""
    lines = ["# TYPE vllm:cache_config_info gauge"] if engines else []
    for number, labels in enumerate(engines):
        told = ",".join(f'{name}="{value}"' for name, value in labels.items())
        lines.append(f'vllm:cache_config_info{{engine="{number}",{told}}} 1.0')
    lines += ["# TYPE vllm:prefix_cache_queries_total counter"]
    lines += [f'vllm:prefix_cache_queries_total{{engine="{number}"}} 0' for number in range(max(1, len(engines)))]
    return Reading(expositions=(parse("http://head/metrics", "\n".join(lines) + "\n" + more, TEXT),))


def rust() -> Reading:
    text = '# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine="0"} 0\n# EOF\n'
    return Reading(expositions=(parse("http://head/metrics", text, OPENMETRICS),))


def launched(*argv: str) -> LaunchOptions:
    return LaunchOptions(argv=argv, known=True)


def test_everything_is_read_from_the_labels_of_a_python_front_end() -> None:
    found = read_geometry(reading(PLAIN), version="0.32.0")
    assert (found.block_size, found.match_unit, found.attention_block) == (128, 128, 128)
    assert (found.prefix_caching, found.recurrent, found.cache_mode, found.retention) == (True, False, "none", "0")
    assert (found.draft_drop, found.batch_tokens, found.sliding_window) == (False, None, False)
    assert (found.num_gpu_blocks, found.kv_tokens, found.engines, found.front_end) == (4096, 524_288, 1, "python")
    assert found.witnesses["kv_tokens"] == "vllm:cache_config_info kv_cache_size_tokens"


def test_kimi_k3s_match_unit_is_not_its_block() -> None:
    found = read_geometry(reading(K3), version="0.32.0")
    assert (found.block_size, found.match_unit, found.recurrent, found.cache_mode) == (1536, 128, True, "align")
    assert found.witnesses["match_unit"] == "vllm:cache_config_info prefix_match_unit"


@pytest.mark.parametrize(
    ("labels", "options", "field", "value", "witness"),
    [
        pytest.param(K3 | {"prefix_match_unit": "None"}, {}, "match_unit", 1536, "is not set", id="unit-unset"),
        pytest.param(
            K3 | {"cache_hit_alignment_tokens": "256"}, {}, "match_unit", 256, "alignment_tokens", id="unit-resolved"
        ),
        pytest.param(
            K3 | {"effective_attention_block_size": "12288"}, {}, "attention_block", 12288, "effective", id="dcp-label"
        ),
        pytest.param(
            {k: v for k, v in PLAIN.items() if k != "effective_attention_block_size"},
            {"launch": launched("--decode-context-parallel-size", "8")},
            "match_unit",
            1024,
            "the block of attention",
            id="dcp-launch-before-0.31",
        ),
        pytest.param(K3 | {"prefix_cache_retention_interval": "None"}, {}, "retention", "dense", "label", id="dense"),
        pytest.param(K3 | {"prefix_cache_retention_interval": "3072"}, {}, "retention", "3072", "label", id="interval"),
        pytest.param(
            {k: v for k, v in K3.items() if k != "prefix_cache_retention_interval"},
            {"launch": launched("--prefix-cache-retention-interval=1536")},
            "retention",
            "1536",
            "launch",
            id="retention-launch",
        ),
        pytest.param(
            {k: v for k, v in K3.items() if k != "prefix_cache_retention_interval"},
            {"launch": launched("--tensor-parallel-size", "8"), "version": "0.30.1"},
            "retention",
            "0",
            "default of vLLM 0.30.1",
            id="retention-default",
        ),
        pytest.param(
            K3, {"launch": launched("--max-num-batched-tokens", "4096")}, "batch_tokens", 4096, "launch", id="batch"
        ),
        pytest.param(PLAIN | {"sliding_window": "4096"}, {}, "sliding_window", True, "", id="sliding-window"),
        pytest.param(PLAIN | {"enable_prefix_caching": "False"}, {}, "prefix_caching", False, "label", id="off"),
    ],
)
def test_each_value_comes_from_the_first_source_that_has_it(
    labels: dict[str, str], options: dict[str, Any], field: str, value: object, witness: str
) -> None:
    found = read_geometry(reading(labels), **({"version": "0.32.0"} | options))
    assert getattr(found, field) == value
    told = found.witnesses.get(field, "")
    assert told.startswith("vllm:cache_config_info") if witness == "label" else witness in told


@pytest.mark.parametrize(
    ("argv", "version", "drops"),
    [
        pytest.param((), "0.32.0", False, id="no-draft"),
        pytest.param(("--speculative-config", '{"method": "mtp"}'), "0.32.0", True, id="mtp"),
        pytest.param(("--speculative-config", '{"method": "deepseek_mtp"}'), "0.32.0", True, id="named-after-a-model"),
        pytest.param(("--speculative-config.method=eagle3",), "0.32.0", True, id="dotted"),
        pytest.param(("--speculative-config", '{"method": "ngram"}'), "0.32.0", False, id="ngram"),
        pytest.param(("--speculative-config", '{"method": "dspark"}'), "0.32.0", True, id="dspark-0.32"),
        pytest.param(("--speculative-config", '{"method": "dspark"}'), "0.33.0", False, id="dspark-0.33"),
        pytest.param(
            ("--speculative-config", '{"method": "mtp", "disable_eagle_block_drop": true}'),
            "0.32.0",
            False,
            id="drop-switched-off",
        ),
    ],
)
def test_a_draft_drops_a_unit_or_not_by_its_method(argv: tuple[str, ...], version: str, drops: bool) -> None:
    found = read_geometry(reading(K3, more=DRAFTING if argv else ""), version=version, launch=launched(*argv))
    assert found.draft_drop is drops


def geometry_from_log(lines: list[str], *, told: GeometryOptions | None = None, version: str = "0.33.0") -> Geometry:
    return read_geometry(rust(), version=version, log=read_geometry_log(lines), told=told or GeometryOptions())


def test_a_rust_front_end_publishes_none_and_the_log_tells_it() -> None:
    found = geometry_from_log(HYBRID_LOG)
    assert (found.block_size, found.match_unit, found.cache_mode, found.retention) == (1536, 128, "align", "0")
    assert (found.draft_drop, found.batch_tokens, found.kv_tokens) == (True, 8192, 2_359_296)
    assert (found.prefix_caching, found.engines, found.front_end) == (True, 1, "rust")
    assert found.witnesses["cache_mode"] == "log: Mamba cache mode is set to"


def test_the_match_unit_left_unset_is_the_common_divisor_of_the_groups() -> None:
    unset = [
        line.replace("'prefix_match_unit': 128, ", "").replace("(1536, 1536)", "[1536, 12288]") for line in HYBRID_LOG
    ]
    found = geometry_from_log(unset)
    assert (found.match_unit, found.witnesses["match_unit"]) == (1536, "log: kv cache group sizes")


def test_a_log_of_attention_only_says_so_by_what_it_lacks() -> None:
    lines = [line for line in HYBRID_LOG if "Mamba" not in line and "Setting" not in line and "args" not in line]
    found = geometry_from_log(lines, told=GeometryOptions(block_size=64))
    assert (found.cache_mode, found.block_size, found.prefix_caching) == ("none", 64, None)
    assert found.witnesses["block_size"] == "the operator"


def test_the_last_of_several_starts_in_a_log_counts() -> None:
    assert geometry_from_log([*[line.replace("1536", "768") for line in HYBRID_LOG], *HYBRID_LOG]).block_size == 1536


def test_every_line_of_the_geometry_passes_the_filter_on_the_node() -> None:
    kept = [line for line in HYBRID_LOG if any(mark in line for mark in marks())]
    assert read_geometry_log(kept) == read_geometry_log(HYBRID_LOG)
    assert len(kept) == 7


def test_real_lines_of_an_engine_on_cpu_are_read(project_root: Any) -> None:
    log = (project_root / "tests/data/engine_logs/one_node_vllm_0.32.0_cpu.log").read_text(encoding="utf-8")
    found = read_geometry_log(log.splitlines())
    assert found.number("kv_tokens") == 524_288
    assert found.whole_start
    assert found.argument("enable_prefix_caching") == "True"
    assert found.argument("prefix_match_unit") is None


@pytest.mark.parametrize(
    ("told", "says"),
    [
        pytest.param(GeometryOptions(block_size=64), "block_size was given as 64, and the engine has 1536", id="block"),
        pytest.param(GeometryOptions(match_unit=64), "match_unit was given as 64, and the engine has 128", id="unit"),
        pytest.param(
            GeometryOptions(retention="dense"), "retention was given as dense, and the engine has 0", id="keep"
        ),
    ],
)
def test_what_the_operator_says_wrongly_is_an_error_naming_both(told: GeometryOptions, says: str) -> None:
    with pytest.raises(ContradictedGeometryError) as error:
        read_geometry(reading(K3), version="0.32.0", told=told)
    assert says in str(error.value)
    assert "(vllm:cache_config_info " in str(error.value)


def test_what_the_operator_says_rightly_is_no_error() -> None:
    told = GeometryOptions(block_size=1536, match_unit=128, retention="0")
    assert read_geometry(reading(K3), version="0.32.0", told=told).block_size == 1536


@pytest.mark.parametrize(
    ("labels", "options", "why"),
    [
        pytest.param(None, {}, "absent from /metrics and the log does not say it either, so the block size", id="none"),
        pytest.param(
            None,
            {"told": GeometryOptions(block_size=1536)},
            "whether recurrent state is cached is unknown",
            id="block-alone-is-not-enough",
        ),
        pytest.param(K3 | {"block_size": "None"}, {}, "block_size='None'", id="no-number"),
        pytest.param(PLAIN | {"enable_prefix_caching": "?"}, {}, r"enable_prefix_caching='\?'", id="no-flag"),
        pytest.param(
            K3 | {"prefix_match_unit": "1000"}, {}, "1000 tokens does not divide the block of 1536", id="unit"
        ),
        pytest.param(
            {k: v for k, v in K3.items() if k != "prefix_match_unit"}, {}, "where a hit can land", id="unit-not-told"
        ),
        pytest.param(
            {k: v for k, v in K3.items() if k != "prefix_cache_retention_interval"},
            {"version": "0.28.0", "launch": launched("--tensor-parallel-size", "8")},
            "how long recurrent state is kept",
            id="retention-before-it-was-a-setting",
        ),
        pytest.param(K3, {"more": DRAFTING}, "says that a draft model runs", id="draft-of-unknown-method"),
        pytest.param(
            K3,
            {"launch": launched("--speculative-config", '{"method": "telepathy"}')},
            "speculation by 'telepathy' in vLLM 0.32.0",
            id="method-nobody-knows",
        ),
    ],
)
def test_what_is_unknown_is_not_guessed(labels: dict[str, str] | None, options: dict[str, Any], why: str) -> None:
    seen = reading(*([labels] if labels else []), more=options.get("more", ""))
    sources = {"version": "0.32.0"} | {name: value for name, value in options.items() if name != "more"}
    with pytest.raises(UnknownGeometryError, match=why):
        read_geometry(seen, **sources)


def test_engines_that_disagree_have_no_geometry() -> None:
    with pytest.raises(UnknownGeometryError, match="disagree on block_size: 1536, 768"):
        read_geometry(reading(K3, K3 | {"block_size": "768"}))
    assert read_geometry(reading(K3, K3 | {"num_gpu_blocks": "1"}), version="0.32.0").engines == 2
