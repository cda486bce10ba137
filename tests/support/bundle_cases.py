"""Batches of one request for recordings."""

from __future__ import annotations

from typing import Any

from graphrt.batch import Batch


def prompt(*tokens: int, pages: tuple[int, ...] = (5, 6)) -> Batch:
    n = len(tokens)
    return Batch(
        req_indices=[0], seq_lens=[n], query_lens=[n], tokens=tokens, page_indptr=[0, len(pages)], page_ids=pages
    )


def going_on(seq_len: int, pages: tuple[int, ...] = (5, 6), **options: Any) -> Batch:
    return Batch(req_indices=[0], seq_lens=[seq_len], page_indptr=[0, len(pages)], page_ids=pages, **options)
