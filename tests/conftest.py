"""Fixtures that several test files share."""

import os
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parent.parent
SMOLLM2 = PROJECT / ".cache" / "SmolLM2-135M-Instruct"


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face directory; NOVAKV_TEST_MODEL names another place for it."""
    directory = Path(os.environ.get("NOVAKV_TEST_MODEL", SMOLLM2))
    if not (directory / "config.json").exists():
        pytest.skip(f"no model in {directory}: run python examples/fetch_smollm2.py")
    return directory
