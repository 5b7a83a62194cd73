#!/bin/sh
exec /work/main/.venv/bin/python -m vllm.entrypoints.openai.api_server --model .cache/models/SmolLM2-135M-Instruct --dtype float32 --enforce-eager --max-model-len 2048 --kv-cache-memory-bytes 536870912
