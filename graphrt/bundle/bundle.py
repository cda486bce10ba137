"""Replay bundles: recorded launches in one file, which run again in another process or on another machine.

    recording = manager.record(launches=2)          # records the next two launches, while the manager serves
    ...
    Bundle.of(recording, model={"shape": "llama-3.2-1b", "seed": 0}).save("wrong.bundle")

    bundle = Bundle.load("wrong.bundle")            # on another machine
    with bundle.open(model, device="cuda") as replays:
        print(replays.run(0))                       # compares the graph with an eager run and with the recording

A bundle contains everything that a step reads except the model: its inputs, the request state, and the KV pages that
its requests read. It contains no code and no weights. Loading checks all values and executes nothing.
"""

from __future__ import annotations

import math
import platform
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

from graphrt import __version__
from graphrt.bundle.format import from_plain, read_file, reading, to_plain, write_file
from graphrt.cache.kv_cache import KVCache
from graphrt.capture.descriptor import BatchDescriptor, GraphKind
from graphrt.config import RuntimeConfig
from graphrt.engine.launch_inputs import LaunchInputs
from graphrt.engine.program import capacity_of, page_groups
from graphrt.engine.recording import NOT_STATE, RecordedLaunch, Recording
from graphrt.engine.stats import ShadowDifference
from graphrt.kernels.checks import check_bool, check_instance, check_int
from graphrt.kernels.errors import CapacityError, ConfigError, ShapeError
from graphrt.kernels.metadata.buffers import BufferKind, StaticBuffers
from graphrt.models.loading import free_memory
from graphrt.proposer import Proposer
from graphrt.replay import ReplayManager
from graphrt.runtime import resolve_device
from graphrt.sampling import sample_tokens
from graphrt.spec import AttentionSpec, KVCacheSpec
from graphrt.step import Model, Sampler


@dataclass(frozen=True, slots=True)
class Bundle:
    """Recorded launches, and the settings of a manager that can run them.

    config      config of the recorded manager
    attention   the spec of every layer
    groups      the KV groups, with null page 0
    scales      scales of an fp8 cache, under the names of KVCache.named_tensors
    samples     whether the manager had a sampler
    tables      whether the caller owned the page tables
    model       a description of the model, such as {"shape": ...}: JSON values
    versions    versions of graphrt, torch, triton and Python, and the device and the backend
    """

    launches: tuple[RecordedLaunch, ...]
    config: RuntimeConfig
    attention: tuple[AttentionSpec, ...]
    groups: tuple[KVCacheSpec, ...]
    vocab_size: int
    scales: Mapping[str, torch.Tensor]
    samples: bool
    tables: bool
    model: Mapping[str, Any]
    versions: Mapping[str, str]

    @classmethod
    def of(cls, recording: Recording, model: Mapping[str, Any] | None = None) -> Bundle:
        """Return a bundle of the launches recorded so far. Raises: ConfigError: if there are none."""
        check_instance("recording", recording, Recording, advice="pass a recording that manager.record() returned")
        if model is not None:
            check_instance("model", model, Mapping, advice="pass a dict like {'shape': 'llama-3.2-1b'}")
        if not recording.launches:
            raise ConfigError("recording: has no launches; submit the steps to record first")
        program, cache = recording.program, recording.program.kv_cache
        device = cache.device
        versions = {
            "graphrt": __version__, "torch": str(torch.__version__), "triton": triton.__version__,
            "python": platform.python_version(), "backend": program.backend.name,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        }  # fmt: skip
        drafting = 0 if program.draft_model is None else len(program.draft_model.specs)
        return cls(
            tuple(recording.launches),
            recording.config,
            tuple(layer.spec for layer in program.layers[: len(program.layers) - drafting]),
            tuple(replace(group, null_page=0) for group in cache.groups),
            program.vocab_size,
            {name: t.cpu().clone() for name, t in cache.named_tensors() if "scale" in name},
            program.sampler is not None,
            program.page_tables is not None,
            dict(model or {}),
            versions,
        )

    def save(self, path: str | Path) -> None:
        """Write the bundle to one file. A symbolic link at `path` is kept, and its target is replaced.

        Raises: ConfigError: if the file cannot be written, or `path` is a folder, a pipe or a device.
        """
        tensors = {f"scales/{name}": tensor for name, tensor in self.scales.items()}
        launches = []
        for index, launch in enumerate(self.launches):
            at = f"{index}/"
            tensors |= {f"{at}state/{name}": tensor for name, tensor in launch.state.items()}
            tensors |= {f"{at}pages/{group}": tensor for group, tensor in enumerate(launch.pages)}
            tensors |= {f"{at}ids/{group}": torch.from_numpy(ids) for group, ids in enumerate(launch.page_ids)}
            tensors |= {
                f"{at}words": torch.from_numpy(launch.words.words),
                f"{at}tokens": torch.from_numpy(launch.tokens),
                f"{at}logits": launch.logits,
            }
            launches.append({"descriptor": to_plain(launch.descriptor), "pool_pages": list(launch.pool_pages)})
        meta = {
            "config": to_plain(self.config), "attention": to_plain(self.attention), "groups": to_plain(self.groups),
            "vocab_size": self.vocab_size, "samples": self.samples, "tables": self.tables, "model": dict(self.model),
            "versions": dict(self.versions), "launches": launches,
        }  # fmt: skip
        write_file(path, meta, tensors)

    @classmethod
    def load(cls, path: str | Path) -> Bundle:
        """Read a bundle and check it. Raises: ConfigError or ShapeError: if the file is damaged or not a bundle."""
        meta, tensors = read_file(path)
        with reading("its JSON"):
            groups = _all_of("groups", from_plain(meta["groups"]), KVCacheSpec)
            launches = [
                _read_launch(tensors, f"{index}/", of_launch, len(groups))
                for index, of_launch in enumerate(meta["launches"])
            ]
            scales = {name.split("/", 1)[1]: t for name, t in tensors.items() if name.startswith("scales/")}
            bundle = cls(
                tuple(launches),
                check_instance("config", from_plain(meta["config"]), RuntimeConfig, advice="record it again"),
                _all_of("attention", from_plain(meta["attention"]), AttentionSpec),
                groups,
                check_int("vocab_size", meta["vocab_size"], 1, (1 << 31) - 1, advice="record it again"),
                scales,
                check_bool("samples", meta["samples"], advice="record it again"),
                check_bool("tables", meta["tables"], advice="record it again"),
                dict(meta["model"]),
                {str(name): str(value) for name, value in meta["versions"].items()},
            )
        bundle._check()
        return bundle

    def open(
        self,
        model: Model,
        *,
        device: torch.device | str | None = None,
        sampler: Sampler = sample_tokens,
        proposer: Proposer | None = None,
        backend: str | None = None,
    ) -> BundleReplays:
        """Return a manager that can run the launches, with a cache of the pages that they read. Close it after use.

        model     the recorded model, on `device`; None: CUDA if available
        sampler   ignored if the recorded manager had none
        proposer  the recorded manager's proposer. A launch of several steps needs it for the drafts of its later steps
        backend   attention backend to use instead of the recorded backend; "" selects one automatically

        Raises: the errors of ReplayManager if the model does not match the bundle.
        """
        sampling = sampler if self.samples else None, proposer
        return BundleReplays(self, model, resolve_device(device), *sampling, backend)

    @property
    def opened_config(self) -> RuntimeConfig:
        """The config of the manager that runs the launches, which captures only their sizes."""
        sizes = {launch.descriptor for launch in self.launches}
        return replace(
            self.config,
            decode_sizes=tuple(size.padded_reqs for size in sizes if size.kind is GraphKind.DECODE),
            mixed_sizes=tuple(size.padded_tokens for size in sizes if size.kind is GraphKind.MIXED),
            loop_sizes=(),
            use_graphs=True,
            lazy_capture=False,
            ring_depth=2,
            launch_steps=max(launch.words.steps for launch in self.launches),
        )

    def _check(self) -> None:
        """Raise an error if the launches do not match the manager's settings, before memory is allocated for them."""
        if not self.launches:
            raise ConfigError("bundle: has no launches; record it again")
        config = self.opened_config
        for launch in self.launches:
            same_pools = len(launch.pool_pages) == len({group.pool for group in self.groups})
            _require(same_pools, "the page counts are not those of its pools")
            for pool, count in enumerate(launch.pool_pages):
                held = sum(len(of) for of, spec in zip(launch.page_ids, self.groups, strict=True) if spec.pool == pool)
                most = max(2, 1 + held)
                _require(count <= most, f"expected at most {most} pages in pool {pool}, got {count}")
            meta = KVCache.allocate(self.groups, launch.pool_pages, "meta")
            scales = {name: tuple(t.shape) for name, t in meta.named_tensors() if "scale" in name}
            same_scales = scales == {name: tuple(t.shape) for name, t in self.scales.items()}
            _require(same_scales, f"expected scales {scales}, got {[*self.scales]}")
            groups = page_groups(meta, config.max_seq_len, config.max_encoder_len or 0)
            capacity = capacity_of(config, groups, self.vocab_size)
            shapes = StaticBuffers.shapes(capacity)
            wanted = {
                name: (shapes[name], spec.dtype)
                for name, spec in StaticBuffers.specs().items()
                if spec.kind is BufferKind.PERSISTENT and (name not in NOT_STATE or name == "page_table")
            }
            for row in config.request_tensors:
                wanted[f"row tensor {row.name}"] = (config.max_num_reqs + 1, *row.shape), row.dtype
            _check_state(launch, wanted)
            self._check_ranges(launch, shapes)
            on_host = sum(
                math.prod(shapes[name]) * spec.dtype.itemsize
                for name, spec in StaticBuffers.specs().items()
                if spec.kind in (BufferKind.INPUT, BufferKind.OUTPUT)
            )
            if (free := free_memory(torch.device("cpu"))) is not None and on_host > free:
                raise CapacityError(
                    f"bundle: its host buffers take {on_host} bytes, but only {free} are free; free host memory"
                )
            words = launch.words
            rows, tokens = launch.descriptor.padded_reqs, launch.descriptor.padded_tokens
            fits = (
                words.num_reqs <= min(rows, config.max_num_reqs)
                and words.num_tokens <= min(tokens, config.max_num_tokens)
                and words.steps <= self.config.launch_steps
                and words.inputs_end <= capacity.inputs
            )
            _require(fits, f"a launch is larger than its size {launch.descriptor}")
            words.listed()  # raises if a list is out of range
            for group, (ids, pages) in enumerate(zip(launch.page_ids, launch.pages, strict=True)):
                most = launch.pool_pages[self.groups[group].pool]
                inside = bool(((ids >= 1) & (ids < most)).all())
                distinct = len(np.unique(ids)) == len(ids)
                _require(inside and distinct, f"KV group {group} has a page twice or out of range")
                shape, size = tuple(pages.shape), meta.packer(group).page_bytes
                whole = shape == (len(ids), size) and pages.dtype == torch.uint8
                _require(whole, f"expected {len(ids)} pages of {size} bytes, got {shape}")

    def _check_ranges(self, launch: RecordedLaunch, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ShapeError if a number that kernels use as an index is out of range."""
        state, rows = dict(launch.state), self.config.max_num_reqs
        if (order := launch.words.order) is not None and launch.words.is_delta:
            state["order"] = torch.cat((state["order"], torch.from_numpy(order)))
        most = {
            "order": rows - 1, "req_seq_lens": self.config.max_seq_len, "last_token": self.vocab_size - 1,
            "page_spans": shapes["page_table"][-1], "last_encoder_len": self.config.max_encoder_len or 0,
            "bias_tokens": self.vocab_size - 1, "bias_lists": shapes["bias_tokens"][-1],
        }  # fmt: skip
        state["bias_lists"] = state["bias_lists"][:, :2]  # the third number is a length, which is only compared
        found = [(name, state[name], last) for name, last in most.items()]
        for group, spec in enumerate(self.groups):
            found.append(("page_table", state["page_table"][group], launch.pool_pages[spec.pool] - 1))
        for name, tensor, last in found:
            least = -1 if name in ("order", "last_token") else 0
            _require(bool(((tensor >= least) & (tensor <= last)).all()), f"expected {name} from {least} to {last}")


@dataclass(frozen=True, slots=True)
class LaunchReplay:
    """The results of a recorded launch that ran again.

    difference      difference between the graph and the eager step; None if they are bitwise equal
    tokens, logits  results of the graph: [steps, num_reqs] int32 on the host, and [num_reqs, vocab] of the last step
    tokens_equal    whether the tokens equal the recorded tokens
    logits_distance largest difference between its logits and the recorded logits; infinite if only one of two values is
    NaN
    """

    index: int
    descriptor: BatchDescriptor
    difference: ShadowDifference | None
    tokens: np.ndarray[Any, np.dtype[np.int32]]
    logits: torch.Tensor
    tokens_equal: bool
    logits_distance: float

    def __str__(self) -> str:
        rows = self.logits.shape[0]
        by_graph = "graph and eager step are equal bit by bit" if self.difference is None else str(self.difference)
        tokens = "tokens as recorded" if self.tokens_equal else "tokens differ from recording"
        logits = f"logits off by up to {self.logits_distance:.3g}" if self.logits_distance else "logits as recorded"
        return f"launch {self.index}, {self.descriptor}, {rows} requests: {by_graph}; {tokens}, {logits}"


class BundleReplays:
    """Runs the launches of a bundle from their recorded states, in any order and any number of times."""

    def __init__(
        self,
        bundle: Bundle,
        model: Model,
        device: torch.device,
        sampler: Sampler | None,
        proposer: Proposer | None,
        backend: str | None,
    ) -> None:
        self._bundle = bundle
        pools = [max(counts) for counts in zip(*(launch.pool_pages for launch in bundle.launches), strict=True)]
        cache = KVCache.allocate(bundle.groups, pools, device)
        for name, tensor in cache.named_tensors():
            if name in bundle.scales:
                tensor.copy_(bundle.scales[name])
        backend = bundle.versions.get("backend") if backend is None else backend
        config = replace(bundle.opened_config, shadow_every=1, backend=backend or None)
        self._tables = torch.zeros_like(bundle.launches[0].state["page_table"], device=device)
        self._manager = ReplayManager(
            model, cache, bundle.attention, vocab_size=bundle.vocab_size, config=config, sampler=sampler,
            proposer=proposer, page_tables=self._tables if bundle.tables else None,
        )  # fmt: skip
        try:
            self._manager.capture()
            for size in {launch.descriptor for launch in bundle.launches} - {*self._manager.descriptors}:
                raise ConfigError(f"bundle: size {size} cannot be captured on this machine; record it again")
        except BaseException:
            self._manager.close()
            raise

    @property
    def manager(self) -> ReplayManager:
        """The manager that runs the launches, for audits and tests."""
        return self._manager

    def run(self, index: int = 0) -> LaunchReplay:
        """Run a launch as a graph and eagerly, and wait for the device.

        Raises: ConfigError: if `index` is out of range.
        """
        launch = self._launch(index)
        self._restore(launch)
        stats = self._manager.stats()
        stats.shadow_differences = ()  # stats keep the first few only
        compared = stats.shadow_steps
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the difference is returned
            found = self._manager.replay_words(launch.words, launch.descriptor)
            tokens = found.tokens(raise_on_fault=False)
            logits = self._manager.latest_logits(found, copy=True)
            differences = self._manager.stats().shadow_differences
        assert stats.shadow_steps == compared + 1, "the launch ran eagerly too"
        same = tokens.shape == launch.tokens.shape and bool((tokens == launch.tokens).all())
        here, then = logits.double().cpu(), launch.logits.double()
        if here.shape != then.shape:
            largest = math.inf
        else:
            alike = (here == then) | (here.isnan() & then.isnan())
            distances = (here - then).abs().masked_fill(alike, 0.0).nan_to_num(nan=math.inf, posinf=math.inf)
            largest = float(distances.max()) if here.numel() else 0.0
        return LaunchReplay(index, launch.descriptor, next(iter(differences), None), tokens, logits, same, largest)

    def close(self) -> None:
        """Free the graphs, the buffers and the cache."""
        self._manager.close()
        self._manager.forget_cache()

    def __enter__(self) -> BundleReplays:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _launch(self, index: int) -> RecordedLaunch:
        last = len(self._bundle.launches) - 1
        return self._bundle.launches[check_int("index", index, 0, last, advice="specify a launch of the bundle")]

    def _restore(self, launch: RecordedLaunch) -> None:
        """Restore the recorded request state and pages of a launch."""
        manager = self._manager
        manager.reset()
        rows = {f"row tensor {name}": tensor for name, tensor in manager.request_tables.tensors.items()}
        kept = rows | ({"page_table": self._tables} if self._bundle.tables else {})

        def restore(buffers: StaticBuffers) -> None:
            for name, tensor in launch.state.items():
                (kept[name] if name in kept else getattr(buffers, name)).copy_(tensor)
            for group, (ids, pages) in enumerate(zip(launch.page_ids, launch.pages, strict=True)):
                if len(ids):
                    device = manager.kv_cache.device
                    manager.kv_cache.packer(group).unpack(torch.from_numpy(ids).to(device), pages.view(-1).to(device))

        manager.between_steps(restore)


def _read_launch(
    tensors: Mapping[str, torch.Tensor], at: str, of_launch: Mapping[str, Any], groups: int
) -> RecordedLaunch:
    def numbers(name: str, dtype: torch.dtype, dims: int) -> Any:
        tensor = tensors[at + name]
        if tensor.dtype != dtype or tensor.dim() != dims:
            found = f"{tensor.dim()} and {tensor.dtype}"
            raise ShapeError(f"bundle: expected {name} of {dims} dimensions and {dtype}, got {found}; record it again")
        return tensor.numpy().copy()

    descriptor = check_instance(
        "descriptor", from_plain(of_launch["descriptor"]), BatchDescriptor, advice="record it again"
    )
    prefix = f"{at}state/"
    counts = tuple(check_int("pool_pages", n, 2, (1 << 31) - 1, advice="record it") for n in of_launch["pool_pages"])
    return RecordedLaunch(
        descriptor,
        LaunchInputs(numbers("words", torch.int32, 1), groups),
        {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)},
        tuple(numbers(f"ids/{group}", torch.int64, 1) for group in range(groups)),
        tuple(tensors[f"{at}pages/{group}"] for group in range(groups)),
        counts,
        numbers("tokens", torch.int32, 2),
        tensors[f"{at}logits"],
    )


def _all_of(name: str, values: Any, kind: type[Any]) -> tuple[Any, ...]:
    items: tuple[Any, ...] = check_instance(name, values, tuple, advice="record it again")
    return tuple(check_instance(name, item, kind, advice="record it again") for item in items)


def _require(fits: bool, what: str) -> None:
    """Raise ShapeError if a bundle contradicts itself."""
    if not fits:
        raise ShapeError(f"bundle: {what}; record it again")


def _check_state(launch: RecordedLaunch, wanted: Mapping[str, tuple[Sequence[int], torch.dtype]]) -> None:
    """Raise ShapeError if the state of a launch differs from `wanted` in tensors, shapes or dtypes."""
    others = sorted(launch.state.keys() ^ wanted.keys())
    _require(not others, f"its state has {others[:4]} missing or unknown")
    for name, (shape, dtype) in wanted.items():
        given = tuple(launch.state[name].shape), launch.state[name].dtype
        _require(given == (tuple(shape), dtype), f"expected state {name} of {tuple(shape)} and {dtype}, got {given}")
