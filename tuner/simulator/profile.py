"""Hardware profiles and model shapes: where the simulated engine's coefficients come from."""

from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

import yaml

from tuner.simulator.cost_model import DecodeRegime, StepTimeModel

GIB = 2**30
FALLBACK_MODEL = "Qwen2.5-7B"
_BYTES_PER_WEIGHT = 2  # bfloat16


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What memory and step times need to know of a model."""

    name: str
    parameters: float
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    max_model_len: int

    @property
    def weights_bytes(self) -> float:
        """Size of the weights in bfloat16."""
        return self.parameters * 1e9 * _BYTES_PER_WEIGHT

    def kv_bytes_per_token(self, *, bytes_per_value: float = 2) -> float:
        """Return the size of one token's keys and values over all layers, in bytes."""
        return 2 * self.layers * self.kv_heads * self.head_dim * bytes_per_value

    @property
    def attn_flop_per_pair(self) -> float:
        """Floating point operations of one attention pair: two products over all heads."""
        return 4.0 * self.layers * self.heads * self.head_dim

    def with_layers(self, layers: int) -> "ModelShape":
        """Return the shape with other layers; the embedding's share of the weights stays."""
        embedding = self.vocabulary * self.hidden / 1e9
        blocks = max(self.parameters - embedding, 0.0) * layers / self.layers
        return replace(self, layers=layers, parameters=embedding + blocks)


@dataclass(frozen=True, slots=True)
class DecodeBend:
    """How the decode coefficients change above a number of sequences, as ratios."""

    above_decode_seqs: int
    c0_ratio: float
    c2_ratio: float
    c3_ratio: float


@dataclass(frozen=True, slots=True)
class Roofline:
    """A GPU's data-sheet figures and the shares of them that are reached."""

    memory_bandwidth_gb_per_s: float
    compute_tflops: float
    weights_bandwidth_efficiency: float
    kv_bandwidth_efficiency: float
    compute_efficiency: float
    attention_efficiency: float
    decode_compute_share: float
    step_overhead_ms: float


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """A simulated GPU.

    Attributes:
        name: what `--profile` calls it.
        gpu_name: what the log calls it; vLLM's defaults depend on it.
        made_up: True where no such device exists.
        sources: where the figures come from.
        memory_gib: usable GPU memory (GiB).
        request_overhead_s: time of a request outside the steps (s).
        tensor_parallel_efficiency: share of k GPUs' speed that k GPUs reach together.
        start_time_s: simulated start-up time (s).
        roofline: data-sheet figures, or None.
        fixed: coefficients given outright for every model, or None.
        bend: change of the decode coefficients at large batches, or None.
    """

    name: str
    gpu_name: str
    made_up: bool
    sources: tuple[str, ...]
    memory_gib: float
    request_overhead_s: float
    tensor_parallel_efficiency: float
    start_time_s: float
    roofline: Roofline | None
    fixed: StepTimeModel | None
    bend: DecodeBend | None

    def step_model(
        self, shape: ModelShape, *, tensor_parallel_size: int = 1, kv_bytes_per_value: float = 2
    ) -> StepTimeModel:
        """Return the step-time coefficients for a model on `tensor_parallel_size` such GPUs.

        Roofline arithmetic: weights and KV cache are read at the memory's speed, prefill computes
        two operations per weight and token; each at the share of the peak the profile states.
        k GPUs divide all of it by k times the tensor parallel efficiency, never the host's
        overhead.
        """
        k = tensor_parallel_size
        speed_up = k * self.tensor_parallel_efficiency if k > 1 else 1.0
        if self.fixed is not None:
            fixed = self.fixed
            return StepTimeModel(
                c0_s=fixed.c0_s / speed_up,
                c1_s_per_prefill_token=fixed.c1_s_per_prefill_token / speed_up,
                c2_s_per_seq=fixed.c2_s_per_seq / speed_up,
                c3_s_per_kv_token=fixed.c3_s_per_kv_token / speed_up,
                c4_s_per_attn_token=fixed.c4_s_per_attn_token / speed_up,
                large=_large(self.bend, fixed, speed_up),
                hidden_prefill_tokens=fixed.hidden_prefill_tokens,
            )
        roofline = self.roofline
        assert roofline is not None, f"profile {self.name} has neither roofline nor coefficients"
        bandwidth = roofline.memory_bandwidth_gb_per_s * 1e9 * speed_up
        flop_per_s = roofline.compute_tflops * 1e12 * speed_up
        overhead_s = roofline.step_overhead_ms / 1e3
        weights_s = shape.weights_bytes / (bandwidth * roofline.weights_bandwidth_efficiency)
        token_s = 2 * shape.parameters * 1e9 / (flop_per_s * roofline.compute_efficiency)
        kv_bytes = shape.kv_bytes_per_token(bytes_per_value=kv_bytes_per_value)
        pair_s = shape.attn_flop_per_pair / (flop_per_s * roofline.attention_efficiency)
        small = StepTimeModel(
            c0_s=overhead_s + weights_s,
            c1_s_per_prefill_token=token_s,
            c2_s_per_seq=roofline.decode_compute_share * token_s,
            c3_s_per_kv_token=kv_bytes / (bandwidth * roofline.kv_bandwidth_efficiency),
            c4_s_per_attn_token=pair_s,
        )
        return replace(small, large=_large(self.bend, small, 1.0))


def _large(bend: DecodeBend | None, small: StepTimeModel, speed_up: float) -> DecodeRegime | None:
    if bend is None:
        return None
    return DecodeRegime(
        above_decode_seqs=bend.above_decode_seqs,
        c0_s=small.c0_s * bend.c0_ratio / speed_up,
        c2_s_per_seq=small.c2_s_per_seq * bend.c2_ratio / speed_up,
        c3_s_per_kv_token=small.c3_s_per_kv_token * bend.c3_ratio / speed_up,
    )


def profile_names() -> tuple[str, ...]:
    """Return the names of all profiles, sorted."""
    return tuple(sorted((profile.name for profile in _profiles().values()), key=str.lower))


def load_profile(name: str) -> HardwareProfile:
    """Return a profile by name, case-insensitively.

    Raises:
        ValueError: there is no such profile; the message lists those there are.
    """
    try:
        return _profiles()[name.lower()]
    except KeyError:
        known = ", ".join(profile_names())
        raise ValueError(f"unknown hardware profile {name!r}; there are: {known}") from None


def find_model_shape(model: str) -> tuple[ModelShape, bool]:
    """Return the shape of a model, and whether it is known: else it is that of `FALLBACK_MODEL`."""
    last = model.rstrip("/").rsplit("/", maxsplit=1)[-1].lower()
    shapes = sorted(_shapes(), key=lambda shape: -len(shape.name))
    for shape in shapes:
        if last.startswith(shape.name.lower()):
            return shape, True
    return next(shape for shape in shapes if shape.name == FALLBACK_MODEL), False


@cache
def _shapes() -> tuple[ModelShape, ...]:
    text = resources.files("tuner.simulator").joinpath("model_shapes.yaml").read_text("utf-8")
    return tuple(ModelShape(**item) for item in yaml.safe_load(text))


@cache
def _profiles() -> dict[str, HardwareProfile]:
    folder = resources.files("tuner.simulator").joinpath("profiles")
    texts = [item.read_text("utf-8") for item in folder.iterdir() if item.name.endswith(".yaml")]
    profiles = [_parse(yaml.safe_load(text)) for text in texts]
    return {profile.name.lower(): profile for profile in profiles}


def _parse(data: dict[str, Any]) -> HardwareProfile:
    coefficients = data.get("coefficients")
    fixed = None
    roofline = None
    if coefficients is not None:
        fixed = StepTimeModel(
            c0_s=coefficients["c0_ms"] / 1e3,
            c1_s_per_prefill_token=coefficients["c1_ms_per_prefill_token"] / 1e3,
            c2_s_per_seq=coefficients["c2_ms_per_seq"] / 1e3,
            c3_s_per_kv_token=coefficients["c3_ms_per_kv_token"] / 1e3,
            c4_s_per_attn_token=coefficients["c4_ms_per_attn_token"] / 1e3,
            hidden_prefill_tokens=coefficients["hidden_prefill_tokens"],
        )
    else:
        roofline = Roofline(**{key: data[key] for key in Roofline.__slots__})
    return HardwareProfile(
        name=data["name"],
        gpu_name=data["gpu_name"],
        made_up=data["made_up"],
        sources=tuple(data["sources"]),
        memory_gib=data["memory_gib"],
        request_overhead_s=data["request_overhead_ms"] / 1e3,
        tensor_parallel_efficiency=data["tensor_parallel_efficiency"],
        start_time_s=data["start_time_s"],
        roofline=roofline,
        fixed=fixed,
        bend=DecodeBend(**data["bend"]) if "bend" in data else None,
    )
