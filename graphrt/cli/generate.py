"""`graphrt generate`: load a model, capture it, decode all prompts as one ragged batch, and stream the text."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import distributed as dist

from graphrt.cli.console import capture_with_bar, make_console
from graphrt.cli.options import GenerateOptions
from graphrt.cli.values import check_length, check_vocabulary, draft_source, num_drafts, sampling_params
from graphrt.config import RuntimeConfig
from graphrt.engine.handle import TokenLogprob
from graphrt.engine.ranks import CUDA_BACKENDS, Ranks
from graphrt.engine.stats import Stats
from graphrt.generate.generator import TextGenerator
from graphrt.kernels.errors import ConfigError
from graphrt.models.loading import DUMMY_PREFIX, load_draft_model, load_model, make_runtime, resolve_source
from graphrt.models.shapes import SHAPES
from graphrt.models.smollm import default_model_path
from graphrt.models.stop_strings import StopStrings
from graphrt.models.tokenizer import Tokenizer, check_prompt, load_tokenizer
from graphrt.proposer import Proposer, ngram_drafts
from graphrt.runtime import Runtime, resolve_device
from graphrt.sampling_params import SamplingParams, config_fields

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CPU_CHUNK = 64  # on a CPU, a mixed graph is not faster than an eager chunk, so capture only one small size
_MOST_POSITIONS = 1 << 20


def run(options: GenerateOptions) -> None:
    """Generate and print. Text goes to standard output; progress and statistics go to standard error."""
    device = resolve_device(options.device)
    group, device = _torchrun_group(device)
    ranks = None if group is None else Ranks.of(group)
    is_first = ranks is None or not ranks.rank
    prompts = [*(options.prompts or ()), *_read_prompts(options.prompt_file)] if is_first else []
    if ranks is not None:
        prompts = ranks.exchange(prompts)[0]  # only one process can read standard input
    if not prompts:
        raise ConfigError("prompts: expected at least one prompt; pass it as an argument, or in a file with --prompts")
    for prompt in prompts:
        check_prompt(prompt)
    log = make_console(stderr=True)
    log.quiet = not is_first
    if options.dtype != "auto" and options.dtype not in _DTYPES:
        raise ConfigError(
            f"--dtype: expected auto, float32, bfloat16 or float16, got {options.dtype!r}; choose one of these"
        )
    params = sampling_params(
        options,
        options.max_new_tokens,
        stop_ids=options.stop_id or (),
        min_tokens=options.min_tokens,
        prompt_logprobs=options.prompt_logprobs,
    )
    StopStrings(options.stop or ())  # raises for an empty string before anything is loaded
    drafts = num_drafts(options.speculate, options.drafts)
    path, drafter = _model_path(options.model), draft_source(options.speculate)
    with log.status(f"loading the tokenizer of {path.name}"):
        tokenizer = load_tokenizer(path)
    chat = tokenizer.has_chat_template if options.chat is None else options.chat
    ids = [tokenizer.encode_prompt(prompt, chat=chat) for prompt in prompts]
    most = max(map(len, ids))
    longest = most + options.max_new_tokens - 1  # the last sampled token is not in the cache
    positions = longest if longest <= _MOST_POSITIONS else None  # None: more than any model has, rejected below
    start = time.perf_counter()
    with log.status(f"loading {path.name}"):
        loaded = load_model(
            path, device=device, dtype=_DTYPES.get(options.dtype, "auto"), max_positions=positions, group=group
        )
    log.print(f"loaded {path.name} on {device} in {time.perf_counter() - start:.1f} s", highlight=False, markup=False)
    check_length(ids, options.max_new_tokens, loaded.config.max_position_embeddings)
    check_vocabulary(params, loaded.config.vocab_size)
    special = {text: tokenizer.special_id(text) for text in options.stop or ()}  # decoded text omits special tokens
    ends = () if options.ignore_eos else (*tokenizer.eos_ids, *loaded.config.eos_ids)
    stop_ids = params.stop_ids.union(ends, (index for index in special.values() if index is not None))
    params = replace(params, stop_ids=stop_ids)
    stop = [text for text, index in special.items() if index is None]
    of_prompts = [replace(params, seed=(options.seed + i) % (1 << 32)) for i in range(len(prompts))]
    rows, cuda = min(len(ids), 256), device.type == "cuda"
    config = RuntimeConfig(
        max_num_reqs=rows,
        max_num_tokens=max(2048 if cuda else 512, rows * (1 + drafts)),
        max_seq_len=longest,
        num_speculative_tokens=drafts,
        mixed_sizes=None if cuda else (_CPU_CHUNK,),
        backend=options.backend,
        use_graphs=options.graphs,
        **config_fields(params) | {"truncation": params.truncated},
    )
    proposer: Proposer | None = ngram_drafts if drafts else None
    if drafter is not None:
        with log.status(f"loading {drafter}"):
            proposer = load_draft_model(drafter, loaded.model)
    with make_runtime(
        loaded.model,
        config,
        page_size=options.page_size,
        context_parallel_size=options.context_parallel_size,
        proposer=proposer,
    ) as runtime:
        capture_with_bar(runtime, log)
        if not is_first:
            runtime.follow()
            return
        start = time.perf_counter()
        count = _stream(prompts, runtime, tokenizer, ids, of_prompts, stop, log)
        if options.stats:
            _print_stats(log, runtime.stats(), count, time.perf_counter() - start)


def _torchrun_group(device: torch.device) -> tuple[dist.ProcessGroup | None, torch.device]:
    """Return the group of the processes that torchrun has started (None for a single process), and the device of this
    process. On CUDA, each rank has the GPU of its local rank."""
    if not dist.is_torchelastic_launched():
        return None, device
    if device.type == "cuda":
        device = resolve_device(f"cuda:{dist.get_node_local_rank()}")
        torch.cuda.set_device(device)
    dist.init_process_group(CUDA_BACKENDS if device.type == "cuda" else "gloo")
    return dist.group.WORLD if dist.get_world_size() > 1 else None, device


def _read_prompts(name: str | None) -> list[str]:
    """Return the lines of a file, or of standard input for "-", skipping blank lines."""
    if name is None:
        return []
    try:
        content = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except (OSError, ValueError, AttributeError) as error:  # AttributeError: standard input is closed
        is_folder = isinstance(error, IsADirectoryError)
        advice = "specify a file in it" if is_folder else "check the path, or pass - for standard input"
        raise ConfigError(f"--prompts: {name!r:.200} cannot be read ({error}); {advice}") from error
    try:
        text = content.decode("utf-8-sig")
    except ValueError as error:
        raise ConfigError(f"--prompts: {name!r:.200} is not UTF-8 ({error}); convert it to UTF-8") from error
    return [line for line in text.replace("\r\n", "\n").split("\n") if line.strip()]


def _model_path(model: str | None) -> Path:
    if model is None:
        return default_model_path()
    if model.startswith(DUMMY_PREFIX):
        raise ConfigError(
            f"--model: {model!r} has random weights and no tokenizer; leave --model out for SmolLM2-135M-Instruct, or "
            "time a shape with `graphrt bench decode --shape`: " + ", ".join(SHAPES)
        )
    path = resolve_source(model)
    if path.is_dir() and not (path / "config.json").is_file():
        raise ConfigError(
            f"--model: the folder {str(path)!r} has no config.json; specify a folder with config.json, a tokenizer and "
            "safetensors files"
        )
    return path


def _stream(
    prompts: Sequence[str],
    runtime: Runtime,
    tokenizer: Tokenizer,
    ids: list[list[int]],
    params: list[SamplingParams],
    stop: Sequence[str],
    log: Console,
) -> int:
    """Print the answers, and return their total number of tokens.

    With a single prompt, the answer is printed while it is generated; with several prompts, each answer is printed when
    complete. Log-probabilities are printed to `log` at the end, one line per token.

    A stop string ends an answer, but not the request. Further tokens are dropped until all requests have finished. In
    the first `min_tokens` tokens, no stop string ends an answer.
    """
    streams, stops = [tokenizer.stream() for _ in ids], [StopStrings(stop) for _ in ids]
    texts, lengths = [""] * len(ids), [0] * len(ids)
    single = len(ids) == 1
    lines: list[list[str]] = [[] for _ in ids]
    left = set(range(len(ids)))
    with closing(TextGenerator(runtime).generate(ids, params)) as events:
        for event in events:
            at = event.prompt
            if at not in left:
                continue
            lengths[at] += event.token is not None
            early = lengths[at] <= params[at].min_tokens
            delta = stops[at].push(streams[at].push(event.token), early=early) if event.token is not None else ""
            if event.finished:
                delta += stops[at].push(streams[at].finish(), early=early)
                delta += stops[at].finish()
            texts[at] += delta
            lines[at] += [f"prompt {_logprob_line(found)}" for found in event.prompt_logprobs or ()]
            if event.logprob is not None and event.token is not None:
                lines[at].append(_logprob_line(event.logprob))
            if event.finished or stops[at].stopped:
                left.discard(at)
            if single:
                print(delta, end="", flush=True)
            elif at not in left:
                print(f"[{at + 1}] {prompts[at]}\n{texts[at].strip()}\n", flush=True)
            if not left:
                break
    if single:
        print(flush=True)
    for index, of_prompt in enumerate(lines):
        for line in of_prompt:
            log.print(f"[{index + 1}] {line}", highlight=False, markup=False, soft_wrap=True)
    return sum(lengths)


def _logprob_line(found: TokenLogprob) -> str:
    best = "".join(f"  {token}: {logprob:.3f}" for token, logprob in found.top)
    return f"token {found.token}: {found.logprob:.3f}, rank {found.rank}{';' if best else ''}{best}"


def _print_stats(log: Console, stats: Stats, tokens: int, seconds: float) -> None:
    table = Table(show_header=False, box=None)
    table.add_row("tokens", f"{tokens} in {seconds:.2f} s, {tokens / seconds:.1f} per second, prompts included")
    table.add_row("backend", stats.backend_reason)
    table.add_row("products", stats.products)
    table.add_row("replays", ", ".join(sorted(f"{d}: {n}" for d, n in stats.replays.items())) or "none")
    table.add_row("eager steps", ", ".join(f"{n} ({why})" for why, n in stats.eager_steps.items()) or "none")
    if stats.tokens_per_step:
        steps = stats.tokens_per_step.total()
        accepted, verified = stats.num_accepted_tokens, stats.num_draft_tokens
        per_step = f"{1 + accepted / steps:.2f} tokens per request and step, in {steps} steps"
        table.add_row("drafts", f"{accepted} of {verified} accepted; {per_step}")
    table.add_row("padding", f"{stats.pad_waste:.1%} of computed tokens")
    for advice in stats.advice:
        table.add_row("sizes", advice)
    table.add_row("ring waits", str(stats.ring_waits))
    for report in stats.graphs:
        table.add_row(
            str(report.descriptor),
            f"{report.seconds:.3f} s, {report.nbytes / (1 << 20):.1f} MiB, {report.nodes} nodes",
        )
    log.print(table)
