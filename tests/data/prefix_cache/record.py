"""Record what vLLM's own scheduler says its prefix cache supplies, without a model: prompts in, counted hits out.

Run with an interpreter that has vLLM for CPU, from the root of the checkout, to see what a new version changed:

    python tests/data/prefix_cache/record.py MODEL_DIRECTORY > tests/data/prefix_cache/vllm_VERSION_scheduler.json

MODEL_DIRECTORY holds a model's config.json and tokenizer (the lab's will do); its weights are not read.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import torch
import vllm
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCKS, CONTEXT = 4000, 16384
SEEDS, PROMPTS = 3, 12
# Fields as CacheModel has them; `inside` is the alignment of a prefill kernel that writes the last state from inside.
ENGINES: list[dict[str, Any]] = [
    {"block_size": 128},
    {"block_size": 64},
    {"block_size": 128, "draft_drop": True},
    *(
        {"recurrent": True, "block_size": 128} | more
        for more in (
            {},
            {"block_size": 64},
            {"match_unit": 32},
            {"match_unit": 32, "inside": 16},
            {"inside": 16},
            {"draft_drop": True},
            {"match_unit": 32, "draft_drop": True},
            {"match_unit": 64, "batch_tokens": 200},
            {"retention": None},
            {"retention": None, "batch_tokens": 256},
            {"retention": None, "batch_tokens": 128},
            {"retention": None, "batch_tokens": 256, "draft_drop": True},
            {"retention": 128, "block_size": 64, "batch_tokens": 64},
            {"retention": 128, "block_size": 64, "batch_tokens": 192},
            {"retention": 256, "match_unit": 32, "batch_tokens": 300},
        )
    ),
]


class Speculation:
    """As much of a speculative configuration as the scheduler asks for: a method whose last unit is dropped."""

    method = "mtp"
    num_speculative_tokens = 1
    draft_model_config = None

    def use_eagle(self) -> bool:
        return True

    def use_eagle_block_drop(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        return (lambda: False) if name.startswith("use") else False


def scheduler(model: str, engine: dict[str, Any]) -> tuple[Scheduler, int]:
    """Return vLLM's scheduler for an engine, and its hash unit."""
    block, recurrent = engine["block_size"], engine.get("recurrent", False)
    retention, batch = engine.get("retention", 0), engine.get("batch_tokens", 8192)
    config = VllmConfig(
        model_config=ModelConfig(model=model, max_model_len=CONTEXT, dtype="float32"),
        scheduler_config=SchedulerConfig(
            max_num_seqs=4, max_num_batched_tokens=batch, max_model_len=CONTEXT, is_encoder_decoder=False
        ),
        cache_config=CacheConfig(block_size=block, enable_prefix_caching=True),
        device_config=DeviceConfig("cpu"),
    )
    cache = config.cache_config
    cache.block_size, cache.num_gpu_blocks, cache.prefix_match_unit = block, BLOCKS, engine.get("match_unit")
    cache.enable_prefix_caching = True
    cache.mamba_cache_mode = "align" if recurrent else "none"
    config.scheduler_config.max_num_batched_tokens = batch
    config.scheduler_config.async_scheduling = False
    attention = FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=1, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["attention"], attention)]
    if recurrent:
        state = MambaSpec(
            block_size=block,
            shapes=((1, 1),),
            dtypes=(torch.float32,),
            mamba_cache_mode="align",
            num_prefill_checkpoint_blocks=int("inside" in engine),
            prefill_checkpoint_alignment=engine.get("inside"),
        )
        groups.append(KVCacheGroupSpec(["state"], state))
    if engine.get("draft_drop"):
        groups[0].is_eagle_group = True
        config.speculative_config = Speculation()
    blocks = KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_tensors=[],
        kv_cache_groups=groups,
        prefix_cache_retention_interval=retention if recurrent else 0,
    )
    schedule_unit, hash_unit = resolve_kv_cache_block_sizes(blocks, config)
    made = Scheduler(
        vllm_config=config,
        kv_cache_config=blocks,
        structured_output_manager=StructuredOutputManager(config),
        block_size=schedule_unit,
        hash_block_size=hash_unit,
        log_stats=True,
    )
    return made, hash_unit


def hits(made: Scheduler, hash_unit: int, name: str, tokens: list[int]) -> int:
    """Return what the scheduler counts as hits for one prompt that is run alone to its end."""
    request = Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=4, temperature=0, ignore_eos=True),
        pooling_params=None,
        block_hasher=get_request_block_hasher(hash_unit, sha256),
    )
    made.add_request(request)
    counted = 0
    while made.has_requests():
        planned = made.schedule()
        names = list(planned.num_scheduled_tokens)
        prefilled = request.num_computed_tokens >= request.num_tokens
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={one: place for place, one in enumerate(names)},
            sampled_token_ids=[[7] if prefilled else []],
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        for step in made.update_from_output(planned, output).values():
            if step.scheduler_stats is not None:
                counted += step.scheduler_stats.prefix_cache_stats.hits
    return counted


def scenario(seed: int, block: int) -> list[list[list[int]]]:
    """Return prompts as parts (id, length): new ones, ones sent again, turns appended, and ones that part somewhere."""
    draw, next_id, prompts = random.Random(seed), seed * 1000, []  # noqa: S311 - no secret

    def new(length: int) -> list[int]:
        nonlocal next_id
        next_id += 1
        return [next_id, length]

    while len(prompts) < PROMPTS:
        kind = draw.random() if prompts else 0.0
        base = draw.choice(prompts) if prompts else []
        if kind < 0.15:
            prompt = [new(draw.randint(block // 2, block * 6))]
        elif kind < 0.3:
            prompt = cut(base, size(base))
        elif kind < 0.4:
            prompt = [*cut(base, size(base)), new(draw.randint(1, block * 2))]
        elif kind < 0.5:
            prompt = cut(base, draw.randint(size(base) // 3, size(base)))
        else:
            least, most = draw.choice(((1, block // 3), (block, 2 * block), (1, 3 * block)))
            prompt = [*cut(base, draw.randint(size(base) // 3, size(base))), new(draw.randint(least, most))]
        if draw.random() < 0.1:
            prompt = cut(prompt, size(prompt) // block * block or size(prompt))
        if block // 3 <= size(prompt) <= block * 8:
            prompts.append(prompt)
    return prompts


def cut(parts: list[list[int]], length: int) -> list[list[int]]:
    """Return the first so many tokens of a prompt."""
    found = []
    for part, tokens in parts:
        if length > 0:
            found.append([part, min(tokens, length)])
        length -= tokens
    return found


def size(parts: list[list[int]]) -> int:
    """Return a prompt's length in tokens."""
    return sum(length for _, length in parts)


def tokens_of(parts: list[list[int]]) -> list[int]:
    """Return a prompt's tokens: a part's are its own and always the same."""
    return [part * 100_000 + place for part, length in parts for place in range(length)]


def main() -> None:
    """Print the recording, one run to a line."""
    init_none_hash(sha256)
    runs = []
    for number, engine in enumerate(ENGINES):
        for seed in range(SEEDS):
            prompts = scenario(number * 100 + seed + 1, engine["block_size"])
            made, hash_unit = scheduler(sys.argv[1], engine)
            counted = [hits(made, hash_unit, str(n), tokens_of(parts)) for n, parts in enumerate(prompts)]
            runs.append({"engine": engine, "prompts": prompts, "hits": counted})
    lines = ",\n".join(json.dumps(run) for run in runs)
    sys.stdout.write(f'{{"vllm": "{vllm.__version__}", "runs": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
