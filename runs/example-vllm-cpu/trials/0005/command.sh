#!/bin/sh
exec /work/main/.venv/bin/python -m vllm.entrypoints.openai.api_server --model /work/main/.cache/models/SmolLM2-135M-Instruct --max-num-batched-tokens 512 --max-num-seqs 4 --dtype float32 --enforce-eager --hf-overrides '{"num_hidden_layers": 4}' --kv-cache-memory-bytes 268435456 --load-format dummy --max-model-len 2048
