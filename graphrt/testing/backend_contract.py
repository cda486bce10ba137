"""A test suite for attention backends, which any package can run on its backend.

Each case builds the backend, captures a step and replays it with different requests. A case fails if a replay is not
bitwise equal to the eager step. It fails if the error of a result against float64 is more than twice that of plain
torch in the same dtype. It also fails if padding, stale metadata or NaN reach an output. The class attributes determine
the cases.

With pytest, one test per case:

    @pytest.mark.parametrize("case", contract_cases(AcmeBackend), ids=str)
    def test_contract(case):
        case.run()

Without pytest, in Python (`check_backend(AcmeBackend)` returns a report) or in a shell:

    python -m graphrt.testing.backend_contract acme
    python -m graphrt.testing.backend_contract acme_package.module:AcmeBackend

CUDA cases are skipped on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import traceback
import unittest
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from graphrt.backends.base import AttentionBackend
from graphrt.backends.registry import backend_class, check_declaration
from graphrt.kernels.errors import ConfigError
from graphrt.testing.backend_features import FEATURES, ROWS, Feature, declared_features
from graphrt.testing.backend_rig import DenseSequence, Rig, Rows, open_rigs, spoil
from graphrt.testing.numerics import assert_bitwise_equal

_STEPS, _INVARIANCE, _RETRY = "steps", "batch invariance", "capture twice"
_BRIEF_STEPS = ("longest", "shrunk", "chunks", "borders")
_Lengths = tuple[tuple[int, int], ...]
"""(seq_len, query_len) of each request of a step."""


@dataclass(frozen=True)
class ContractCase:
    """One test of one backend.

    feature   the feature under test
    device    the device under test
    what      "steps": capture with some requests, replay with others. "batch invariance": a request alone, and in full
              batches. "capture twice": allocate and capture again, as after a failure
    brief     fewer steps, for slow kernels such as interpreted ones
    """

    backend: type[AttentionBackend]
    feature: Feature
    device: torch.device
    what: str = _STEPS
    brief: bool = False

    def run(self) -> None:
        """Run the case.

        Raises:
            AssertionError: if the backend breaks the contract.
            unittest.SkipTest: if the device is missing, or the class has `unsupported_reasons`; pytest skips the test.
        """
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise unittest.SkipTest("needs a CUDA device")
        checks: dict[str, Callable[..., None]] = {
            _STEPS: check_steps,
            _INVARIANCE: check_batch_invariance,
            _RETRY: check_retry,
        }
        checks[self.what](self.backend, self.feature, self.device, brief=self.brief)

    def __str__(self) -> str:
        what = "" if self.what == _STEPS else f"-{self.what.replace(' ', '_')}"
        return f"{self.backend.name}-{self.device.type}-{self.feature.id}{what}"


@dataclass(frozen=True)
class ContractReport:
    """The cases that passed, failed and were skipped, with reasons."""

    passed: tuple[ContractCase, ...]
    failed: tuple[tuple[ContractCase, str], ...]
    skipped: tuple[tuple[ContractCase, str], ...]

    @property
    def ok(self) -> bool:
        """Whether at least one case ran and none failed."""
        return bool(self.passed) and not self.failed

    def __str__(self) -> str:
        lines = [f"passed   {case}" for case in self.passed]
        lines += [f"skipped  {case}: {reason}" for case, reason in self.skipped]
        lines += [f"FAILED   {case}: {reason}" for case, reason in self.failed]
        counts = f"{len(self.passed)} passed, {len(self.failed)} failed, {len(self.skipped)} skipped"
        return "\n".join([*lines, counts if self.passed or self.failed else f"{counts}: nothing was checked"])


def contract_cases(
    backend: type[AttentionBackend],
    *,
    devices: Sequence[str] | None = None,
    features: Iterable[str] | None = None,
    brief: bool = False,
) -> list[ContractCase]:
    """Return all cases for a backend.

    devices    device types; None: all types that the class declares
    features   ids of the features to check; None: all features that the class declares
    brief      run fewer steps in each case

    Raises:
        ConfigError: if a class attribute is missing or wrong, the class does not declare a device, or a feature
            is unknown.
    """
    check_declaration(backend)
    wanted = None if features is None else tuple(features)
    cases, found = [], []
    for kind in backend.capabilities.devices if devices is None else devices:
        if kind not in backend.capabilities.devices:
            raise ConfigError(
                f"devices: {backend.name} supports {', '.join(backend.capabilities.devices)}, not {kind!r}; declare "
                f"the device in capabilities, or omit it"
            )
        device = torch.device("cuda", 0) if kind == "cuda" else torch.device(kind)
        for feature in declared_features(backend, device):
            found.append(feature.id)
            if wanted is not None and feature.id not in wanted:
                continue
            what = _INVARIANCE if feature.batch_invariant else _STEPS
            cases.append(ContractCase(backend, feature, device, what, brief))
            if feature.id in ("plain", "mixed"):
                cases.append(ContractCase(backend, feature, device, _RETRY, brief))
    for name in wanted or ():
        if name not in FEATURES and name not in found:
            raise ConfigError(
                f"features: expected some of {', '.join(dict.fromkeys(found))}, got {name!r}; choose one of these"
            )
    return cases


def check_backend(
    backend: type[AttentionBackend],
    *,
    devices: Sequence[str] | None = None,
    features: Iterable[str] | None = None,
    brief: bool = False,
    progress: Callable[[str], None] | None = None,
) -> ContractReport:
    """Run all cases and return a report. For the other arguments, see `contract_cases`.

    progress   called with one line per case

    Any exception in a case counts as a failure; the other cases still run.
    """
    passed, failed, skipped = [], [], []
    for case in contract_cases(backend, devices=devices, features=features, brief=brief):
        try:
            case.run()
        except unittest.SkipTest as reason:
            skipped.append((case, str(reason)))
            line = f"skipped  {case}: {reason}"
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
            failed.append((case, f"{text} ({where.filename}:{where.lineno})"))
            line = f"FAILED   {case}: {failed[-1][1]}"
        else:
            passed.append(case)
            line = f"passed   {case}"
        if progress is not None:
            progress(line)
    return ContractReport(tuple(passed), tuple(failed), tuple(skipped))


def steps_of(rig: Rig) -> dict[str, Rows]:
    """Return the requests of each step: longer than at capture, ragged, on page boundaries, fewer, and none.

    Encoder lengths vary too: one page, fewer than queries, the longest, 0, and one page plus a token.
    """
    steps = _whole_sequences(rig) if rig.feature.encoder_attention else _cached_steps(rig)
    page = next((kv.page_size for kv in rig.context.kv_groups if kv.cross), None)
    encoder_lens = (0,) if page is None else (page, 2, rig.context.max_encoder_len, 0, page + 1)
    return {
        name: tuple((*row, encoder_lens[(number + at) % len(encoder_lens)]) for at, row in enumerate(rows))
        for number, (name, rows) in enumerate(steps.items())
    }


def _whole_sequences(rig: Rig) -> dict[str, _Lengths]:
    """Return requests with all their tokens in the step, as encoder layers require."""
    tokens, longest, query_len = rig.descriptor.padded_tokens, rig.metadata.max_seq_len, rig.feature.query_len
    lengths: dict[str, tuple[int, ...]] = {"longest": (query_len,) * ROWS, "shrunk": (query_len,) * 2, "none": ()}
    if rig.feature.mixed:
        lengths = {"prompt": (tokens - 5, 1, 1, 2), "chunks": (2, tokens - 6, 3), "one": (5,), "none": ()}
    return {name: tuple((min(n, longest), min(n, longest)) for n in rows) for name, rows in lengths.items()}


def _cached_steps(rig: Rig) -> dict[str, _Lengths]:
    page, longest, query_len = rig.context.kv_groups[0].page_size, rig.metadata.max_seq_len, rig.feature.query_len
    if rig.feature.mixed:
        chunk = rig.descriptor.padded_tokens - 5
        steps = {
            "prompt": ((min(chunk, longest), min(chunk, longest)), (longest, 1), (page, 1), (3, 2)),
            "chunks": ((longest, 4), (page, 1), (min(page + 1, longest), 3)),
            "one": ((page, min(page, 5)),),
        }
        return {name: tuple((n, min(q, n)) for n, q in rows) for name, rows in steps.items()}
    lengths: dict[str, tuple[int, ...]] = {
        "longest": (longest,) * ROWS,
        "ragged": (longest, query_len, min(page + 1, longest), max(query_len, page - 1)),
        "boundary": (page, min(page + 1, longest), min(2 * page, longest), min(2 * page - 1, longest)),
        "shrunk": (min(2 * page + 1, longest), max(query_len, 2)),
        "none": (),
    }
    size = next((spec.attention_chunk_size for spec in rig.context.attention if spec.attention_chunk_size), None)
    if size is not None:  # the last token of a chunk, and the first of the next, which sees only itself
        lengths["borders"] = tuple(min(n, longest) for n in (size, size + 1, 2 * size, 2 * size + 1))
    return {name: tuple((max(n, query_len), query_len) for n in rows) for name, rows in lengths.items()}


def check_steps(backend: type[AttentionBackend], feature: Feature, device: torch.device, *, brief: bool) -> None:
    """Capture without requests, like a runtime, and again with the longest requests; replay all steps each time.

    brief   only the first capture and few steps
    """
    for captured_with in ("none",) if brief else ("none", "longest"):
        with open_rigs(backend, feature, device) as (rig,):
            _check_steps(rig, captured_with, brief=brief)


def _check_steps(rig: Rig, captured_with: str, *, brief: bool) -> None:
    steps = steps_of(rig)
    first = next(iter(steps.values())) if captured_with == "longest" else ()
    rig.write([rig.sequence(*row) for row in first])
    rig.capture()
    for name, rows in steps.items():
        if brief and name not in _BRIEF_STEPS:
            continue
        sequences = [rig.sequence(*row) for row in rows]
        _check_step(rig, name, sequences)
        if brief or name in ("boundary", "none"):
            continue
        # The same requests in a different order and different pages, since results must not depend on batch positions.
        _check_step(rig, f"{name}, permuted", sequences[::-1])


def check_batch_invariance(
    backend: type[AttentionBackend], feature: Feature, device: torch.device, *, brief: bool
) -> None:
    """Check that a request gives bitwise equal results alone and as the last of full batches of several sizes.

    Mixed steps are compared at only one size.

    brief   only one sequence length
    """
    sizes = (ROWS,) if feature.mixed else (1, ROWS, 16) if device.type == "cuda" else (1, ROWS)
    with open_rigs(backend, feature, device, sizes) as rigs:
        for rig in rigs:
            rig.write([rig.sequence(feature.query_len, feature.query_len)])
            rig.capture()
        page, longest = rigs[0].context.kv_groups[0].page_size, rigs[0].metadata.max_seq_len
        most = rigs[0].context.max_encoder_len
        query_len = 5 if feature.mixed else feature.query_len
        for length in (longest,) if brief else (longest, page + 1, page, longest - 1):
            seq_len = max(length, query_len)
            row = rigs[0].sequence(seq_len, query_len, min(length, most))
            alone = _check_step(rigs[0], f"{seq_len}, alone", [row])[0][:query_len]
            for rig, rows in zip(rigs, sizes, strict=True):
                lengths = ((longest, most) if at % 2 else (query_len, most // 3) for at in range(rows - 1))
                others = [rig.sequence(length, query_len, encoder_len) for length, encoder_len in lengths]
                others = others[:1] if feature.mixed else others
                here = slice(len(others) * query_len, (len(others) + 1) * query_len)
                among = _check_step(rig, f"{seq_len}, {rows} rows", [*others, row])[0][here]
                assert_bitwise_equal(among, alone, name=f"{rig.backend.name}: a row of {seq_len} with others")


def check_retry(backend: type[AttentionBackend], feature: Feature, device: torch.device, *, brief: bool) -> None:
    """Allocate and capture twice, as after a failed capture.

    The tensors of the first attempt are kept alive but overwritten with garbage, because the second graph must not read
    them.

    brief   one step after each capture
    """
    with open_rigs(backend, feature, device) as (rig,):
        query_len = rig.feature.query_len
        rig.write([rig.sequence(query_len, query_len) for _ in range(ROWS)])
        for attempt in range(2):
            if attempt:
                rig.drop_graph()
                _allocate_again(rig)
            rig.capture()
            for name, rows in steps_of(rig).items():
                if name in (("shrunk", "chunks") if brief else ("longest", "shrunk", "chunks")):
                    _check_step(rig, f"{name}, attempt {attempt}", [rig.sequence(*row) for row in rows])


def _allocate_again(rig: Rig) -> None:
    first = rig.backend.tensors()
    rig.backend.allocate()
    now = {tensor.data_ptr() for tensor in rig.backend.tensors().values()}
    for name, tensor in first.items():
        if tensor.data_ptr() in now:
            raise AssertionError(f"{rig.backend.name}: the second allocate() reuses the memory of {name}")
        spoil(tensor)


def _check_step(rig: Rig, name: str, sequences: list[DenseSequence]) -> list[torch.Tensor]:
    rig.write(sequences)
    replayed = rig.replayed() if rig.graph is not None else None
    eager = rig.eager()
    rig.check(name, eager if replayed is None else replayed)
    for have, want in zip(replayed or (), eager, strict=replayed is not None):
        assert_bitwise_equal(have, want, name=f"{rig.backend.name}, {name}: replay against eager")
    return eager


def main(arguments: Sequence[str] | None = None) -> int:
    """Check a backend, given as a name or `module:Class`. Exits with 1 if a case fails or no case could run."""
    parser = argparse.ArgumentParser(prog="python -m graphrt.testing.backend_contract", description=main.__doc__)
    parser.add_argument("backend", help="a name that graphrt env lists, or module:Class")
    parser.add_argument("--device", action="append", help="cpu or cuda (default: all that the class declares)")
    parser.add_argument("--feature", action="append", help="a feature id, as in the output; may be repeated")
    parser.add_argument("--brief", action="store_true", help="run fewer steps in each case")
    options = parser.parse_args(arguments)
    module, _, attribute = options.backend.partition(":")
    try:
        cls = getattr(importlib.import_module(module), attribute) if attribute else backend_class(options.backend)
        report = check_backend(
            cls, devices=options.device, features=options.feature, brief=options.brief, progress=print
        )
    except (ImportError, AttributeError, ConfigError) as error:
        parser.error(str(error))
    print(str(report).splitlines()[-1])
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
