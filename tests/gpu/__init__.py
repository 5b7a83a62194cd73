"""Tests that need a GPU and vLLM for it (`make test-gpu`)."""
