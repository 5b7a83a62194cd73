"""The configuration of a run: one strict, frozen record, with every mistake told at once.

Values come from the command line, else the YAML file, else the defaults here.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from objectives import LoadMode, Slo, SloError, parse_slo
from search_spaces import (
    Space,
    SpaceError,
    parse_space,
    preset_names,
    preset_text,
    with_included,
)
from tuner.durations import parse_duration_s
from tuner.errors import UsageError
from tuner.records import MeterLimits
from tuner.secrets import (
    MASK,
    is_secret,
    is_secret_name,
    masked_named,
    masked_words,
    restored_options,
    restored_variables,
    restored_words,
)
from tuner.workloads import Workload, WorkloadModel, workload_data, workload_names
from tuner.yaml_source import Keys, YamlSource, parse_yaml, read_yaml

DEFAULT_MODEL = "Qwen/Qwen2.5-7B-Instruct"
DEFAULT_FILE = Path("tune.yaml")
EngineKind = Literal["auto", "vllm", "simulated"]
Scalar = bool | int | float | str

# Far above any machine or patience, far below where floats and clocks lose sense.
_MOST = 10**9
_MOST_REQUESTS = 10**7
_STRICT = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def _as_budget_s(value: Any) -> Any:
    return parse_duration_s(value) if isinstance(value, str) else value


def _as_mapping(key: str) -> BeforeValidator:
    """A bare name stands for a mapping with that name under `key`."""
    return BeforeValidator(lambda v: {key: v} if isinstance(v, str) else v)


def _as_engine_values(value: Any) -> Any:
    """Structured values are JSON text on vLLM's command line."""
    if not isinstance(value, dict):
        return value
    try:
        return {k: json.dumps(v) if isinstance(v, dict | list) else v for k, v in value.items()}
    except (TypeError, ValueError) as error:
        raise ValueError(f"holds what JSON cannot say: {error}") from error


def _as_texts(value: Any) -> Any:
    """Environment values are texts; YAML reads `1` as a number."""
    if not isinstance(value, dict):
        return value
    return {k: str(v) if isinstance(v, int | float) else v for k, v in value.items()}


# What workloads without loads were driven at before capacities were searched for.
_EARLIER_LADDERS = {"levels": (8, 16, 32, 64), "rates": (0.5, 1.0, 2.0, 4.0, 8.0)}


# A name of an option or variable; a value may be any text.
_OptionName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*$")]
_VariableName = Annotated[str, Field(pattern=r"^[^=\x00-\x1f\x7f]+$")]
# Escape sequences in a name would act on every terminal that shows it.
_ModelName = Annotated[str, Field(min_length=1, pattern=r"^[^\x00-\x1f\x7f-\x9f]+$")]


class EngineSection(BaseModel):
    """How engines are launched."""

    model_config = _STRICT

    kind: EngineKind = "auto"
    command: tuple[str, ...] | None = Field(default=None, min_length=1)
    env: Annotated[dict[_VariableName, str], BeforeValidator(_as_texts)] = Field(
        default_factory=dict
    )
    start_timeout_s: float = Field(default=1800.0, gt=0, le=_MOST)
    start_silence_s: float = Field(default=600.0, gt=0, le=_MOST)
    control_timeout_s: float = Field(default=30.0, gt=0, le=_MOST)
    live_dir: Path | None = None


class MeterSection(BaseModel):
    """When the load generator calls itself the bottleneck."""

    model_config = _STRICT

    max_lag_ms: float = Field(default=20.0, gt=0)
    max_late_share: float = Field(default=0.02, gt=0, le=1)


class ConfirmSection(BaseModel):
    """How finalists and baseline are measured again at the end."""

    model_config = _STRICT

    replicates: int = Field(default=5, ge=1, le=100)
    requests: int = Field(default=1000, ge=1, le=_MOST_REQUESTS)


class CapacitySection(BaseModel):
    """How the largest load of a setting is searched for, where the workload names no loads."""

    model_config = _STRICT

    resolution: float = Field(default=0.05, ge=0.005, le=0.5)
    max_load: float = Field(default=4096.0, ge=1, le=_MOST)
    promotion_seeds: int = Field(default=2, ge=0, le=20)


class CanarySection(BaseModel):
    """How workers are compared with each other and with themselves."""

    model_config = _STRICT

    every: int = Field(default=8, ge=0, le=_MOST)
    tolerance: float = Field(default=0.05, gt=0, le=10)


class ConfigModel(BaseModel):
    """The keys of `tune.yaml`; the options of `tune run` have the same names."""

    model_config = _STRICT

    slo: str
    model: _ModelName | None = None
    engine: Annotated[EngineSection, _as_mapping("kind")] = EngineSection()
    engine_arg: Annotated[dict[_OptionName, Scalar], BeforeValidator(_as_engine_values)] = Field(
        default_factory=dict
    )
    gpus: int | None = Field(default=None, ge=1, le=100_000)
    gpus_per_engine: int = Field(default=1, ge=1, le=100_000)
    ray_address: str | None = None
    fleet: Literal["ray", "local"] = "ray"
    workload: Annotated[dict[str, Any], _as_mapping("name")] = Field(
        default_factory=lambda: {"name": "mixed"}
    )
    load: LoadMode = "concurrency"
    space: Annotated[dict[str, Any], _as_mapping("name")] = Field(
        default_factory=lambda: {"name": "vllm"}
    )
    trials: int = Field(default=24, ge=1, le=100_000)
    budget: Annotated[float | None, BeforeValidator(_as_budget_s)] = Field(
        default=None, gt=0, le=_MOST
    )
    live: bool = True
    prior: bool = True
    calibration: Path | None = None
    sampler: Literal["tpe", "gp", "random"] = "tpe"
    seed: int = Field(default=0, ge=0, le=2**31)
    runs_dir: Path = Path("runs")
    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    meter: MeterSection = MeterSection()
    confirm: ConfirmSection = ConfirmSection()
    capacity: CapacitySection = CapacitySection()
    canary: CanarySection = CanarySection()
    patience: int = Field(default=12, ge=0, le=_MOST)


@dataclass(frozen=True, slots=True)
class RunConfig:
    """A valid configuration, ready to run.

    Attributes:
        options: the config's keys.
        slo: parsed.
        workload: resolved from its preset or file.
        space: likewise.
        workload_data: the workload as plain data, for `config.yaml`.
        space_data: the space as plain data, likewise.
    """

    options: ConfigModel
    slo: Slo
    workload: Workload
    space: Space
    workload_data: Mapping[str, Any]
    space_data: Mapping[str, Any]

    @property
    def model(self) -> str:
        """The model's name or path."""
        return self.options.model or DEFAULT_MODEL

    @property
    def meter_limits(self) -> MeterLimits:
        """The load generator's limits."""
        return MeterLimits(self.options.meter.max_lag_ms, self.options.meter.max_late_share)

    def to_data(self) -> dict[str, Any]:
        """The resolved configuration as plain data, secrets masked.

        Reading it again gives the same run once `with_secrets` has put them back.
        """
        data = self.options.model_dump(mode="json", exclude_none=True)
        data["engine_arg"] = masked_named(data["engine_arg"])
        data["engine"]["env"] = masked_named(data["engine"]["env"])
        if "command" in data["engine"]:
            data["engine"]["command"] = masked_words(data["engine"]["command"])
        # Named also where there is none: a config without the keys is one of an earlier version.
        workload = {"levels": None, "rates": None, **self.workload_data}
        return {**data, "workload": workload, "space": dict(self.space_data)}

    @property
    def secret_values(self) -> tuple[str, ...]:
        """The values that must be masked wherever they turn up."""
        engine = self.options.engine
        named = (*engine.env.items(), *self.options.engine_arg.items())
        values = {str(value) for name, value in named if is_secret(name, value)}
        for word, masked in zip(
            engine.command or (), masked_words(engine.command or ()), strict=True
        ):
            if word != masked:
                values.add(word.removeprefix(masked.removesuffix(MASK)))
        # The longest first: one may be a part of another.
        return tuple(sorted(values - {"", MASK}, key=len, reverse=True))

    def with_secrets(self, environment: Mapping[str, str] | None = None) -> RunConfig:
        """The config with every mask replaced by its value, for whoever starts an engine.

        Args:
            environment: where the values are; this process' own by default.

        Raises:
            UsageError: with the variables that have to be set.
        """
        environment = os.environ if environment is None else environment
        options = self.options
        env, no_env = restored_variables(options.engine.env, environment)
        args, no_args = restored_options(options.engine_arg, environment)
        words, no_words = restored_words(options.engine.command or (), environment)
        places = (("engine.env", no_env), ("engine_arg", no_args), ("engine.command", no_words))
        problems = [_masked_problem(place, name) for place, names in places for name in names]
        if problems:
            raise UsageError(problems)
        command = tuple(words) if options.engine.command is not None else None
        engine = options.engine.model_copy(update={"env": env, "command": command})
        return replace(
            self, options=options.model_copy(update={"engine": engine, "engine_arg": args})
        )

    def without_secrets(self) -> RunConfig:
        """The config without what is masked, for whoever starts no engine."""
        options = self.options
        env = {n: v for n, v in options.engine.env.items() if v != MASK}
        args = {n: v for n, v in options.engine_arg.items() if v != MASK}
        engine = options.engine.model_copy(update={"env": env})
        return replace(
            self, options=options.model_copy(update={"engine": engine, "engine_arg": args})
        )


@dataclass(frozen=True, slots=True)
class Option:
    """A value from the command line: the key's path, the value, and how the option was written."""

    keys: Keys
    value: Any
    written: str


def load_stored_config(path: Path) -> RunConfig:
    """The config that a run was started with, by this or an earlier version.

    Raises:
        UsageError: when it cannot be read.
    """
    data = read_yaml(path).data
    given = data.get("workload", {}) if isinstance(data, dict) else {}
    options = [
        Option(("workload", name), list(ladder), f"workload.{name}")
        for name, ladder in _EARLIER_LADDERS.items()
        if isinstance(given, dict) and name not in given
    ]
    try:
        return load_config(file=path, options=options, allow_default_file=False)
    except UsageError as error:
        # Nobody gave these as options: what is missing or wrong, is so in the file.
        named = [p if str(path) in p else f"{path}: {p}" for p in error.problems]
        raise UsageError(named) from error


def load_config(
    *, file: Path | None, options: Sequence[Option] = (), allow_default_file: bool = True
) -> RunConfig:
    """Read, merge and check everything.

    Raises:
        UsageError: with every mistake and its place.
    """
    source = _read_source(file, allow_default_file=allow_default_file)
    problems = list(source.problems)
    if not isinstance(source.data, dict):
        raise UsageError([*problems, f"{source.path}:1: a config is a mapping of keys to values"])
    data: dict[str, Any] = dict(source.data)
    for option in options:
        _put(data, option, problems)
    checker = _Checker(source, options, problems)
    config = checker.check(data)
    if problems or config is None:
        raise UsageError(problems)
    return config


def parse_set_option(text: str) -> Option:
    """`a.b=VALUE` as an option; the value is read as YAML.

    Raises:
        UsageError: when it has no `=` or no valid value.
    """
    name, found, value_text = text.partition("=")
    if not found or not name.strip():
        raise UsageError([f"--set {text}: write it as KEY=VALUE, as --set workload.levels=[4,8]"])
    try:
        value = parse_yaml(value_text)
    except ValueError as error:
        raise UsageError([f"--set {name.strip()}: the value is not valid YAML: {error}"]) from error
    return Option(tuple(name.strip().split(".")), value, f"--set {name.strip()}")


def parse_engine_arg(text: str) -> Option:
    """`NAME=VALUE` as an option for one fixed vLLM argument.

    Raises:
        UsageError: when it has no `=`.
    """
    name, found, value_text = text.partition("=")
    name = name.strip().removeprefix("--").replace("-", "_")
    if not found or not name.isidentifier():
        raise UsageError(
            [f"--engine-arg {text}: write it as NAME=VALUE, as --engine-arg max_model_len=4096"]
        )
    try:
        value = parse_yaml(value_text) if value_text.strip() else ""
    except ValueError:
        value = None
    # What is no plain value (as JSON for hf_overrides) goes to the engine as it was written.
    is_plain = isinstance(value, bool | int | float | str)
    return Option(("engine_arg", name), value if is_plain else value_text, f"--engine-arg {name}")


def _masked_problem(place: str, variable: str) -> str:
    if not variable:
        return f"{place}: a word without a name is masked; keep secrets in engine.env"
    return f"{place}: a secret is masked here; set the environment variable {variable} to it"


def _read_source(file: Path | None, *, allow_default_file: bool) -> YamlSource:
    if file is not None:
        return read_yaml(file)
    if allow_default_file and DEFAULT_FILE.exists():
        return read_yaml(DEFAULT_FILE)
    return YamlSource(DEFAULT_FILE, {})


def _put(data: dict[str, Any], option: Option, problems: list[str]) -> None:
    """Set a value deep in the data; a bare name on the way becomes a mapping with that name."""
    target = data
    for key in option.keys[:-1]:
        inner = target.get(str(key))
        if isinstance(inner, str):
            inner = {"kind" if key == "engine" else "name": inner}
        elif inner is None:
            inner = {}
        elif not isinstance(inner, dict):
            problems.append(f"{option.written}: {key} is not a mapping, it has no keys")
            return
        inner = dict(inner)
        target[str(key)] = inner
        target = inner
    target[str(option.keys[-1])] = option.value


class _Checker:
    """Checks merged data part by part and collects problems with their places."""

    def __init__(self, source: YamlSource, options: Sequence[Option], problems: list[str]) -> None:
        self._source = source
        self._options = options
        self._problems = problems

    def check(self, data: dict[str, Any]) -> RunConfig | None:
        self._refuse_odd_text(data)
        model = self._model(data)
        workload, workload_source = self._workload(data.get("workload", {"name": "mixed"}))
        space, space_source = self._space(data.get("space", {"name": "vllm"}))
        classes = workload.class_names if workload else None
        slo = self._slo(data, classes)
        if model is None or workload is None or space is None or slo is None:
            return None
        return RunConfig(model, slo, workload, space, workload_source, space_source)

    def _model(self, data: dict[str, Any]) -> ConfigModel | None:
        try:
            return ConfigModel.model_validate(data)
        except ValidationError as error:
            self._add_all(error, prefix=(), model=ConfigModel)
            return None

    def _refuse_odd_text(self, data: Any) -> None:
        """Texts that neither a command line nor a file could hold."""
        for keys, text in _texts(data, ()):
            if _UNUSABLE.search(text):
                self._add(keys, "has a character that no command or file can hold (NUL, surrogate)")

    def _slo(self, data: dict[str, Any], classes: Sequence[str] | None) -> Slo | None:
        text = data.get("slo")
        if not isinstance(text, str):
            return None  # told by the model already
        try:
            return parse_slo(text, classes=classes)
        except SloError as error:
            self._add(("slo",), str(error))
            return None

    def _workload(self, value: Any) -> tuple[Workload | None, dict[str, Any]]:
        given = {"name": value} if isinstance(value, str) else value
        if not isinstance(given, dict):
            return None, {}  # told by the model already
        name = str(given.get("name") or ("custom" if "classes" in given else "mixed"))
        own = {k: v for k, v in given.items() if k != "name"}
        base, place = self._workload_base(name, has_own="classes" in own)
        if base is None:
            return None, {}
        if place is not None:
            self._refuse_odd_text(base)
        merged = {**base, **own}
        try:
            model = WorkloadModel.model_validate(merged)
        except ValidationError as error:
            if place is not None:
                self._add_all_in(place, error, own=own)
            else:
                self._add_all(error, prefix=("workload",), model=WorkloadModel)
            return None, {}
        short = Path(name).stem if place is not None else name
        return model.to_workload(short), {"name": short, **merged}

    def _workload_base(
        self, name: str, *, has_own: bool
    ) -> tuple[dict[str, Any] | None, YamlSource | None]:
        if name in workload_names():
            return workload_data(name), None
        if _looks_like_file(name):
            source = read_yaml(Path(name))
            self._problems += source.problems
            is_mapping = isinstance(source.data, dict)
            if not is_mapping:
                self._problems.append(f"{name}:1: a workload is a mapping with the key 'classes'")
            return (source.data if is_mapping and not source.problems else None), source
        if has_own:
            return {}, None
        self._add(
            ("workload",),
            f"unknown workload {name[:80]!r}; presets are {', '.join(workload_names())}, "
            "or give a YAML file",
        )
        return None, None

    def _space(self, value: Any) -> tuple[Space | None, dict[str, Any]]:
        given = {"name": value} if isinstance(value, str) else value
        if not isinstance(given, dict):
            return None, {}
        name = str(given.get("name") or ("custom" if "parameters" in given else "vllm"))
        include = given.get("include") or []
        if not isinstance(include, list):
            self._add(("space", "include"), "give a list of parameter names")
            return None, {}
        own = {k: v for k, v in given.items() if k not in ("name", "include")}
        base, place = self._space_base(name, has_own="parameters" in own)
        if base is None:
            return None, {}
        if place is not None:
            self._refuse_odd_text(base)
        merged = {**base, **own}
        short = Path(name).stem if place is not None else name
        try:
            space = with_included(parse_space(merged, name=short), list(include))
        except SpaceError as error:
            for keys, message in error.problems:
                where = place.place(keys) if place else self._where(("space", *keys))
                self._problems.append(f"{where}: {'.'.join(map(str, ('space', *keys)))}: {message}")
            return None, {}
        return space, {"name": short, "include": list(include), **merged}

    def _space_base(
        self, name: str, *, has_own: bool
    ) -> tuple[dict[str, Any] | None, YamlSource | None]:
        if name in preset_names():
            return _preset_space_data(name), None
        if _looks_like_file(name):
            source = read_yaml(Path(name))
            self._problems += source.problems
            is_mapping = isinstance(source.data, dict)
            if not is_mapping:
                self._problems.append(f"{name}:1: a space is a mapping with the key 'parameters'")
            return (source.data if is_mapping and not source.problems else None), source
        if has_own:
            return {}, None
        self._add(
            ("space",),
            f"unknown space {name[:80]!r}; presets are {', '.join(preset_names())}, "
            "or give a YAML file",
        )
        return None, None

    def _add_all(self, error: ValidationError, *, prefix: Keys, model: type[BaseModel]) -> None:
        for item in error.errors():
            self._add((*prefix, *item["loc"]), _message(item, model))

    def _add_all_in(
        self, place: YamlSource, error: ValidationError, *, own: Mapping[str, Any]
    ) -> None:
        for item in error.errors():
            if item["loc"] and item["loc"][0] in own:
                self._add(("workload", *item["loc"]), _message(item, WorkloadModel))
                continue
            path = ".".join(map(str, item["loc"]))
            where = place.place(tuple(item["loc"]))
            self._problems.append(f"{where}: {path}: {_message(item, WorkloadModel)}")

    def _add(self, keys: Keys, message: str) -> None:
        path = ".".join(map(str, keys))
        where = self._where(keys)
        text = f"{where}: {message}" if where == _flag(keys) else f"{where}: {path}: {message}"
        self._problems.append(text)

    def _where(self, keys: Keys) -> str:
        for option in self._options:
            if keys[: len(option.keys)] == option.keys:
                return option.written
        if self._source.lines and any(
            keys[:n] in self._source.lines for n in range(1, len(keys) + 1)
        ):
            return self._source.place(keys)
        return _flag(keys)


def _flag(keys: Keys) -> str:
    return f"--{str(keys[0]).replace('_', '-')}" if keys else "config"


def _message(item: Any, model: type[BaseModel]) -> str:
    if item["type"] == "extra_forbidden":
        allowed = ", ".join(model.model_fields)
        where = f"; allowed are {allowed}" if len(item["loc"]) == 1 else ""
        return f"unknown key{where}"
    if item["type"] == "missing":
        if item["loc"] == ("slo",):
            return "is missing; say what you promise, as --slo p95_ttft=800ms,tpot=50ms"
        return "is missing"
    message: str = item["msg"]
    message = message.removeprefix("Value error, ")
    if any(is_secret_name(str(key)) for key in item["loc"]):
        return message
    shown = repr(item["input"])
    return message if len(shown) > 60 else f"{message} (got {shown})"


# NUL ends a word of a command line; half a surrogate pair has no UTF-8.
_UNUSABLE = re.compile("[\0\ud800-\udfff]")


def _texts(data: Any, keys: Keys) -> Iterator[tuple[Keys, str]]:
    """Every text in plain data with the path to it; a key's own text as well."""
    if isinstance(data, str):
        yield keys, data
    elif isinstance(data, dict):
        for key, value in data.items():
            if isinstance(key, str):
                yield keys, key
            yield from _texts(value, (*keys, key if isinstance(key, int) else str(key)))
    elif isinstance(data, list | tuple):
        for index, value in enumerate(data):
            yield from _texts(value, (*keys, index))


def _looks_like_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml")) or "/" in name


def _preset_space_data(name: str) -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load(preset_text(name))
    return data
