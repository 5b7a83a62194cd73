#!/bin/sh
# latency-first for p75_ttft<=4000ms,p75_tpot<=600ms,error_rate<=1%
# run example-smollm2-cpu, trial 0, vllm 0.32.0, AMD EPYC
# measured at 6 concurrent, workload cpu-smoke: 12.9 output tokens/s, p95 TTFT 3004 ms, p95 TPOT 538 ms
# confirmed in 2 fresh measurements
export HF_HUB_OFFLINE=1
exec /work/main/.venv/bin/python -m vllm.entrypoints.openai.api_server \
  --model .cache/models/SmolLM2-135M-Instruct \
  --dtype float32 \
  --enforce-eager \
  --max-model-len 2048 \
  --kv-cache-memory-bytes 536870912 "$@"
