"""`from_transformers`: a decoder of `transformers` as a captured runtime."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from graphrt.cache.groups import kv_groups
from graphrt.config import RuntimeConfig
from graphrt.engine.ranks import Ranks
from graphrt.engine.step_model import is_compiled
from graphrt.integrations.transformers import generation
from graphrt.integrations.transformers.discovery import device_of, discover
from graphrt.integrations.transformers.fuse import find_fused
from graphrt.integrations.transformers.generation import GeneratedToken, Generation, Prompts
from graphrt.integrations.transformers.generation_config import own_needs
from graphrt.integrations.transformers.host import (
    HostedModel,
    check_attention_functions,
    check_eval,
    package,
    reserved,
)
from graphrt.integrations.transformers.layers import find_layers
from graphrt.integrations.transformers.probe import check_independence
from graphrt.integrations.transformers.rotation import find_rotation
from graphrt.integrations.transformers.sharding import group_of, together
from graphrt.kernels.attention.options import FP8_DTYPES
from graphrt.kernels.checks import check_bool, check_instance
from graphrt.kernels.errors import ConfigError, UnsupportedError
from graphrt.proposer import Proposer
from graphrt.runtime import Runtime, default_config


class TransformersRuntime(Runtime):
    """A Runtime over a decoder of `transformers`; `from_transformers` builds it.

    model      the model passed to `from_transformers`
    tokenizer  its tokenizer, or None
    fused      the operator that replaces a module in steps, by the module's name
    """

    model: Any
    tokenizer: Any
    fused: dict[str, str]
    _hosted: HostedModel

    def generate(
        self, prompts: Prompts | None = None, generation_config: Any = None, *, streamer: Any = None, **options: Any
    ) -> list[Generation]:
        """Continue prompts as `model.generate` does, and return a result per sequence, in order.

        Any number of prompts run with continuous batching. Each is computed alone, so no prompt needs padding.

            results = runtime.generate(["Why is the sky blue?"], max_new_tokens=100, do_sample=True, top_p=0.9)
            print(results[0].text)

        prompts            texts, lists of token ids, or a padded batch [prompts, tokens]; None: pass `input_ids`
        generation_config  a GenerationConfig; None: the model's own
        streamer           an object with `put` and `end`, such as TextStreamer, for a single sequence
        options            fields of GenerationConfig, which override those of `generation_config`, and:
          tokenizer          for texts and stop strings; by default the runtime's, or one loaded by the model's name
          attention_mask     0 for padding, like `prompts`; None: tokens that equal `pad_token_id` are padding, unless
                             this is an end-of-sequence token
          stopping_criteria  StoppingCriteria, called with the token ids [1, tokens] of a sequence, and None as scores
          logprobs           return log-probabilities of each token and of this many most likely tokens, as in
                             SamplingParams

        docs/hosts.md lists the fields that are honoured. The random numbers of sequences come from torch's generator
        for the CPU, so `torch.manual_seed` makes them repeatable.

        Raises:
            UnsupportedError: naming all fields that graphrt does not honour, with their values, or a field that needs
                an option of RuntimeConfig.
            ConfigError: if an option is unknown or wrong, or no tokenizer is found.
            ShapeError: if prompts are empty, or not lists of token ids.
            CapacityError: if a prompt and its new tokens exceed `max_seq_len`.
            ReplayError: if a weight or buffer was moved, replaced or added since the capture, or an adapter was merged,
                disabled, chosen or scaled. All of these are raised before any step.
            See also TextGenerator.generate.
        """
        self._follow_model()
        options.setdefault("tokenizer", self.tokenizer)
        return generation.generate(self, self.model, prompts, generation_config, streamer, **options)

    def generate_stream(
        self, prompts: Prompts | None = None, generation_config: Any = None, **options: Any
    ) -> Generator[GeneratedToken, None, None]:
        """Yield the tokens of all sequences as they arrive. Arguments and errors are those of `generate`.

        Requests and pages are returned at the end, after an error, and when the generator is closed.
        """
        self._follow_model()
        options.setdefault("tokenizer", self.tokenizer)
        return generation.stream(self, self.model, prompts, generation_config, **options)

    def _follow_model(self) -> None:
        """Check the weights, buffers and adapters, and rebuild tables whose buffers were changed in place."""
        self.manager.check_weights(self._hosted)
        for table in (*self._hosted.tables.values(), *self._hosted.rotations.values()):
            table.rebuild()


def from_transformers(
    model: Any,
    tokenizer: Any = None,
    *,
    config: RuntimeConfig | None = None,
    num_pages: int | Sequence[int] | Literal["auto"] = "auto",
    memory_utilization: float = 0.9,
    page_size: int = 16,
    kv_dtype: torch.dtype | None = None,
    fuse: bool = True,
    proposer: Proposer | None = None,
) -> TransformersRuntime:
    """Return a captured runtime for a causal language model of `transformers`.

        model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-8B", dtype=torch.bfloat16).cuda()
        runtime = graphrt.from_transformers(model)

    The layers are learned by one run on the meta device, and checked by runs of 128 tokens. The model keeps its
    attention implementation and its config, so that it can also be used without graphrt, and in other threads. Until
    this function returns, forward passes by other callers raise CaptureError.

    model               a PreTrainedModel in eval mode, with all weights on one device. If it was sharded over ranks,
                        all ranks call this function; docs/parallel.md shows how
    tokenizer           kept as `runtime.tokenizer`, for text prompts
    config              capacities and options; None: up to 256 requests and 2,048 tokens a step (8 and 64 on a CPU),
                        and sequences as long as the model and the device memory allow. A RuntimeConfig replaces all
                        of these, but a `max_seq_len` of 4,096, the default, is lowered to the positions of the model
    num_pages           as for Runtime
    memory_utilization  as for Runtime
    page_size           as for `kv_groups`
    kv_dtype            dtype of the KV cache; None: the dtype of the keys
    fuse                replace norms, gated MLPs, linear layers, rotary embeddings and whole decoder layers by
                        graphrt's operators, where these compute the same result on random input; `runtime.fused` names
                        them. Weights of linear layers with the same input become adjacent in memory, and keep their
                        values and names
    proposer            as for Runtime, with RuntimeConfig.num_speculative_tokens. A head reads the last hidden states
                        of the base model

    Raises:
        ConfigError: if `transformers` is missing, an argument is wrong, or the ranks have different models.
        UnsupportedError: if a graph cannot contain the model, with the file and line to blame, or if it was sharded by
            anything other than tensor parallelism.
        RankError: if another rank exits or fails.
        CapacityError: if the cache does not fit into the memory of the device.
    """
    check_instance("model", model, package().PreTrainedModel, advice="pass what from_pretrained() returned")
    if config is not None:
        check_instance("config", config, RuntimeConfig, advice="pass None for capacities that fit the model")
    if kv_dtype is not None:
        check_instance("kv_dtype", kv_dtype, torch.dtype, advice="pass None for the dtype of the keys")
    if tokenizer is not None:
        check_instance("tokenizer", tokenizer, package().PreTrainedTokenizerBase, advice="load it with AutoTokenizer")
    check_bool("fuse", fuse, advice="pass False to run the modules of the model")
    if isinstance(proposer, package().PreTrainedModel):
        raise ConfigError(
            f"proposer: expected a DraftModel, or a function of a Step, got {type(proposer).__name__}; load it with "
            "load_model(), and pass DraftModel(model, attention, vocab_size=...)"
        )
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    longest = limit if isinstance(limit, int) and limit > 0 else 4096
    if config is not None and config.max_seq_len > longest:
        if config.max_seq_len != RuntimeConfig().max_seq_len:
            raise ConfigError(
                f"config.max_seq_len: expected at most {longest}, the positions of this model, got "
                f"{config.max_seq_len}; lower it"
            )
        config = replace(config, max_seq_len=longest)
    # Weights that `fuse` moves stay normal tensors, so that the model can be trained.
    group = group_of(model)
    ordinary = torch.autocast(device_of(model).type, enabled=False)
    with reserved(model), torch.inference_mode(False), torch.no_grad(), ordinary, together(group):
        if group is not None:
            described = {f"model.config.{name}": value for name, value in model.config.to_dict().items()}
            Ranks.of(group).check_equal({"model": type(model).__name__} | described)
        hosted, vocab_size = host(model, longest if config is None else config.max_seq_len)
        if kv_dtype not in (None, keys := hosted.specs[0].dtype, *FP8_DTYPES):
            raise ConfigError(f"kv_dtype: expected fp8 or {keys}, the dtype of the keys, got {kv_dtype}; pass None")
        groups = kv_groups(hosted.specs, page_size=page_size, dtype=kv_dtype)
        if config is None:
            config = default_config(groups, longest, model.device, memory_utilization)
            config = replace(config, **own_needs(model, vocab_size))
            if group is not None:
                config = replace(config, max_seq_len=min(Ranks.of(group).exchange(config.max_seq_len)))
        fused: dict[str, str] = {}
        if fuse:
            fused = find_fused(hosted, config.max_seq_len, vocab_size)
            fused |= find_rotation(hosted, config.max_seq_len, vocab_size)
            layers = find_layers(hosted, config.max_seq_len, vocab_size)
            inside = tuple(f"{name}." for name in layers)
            fused = {name: operator for name, operator in fused.items() if not name.startswith(inside)} | layers
        hosted.register_tables()
        runtime = TransformersRuntime(
            hosted,
            hosted.specs,
            groups,
            vocab_size=vocab_size,
            device=model.device,
            config=config,
            num_pages=num_pages,
            memory_utilization=memory_utilization,
            proposer=proposer,
            group=group,
        )
        runtime.model, runtime.tokenizer, runtime.fused, runtime._hosted = model, tokenizer, fused, hosted
        runtime.kv_boundary = next((of.boundary for of in hosted.tables.values() if of.boundary), None)
        try:
            runtime.capture()
        except BaseException:
            runtime.close()
            raise
    return runtime


def host(model: Any, max_seq_len: int) -> tuple[HostedModel, int]:
    """Return a decoder of `transformers` as a model of graphrt, with its specs, and its vocabulary size.

    Raises: see `from_transformers`.
    """
    if model.config.is_encoder_decoder:
        raise UnsupportedError(
            f"{type(model).__name__}: is an encoder-decoder model; to embed its cross layers, see docs/embedding.md"
        )
    if model.get_output_embeddings() is None:
        raise UnsupportedError(
            f"{type(model).__name__}: has no head that gives logits of the vocabulary; load it by AutoModelForCausalLM"
        )
    check_eval(model)
    if is_compiled(model):
        raise ConfigError("model: expected an uncompiled model; pass it before model.compile()")
    check_attention_functions(model)
    hosted = HostedModel(model)
    vocab_size = discover(hosted, max_seq_len)
    check_independence(hosted, max_seq_len, vocab_size)
    return hosted, vocab_size
