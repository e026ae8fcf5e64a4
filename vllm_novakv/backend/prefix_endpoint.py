"""Two routes on vLLM's API server: the prefix index's figures as JSON, and a page that draws them.

An endpoint plugin of vLLM's: loaded only if ``VLLM_PLUGINS`` names it. The figures lie below ``/v1``, where vLLM asks
for its API key if it has one; the page holds none.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse, JSONResponse

from vllm_novakv.backend.prefix_settings import status_directory
from vllm_novakv.config import NovaKVConfig
from vllm_novakv.prefix.status import read_statuses

JSON_PATH = "/v1/novakv/prefix"
PAGE_PATH = "/novakv/prefix"


class PrefixEndpoint:
    """vLLM's ``EndpointPlugin`` protocol."""

    name = "novakv"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._directory: Path | None = None

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes; before `init_state`, and without a prefix index, the figures are answered with 404."""

        def figures() -> JSONResponse:
            if self._directory is None:
                message = (
                    'no prefix index: start the server with --additional-config \'{"novakv": {"prefix_index": {}}}\''
                )
                return JSONResponse({"error": message}, status_code=404)
            return JSONResponse(read_statuses(self._directory))

        def page() -> HTMLResponse:
            return HTMLResponse(files("vllm_novakv.prefix").joinpath("page.html").read_text(encoding="utf-8"))

        app.add_api_route(JSON_PATH, figures, methods=["GET"])
        app.add_api_route(PAGE_PATH, page, methods=["GET"])

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Find the engines' figures."""
        if engine_client is None:
            return
        vllm_config = engine_client.vllm_config
        if vllm_config.scheduler_config.scheduler_cls is None:
            return
        settings = NovaKVConfig.from_additional_config(vllm_config.additional_config).prefix_index
        if settings is not None:
            self._directory = status_directory(vllm_config, settings)
