#!/usr/bin/env python3
"""Time of a whole calibration on a GPU: `calib/fit.py` on a model of Qwen3-8B's shape with random weights.

    python benchmarks/calibration_gpu.py --tokenizer MODEL --prompts essays.txt --num-tokens 131072 --seq-len 32768

The time is the command's own, from its start to its end: loading the 16 GB of weights, prefill, fit, artifact. Random
weights cost what trained ones cost; what a fit is worth is measured elsewhere, on trained models.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from engine_gpu import QWEN3_8B
from safetensors.torch import save_file

from vllm_novakv.evaluation.record import write_record

ROOT = Path(__file__).resolve().parent.parent

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def main() -> None:
    """Write the model, fit it, write a record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", type=Path, required=True, help="model directory whose tokenizer is used")
    parser.add_argument("--prompts", type=Path, required=True, help="as for calib/fit.py")
    parser.add_argument("--num-tokens", type=int, default=131_072)
    parser.add_argument("--seq-len", type=int, default=32_768)
    parser.add_argument("--layers", type=int, default=36, help="layers of the model, fewer for a quick look")
    parser.add_argument("--out", type=Path, help="folder of the record")
    parser.add_argument("--commit", help="commit of the code, where it is no git checkout")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        model, artifact = Path(name) / "model", Path(name) / "artifact"
        write_random_model(model, arguments.tokenizer, arguments.layers)
        command = [
            sys.executable, str(ROOT / "calib" / "fit.py"), "--model", str(model), "--prompts", str(arguments.prompts),
            "--num-tokens", str(arguments.num_tokens), "--seq-len", str(arguments.seq_len), "--out", str(artifact),
        ]  # fmt: skip
        start = time.perf_counter()
        subprocess.run(command, check=True)
        seconds = round(time.perf_counter() - start, 1)
        manifest = json.loads((artifact / "manifest.json").read_text())
    print(f"calibration took {seconds} s")
    if arguments.out:
        settings = {"model": QWEN3_8B, "layers": arguments.layers, "prompts": arguments.prompts.name}
        results = {"seconds": seconds, "calibration": manifest["calibration"]}
        print(write_record(arguments.out, "calibration-h200", settings, results, commit=arguments.commit))


def write_random_model(directory: Path, tokenizer: Path, num_layers: int) -> None:
    """A checkpoint of Qwen3-8B's shape with random weights, a file per layer.

    Args:
        directory: where.
        tokenizer: directory whose tokenizer is copied.
        num_layers: layers of the model.
    """
    directory.mkdir()
    config = QWEN3_8B | {"num_hidden_layers": num_layers}
    (directory / "config.json").write_text(json.dumps(config))
    for name in TOKENIZER_FILES:
        shutil.copy(tokenizer / name, directory / name)
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    layer_shapes = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, query),
        "self_attn.q_norm": (size,),
        "self_attn.k_norm": (size,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    files = {
        f"layer-{i:02}.safetensors": {f"model.layers.{i}.{name}": shape for name, shape in layer_shapes.items()}
        for i in range(num_layers)
    }
    ends = (config["vocab_size"], hidden)
    files["ends.safetensors"] = {"model.embed_tokens": ends, "model.norm": (hidden,), "lm_head": ends}
    source = torch.Generator("cuda").manual_seed(0)
    weight_map = {}
    for file, shapes in files.items():
        tensors = {f"{name}.weight": random_weight(shape, source) for name, shape in shapes.items()}
        save_file(tensors, directory / file)
        weight_map |= dict.fromkeys(tensors, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def random_weight(shape: tuple[int, ...], source: torch.Generator) -> torch.Tensor:
    """Ones for a norm; for a matrix, normal with a variance that keeps that of its input."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    weight = torch.randn(shape, generator=source, dtype=torch.bfloat16, device="cuda")
    return (weight * shape[1] ** -0.5).cpu()


if __name__ == "__main__":
    main()
