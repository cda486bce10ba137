"""Print how a decode batch is divided into work partitions, and the KV splits of each partition.

    python scripts/print_schedule.py --seq-lens 1x32768+63x512
    python scripts/print_schedule.py --seq-lens 96+32+160 --num-q-heads 16 --num-kv-heads 4 --num-sms 2 --triton

No GPU is needed: --num-sms gives the number of multiprocessors (132 on an H200). docs/attention.md explains the terms.
"""

from __future__ import annotations

import argparse
import sys

import torch

from graphrt.kernels.attention.explain import explain_schedule, parse_seq_lens
from graphrt.kernels.attention.plan import AttentionPlan
from graphrt.kernels.errors import GraphRTError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-lens", required=True, metavar="LENGTHS", help="such as 1x32768+63x512")
    parser.add_argument("--num-q-heads", type=int, default=32)
    parser.add_argument("--num-kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--v-head-dim", type=int, help="default: --head-dim")
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--kv-dtype", choices=("float8_e4m3fn", "float8_e5m2"), help="default: --dtype")
    parser.add_argument("--num-sms", type=int, default=132, help="streaming multiprocessors of the GPU (default: 132)")
    parser.add_argument("--query-len", type=int, default=1, help="new tokens per request (default: 1)")
    parser.add_argument("--window", type=int, default=0, help="sliding window; 0: none")
    parser.add_argument("--chunk", type=int, default=0, help="attention_chunk_size; 0: none")
    parser.add_argument("--batch-invariant", action="store_true", help="split each request by its own length")
    parser.add_argument("--triton", action="store_true", help="plan for the Triton kernel instead of the CUDA kernel")
    parser.add_argument("--all", action="store_true", help="do not shorten the tables")
    arguments = parser.parse_args()
    try:
        seq_lens = parse_seq_lens(arguments.seq_lens)
        plan = AttentionPlan.decode(
            len(seq_lens),
            num_q_heads=arguments.num_q_heads,
            num_kv_heads=arguments.num_kv_heads,
            head_dim=arguments.head_dim,
            v_head_dim=arguments.v_head_dim,
            dtype=getattr(torch, arguments.dtype),
            kv_dtype=None if arguments.kv_dtype is None else getattr(torch, arguments.kv_dtype),
            num_sms=arguments.num_sms,
            query_len=arguments.query_len,
            batch_invariant=arguments.batch_invariant,
            native=not arguments.triton,
        )
        spans = {"sliding_window": arguments.window, "attention_chunk_size": arguments.chunk}
        print(explain_schedule(plan, seq_lens, every_line=arguments.all, **spans))
    except GraphRTError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
