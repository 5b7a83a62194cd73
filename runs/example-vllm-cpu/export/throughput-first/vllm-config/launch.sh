#!/bin/sh
# The file is a word of its own: vLLM ignores "--config=config.yaml".
export HF_HUB_OFFLINE=1
exec /work/main/.venv/bin/python -m vllm.entrypoints.openai.api_server --config config.yaml "$@"
