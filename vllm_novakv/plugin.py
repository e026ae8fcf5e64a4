"""Entry point ``vllm.general_plugins``: makes ``--attention-backend NOVAKV`` known to a stock vLLM.

vLLM calls `register` in every process that it starts, possibly more than once. Nothing here has an effect on a server
that does not ask for NOVAKV: the two wrapped platform methods look at the selected backend first and otherwise do
exactly what vLLM does.
"""

from __future__ import annotations

from typing import Any

BACKEND_NAME = "NOVAKV"
BACKEND_PATH = "vllm_novakv.backend.attention.NovaKVBackend"


def register() -> None:
    """Add the enum member ``NOVAKV`` and wrap the platform's backend choice; calling it again changes nothing."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if BACKEND_NAME not in AttentionBackendEnum.__members__:
        member = AttentionBackendEnum.register(BACKEND_NAME, BACKEND_PATH)
        # A spawned process unpickles the configuration before it loads plugins: let the member register itself.
        # Can go when vLLM loads general plugins before it unpickles its configuration.
        member.__reduce_ex__ = lambda protocol: (restore_member, ())
    _wrap_platform()


def restore_member() -> Any:
    """Unpickle the enum member ``NOVAKV`` in a process that has not loaded its plugins yet."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    register()
    return AttentionBackendEnum[BACKEND_NAME]


def _wrap_platform() -> None:
    """Wrap two class methods of the current platform.

    - ``get_attn_backend_cls``: without it the CPU platform falls back to its own backend silently, and the CUDA
      platform refuses models that also have sliding-window layers. Can go when both take registered backends and
      choose per layer kind.
    - ``check_and_update_config``: the one place where a whole configuration can be refused before anything is loaded.
      Can go when backends get a hook of their own there.
    """
    from vllm.platforms import current_platform

    platform_cls = type(current_platform)
    if getattr(platform_cls.get_attn_backend_cls, "wrapped_by_novakv", False):
        return
    choose_backend = platform_cls.get_attn_backend_cls.__func__
    check_config = platform_cls.check_and_update_config.__func__

    def get_attn_backend_cls(
        cls: Any, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        if getattr(selected_backend, "name", None) == BACKEND_NAME:
            from vllm_novakv.backend.selection import takes_layer

            if takes_layer(attn_selector_config):
                return BACKEND_PATH
            selected_backend = None
        return choose_backend(cls, selected_backend, attn_selector_config, num_heads)

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        if _asks_for_novakv(vllm_config):
            from vllm_novakv.backend.validation import validate_and_resolve

            check_config(cls, vllm_config)
            validate_and_resolve(vllm_config)
        else:
            check_config(cls, vllm_config)

    get_attn_backend_cls.wrapped_by_novakv = True  # type: ignore[attr-defined]
    platform_cls.get_attn_backend_cls = classmethod(get_attn_backend_cls)
    platform_cls.check_and_update_config = classmethod(check_and_update_config)


def _asks_for_novakv(vllm_config: Any) -> bool:
    attention = vllm_config.attention_config
    selected = [attention.backend, *(attention.backend_per_kind or {}).values()]
    return any(getattr(backend, "name", None) == BACKEND_NAME for backend in selected)
