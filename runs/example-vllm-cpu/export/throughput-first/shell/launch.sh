#!/bin/sh
# throughput-first for p75_ttft<=1500ms,p75_tpot<=120ms,error_rate<=1%
# run example-vllm-cpu, trial 0, vllm 0.32.0, AMD EPYC
# measured at 6 concurrent, workload cpu-smoke: 71.6 output tokens/s, p95 TTFT 337 ms, p95 TPOT 111 ms
# confirmed in 5 fresh measurements
export HF_HUB_OFFLINE=1
exec /work/main/.venv/bin/python -m vllm.entrypoints.openai.api_server \
  --model /work/main/.cache/models/SmolLM2-135M-Instruct \
  --dtype float32 \
  --enforce-eager \
  --hf-overrides '{"num_hidden_layers": 4}' \
  --kv-cache-memory-bytes 268435456 \
  --load-format dummy \
  --max-model-len 2048 "$@"
