"""Short calls to a running engine; the load itself goes through `tuner.load`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx2

from tuner.engines.scrape import Snapshot, parse_snapshot
from tuner.workloads import Endpoint

_CALL_TIMEOUT_S = 10.0


class EngineHttp:
    """A client for one engine; proxies of the environment are never used for loopback.

    Args:
        base_url: as `http://127.0.0.1:8000`.
        api_key: sent as the bearer token; empty: none.
    """

    def __init__(self, base_url: str, *, api_key: str = "") -> None:
        self.base_url = base_url
        self._client = httpx2.Client(
            base_url=base_url,
            trust_env=False,
            timeout=_CALL_TIMEOUT_S,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
        )

    def close(self) -> None:
        """Give the connections back."""
        self._client.close()

    def is_healthy(self) -> bool:
        """Whether `/health` answers 200."""
        try:
            return self._client.get("/health").status_code == httpx2.codes.OK
        except httpx2.HTTPError:
            return False

    def models(self) -> list[Mapping[str, Any]]:
        """The served models; empty where the engine does not answer."""
        data = self._json("/v1/models").get("data")
        return [m for m in data if isinstance(m, dict)] if isinstance(data, list) else []

    def version(self) -> str | None:
        """The engine's version, where it tells."""
        version = self._json("/version").get("version")
        return version if isinstance(version, str) else None

    def complete(self, *, model: str, endpoint: Endpoint, timeout_s: float) -> str | None:
        """Ask for one real token; None on success, else what went wrong."""
        body: dict[str, Any] = {"model": model, "max_tokens": 1, "temperature": 0}
        if endpoint == "chat":
            path = "/v1/chat/completions"
            body["messages"] = [{"role": "user", "content": "ready?"}]
        else:
            path = "/v1/completions"
            body["prompt"] = "ready?"
        try:
            response = self._client.post(path, json=body, timeout=timeout_s)
        except httpx2.HTTPError as error:
            return f"{type(error).__name__}: {error}"
        if response.status_code != httpx2.codes.OK:
            return f"HTTP {response.status_code}: {response.text[:300]}"
        return None

    def count_tokens(self, text: str, *, model: str) -> int | None:
        """Tokens of a text by the engine's own tokenizer; None where it does not say."""
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        try:
            response = self._client.post("/tokenize", json=body)
            count = response.json().get("count") if response.is_success else None
        except (httpx2.HTTPError, ValueError, AttributeError):
            return None
        return count if isinstance(count, int) else None

    def scrape(self, *, at_s: float) -> Snapshot | None:
        """One scrape of `/metrics`; None where the engine does not answer."""
        try:
            response = self._client.get("/metrics")
            return parse_snapshot(response.text, at_s=at_s) if response.is_success else None
        except (httpx2.HTTPError, ValueError):
            return None

    def _json(self, path: str) -> Mapping[str, Any]:
        try:
            data = self._client.get(path).json()
        except (httpx2.HTTPError, ValueError):
            return {}
        return data if isinstance(data, dict) else {}
