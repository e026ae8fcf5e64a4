"""Who may import whom, checked in fresh processes and in the source: the boundaries that keep the parts apart."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import vllm_novakv

PACKAGE = Path(vllm_novakv.__file__).resolve().parent
MODULES = sorted(
    ".".join(("vllm_novakv", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
)
MAY_IMPORT_VLLM = ("vllm_novakv.backend", "vllm_novakv.calibration.capture", "vllm_novakv.plugin")
MAY_CALL_VLLM_LATER = (*MAY_IMPORT_VLLM, "vllm_novakv.cli", "vllm_novakv.offline", "vllm_novakv.vllm_launcher")
REGISTRATION_LIMIT_MS = 50.0

# parts that a part must not know of; imports go codec -> artifact -> baselines -> ops -> backend -> plugin
FORBIDDEN_PARTS = {
    "codec": {"artifact", "backend", "calibration", "cli", "config", "doctor", "evaluation", "fingerprint", "ops"},
    "artifact": {"backend", "baselines", "calibration", "cli", "config", "doctor", "evaluation", "ops", "plugin"},
    "baselines": {"backend", "calibration", "cli", "config", "doctor", "evaluation", "ops", "plugin"},
    "fingerprint": {"backend", "baselines", "calibration", "cli", "config", "doctor", "evaluation", "ops", "plugin"},
    "support": {"artifact", "backend", "calibration", "cli", "codec", "doctor", "evaluation", "ops", "plugin"},
    "ops": {"backend", "calibration", "cli", "doctor", "evaluation", "plugin"},
    "backend": {"calibration", "cli", "doctor", "evaluation"},
    "plugin": {"calibration", "cli", "doctor", "evaluation"},
    "calibration": {"backend", "cli", "doctor", "evaluation", "plugin"},
    "prefix": {"artifact", "backend", "calibration", "cli", "codec", "config", "doctor", "evaluation", "ops", "plugin"},
    "evaluation": {
        *("artifact", "backend", "calibration", "cli", "codec_study", "doctor", "eval_command", "offline", "ops"),
        "plugin",
    },
}


def is_within(module, parts):
    return any(module == part or module.startswith(f"{part}.") for part in parts)


def is_kernel(module):
    return module.startswith("vllm_novakv.ops.") and module != "vllm_novakv.ops.reference"


def source_of(module):
    path = PACKAGE.parent.joinpath(*module.split("."))
    return path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"


def imported_names(module):
    """Every module named in an import statement, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse(source_of(module).read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def run_python(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def test_importing_the_package_loads_nothing_heavy():
    code = "import sys, vllm_novakv; print(*sorted({n.split('.')[0] for n in sys.modules}))"
    assert not {"torch", "numpy", "vllm", "pydantic", "triton", "transformers"} & set(run_python(code).split())


@pytest.mark.parametrize("module", ["plugin", "support", "vllm_launcher", "cli"])
def test_light_modules_load_neither_torch_nor_vllm(module):
    code = f"import sys, vllm_novakv.{module}; print(*sorted({{n.split('.')[0] for n in sys.modules}}))"
    assert not {"torch", "vllm", "triton", "transformers"} & set(run_python(code).split())


def test_modules_outside_the_backend_work_without_vllm_and_triton():
    names = [name for name in MODULES if not is_within(name, MAY_IMPORT_VLLM) and not is_kernel(name)]
    assert "vllm_novakv.codec.layout" in names
    code = f"""
import importlib, sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("vllm", "triton"):
            raise ImportError(f"{{name}} was imported")  # torch looks for triton and copes without it
sys.meta_path.insert(0, Blocker())
for name in {names!r}:
    importlib.import_module(name)
"""
    run_python(code)


@pytest.mark.parametrize("module", MODULES)
def test_only_the_allowed_modules_name_vllm_or_triton(module):
    roots = {name.split(".")[0] for name in imported_names(module)}
    if not is_within(module, MAY_CALL_VLLM_LATER):
        assert "vllm" not in roots
    if not is_kernel(module):
        assert "triton" not in roots


@pytest.mark.parametrize("module", [name for name in MODULES if name.count(".") >= 1])
def test_imports_go_one_way(module):
    forbidden = {f"vllm_novakv.{part}" for part in FORBIDDEN_PARTS.get(module.split(".")[1], ())}
    assert not {name for name in imported_names(module) if is_within(name, forbidden)}


@pytest.mark.parametrize("module", [n for n in MODULES if is_within(n, ("vllm_novakv.codec", "vllm_novakv.ops"))])
def test_settings_never_come_from_the_environment(module):
    attributes = {node.attr for node in ast.walk(ast.parse(source_of(module).read_text())) if hasattr(node, "attr")}
    assert not {"environ", "getenv"} & attributes


def test_registration_is_fast_beside_vllm_s_own_imports():
    code = """
import time
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
current_platform.device_type
start = time.process_time()
from vllm_novakv.plugin import register
register()
print((time.process_time() - start) * 1000)
assert "NOVAKV" in AttentionBackendEnum.__members__
register()
"""
    assert float(run_python(code).splitlines()[-1]) < REGISTRATION_LIMIT_MS
