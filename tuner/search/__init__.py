"""Proposes settings and learns from what came of them."""

from tuner.search.search import VIOLATION_CAP, Observation, Proposal, Search, Suggestion

__all__ = ["VIOLATION_CAP", "Observation", "Proposal", "Search", "Suggestion"]
