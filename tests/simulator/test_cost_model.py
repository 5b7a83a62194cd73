"""The step-time model and the profiles it comes from."""

import itertools
import math
import statistics

import pytest

from tuner.simulator.cost_model import Batch, DecodeRegime, StepTimeModel, noise_factors
from tuner.simulator.profile import find_model_shape, load_profile, profile_names

MS = 1e-3


def distserve() -> StepTimeModel:
    """DistServe's profile of vLLM, OPT-13B, A100 80 GB, TP1, decode part."""
    large = DecodeRegime(94, c0_s=20.21 * MS, c2_s_per_seq=0.120 * MS, c3_s_per_kv_token=4.91e-7)
    return StepTimeModel(23.48 * MS, 0.1405 * MS, 0.0607 * MS, 5.93e-7, 2 * 8.08e-9, large)


@pytest.mark.parametrize(
    ("batch", "expected_ms"),
    [
        (Batch(0, 10, 5000, 0), 23.48 + 5.93e-4 * 5000 + 0.0607 * 10),
        (Batch(0, 94, 0, 0), 23.48 + 0.0607 * 94),
        (Batch(0, 95, 1000, 0), 20.21 + 4.91e-4 * 1000 + 0.120 * 95),
        (Batch(1000, 0, 0, 1000 * 500), 23.48 + 0.1405 * 1000 + 8.08e-6 * 1000**2),
    ],
)
def test_step_time_vectors(batch: Batch, expected_ms: float) -> None:
    """The linear form reproduces DistServe's published lines, the bend at 95 included."""
    assert distserve().step_s(batch) == pytest.approx(expected_ms * MS)


def test_small_chunks_hide_behind_decodes() -> None:
    """Hidden prompt tokens cost nothing beside decodes, and their full price alone."""
    model = StepTimeModel(0.01, 0.001, 0, 0, 0, hidden_prefill_tokens=100)
    assert model.step_s(Batch(100, 1, 0, 0)) == pytest.approx(0.01)
    assert model.step_s(Batch(150, 1, 0, 0)) == pytest.approx(0.06)
    assert model.step_s(Batch(100, 0, 0, 0)) == pytest.approx(0.11)


def test_noise_is_seeded_and_centred() -> None:
    """Equal seeds give equal noise, the mean is 1, and no noise is exactly 1."""
    first = list(itertools.islice(noise_factors(0.1, seed=3), 5000))
    assert first == list(itertools.islice(noise_factors(0.1, seed=3), 5000))
    assert first != list(itertools.islice(noise_factors(0.1, seed=4), 5000))
    assert statistics.mean(first) == pytest.approx(1.0, abs=0.01)
    assert statistics.stdev(map(math.log, first)) == pytest.approx(0.1, rel=0.1)
    assert next(noise_factors(0.0, seed=0)) == 1.0


def test_a100_profile_reproduces_its_source() -> None:
    """The A100's efficiencies give back DistServe's coefficients for OPT-13B."""
    shape, known = find_model_shape("facebook/opt-13b")
    assert known
    model = load_profile("a100-80").step_model(shape)
    assert model.c1_s_per_prefill_token == pytest.approx(0.1405 * MS, rel=0.03)
    assert model.c2_s_per_seq == pytest.approx(0.0607 * MS, rel=0.03)
    assert model.c3_s_per_kv_token == pytest.approx(5.93e-7, rel=0.03)
    assert model.c4_s_per_attn_token == pytest.approx(2 * 8.08e-9, rel=0.05)
    assert model.large is not None
    assert model.large.c2_s_per_seq == pytest.approx(0.120 * MS, rel=0.03)


def test_profiles_are_found_in_any_case_and_state_their_sources() -> None:
    """Every profile loads by any spelling of its case and says where it comes from."""
    assert {"A10", "L40S", "A100-80", "H100", "demo"} <= set(profile_names())
    for name in profile_names():
        profile = load_profile(name.upper())
        assert profile == load_profile(name.lower())
        assert profile.sources
        assert profile.made_up == (name == "demo")
    with pytest.raises(ValueError, match=r"unknown hardware profile 'b200'.*H100"):
        load_profile("b200")


def test_faster_hardware_is_faster() -> None:
    """For the same batch an H100 beats an A100, which beats an L40S, which beats an A10."""
    shape, _ = find_model_shape("Qwen/Qwen2.5-7B-Instruct")
    batch = Batch(512, 32, 20_000, 512 * 256)
    names = ("H100", "A100-80", "L40S", "A10")
    times = [load_profile(name).step_model(shape).step_s(batch) for name in names]
    assert times == sorted(times)


@pytest.mark.parametrize("name", ["H100", "demo"])
def test_tensor_parallel_speeds_up_less_than_k_times(name: str) -> None:
    """Two GPUs are faster than one, and slower than twice as fast."""
    shape, _ = find_model_shape("Qwen/Qwen2.5-7B-Instruct")
    batch = Batch(512, 32, 20_000, 512 * 256)
    one, two = (
        load_profile(name).step_model(shape, tensor_parallel_size=k).step_s(batch) for k in (1, 2)
    )
    assert one / 2 < two < one


@pytest.mark.parametrize(
    ("model", "shape", "known"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen2.5-7B", True),
        ("meta-llama/Llama-3.1-8B-Instruct", "Llama-3.1-8B", True),
        ("/models/smollm2-135m-instruct/", "SmolLM2-135M", True),
        ("Qwen/Qwen2.5-3B", "Qwen2.5-3B", True),
        ("someone/mystery", "Qwen2.5-7B", False),
    ],
)
def test_model_shapes_are_found_by_name(model: str, shape: str, known: bool) -> None:
    """A model is found by the start of its last name part, else the fallback is named as one."""
    found, is_known = find_model_shape(model)
    assert (found.name, is_known) == (shape, known)


def test_fewer_layers_keep_the_embedding() -> None:
    """Overriding the layers shrinks weights and KV cache, not the vocabulary."""
    shape, _ = find_model_shape("SmolLM2-135M")
    small = shape.with_layers(3)
    assert small.kv_bytes_per_token() == shape.kv_bytes_per_token() / 10
    assert shape.vocabulary * shape.hidden / 1e9 < small.parameters < shape.parameters
