"""Batches of the toy rig, and the check that a rig still serves after an error."""

from __future__ import annotations

from typing import Any

import torch

from graphrt.batch import Batch
from tests.support.toy import Rig

CPU = torch.device("cpu")


def good(**changes: Any) -> dict[str, Any]:
    """Arguments of a batch that every rig serves, with changes."""
    arguments = {"req_indices": [0, 1], "seq_lens": [1, 1], "tokens": [3, 4], "page_indptr": [0, 1, 2]}
    return arguments | {"page_ids": [5, 6]} | changes


def prompt(*tokens: int, pages: tuple[int, ...] = (5, 6)) -> Batch:
    """The prompt of a new sequence of request index 0."""
    n = len(tokens)
    return Batch(
        req_indices=[0], seq_lens=[n], query_lens=[n], tokens=tokens, page_indptr=[0, len(pages)], page_ids=pages
    )


def decode(seq_len: int, pages: tuple[int, ...] = (5, 6), **options: Any) -> Batch:
    """A decode step of request index 0."""
    return Batch(req_indices=[0], seq_lens=[seq_len], page_indptr=[0, len(pages)], page_ids=pages, **options)


def assert_works(rig: Rig) -> None:
    """Run a correct step, and compare its logits and its token with the oracle."""
    sequence = rig.start(7, [1, 2, 3])
    handle = rig.manager.replay(Batch.from_requests([rig.row(sequence)]))
    want = rig.model.oracle([1, 2, 3])
    assert (handle.logits()[0].double().cpu() - want).abs().max() < 2e-4
    assert int(handle.tokens()[0]) == int(handle.logits()[0].argmax())
