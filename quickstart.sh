#!/usr/bin/env bash
# Everything on a fresh machine: install into .venv, fetch SmolLM2-135M-Instruct, calibrate it, serve it, ask it.
set -euo pipefail
cd "$(dirname "$0")"

[ -x .venv/bin/novakv ] || ./install.sh .venv
exec .venv/bin/python examples/quickstart.py
