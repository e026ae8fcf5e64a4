#!/usr/bin/env bash
# Run every check in an environment of its own (.venv-test): lint, format, types, tests. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")"

[ -x .venv-test/bin/novakv ] || ./install.sh .venv-test
bin=$PWD/.venv-test/bin
"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/mypy"
"$bin/python" examples/fetch_smollm2.py
"$bin/python" -m pytest "$@"
