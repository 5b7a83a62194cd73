"""Optuna's samplers under the conformance suite, and what only some of them can."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from search_spaces import (
    Choice,
    Fixed,
    FloatRange,
    IntRange,
    LogIntRange,
    Parameter,
    PowerOfTwo,
    Space,
)
from tests.search.conformance import SLO, SMALL, SearchConformance, crash_share
from tuner.errors import UsageError
from tuner.search.distributions import distributions, param_name, to_params, to_settings
from tuner.search.optuna_search import OptunaSearch

HAS_TORCH = importlib.util.find_spec("torch") is not None


class TestTpe(SearchConformance):
    """Multivariate TPE."""

    sampler = "tpe"

    def test_a_region_that_crashes_is_learned(self, tmp_path: Path) -> None:
        """Told as infeasible, a crashing region is left; never told, it is asked for on and on."""
        told = crash_share(self.make, tmp_path, teaches=True)
        untold = crash_share(self.make, tmp_path, teaches=False)
        assert told < 0.4
        assert told < 0.7 * untold


class TestRandom(SearchConformance):
    """Random sampling, the yardstick."""

    sampler = "random"


@pytest.mark.skipif(not HAS_TORCH, reason="the GP sampler needs torch, which is not installed")
class TestGp(SearchConformance):
    """The Gaussian process sampler."""

    sampler = "gp"


@pytest.mark.skipif(HAS_TORCH, reason="torch is installed")
def test_the_gp_sampler_without_torch_says_what_to_install(tmp_path: Path) -> None:
    """Asked for and not possible: the message has the extra to install and the alternative."""
    with pytest.raises(UsageError, match=r"--sampler gp needs torch; pip install .*\[gp\].* tpe"):
        OptunaSearch(
            SMALL, slo=SLO, references=(), sampler="gp", seed=0, journal=tmp_path / "journal"
        )


@pytest.mark.parametrize(
    ("parameter", "name"),
    [
        (IntRange(8, 64, 8), "a"),
        (LogIntRange(1, 64), "a"),
        (FloatRange(0.8, 0.95, 0.05), "a"),
        (PowerOfTwo(1, 8), "log2(a)"),
        (Choice((16, 32, 512)), "a[index]"),
        (Choice(("auto", "fp8")), "a"),
        (Choice((False, True)), "a"),
    ],
)
def test_every_value_survives_the_way_to_optuna_and_back(parameter: Parameter, name: str) -> None:
    """Each value of a parameter, ends included, is one that Optuna can suggest, and comes back."""
    space = Space("s", {"a": parameter, "b": Fixed(1)})
    assert param_name("a", parameter) == name
    distribution = distributions(space)[name]
    values = parameter.values() or ()
    assert values
    for value in values:
        params = to_params(space, {"a": value, "b": 1})
        assert distribution._contains(distribution.to_internal_repr(params[name]))
        assert to_settings(space, params) == {"a": value, "b": 1}
