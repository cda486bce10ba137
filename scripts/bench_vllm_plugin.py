"""Decode steps of vLLM with graphrt's attention against its own FlashAttention, in the same run.

    python -m scripts.bench_vllm_plugin                      # needs vLLM and one GPU; the shape of Llama 3.1 8B
    python -m scripts.bench_vllm_plugin --cells 64x1024 --steps 32

Each backend runs in a new process, with the same random weights, prompts and options of vLLM. In a cell, such as
64x1024, 64 requests with a context of 1,024 tokens decode greedily. Prompts come from the prefix cache. Two calls of
`generate` with different numbers of tokens are timed, each as the faster of two runs. The difference of the times,
divided by the difference of the tokens, is the time of a step.

Tokens are compared up to the first difference of a request. There, the margin between the two best logits of
FlashAttention must be at most MARGIN. The last line of standard output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BACKENDS = {"FLASH_ATTN": "vllm", "CUSTOM": "graphrt"}
CELLS = ((64, 1024), (256, 1024), (64, 8192), (256, 8192))
MARGIN = 0.25
"""Largest margin at which tokens may differ: 8 ULP of a bfloat16 logit between 4 and 8, where the best logits are."""

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}

Tokens = list[list[tuple[int, float]]]
"""Per request and step: the token, and the margin between the two best logits."""


def randomize(model: Any) -> None:
    """Fill the weights with seeded noise, so that logits are of order one and attention weights differ."""
    import torch

    for name, weight in model.named_parameters():
        generator = torch.Generator(weight.device).manual_seed(0)
        if weight.dim() < 2:
            weight.data.fill_(1.0)
        else:
            weight.data.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)
        if "qkv_proj" in name:
            weight.data.mul_(2.0)


def start(backend: str, longest: int) -> Any:
    """Return an engine of vLLM in this process."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    from vllm import LLM

    from graphrt.integrations.vllm import register

    register()  # as vLLM does if graphrt is installed
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(CONFIG))
    llm = LLM(
        model=str(folder), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=longest,
        max_num_seqs=256, gpu_memory_utilization=0.9, enable_prefix_caching=True, disable_log_stats=True,
        attention_config={"backend": backend}, compilation_config={"cudagraph_capture_sizes": [1, 8, 64, 256]},
    )  # fmt: skip
    llm.apply_model(randomize)
    return llm


def kv_tokens(llm: Any) -> int:
    """Return the tokens that the KV cache has room for."""
    cache = llm.llm_engine.vllm_config.cache_config
    return int(cache.num_gpu_blocks * cache.block_size)


def measure(llm: Any, sampling: Any, batch: int, context: int, steps: int) -> dict[str, Any]:
    """Return the milliseconds of a step, and tokens with their margins.

    sampling   vLLM's SamplingParams
    """
    if batch * (context + steps + 2) > kv_tokens(llm):
        return {"reason": f"the KV cache has room for {kv_tokens(llm)} tokens"}
    draw = random.Random(f"{batch} {context}")
    prompts = [{"prompt_token_ids": [draw.randrange(10, 128000) for _ in range(context)]} for _ in range(batch)]

    def generate(count: int, **options: Any) -> tuple[float, list[Any]]:
        params = sampling(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False, **options)
        begin = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - begin, [output.outputs[0] for output in outputs]

    generate(2)  # prefills the prompts
    short, long = (min(generate(count)[0] for _ in range(2)) for count in (2, 2 + steps))
    tokens = [
        [(token, _margin(step)) for token, step in zip(output.token_ids, output.logprobs, strict=True)]
        for output in generate(2 + steps, logprobs=2)[1]
    ]
    return {"step_ms": (long - short) / steps * 1e3, "tokens": tokens}


def _margin(step: dict[int, Any]) -> float:
    best, second, *_ = sorted((entry.logprob for entry in step.values()), reverse=True)
    return float(best - second)


def compare(ours: Tokens, theirs: Tokens) -> dict[str, Any]:
    """Return how many tokens are equal up to the first difference of each request, and the margins there."""
    equal, margins = 0, []
    for mine, other in zip(ours, theirs, strict=True):
        for (token, _), (expected, margin) in zip(mine, other, strict=True):
            if token != expected:
                margins.append(margin)
                break
            equal += 1
    largest = max(margins, default=0.0)
    return {
        "equal_tokens": equal,
        "requests_that_differ": len(margins),
        "largest_margin": largest,
        "tokens_agree": largest <= MARGIN,
    }


def results(found: dict[str, list[dict[str, Any]]], cells: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Return one record per cell from the measurements of both backends."""
    rows = []
    for at, (batch, context) in enumerate(cells):
        theirs, ours = (found[backend][at] for backend in BACKENDS)
        row: dict[str, Any] = {"batch": batch, "context": context}
        if reason := theirs.get("reason") or ours.get("reason"):
            rows.append(row | {"reason": reason})
            continue
        row |= {f"{name}_ms": found[backend][at]["step_ms"] for backend, name in BACKENDS.items()}
        rows.append(row | {"ratio": ours["step_ms"] / theirs["step_ms"], **compare(ours["tokens"], theirs["tokens"])})
    return rows


def in_process(backend: str, arguments: list[str]) -> list[dict[str, Any]]:
    """Return the measurements of a backend in a new process."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        command = [sys.executable, "-m", "scripts.bench_vllm_plugin", *arguments, "--backend", backend]
        subprocess.run([*command, "--into", str(file)], stdout=sys.stderr, check=True)
        found: list[dict[str, Any]] = json.loads(file.read_text())
        return found


def line(row: dict[str, Any]) -> str:
    """Return a cell as text."""
    name = f"B={row['batch']:<3} context {row['context']:<5}"
    if "reason" in row:
        return f"{name} not measured: {row['reason']}"
    verdict = "tokens agree" if row["tokens_agree"] else f"TOKENS DIFFER at a margin of {row['largest_margin']:.3f}"
    return f"{name} vLLM {row['vllm_ms']:.2f} ms, graphrt {row['graphrt_ms']:.2f} ms ({row['ratio']:.3f}), {verdict}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = ",".join(f"{batch}x{context}" for batch, context in CELLS)
    parser.add_argument("--cells", default=every, help="requests x context, comma-separated")
    parser.add_argument("--steps", type=int, default=128, help="decode steps per cell")
    parser.add_argument("--backend", help=argparse.SUPPRESS)  # set in a new process
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    cells = [tuple(map(int, cell.split("x"))) for cell in arguments.cells.split(",")]
    if arguments.backend is not None:
        llm = start(arguments.backend, max(context for _, context in cells) + arguments.steps + 2)
        from vllm import SamplingParams

        found = [measure(llm, SamplingParams, batch, context, arguments.steps) for batch, context in cells]
        arguments.into.write_text(json.dumps(found))
        return
    from graphrt.bench.environment import provenance

    options = ["--cells", arguments.cells, "--steps", str(arguments.steps)]
    rows = results({backend: in_process(backend, options) for backend in BACKENDS}, cells)
    print("\n".join(map(line, rows)))
    print(json.dumps({"name": "vllm", **provenance(), "margin": MARGIN, "results": rows}), flush=True)


if __name__ == "__main__":
    main()
