"""Fixtures that several test files share."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    # Without a GPU the kernels run in Triton's interpreter, which Triton chooses when its own library is imported; the
    # variable is gone again before anything else, vLLM above all, could see it.
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        import triton.experimental.gluon  # noqa: F401  loads triton.language, and is loaded later anyway
    except ImportError:
        pass
    finally:
        del os.environ["TRITON_INTERPRET"]

PROJECT = Path(__file__).resolve().parent.parent
SMOLLM2 = PROJECT / ".cache" / "SmolLM2-135M-Instruct"


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """vLLM writes to the environment; no test, nor a server that it starts, inherits what an earlier one left there."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face directory; NOVAKV_TEST_MODEL names another place for it."""
    directory = Path(os.environ.get("NOVAKV_TEST_MODEL", SMOLLM2))
    if not (directory / "config.json").exists():
        pytest.skip(f"no model in {directory}: run python examples/fetch_smollm2.py")
    return directory
