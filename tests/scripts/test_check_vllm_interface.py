"""The comparison of vLLM's interface names what changed. The stub serves as a version of vLLM."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from scripts.check_vllm_interface import STANDIN, interface_faults


def test_the_standin_equals_itself() -> None:
    assert interface_faults(STANDIN / "vllm") == []


@pytest.mark.parametrize(
    ("file", "old", "new", "fault"),
    [
        ("v1/attention/backend.py", "fast_build=False", "fast_build=False, stage=0", "MetadataBuilder.build: takes"),
        ("v1/attention/backend.py", "def is_mla(", "def uses_mla(", "AttentionBackend.is_mla: missing in vLLM"),
        ("v1/attention/backend.py", "seq_lens: torch", "lengths: torch", "CommonAttentionMetadata.seq_lens: missing"),
        ("v1/attention/backend.py", "UNIFORM_BATCH = 2", "UNIFORM_BATCH = 7", "2 in the stub, 7 in vLLM"),
        (
            "_custom_ops.py",
            "slot_mapping, kv",
            "slot_mapping, blocks, kv",
            "reshape_and_cache_flash: the stub takes",
        ),
        (
            "v1/attention/backend.py",
            "    @abstractmethod\n    def forward(",
            "    @abstractmethod\n    def warm_up(self): ...\n\n    @abstractmethod\n    def forward(",
            "GraphrtImpl.warm_up: abstract in vLLM, and missing",
        ),
    ],
)
def test_a_change_is_named(file: str, old: str, new: str, fault: str, tmp_path: Path) -> None:
    package = Path(shutil.copytree(STANDIN / "vllm", tmp_path / "vllm"))
    text = (package / file).read_text()
    assert old in text
    (package / file).write_text(text.replace(old, new))
    faults = interface_faults(package)
    assert any(fault in line for line in faults), faults
