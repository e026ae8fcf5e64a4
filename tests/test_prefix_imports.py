"""The prefix index needs the standard library and numpy alone."""

import subprocess
import sys
from pathlib import Path

import vllm_novakv.prefix

FOLDER = Path(vllm_novakv.prefix.__file__).resolve().parent


def test_prefix_loads_only_numpy_and_the_standard_library():
    modules = [f"vllm_novakv.prefix.{path.stem}" for path in sorted(FOLDER.glob("*.py")) if path.stem != "__init__"]
    assert "vllm_novakv.prefix.trie" in modules
    code = f"""
import importlib, sys
before = set(sys.modules)
for name in {modules!r}:
    importlib.import_module(name)
roots = {{name.split(".")[0] for name in set(sys.modules) - before}}
print(*sorted(roots - set(sys.stdlib_module_names)))
print(*sorted(name for name in sys.modules if name.startswith("vllm_novakv.") and ".prefix" not in name))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=FOLDER.parent.parent)
    assert done.returncode == 0, done.stderr[-3000:]
    third_party, others = done.stdout.split("\n")[:2]
    assert third_party.split() == ["numpy", "vllm_novakv"]
    assert others == ""
