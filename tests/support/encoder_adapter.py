"""BART and ModernBERT of `transformers` as models of graphrt: their own modules, with attention in steps."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AttentionInterface
from transformers.models.bart.modeling_bart import eager_attention_forward

from graphrt.integrations.transformers.host import NoCache
from graphrt.spec import AttentionKind, AttentionSpec
from graphrt.step import Step

HEADS, WIDTH, VOCAB = 4, 64, 97
OWN, CROSS, ENCODER = (
    AttentionSpec(4, 2, 16, torch.float32, kind=kind)
    for kind in (AttentionKind.DECODER, AttentionKind.CROSS, AttentionKind.ENCODER)
)


def attention(
    module: torch.nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Any,
    step: Step | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The function that `transformers` calls in every layer. Outside of a step it computes BART's own attention."""
    if step is None:
        return eager_attention_forward(module, q, k, v, mask, **options)
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # of [1, heads, tokens, size]
    if hasattr(module, "is_decoder"):  # BART: each layer of the decoder has two
        out = step.attend(2 * module.layer_idx, q, k, v) if module.is_causal else step.attend(
            2 * module.layer_idx + 1, q, None, None
        )  # fmt: skip
    else:
        out = step.attend(module.layer_idx, q, k, v)
    return out[None], None


AttentionInterface.register("graphrt_steps", attention)


@torch.no_grad()
def _randomise(model: torch.nn.Module) -> None:
    """Weights that are large enough for each to change the output."""
    generator = torch.Generator().manual_seed(3)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        scale = 0.15 if weight.dim() == 1 else weight.shape[-1] ** -0.5
        weight.copy_(scale * noise + float("norm" in name and name.endswith("weight")))


def make_bart(device: torch.device) -> transformers.BartForConditionalGeneration:
    config = transformers.BartConfig(
        vocab_size=VOCAB, d_model=WIDTH, encoder_layers=2, decoder_layers=2, encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS, encoder_ffn_dim=96, decoder_ffn_dim=96, max_position_embeddings=64,
        bos_token_id=0, pad_token_id=1, eos_token_id=None, forced_eos_token_id=None, decoder_start_token_id=2,
        tie_word_embeddings=False, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.BartForConditionalGeneration(config).eval()
    _randomise(model)
    return model.to(device)


class HostedBart(torch.nn.Module):
    """The decoder of a BART, for capture. Its encoder runs unchanged, once per sequence."""

    def __init__(self, model: transformers.BartForConditionalGeneration) -> None:
        super().__init__()
        model.set_attn_implementation("graphrt_steps")
        self.model = model
        own = AttentionSpec(HEADS, HEADS, WIDTH // HEADS, model.dtype)
        cross = AttentionSpec(HEADS, HEADS, WIDTH // HEADS, model.dtype, kind=AttentionKind.CROSS)
        self.specs = (own, cross) * model.config.decoder_layers

    @torch.no_grad()
    def encode(self, tokens: list[int]) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Return keys and values [tokens, heads, size] of one sequence, by cross layer."""
        ids = torch.tensor([tokens], device=self.model.device)
        hidden = self.model.model.encoder(ids).last_hidden_state[0]
        found = {}
        for index, layer in enumerate(self.model.model.decoder.layers):
            both = (layer.encoder_attn.k_proj(hidden), layer.encoder_attn.v_proj(hidden))
            found[2 * index + 1] = tuple(x.view(-1, HEADS, WIDTH // HEADS) for x in both)
        return found

    def forward(self, step: Step) -> torch.Tensor:
        ids = step.input_ids[None]
        nothing = self.model.model.shared.weight[:1][None]  # stands for what the encoder wrote, which no layer looks at
        before = step.positions - torch.arange(len(step.positions), device=step.positions.device)
        out = self.model.model.decoder(
            ids, torch.ones_like(ids), nothing, past_key_values=NoCache(before), use_cache=False, step=step
        )
        hidden = out.last_hidden_state[0, step.logits_indices]
        return self.model.lm_head(hidden) + self.model.final_logits_bias


def make_modernbert(device: torch.device) -> transformers.ModernBertModel:
    """A ModernBERT in which every second layer has a window of two tokens on each side."""
    config = transformers.ModernBertConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=96, num_hidden_layers=4, num_attention_heads=HEADS,
        max_position_embeddings=64, local_attention=4, global_attn_every_n_layers=2, pad_token_id=0,
        attn_implementation="eager",
    )  # fmt: skip
    model = transformers.ModernBertModel(config).eval()
    _randomise(model)
    return model.to(device)


class HostedModernBert(torch.nn.Module):
    """A ModernBERT that returns the mean hidden state of each request."""

    def __init__(self, model: transformers.ModernBertModel) -> None:
        super().__init__()
        model.set_attn_implementation("graphrt_steps")
        self.model = model
        self.specs = tuple(
            AttentionSpec(
                HEADS, HEADS, WIDTH // HEADS, model.dtype, kind=AttentionKind.ENCODER,
                sliding_window=layer.attn.sliding_window,
            )
            for layer in model.layers
        )  # fmt: skip

    def forward(self, step: Step) -> torch.Tensor:
        positions = step.positions[None]
        hidden = self.model(step.input_ids[None], position_ids=positions, step=step).last_hidden_state[0]
        starts = step.metadata.query_start_loc
        at = torch.arange(len(hidden), device=hidden.device)
        of_row = (at >= starts[:-1, None]) & (at < starts[1:, None])  # [padded_reqs, padded_tokens]
        counts = of_row.sum(1, keepdim=True).clamp(min=1)
        return of_row.to(hidden.dtype) @ hidden / counts


def cross_layer(specs: tuple[AttentionSpec, ...], device: torch.device | str = "cpu") -> Any:
    """A model that adds up its layers' outputs for queries by token id, and its embedding table on the host."""
    table = torch.randn(VOCAB, 8, 16, generator=torch.Generator().manual_seed(1))
    on_device = table.to(device)

    def model(step: Step) -> torch.Tensor:
        q, k, v = on_device[step.input_ids].to(specs[0].dtype).split([4, 2, 2], 1)
        outs = [step.attend(i, q, *((None, None) if spec.is_cross else (k, v))) for i, spec in enumerate(specs)]
        return torch.stack(outs, 1).flatten(1)[step.logits_indices].float()

    return model, table
