"""Tests on real vLLM, on this machine's CPU."""
