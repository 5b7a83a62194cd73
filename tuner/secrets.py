"""What is a secret, and how it is masked, wherever it would be written or shown.

A masked value is `***`. It comes back from the environment of the process that needs it, from the
variable that `variable_of` names: a run folder never holds the value itself.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MASK = "***"

# A path is no secret, nor is a count of tokens or a tokenizer.
_SECRET_NAME = re.compile(
    r"(?i)(?:^|[_.-])(?:token|key|pass|passphrase|credentials?)$"
    r"|password|passwd|secret|access_?key|api_?key|apikey"
)
_PATH_NAME = re.compile(r"(?i)[_-](?:path|file|dir|name)$")
_LOOKS_SECRET = re.compile(
    r"(?<![A-Za-z0-9_-])(?:"
    r"hf_[A-Za-z0-9]{12,}"
    r"|sk-(?=[A-Za-z0-9_-]*\d)[A-Za-z0-9_-]{12,}"
    r"|gh[opsu]_[A-Za-z0-9]{20,}|github_pat_\w{20,}"
    r"|xox[abp]-[A-Za-z0-9-]{10,}|nvapi-[\w-]{20,}|AKIA[A-Z0-9]{16}"
    r")"
)
# In running text a name, a sign and a value say that the value is secret; so do schemes and URLs.
_NAMED_IN_TEXT = re.compile(
    r"(?i)((?:api[_-]?key|(?<![a-z])token|[_-]token|secret|passw(?:or)?d|access_?key)"
    r"[\"']?\s{0,8}[=:]\s{0,8}[\"']?|\bBearer\s{1,8}|--(?:[\w-]*-)?(?:api-key|token|password)\s)"
    r"(?!\*\*\*)([^\s\"',;)}\]]{4,})"
)
_IN_URL = re.compile(r"(://[^\s/:@]{1,200}:)[^\s/@]{1,500}(?=@)")
_ASSIGNMENT = re.compile(r"(-{0,2}[A-Za-z_][\w.-]*)=(.*)", re.DOTALL)
# A shorter value, or a mere number, cannot be told from ordinary text.
_LEAST_CHARS = 6
# Where the engine itself reads an option's value from the environment, under another name.
_VARIABLES = {"api_key": "VLLM_API_KEY", "hf_token": "HF_TOKEN"}


def is_secret_name(name: str) -> bool:
    """Whether a variable or option of this name holds a secret, as HF_TOKEN or api_key."""
    return bool(_SECRET_NAME.search(name)) and not _PATH_NAME.search(name)


def is_secret(name: str, value: Any) -> bool:
    """Whether a named value is one: by its name, or because it looks like one."""
    if isinstance(value, bool) or value is None:
        return False
    return is_secret_name(name) or masked_text(str(value)) != str(value)


def variable_of(option: str) -> str:
    """The environment variable that gives the value of a masked option; "" where none can."""
    plain = option.lstrip("-").replace("-", "_").lower()
    return _shell_name(_VARIABLES.get(plain, plain.upper()))


def masked_named(values: Mapping[str, Any]) -> dict[str, Any]:
    """Variables or options with each secret value masked as a whole."""
    return {n: MASK if is_secret(n, v) else v for n, v in values.items()}


def masked_text(text: str, values: Iterable[str] = ()) -> str:
    """Running text without what looks like a secret, and without the values known to be."""
    for value in values:
        if _can_be_found(value):
            text = text.replace(value, MASK)
    text = _LOOKS_SECRET.sub(MASK, text)
    text = _IN_URL.sub(rf"\g<1>{MASK}", text)
    return _NAMED_IN_TEXT.sub(_masked_match, text)


def masked_words(words: Sequence[str], values: Iterable[str] = ()) -> list[str]:
    """A command line without its secrets: values of options, assignments, and what looks like."""
    known = tuple(values)
    masked: list[str] = []
    option = ""
    for word in words:
        assignment = _ASSIGNMENT.fullmatch(word)
        if option and is_secret_name(option) and not word.startswith("--"):
            masked.append(MASK)
        elif assignment is not None and assignment[2]:
            name, value = assignment.groups()
            hidden = is_secret(name, value) or value in known or _mentions(value, known)
            masked.append(f"{name}={MASK}" if hidden else word)
        else:
            is_hidden = word in known or masked_text(word, known) != word
            masked.append(MASK if is_hidden else word)
        option = word if word.startswith("--") and "=" not in word else ""
    return masked


def masked_data(data: Any, values: Iterable[str] = ()) -> Any:
    """Plain data with the known values taken out of every text in it."""
    known = [value for value in values if _can_be_found(value)]
    return _masked_data(data, known) if known else data


def masked_bytes(content: bytes, values: Iterable[str] = ()) -> bytes:
    """A log without its secrets; what is no text in it stays as it is."""
    text = content.decode("utf-8", errors="surrogateescape")
    return masked_text(text, values).encode("utf-8", errors="surrogateescape")


def masked_json_lines(content: bytes, values: Iterable[str] = ()) -> bytes:
    """JSON lines without the known values; the lines stay JSON."""
    known = [value for value in values if _can_be_found(value)]
    spelled = [json.dumps(value, ensure_ascii=False)[1:-1].encode() for value in known]
    if not any(value in content for value in spelled):
        return content
    lines = []
    for line in content.splitlines(keepends=True):
        if any(value in line for value in spelled):
            data = _masked_data(json.loads(line), known)
            text = json.dumps(data, ensure_ascii=False)
            line = f"{text}\n".encode(errors="backslashreplace")
        lines.append(line)
    return b"".join(lines)


def restored_variables(
    values: Mapping[str, str], environment: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """Environment variables with masks replaced; and those that are not set."""
    masked = [name for name, value in values.items() if value == MASK]
    restored = {**values, **{n: environment.get(n, MASK) for n in masked}}
    return restored, [n for n in masked if n not in environment]


def restored_options(
    values: Mapping[str, Any], environment: Mapping[str, str]
) -> tuple[dict[str, Any], list[str]]:
    """Options with masks replaced; and the variables that are not set."""
    masked = {name: variable_of(name) for name, value in values.items() if value == MASK}
    restored = {**values, **{n: environment.get(v, MASK) for n, v in masked.items()}}
    return restored, [v for v in masked.values() if v not in environment]


def restored_words(
    words: Sequence[str], environment: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """A command line with masks replaced; and the variables that are not set, "" for no name."""
    restored, missing = [], []
    for prefix, variable, word in _parts(words):
        if variable is None:
            restored.append(word)
            continue
        restored.append(f"{prefix}{environment.get(variable, MASK)}")
        missing += [variable] if variable not in environment else []
    return restored, missing


def shell_words(words: Sequence[str]) -> list[str]:
    """A command line quoted for a shell; a masked value is read from its variable."""
    quoted = []
    for prefix, variable, word in _parts(words):
        reference = f'"${{{variable}:?is not set}}"' if variable else ""
        quoted.append(f"{prefix}{reference}" if reference else shlex.quote(word))
    return quoted


def _parts(words: Sequence[str]) -> Iterable[tuple[str, str | None, str]]:
    """Each word with what stands before its mask and the mask's variable, None without a mask."""
    option = ""
    for word in words:
        assignment = _ASSIGNMENT.fullmatch(word)
        if word == MASK:
            yield "", variable_of(option) if option else "", word
        elif assignment is not None and assignment[2] == MASK:
            name = assignment[1]
            variable = variable_of(name) if name.startswith("-") else _shell_name(name)
            yield f"{name}=", variable, word
        else:
            yield "", None, word
        option = word if word.startswith("--") and "=" not in word else ""


def _shell_name(name: str) -> str:
    return name if name.isidentifier() and name.isascii() else ""


def _masked_match(found: re.Match[str]) -> str:
    return f"{found[1]}{MASK}"


def _masked_data(data: Any, known: Sequence[str]) -> Any:
    if isinstance(data, str):
        for value in known:
            data = data.replace(value, MASK)
        return data
    if isinstance(data, Mapping):
        return {name: _masked_data(value, known) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [_masked_data(value, known) for value in data]
    return data


def _mentions(text: str, known: Iterable[str]) -> bool:
    return any(value in text for value in known if _can_be_found(value))


def _can_be_found(value: str) -> bool:
    return len(value) >= _LEAST_CHARS and not value.isdigit() and value != MASK
