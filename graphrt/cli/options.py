"""The options of each command. One dataclass per command declares names, ranges, defaults and help texts.

This file imports neither torch nor the library, so that `graphrt --help` responds immediately.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, get_type_hints

import typer

from graphrt.cli.interrupts import importing

_Backend = Annotated[str | None, typer.Option(help="Attention backend; `graphrt env` lists them.")]
_Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; default: cuda if available.")]
_JsonOnly = Annotated[bool, typer.Option("--json-only", help="Print only the JSON line, no table.")]
_PageSize = Annotated[int, typer.Option(min=1, max=1024, help="Tokens per KV page.")]


def _sampled(text: str, **more: Any) -> Any:
    return typer.Option(help=text, rich_help_panel="Sampling", **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Sampling options; see SamplingParams."""

    temperature: Annotated[float, _sampled("0 is greedy.")] = 0.0
    top_k: Annotated[int, _sampled("Sample among the K most likely tokens; 0 means all.")] = 0
    top_p: Annotated[
        float, _sampled("Sample among the most likely tokens with this total probability; 1 means all.")
    ] = 1.0
    min_p: Annotated[
        float, _sampled("Sample among tokens with at least this share of the top probability; 0 means all.")
    ] = 0.0
    repetition_penalty: Annotated[
        float, _sampled("Above 1, makes tokens in the prompt and the output less likely; 1 is off.")
    ] = 1.0
    presence_penalty: Annotated[float, _sampled("Subtracted from the logits of tokens in the output.")] = 0.0
    frequency_penalty: Annotated[float, _sampled("Subtracted once per occurrence of a token in the output.")] = 0.0
    logit_bias: Annotated[
        list[str] | None,
        _sampled("Added to the logit of token ID; -inf forbids the token. Repeatable.", metavar="ID=X"),
    ] = None
    logprobs: Annotated[
        int | None,
        _sampled("Return log-probabilities of each token and of the N most likely tokens; generate prints them."),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions(SamplingOptions):
    """Generate text. Answers go to standard output, everything else to standard error."""

    prompt_logprobs: Annotated[
        int | None, _sampled("As --logprobs, for prompt tokens after the first; the prompt runs one token per step.")
    ] = None
    prompts: Annotated[
        list[str] | None, typer.Argument(help="One or more prompts, decoded together as one ragged batch.")
    ] = None
    prompt_file: Annotated[
        str | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help="UTF-8 file with more prompts, one per line; - is standard input. Blank lines are skipped.",
        ),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(help="Folder or hub id with safetensors, or a .gguf file. Default: SmolLM2-135M-Instruct."),
    ] = None
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens to generate per prompt.")] = 128
    stop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT", help="End an answer before this text, or at the special token with this text. Repeatable."
        ),
    ] = None
    stop_id: Annotated[
        list[int] | None, typer.Option(min=0, metavar="ID", help="End an answer at this token. Repeatable.")
    ] = None
    min_tokens: Annotated[
        int, typer.Option(min=0, help="In the first N tokens, do not sample end or stop tokens, and ignore --stop.")
    ] = 0
    speculate: Annotated[
        str | None,
        typer.Option(
            metavar="ngram|MODEL",
            help="Verify drafts from earlier text of the same prompt and answer (ngram), or from a draft model with "
            "the same tokenizer or an EAGLE head (a folder, .gguf file or hub id).",
        ),
    ] = None
    drafts: Annotated[
        int | None, typer.Option(min=1, max=63, help="Maximum drafts per step, with --speculate; default: 4.")
    ] = None
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Do not end an answer at the model's end tokens.")
    ] = False
    seed: Annotated[
        int,
        typer.Option(min=0, max=(1 << 32) - 1, help="Seed of the first prompt; each later prompt uses the next seed."),
    ] = 0
    backend: _Backend = None
    device: _Device = None
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto"
    page_size: _PageSize = 16
    context_parallel_size: Annotated[
        int, typer.Option(min=1, help="Number of ranks that divide the KV of each request. Needs torchrun.")
    ] = 1
    chat: Annotated[
        bool | None, typer.Option("--chat/--raw", help="Apply the model's chat template; default: if there is one.")
    ] = None
    graphs: Annotated[bool, typer.Option("--graphs/--no-graphs", help="Replay captured graphs, or run eagerly.")] = True
    stats: Annotated[bool, typer.Option("--stats", help="Print counts of tokens, graphs and replays.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOptions(SamplingOptions):
    """Measure milliseconds per decode step against the memory floor and a baseline. The last line is JSON."""

    shape: Annotated[str | None, typer.Option(help="Shape with dummy weights, e.g. llama-3.1-8b-fp8.")] = None
    model: Annotated[str | None, typer.Option(help="A model with weights instead: folder, hub id or .gguf file.")] = (
        None
    )
    batch: Annotated[str, typer.Option(help="Comma-separated batch sizes.")] = "1,8,32"
    context: Annotated[int, typer.Option(min=1, help="KV tokens per sequence before the first timed step.")] = 1024
    steps: Annotated[int, typer.Option(min=1, help="Steps per round.")] = 50
    page_size: _PageSize = 16
    backend: _Backend = None
    device: _Device = None
    baseline: Annotated[
        str | None, typer.Option(help="transformers: also time greedy decoding of Hugging Face transformers.")
    ] = None
    speculate: Annotated[
        str | None,
        typer.Option(
            metavar="ngram|MODEL",
            help="Also time drafts, with all and with none accepted: by prompt lookup (ngram), or by a draft model or "
            "an EAGLE head (a folder, .gguf file, hub id or dummy:SHAPE).",
        ),
    ] = None
    drafts: Annotated[
        int | None, typer.Option(min=1, max=63, help="Drafts per step, with --speculate; default: 4.")
    ] = None
    tp: Annotated[int, typer.Option(min=1, help="Also time the model split over this number of ranks.")] = 1
    json_only: _JsonOnly = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions(SamplingOptions):
    """Measure tokens per second for many prompts of random lengths. The last line is JSON."""

    shape: Annotated[str, typer.Option(help="Shape with dummy weights.")] = "qwen3-0.6b"
    requests: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 256
    least: Annotated[int, typer.Option(min=1, help="Minimum tokens per prompt and per answer.")] = 100
    most: Annotated[int, typer.Option(min=1, help="Maximum tokens per prompt and per answer.")] = 1024
    temperature: Annotated[float, _sampled("0 is greedy.")] = 0.6
    seed: Annotated[int, typer.Option(min=0, help="Seed of lengths and prompts.")] = 0
    rows: Annotated[int, typer.Option(min=1, help="Maximum concurrent requests.")] = 256
    step_tokens: Annotated[int, typer.Option(min=1, help="Maximum new tokens per step.")] = 8192
    page_size: _PageSize = 16
    backend: _Backend = None
    device: _Device = None
    json_only: _JsonOnly = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureOptions:
    """Capture the graphs of a model, and print their costs and contents. The last line is JSON."""

    shape: Annotated[str | None, typer.Option(help="Shape with dummy weights, e.g. llama-3.2-1b.")] = None
    model: Annotated[str | None, typer.Option(help="A model with weights instead: folder, hub id or .gguf file.")] = (
        None
    )
    rows: Annotated[int, typer.Option(min=1, help="Maximum requests per step.")] = 64
    step_tokens: Annotated[int, typer.Option(min=1, help="Maximum new tokens per step.")] = 2048
    context: Annotated[int, typer.Option(min=2, help="Maximum tokens per sequence.")] = 4096
    page_size: _PageSize = 16
    backend: _Backend = None
    device: _Device = None
    html: Annotated[str | None, typer.Option(metavar="FILE", help="Write a graph as an HTML page.")] = None
    json: Annotated[str | None, typer.Option(metavar="FILE", help="Write the same graph as JSON.")] = None
    nodes: Annotated[bool, typer.Option("--nodes", help="Print the nodes of the same graph by name.")] = False
    size: Annotated[
        int | None,
        typer.Option(min=1, help="Requests of the decode graph to show; default: the largest."),
    ] = None
    against: Annotated[
        int | None, typer.Option(min=1, help="Print the differences from the decode graph of N requests.")
    ] = None
    audit: Annotated[
        bool, typer.Option("--audit", help="Check the owners of all memory that graphs use; exit with 1 on a finding.")
    ] = False
    record: Annotated[
        str | None, typer.Option(metavar="FILE", help="Run random prompts and record launches in a replay bundle.")
    ] = None
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of each random prompt.")] = 64
    after: Annotated[int, typer.Option(min=0, help="Steps before the recorded launches.")] = 8
    launches: Annotated[int, typer.Option(min=1, help="Launches to record.")] = 1
    json_only: _JsonOnly = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """Run a replay bundle as graphs and eagerly, and compare the results. Exits with 1 if a graph differs."""

    bundle: Annotated[str, typer.Argument(help="File written by `graphrt capture --record` or Bundle.save.")]
    shape: Annotated[str | None, typer.Option(help="Shape with dummy weights; default: the recorded model.")] = None
    model: Annotated[str | None, typer.Option(help="A model with weights: folder, hub id or .gguf file.")] = None
    backend: Annotated[str | None, typer.Option(help="Attention backend; default: the recorded backend.")] = None
    device: _Device = None
    json_only: _JsonOnly = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Propose capture sizes for a trace of batch sizes, and compare them with the default sizes.

    Step times and graph memory are measured with --shape or --model, read with --measured, or else assumed.
    """

    trace: Annotated[
        str, typer.Option(metavar="FILE", help="Lines such as `decode 12` or `mixed 512 40`; see docs/embedding.md.")
    ]
    memory: Annotated[float, typer.Option(min=0, metavar="GiB", help="Maximum device memory of all graphs.")]
    rows: Annotated[int, typer.Option(min=1, help="RuntimeConfig.max_num_reqs.")] = 256
    step_tokens: Annotated[int, typer.Option(min=1, help="RuntimeConfig.max_num_tokens.")] = 2048
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps from one capture to the next; default: as many as in the trace.")
    ] = None
    measured: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Last lines of `graphrt bench decode` and `graphrt capture`, from anywhere."),
    ] = None
    shape: Annotated[str | None, typer.Option(help="Measure here: a shape with dummy weights.")] = None
    model: Annotated[str | None, typer.Option(help="Measure here: a folder, hub id or .gguf file.")] = None
    context: Annotated[int, typer.Option(min=2, help="KV tokens per sequence in the measurement.")] = 1024
    page_size: _PageSize = 16
    backend: _Backend = None
    device: _Device = None
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON instead of a table.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvOptions:
    """Print the environment, and which attention backends can run here and why."""

    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON instead of a table.")] = False


def add_command(app: typer.Typer, name: str, options: Callable[..., Any]) -> None:
    """Add a command with the options of a dataclass in this file. Its code is `run` in graphrt.cli.<name>."""

    def call(**values: Any) -> None:
        with importing():  # import only when the command runs, because torch and the library take seconds
            module = importlib.import_module(f"graphrt.cli.{name}")
        try:
            module.run(options(**values))
        except KeyboardInterrupt:
            raise SystemExit(130) from None

    hints = get_type_hints(options, include_extras=True)
    parameters = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(options)  # type: ignore[arg-type]  # a dataclass, which no annotation can say
    ]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app.command(name, help=options.__doc__)(call)
