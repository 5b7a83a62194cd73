#!/bin/sh
# latency-first for p75_ttft<=1500ms,p75_tpot<=120ms,error_rate<=1%
# run 20261130T234658Z-example, trial 5, vllm 0.32.0, AMD EPYC
# measured at 10 concurrent, workload cpu-smoke: 56.4 output tokens/s, p95 TTFT 1294 ms, p95 TPOT 98.8 ms
# confirmed in 5 fresh measurements
export HF_HUB_OFFLINE=1
exec /work/main/.venv/bin/python -m vllm.entrypoints.openai.api_server \
  --model /work/main/.cache/models/SmolLM2-135M-Instruct \
  --max-num-batched-tokens 512 \
  --max-num-seqs 4 \
  --dtype float32 \
  --enforce-eager \
  --hf-overrides '{"num_hidden_layers": 4}' \
  --kv-cache-memory-bytes 268435456 \
  --load-format dummy \
  --max-model-len 2048 "$@"
