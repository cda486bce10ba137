"""Tiny models of `transformers` as oracles, and a step with dense attention without pages and kernels."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from torch.nn import functional

from graphrt.kernels.ops.linear import linear
from graphrt.models.llama import LlamaModel

# To learn whether a package called `kernels` is installed, transformers imports it, once, and in a checkout finds the
# folder of that name. Nothing of ours may be imported by that name, so it is asked here, and the import undone.
transformers.utils.is_kernels_available()
if getattr(sys.modules.get("kernels"), "__file__", "") is None:
    del sys.modules["kernels"]

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
PROMPT = [5, 17, 3, 88, 41, 9, 60, 17, 3, 2, 70, 33, 96, 0, 12, 54]


def make_oracle(architecture: str, **options) -> transformers.PreTrainedModel:
    """A model of `transformers` with random weights that are large enough to change the logits."""
    model_class = getattr(transformers, f"{architecture}{'LMHeadModel' if architecture == 'GPT2' else 'ForCausalLM'}")
    config = model_class.config_class(**(SIZES | options), attn_implementation="eager")
    model = model_class(config).eval()
    randomize(model)
    return model


@torch.no_grad()
def randomize(model: torch.nn.Module) -> None:
    """Set random weights that are large enough to change the logits."""
    generator = torch.Generator().manual_seed(3)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        weight.copy_(1 + 0.2 * noise if "norm" in name else 1.5 * noise / max(weight.shape[-1], 1) ** 0.5)


def save_oracle(folder: Path, architecture: str, **options) -> transformers.PreTrainedModel:
    """Save a random model to `folder` and return it."""
    model = make_oracle(architecture, **options)
    model.save_pretrained(folder)
    return model


def edit_json(path: Path, **changes: object) -> None:
    """Change values of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Apply `change` to the tensors of a safetensors file."""
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def check_shards(shards: list[dict[str, torch.Tensor]], whole: dict[str, torch.Tensor], kv_copies: int) -> None:
    """The weights of all ranks are slices of the whole weights, with zeros after the last slice, or copies of them."""
    for key, weight in whole.items():
        parts, module = [shard[key] for shard in shards], key.split(".")[-2]
        if "norm" in key or (key.endswith("bias") and module in ("o_proj", "down_proj")):
            assert all(torch.equal(part, weight) for part in parts)
            continue
        assert len({part.shape for part in parts}) == 1
        if module in ("k_proj", "v_proj"):
            parts = parts[::kv_copies]
        dim = int(module in ("o_proj", "down_proj"))
        values, padding = torch.cat(parts, dim).tensor_split([weight.shape[dim]], dim)
        assert torch.equal(values, weight), key
        assert not padding.any(), key


def check_logits(model: LlamaModel, oracle: transformers.PreTrainedModel):
    """Check that a prefill of PROMPT and the steps after it give the logits of the oracle."""
    expected = oracle_logits(oracle, PROMPT)[6:]
    logits = DenseRunner(model).all_logits(PROMPT, 7)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0, check_stride=False)


@torch.no_grad()
def oracle_logits(model: transformers.PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """Logits [len(tokens), vocab_size] after each token."""
    return model(torch.tensor([tokens]), use_cache=False).logits[0].float()


class DenseStep:
    """A step over several sequences, whose attention keeps K and V in plain tensors. Ends with padding."""

    def __init__(self, runner: DenseRunner, rows: dict[int, list[int]]) -> None:
        self.runner = runner
        self.rows = [(row, len(tokens)) for row, tokens in rows.items()]
        tokens = [t for new in rows.values() for t in new]
        starts = [len(runner.tokens.get(row, [])) for row in rows]
        positions = [start + i for start, new in zip(starts, rows.values(), strict=True) for i in range(len(new))]
        lasts = torch.tensor([count for _, count in self.rows]).cumsum(0) - 1
        self.input_ids = torch.tensor([*tokens, 0])
        self.positions = torch.tensor([*positions, 0])
        self.logits_indices = torch.cat((lasts, torch.tensor([0])))
        for row, new in rows.items():
            runner.tokens[row] = runner.tokens.get(row, []) + new

    def linear_rope_write(self, layer, x, weight, *, rotary, bias):
        config = self.runner.model.config
        counts = (config.num_q_heads, config.num_kv_heads, config.num_kv_heads)
        qkv = linear(x, weight, bias).view(len(x.x), -1, config.head_dim)
        q, k, self._v = qkv.split_with_sizes(counts, 1)
        self._k = self._rotate(k, rotary.k_norm, rotary)
        return self._rotate(q, rotary.q_norm, rotary)

    def keep_hidden(self, hidden, *, before=None):
        pass

    def attend(self, layer, q):
        out = torch.zeros_like(q)
        first = 0
        for row, count in self.rows:
            span = slice(first, first + count)
            first += count
            keys, values = self.runner.append(layer, row, self._k[span], self._v[span])
            out[span] = self._dense(q[span], keys, values, self.runner.windows[layer])
        return out

    def _rotate(self, x, norm, rotary):
        if norm is not None:
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + rotary.norm_eps) * norm
        cos, sin = rotary.cos_sin[self.positions].chunk(2, dim=-1)
        dim = rotary.cos_sin.shape[1]
        a, b = x[..., : dim // 2], x[..., dim // 2 : dim]
        cos, sin = cos[:, None], sin[:, None]
        return torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., dim:]), dim=-1)

    @staticmethod
    def _dense(q, keys, values, window):
        distance = torch.arange(len(keys) - len(q), len(keys))[:, None] - torch.arange(len(keys))
        seen = (distance >= 0) & (distance < (window or len(keys) + 1))
        heads = (x.transpose(0, 1)[None] for x in (q, keys, values))
        return functional.scaled_dot_product_attention(*heads, attn_mask=seen, enable_gqa=True)[0].transpose(0, 1)


class DenseRunner:
    """Runs a model with dense attention over any number of sequences."""

    def __init__(self, model: LlamaModel) -> None:
        self.model = model
        self.windows = model.config.sliding_windows
        self.tokens: dict[int, list[int]] = {}
        self._cache: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def append(self, layer, row, k, v):
        old = self._cache.get((layer, row))
        new = (k, v) if old is None else (torch.cat((old[0], k)), torch.cat((old[1], v)))
        self._cache[layer, row] = new
        return new

    @torch.no_grad()
    def step(self, rows: dict[int, list[int]]) -> torch.Tensor:
        """Feed new tokens to some sequences; return logits [rows, vocab_size] after the last token of each."""
        logits = self.model(DenseStep(self, rows))
        assert logits.shape == (len(rows) + 1, self.model.config.vocab_size), "a pad row has logits too"
        assert logits.isfinite().all()
        return logits[:-1]

    def all_logits(self, tokens: list[int], prompt: int) -> torch.Tensor:
        """Logits after token `prompt - 1` and each later one: one prefill, then one token at a time."""
        steps = [tokens[:prompt], *([t] for t in tokens[prompt:])]
        return torch.cat([self.step({0: new}) for new in steps])


def byte_tokenizer(*, bos: bool = False) -> transformers.PreTrainedTokenizerFast:
    """One token per byte, so that every character beyond ASCII is split."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(BPE({char: i for i, char in enumerate(alphabet)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    if bos:
        raw.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", raw.token_to_id("<s>"))])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|endoftext|>")


def sentencepiece_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Words with a leading space that is dropped at the start of a text, and bytes for the rest, as in Llama 2."""
    words = ["▁Hello", "▁world", "▁", "s", "!"]
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    vocab |= {word: len(vocab) + i for i, word in enumerate(words)}
    raw = Tokenizer(BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw)
