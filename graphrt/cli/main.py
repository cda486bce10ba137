"""The command line: `graphrt generate`, `graphrt bench decode`, `graphrt env`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from graphrt.cli.console import make_console
from graphrt.kernels.errors import ConfigError, GraphRTError

app = typer.Typer(
    help="The decode step of a language model: captured CUDA graphs, paged attention, in-graph sampling.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench_app = typer.Typer(help="Benchmarks, each with its baseline in the same run.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")

_BackendOption = Annotated[str | None, typer.Option("--backend", help="Attention backend; `graphrt env` lists them.")]
_DeviceOption = Annotated[
    str | None, typer.Option("--device", help="cpu, cuda or cuda:N; default: cuda if there is one.")
]


def main() -> None:
    """Run the command line; errors of graphrt end it with their text and exit code 1, without a traceback."""
    try:
        app()
    except GraphRTError as error:
        make_console(stderr=True).print(f"[bold red]{type(error).__name__}[/]: ", end="")
        print(error, file=sys.stderr)
        sys.exit(1)


@app.command()
def generate(
    prompts: Annotated[list[str], typer.Argument(help="One or more prompts, decoded together as one ragged batch.")],
    model: Annotated[
        str | None,
        typer.Option(help="Folder or hub id with safetensors, or a .gguf file. Default: SmolLM2-135M-Instruct."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate at most, per prompt.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the first prompt; the next one's is one higher.")] = 0,
    backend: _BackendOption = None,
    device: _DeviceOption = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    page_size: Annotated[int, typer.Option(help="Tokens per KV page.")] = 16,
    chat: Annotated[
        bool | None, typer.Option("--chat/--raw", help="Apply the model's chat template; default: if it has one.")
    ] = None,
    graphs: Annotated[
        bool, typer.Option("--graphs/--no-graphs", help="Replay captured graphs, or run eagerly.")
    ] = True,
    stats: Annotated[bool, typer.Option("--stats", help="Print what was captured, replayed and measured.")] = False,
) -> None:
    """Generate text. The answer goes to standard output, everything else to standard error."""
    from graphrt.cli.generate import GenerateOptions, run_generate

    run_generate(
        GenerateOptions(
            prompts=tuple(prompts),
            model=model,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            backend=backend,
            device=device,
            dtype=dtype,
            page_size=page_size,
            chat=chat,
            graphs=graphs,
            stats=stats,
        )
    )


@bench_app.command("decode")
def bench_decode_command(
    shape: Annotated[str | None, typer.Option(help="Shape with dummy weights, e.g. llama-3.1-8b.")] = None,
    model: Annotated[str | None, typer.Option(help="A real model instead: folder, hub id or .gguf file.")] = None,
    batch: Annotated[str, typer.Option(help="Comma-separated batch sizes.")] = "1,8,32",
    context: Annotated[int, typer.Option(help="KV tokens per sequence before the first timed step.")] = 1024,
    steps: Annotated[int, typer.Option(help="Steps per round.")] = 50,
    page_size: Annotated[int, typer.Option(help="Tokens per KV page.")] = 16,
    backend: _BackendOption = None,
    device: _DeviceOption = None,
    json_only: Annotated[bool, typer.Option("--json-only", help="No table, only the JSON line.")] = False,
) -> None:
    """Milliseconds per decode step against the memory floor, eager against replay. The last line is JSON."""
    from graphrt.cli.bench import BenchOptions, run_bench

    if (shape is None) == (model is None):
        raise ConfigError("bench decode: expected one of --shape and --model, got both or none; name one")
    run_bench(
        BenchOptions(
            shape=shape,
            model=model,
            batches=tuple(_positive_ints("--batch", batch)),
            context=context,
            steps=steps,
            page_size=page_size,
            backend=backend,
            device=device,
            json_only=json_only,
        )
    )


@app.command("env")
def env_command(
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON instead of a table.")] = False,
) -> None:
    """Print the environment, and which attention backends can run here and why not the others."""
    from graphrt.cli.env import run_env

    run_env(as_json=as_json)


def _positive_ints(name: str, text: str) -> list[int]:
    values = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if min(values) < 1:
        raise ConfigError(f"{name}: expected comma-separated numbers >= 1, got {text!r}")
    return values
