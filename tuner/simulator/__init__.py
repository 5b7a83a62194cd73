"""The simulated engine: vLLM's scheduler in virtual time, a step-time model, and an HTTP face."""
