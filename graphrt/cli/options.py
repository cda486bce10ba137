"""The options of each command: one dataclass per command declares their names, ranges, defaults and help texts.

Importing this file imports neither torch nor the library, so that `graphrt --help` answers at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

T = TypeVar("T")

_Backend = Annotated[str | None, typer.Option(help="Attention backend; `graphrt env` lists them.")]
_Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; default: cuda if there is one.")]
_PageSize = Annotated[int, typer.Option(min=1, max=1024, help="Tokens per KV page.")]


def _sampled(text: str, **more: Any) -> Any:
    return typer.Option(help=text, rich_help_panel="Sampling", **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How tokens are sampled; see SamplingParams."""

    temperature: Annotated[float, _sampled("0 is greedy.")] = 0.0
    top_k: Annotated[int, _sampled("Draw among so many best tokens; 0 is all.")] = 0
    top_p: Annotated[float, _sampled("Draw among the best that hold this probability; 1 is all.")] = 1.0
    min_p: Annotated[float, _sampled("Draw among those with this share of the best one's; 0 is all.")] = 0.0
    repetition_penalty: Annotated[
        float, _sampled("Above 1: tokens of prompt and output are less likely; 1 is none.")
    ] = 1.0
    presence_penalty: Annotated[float, _sampled("Taken from the logits of tokens in the output.")] = 0.0
    frequency_penalty: Annotated[float, _sampled("The same for each time that a token is there.")] = 0.0
    logit_bias: Annotated[
        list[str] | None,
        _sampled("Added to the logit of token ID; -inf forbids it. May be given many times.", metavar="ID=X"),
    ] = None
    logprobs: Annotated[
        int | None, _sampled("Give log-probabilities of each token, and of so many best ones; generate prints them.")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions(SamplingOptions):
    """The same, where there are prompts."""

    prompt_logprobs: Annotated[
        int | None, _sampled("The same of each token of the prompt but the first: such a prompt runs a token a step.")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions(PromptOptions):
    """Generate text. The answer goes to standard output, everything else to standard error."""

    prompts: Annotated[
        list[str] | None, typer.Argument(help="One or more prompts, decoded together as one ragged batch.")
    ] = None
    prompt_file: Annotated[
        str | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help="File of further prompts in UTF-8, one per line; - is standard input. Blank lines are skipped.",
        ),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(help="Folder or hub id with safetensors, or a .gguf file. Default: SmolLM2-135M-Instruct."),
    ] = None
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most, per prompt.")] = 128
    stop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT", help="End an answer before this text, or at the special token of this text. Repeatable."
        ),
    ] = None
    stop_id: Annotated[
        list[int] | None, typer.Option(min=0, metavar="ID", help="End an answer at this token. Repeatable.")
    ] = None
    min_tokens: Annotated[
        int, typer.Option(min=0, help="Sample no end or stop token, and ignore --stop, for so many tokens.")
    ] = 0
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Do not end an answer at the model's own end tokens.")
    ] = False
    seed: Annotated[
        int,
        typer.Option(min=0, max=(1 << 32) - 1, help="Seed of the first prompt; each next one's is one higher."),
    ] = 0
    backend: _Backend = None
    device: _Device = None
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto"
    page_size: _PageSize = 16
    chat: Annotated[
        bool | None, typer.Option("--chat/--raw", help="Apply the model's chat template; default: if it has one.")
    ] = None
    graphs: Annotated[bool, typer.Option("--graphs/--no-graphs", help="Replay captured graphs, or run eagerly.")] = True
    stats: Annotated[bool, typer.Option("--stats", help="Print what was captured, replayed and measured.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOptions(SamplingOptions):
    """Milliseconds per decode step, against the memory floor and a baseline. The last line is JSON."""

    shape: Annotated[str | None, typer.Option(help="Shape with dummy weights, e.g. llama-3.1-8b.")] = None
    model: Annotated[str | None, typer.Option(help="A real model instead: folder, hub id or .gguf file.")] = None
    batch: Annotated[str, typer.Option(help="Comma-separated batch sizes.")] = "1,8,32"
    context: Annotated[int, typer.Option(min=1, help="KV tokens per sequence before the first timed step.")] = 1024
    steps: Annotated[int, typer.Option(min=1, help="Steps per round.")] = 50
    page_size: _PageSize = 16
    backend: _Backend = None
    device: _Device = None
    baseline: Annotated[
        str | None, typer.Option(help="transformers: time Hugging Face's greedy decoding of the same shape too.")
    ] = None
    json_only: Annotated[bool, typer.Option("--json-only", help="No table, only the JSON line.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions(PromptOptions):
    """Tokens per second of many prompts of random lengths, all at once. The last line is JSON."""

    shape: Annotated[str, typer.Option(help="Shape with dummy weights.")] = "qwen3-0.6b"
    requests: Annotated[int, typer.Option(min=1, help="Prompts.")] = 256
    least: Annotated[int, typer.Option(min=1, help="Tokens of a prompt, and of an answer, at least.")] = 100
    most: Annotated[int, typer.Option(min=1, help="Tokens of a prompt, and of an answer, at most.")] = 1024
    temperature: Annotated[float, _sampled("0 is greedy.")] = 0.6
    seed: Annotated[int, typer.Option(min=0, help="Of lengths and prompts.")] = 0
    rows: Annotated[int, typer.Option(min=1, help="Prompts that run at once, at most.")] = 256
    step_tokens: Annotated[int, typer.Option(min=1, help="New tokens of a step, at most.")] = 8192
    page_size: _PageSize = 16
    backend: _Backend = None
    device: _Device = None
    json_only: Annotated[bool, typer.Option("--json-only", help="No table, only the JSON line.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureOptions:
    """Capture the graphs of a model: what each costs, and what is in them. The last line is JSON."""

    shape: Annotated[str | None, typer.Option(help="Shape with dummy weights, e.g. llama-3.2-1b.")] = None
    model: Annotated[str | None, typer.Option(help="A real model instead: folder, hub id or .gguf file.")] = None
    rows: Annotated[int, typer.Option(min=1, help="Sequences in a step, at most.")] = 64
    step_tokens: Annotated[int, typer.Option(min=1, help="New tokens of a step, at most.")] = 2048
    context: Annotated[int, typer.Option(min=2, help="Tokens of a sequence, at most.")] = 4096
    page_size: _PageSize = 16
    backend: _Backend = None
    device: _Device = None
    html: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write a graph as a page that any browser opens.")
    ] = None
    dot: Annotated[str | None, typer.Option(metavar="FILE", help="Write the same graph as DOT.")] = None
    json: Annotated[str | None, typer.Option(metavar="FILE", help="Write the same graph as JSON.")] = None
    nodes: Annotated[bool, typer.Option("--nodes", help="Print the nodes of the same graph, by name.")] = False
    size: Annotated[
        int | None, typer.Option(min=1, help="Rows of the decode graph that these show; default: the most.")
    ] = None
    against: Annotated[
        int | None, typer.Option(min=1, help="Print what differs from the same graph to that of so many rows.")
    ] = None
    audit: Annotated[
        bool, typer.Option("--audit", help="Say whose memory the graphs hold; ends with 1 on a finding.")
    ] = False
    record: Annotated[
        str | None, typer.Option(metavar="FILE", help="Run random prompts, and record launches as a replay bundle.")
    ] = None
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of each of these prompts.")] = 64
    after: Annotated[int, typer.Option(min=0, help="Steps before those that are recorded.")] = 8
    launches: Annotated[int, typer.Option(min=1, help="Launches to record.")] = 1
    json_only: Annotated[bool, typer.Option("--json-only", help="No table, only the JSON line.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """Run a replay bundle: as a graph, eagerly, and against what was recorded. Ends with 1 where a graph differs."""

    bundle: Annotated[str, typer.Argument(help="File that `graphrt capture --record` or Bundle.save wrote.")]
    shape: Annotated[str | None, typer.Option(help="Shape with dummy weights; default: the recorded model.")] = None
    model: Annotated[str | None, typer.Option(help="A real model: folder, hub id or .gguf file.")] = None
    backend: Annotated[str | None, typer.Option(help="Another attention backend than the recorded one.")] = None
    device: _Device = None
    time: Annotated[bool, typer.Option("--time", help="Time each launch on the device as well.")] = False
    json_only: Annotated[bool, typer.Option("--json-only", help="No text, only the JSON line.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvOptions:
    """Print the environment, and which attention backends can run here and why not the others."""

    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON instead of a table.")] = False


def add_command(app: typer.Typer, name: str, options: Callable[..., T], run: Callable[[T], None]) -> None:
    """Add a command: its options are those of `options`, a dataclass of this file, and `run` is called with one."""

    def call(**values: Any) -> None:
        try:
            run(options(**values))
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
