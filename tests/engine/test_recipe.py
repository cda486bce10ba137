"""Apply the recipe of docs/decode_step.md for a static tensor in a copy of the tree, and run a model with it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs" / "decode_step.md").read_text()
STEP = re.compile(r"<!-- recipe (\S+) (after|before): (.*?) -->\n( *)```python\n(.*?)\n *```", re.DOTALL)

# A model whose logits select token 10 * adapter + input, checked under replay, with pads and another batch order.
CHECK = """
import torch
from graphrt.batch import Batch, Request
from graphrt.capture.descriptor import BatchDescriptor
from graphrt.config import RuntimeConfig
from graphrt.cache.kv_cache import KVCache
from graphrt.replay import ReplayManager
from graphrt.spec import AttentionSpec, KVCacheSpec

seen = torch.full((4,), 99, dtype=torch.int32)

def model(step):
    padded_reqs = step.adapter_ids.shape[0]
    seen[:padded_reqs].copy_(step.adapter_ids)
    chosen = step.adapter_ids.long() * 10 + step.input_ids[step.logits_indices]
    return (torch.arange(100)[None, :] == chosen[:, None]).float()

cache = KVCache.allocate(KVCacheSpec(1, 1, 16, 4, dtype=torch.float32), 8, "cpu")
config = RuntimeConfig(max_num_reqs=4, max_num_tokens=4, max_seq_len=8, decode_sizes=(4,))
manager = ReplayManager(model, cache, AttentionSpec(1, 1, 16, torch.float32), vocab_size=100, config=config)
manager.capture()
for adapters in ([3, 1], [7, 0], [1, 3]):
    batch = Batch(req_indices=[0, 1], seq_lens=[1, 1], tokens=[5, 6], page_indptr=[0, 1, 2], page_ids=[2, 3],
                  adapter_ids=adapters)
    handle = manager.replay(batch)
    assert handle.why_eager == ""
    assert handle.tokens().tolist() == [10 * adapters[0] + 5, 10 * adapters[1] + 6]
    assert seen.tolist() == [*adapters, 0, 0]
requests = [Request(0, [5], 1, [2], adapter_id=4), Request(1, [6], 1, [3], adapter_id=2)]
assert manager.replay(Batch.from_requests(requests)).tokens().tolist() == [45, 26]
without = Batch(req_indices=[0], seq_lens=[1], tokens=[5], page_indptr=[0, 1], page_ids=[2])
assert manager.replay(without).tokens() == [5]
print("right")
"""


def test_the_recipe_adds_a_static_tensor(tmp_path: Path) -> None:
    for folder in ("kernels", "capture", "graphrt"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=ignore)
    steps = STEP.findall(PAGE)
    files = {path for path, *_ in steps}
    assert len(steps) <= 6
    assert len(files) <= 4
    for path, where, mark, indent, code in steps:
        lines = (tmp_path / path).read_text().splitlines()
        at = next(index for index, line in enumerate(lines) if line.strip() == mark or line.strip().startswith(mark))
        added = [line.removeprefix(indent) for line in code.splitlines()]
        lines[at + (where == "after") : at + (where == "after")] = added
        (tmp_path / path).write_text("\n".join(lines) + "\n")
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHECK)], cwd=tmp_path, capture_output=True, text=True,
        env={"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert result.stdout.strip() == "right", result.stderr
