"""What every step is given: the plan, the engine, the nodes, and what earlier steps found out."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from kimi_runbook.acceptance import metrics
from kimi_runbook.acceptance.client import EngineClient
from kimi_runbook.acceptance.geometry import Geometry
from kimi_runbook.acceptance.hosts import EngineHost, HostError
from kimi_runbook.acceptance.metrics import Reading
from kimi_runbook.acceptance.plan import STEP_NAMES, AcceptancePlan
from kimi_runbook.acceptance.progress import Listener, Progress, silent


@dataclass(slots=True, kw_only=True)
class Context:
    """One run of the chain, as its steps see it.

    Attributes:
        plan: What to do.
        client: The engine's API.
        read_metrics: Reads every metrics endpoint once.
        hosts: The nodes, by name.
        now: Seconds of a clock that only goes forward.
        elapse: Lets so many seconds pass: an interval to measure in, never a wait for something to happen.
        geometry: Set by step 3, for the record.
        expectation: Set by step 3 before its first request, for the record.
        facts: What steps observed of the engine and its nodes, by name; several values where nodes disagree.
        requests: Request shapes sent, without their salts; their hash goes into the fingerprint.
        last_reading: The counters as the latest window left them; a restart between two windows shows against them.
        listener: Is told how far the run is.
        step: The step that runs, set by the chain.
    """

    plan: AcceptancePlan
    client: EngineClient
    read_metrics: Callable[[], Reading]
    hosts: Mapping[str, EngineHost]
    now: Callable[[], float] = time.monotonic
    elapse: Callable[[float], None] = time.sleep
    geometry: Geometry | None = None
    expectation: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, set[str]] = field(default_factory=dict)
    requests: list[dict[str, Any]] = field(default_factory=list)
    last_reading: Reading | None = None
    listener: Listener = silent
    step: int = 0

    def tell(self, what: str, done: int = 0, total: int = 0) -> None:
        """Tell the listener what the running step does, and how many of how many requests it has done (0: unknown)."""
        self.listener(Progress(step=self.step, name=STEP_NAMES[self.step], what=what, done=done, total=total))

    def note(self, fact: str, value: str) -> None:
        """Keep one observed value for the record's fingerprint."""
        self.facts.setdefault(fact, set()).add(value)

    def observed(self, fact: str) -> str | None:
        """Return the value observed, several joined where nodes disagree, or None when nobody looked."""
        return ", ".join(sorted(self.facts.get(fact, ()))) or None

    @classmethod
    def of(cls, plan: AcceptancePlan, hosts: Mapping[str, EngineHost], *, listener: Listener = silent) -> Context:
        """Return the context of a real run."""
        return cls(
            plan=plan,
            client=EngineClient(plan.endpoint, access=plan.access),
            read_metrics=lambda: metrics.read(plan.metrics, access=plan.access),
            hosts=hosts,
            listener=listener,
        )

    def memory(self) -> dict[str, dict[str, Any]]:
        """Return what every node's engine holds: host to ``gpu_used_mib`` and ``engine_rss_bytes``, None if unknown."""
        if not self.hosts:
            return {}
        with ThreadPoolExecutor(max_workers=len(self.hosts)) as pool:
            return dict(zip(self.hosts, pool.map(self._memory_of, self.hosts.values()), strict=True))

    def _memory_of(self, host: EngineHost) -> dict[str, Any]:
        try:
            return asdict(host.memory(self.plan.engine.container))
        except HostError as error:
            return {"gpu_used_mib": None, "engine_rss_bytes": None, "errors": [str(error)]}

    def chat_body(self, messages: list[dict[str, Any]], *, max_tokens: int | None = None) -> dict[str, Any]:
        """Return a chat request, greedy, with what the model's template is told."""
        body: dict[str, Any] = {
            "model": self.plan.model,
            "messages": messages,
            "max_tokens": max_tokens or self.plan.max_tokens,
            "temperature": 0,
        }
        if self.plan.chat_template_kwargs:
            body["chat_template_kwargs"] = dict(self.plan.chat_template_kwargs)
        return body

    def tokenize(self, messages: list[dict[str, Any]]) -> tuple[int, ...]:
        """Return the token ids the engine makes of a chat, rendered as ``chat_body`` would be."""
        kwargs = self.plan.chat_template_kwargs
        options = {"chat_template_kwargs": dict(kwargs)} if kwargs else {}
        return self.client.tokenize(self.plan.model, messages, options)
