"""A plain PyTorch Llama and a one-layer EAGLE-3 draft, with the weight names SGLang expects."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

MASKED = -1e9
Rotation = tuple[Tensor, Tensor]
KeyValue = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class LlamaShape:
    """The size fields of a Llama ``config.json``."""

    hidden_size: int = 192
    intermediate_size: int = 512
    num_hidden_layers: int = 24
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 32
    vocab_size: int = 512
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    def to_config(self, architecture: str) -> dict:
        """The full Hugging Face configuration of this shape."""
        fixed = {
            "architectures": [architecture],
            "model_type": "llama",
            "hidden_act": "silu",
            "bos_token_id": 0,
            "eos_token_id": 1,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        }
        return {**fixed, **asdict(self)}

    @classmethod
    def from_config(cls, config: dict) -> "LlamaShape":
        """Read the size fields back from a configuration."""
        return cls(**{name: config[name] for name in cls.__dataclass_fields__})


class RMSNorm(nn.Module):
    """Root-mean-square norm."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, states: Tensor) -> Tensor:
        return functional.rms_norm(states, (states.shape[-1],), self.weight.to(states.dtype), self.epsilon)


def rotation_tables(shape: LlamaShape) -> Rotation:
    """Cosines and sines of every position, in the half-split layout of Llama checkpoints."""
    exponents = torch.arange(0, shape.head_dim, 2).float() / shape.head_dim
    angles = torch.outer(torch.arange(shape.max_position_embeddings).float(), shape.rope_theta**-exponents)
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def rotate(states: Tensor, rotation: Rotation) -> Tensor:
    """Apply rotary positions to [batch, heads, tokens, head_dim]."""
    cosine, sine = (table.to(states.dtype) for table in rotation)
    first, second = states.chunk(2, -1)
    return states * cosine + torch.cat([-second, first], -1) * sine


class Attention(nn.Module):
    """The projections of grouped-query attention; callers bring their own masks."""

    def __init__(self, shape: LlamaShape, input_size: int) -> None:
        super().__init__()
        self.heads, self.key_heads = shape.num_attention_heads, shape.num_key_value_heads
        self.head_dim = shape.head_dim
        self.q_proj = nn.Linear(input_size, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(input_size, self.key_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(input_size, self.key_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, shape.hidden_size, bias=False)

    def project(self, states: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Scaled queries [batch, key_heads, group, tokens, dim]; keys and values [batch, key_heads, ...]."""
        batch, tokens, _ = states.shape
        queries = self.q_proj(states).view(batch, tokens, self.heads, self.head_dim).transpose(1, 2)
        keys = self.k_proj(states).view(batch, tokens, self.key_heads, self.head_dim).transpose(1, 2)
        values = self.v_proj(states).view(batch, tokens, self.key_heads, self.head_dim).transpose(1, 2)
        queries = rotate(queries, rotation) * self.head_dim**-0.5
        grouped = queries.reshape(batch, self.key_heads, -1, tokens, self.head_dim)
        return grouped, rotate(keys, rotation), values

    def merge(self, mixed: Tensor) -> Tensor:
        """Output projection of mixed values laid out like the queries."""
        batch, _, _, tokens, _ = mixed.shape
        heads = mixed.reshape(batch, self.heads, tokens, self.head_dim)
        return self.o_proj(heads.transpose(1, 2).reshape(batch, tokens, -1))


def query_key_scores(queries: Tensor, keys: Tensor) -> Tensor:
    """Scores [batch, key_heads, group, queries, keys] as one flat product per key head: fast on a CPU."""
    batch, key_heads, group, tokens, size = queries.shape
    flat = queries.reshape(batch, key_heads, group * tokens, size) @ keys.transpose(-1, -2)
    return flat.view(batch, key_heads, group, tokens, keys.shape[2])


def mix_values(weights: Tensor, values: Tensor) -> Tensor:
    """Weighted sums of the values, laid out like the queries."""
    batch, key_heads, group, tokens, keys = weights.shape
    flat = weights.reshape(batch, key_heads, group * tokens, keys) @ values
    return flat.view(batch, key_heads, group, tokens, values.shape[-1])


def causal_bias(tokens: int, keys: int, like: Tensor, lag: int = 0) -> Tensor:
    """Additive mask: a query at position p sees the keys at positions up to p - lag."""
    query_positions = torch.arange(keys - tokens, keys)[:, None]
    visible = torch.arange(keys)[None] <= query_positions - lag
    return torch.where(visible, 0.0, MASKED).to(like.dtype)


class MLP(nn.Module):
    """Gated feed-forward block."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(states)) * self.up_proj(states))


class DecoderLayer(nn.Module):
    """One Llama layer."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape, shape.hidden_size)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, states: Tensor, rotation: Rotation, cached: KeyValue | None) -> tuple[Tensor, KeyValue]:
        queries, keys, values = self.self_attn.project(self.input_layernorm(states), rotation)
        if cached is not None:
            keys, values = torch.cat([cached[0], keys], 2), torch.cat([cached[1], values], 2)
        scores = query_key_scores(queries, keys)
        if states.shape[1] > 1:
            scores = scores + causal_bias(states.shape[1], keys.shape[2], scores)
        # dtype: autocast would widen the softmax to float32, which costs more than it gives here.
        mixed = mix_values(scores.softmax(-1, dtype=scores.dtype), values)
        states = states + self.self_attn.merge(mixed)
        return states + self.mlp(self.post_attention_layernorm(states)), (keys, values)


class LlamaBody(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList([DecoderLayer(shape) for _ in range(shape.num_hidden_layers)])
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)


class Llama(nn.Module):
    """The target. ``state_dict`` names are those of transformers' LlamaForCausalLM."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = LlamaBody(shape)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        cosine, sine = rotation_tables(shape)
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)
        for name, weight in self.named_parameters():
            if weight.dim() < 2:
                continue
            deviation = 0.5 if "embed" in name else weight.shape[1] ** -0.5
            if "o_proj" in name or "down_proj" in name:
                deviation *= (2 * shape.num_hidden_layers) ** -0.5
            nn.init.normal_(weight, std=deviation)

    def rotation(self, start: int, stop: int) -> Rotation:
        """The rotary tables of a range of positions."""
        return self.cosine[start:stop], self.sine[start:stop]

    def grown(self, layer_count: int) -> "Llama":
        """A deeper copy with the same function: its new layers, evenly spread, add nothing until trained.

        Most of the training then runs at a fraction of the cost of the full depth.
        """
        old = list(self.model.layers)
        deeper = Llama(replace(self.shape, num_hidden_layers=layer_count))
        old_at = {round(index * (layer_count - 1) / (len(old) - 1)): layer for index, layer in enumerate(old)}
        for index, layer in enumerate(deeper.model.layers):
            if index in old_at:
                layer.load_state_dict(old_at[index].state_dict())
            else:
                nn.init.zeros_(layer.self_attn.o_proj.weight)
                nn.init.zeros_(layer.mlp.down_proj.weight)
        deeper.model.embed_tokens, deeper.model.norm = self.model.embed_tokens, self.model.norm
        deeper.lm_head = self.lm_head
        return deeper

    def forward(
        self,
        ids: Tensor,
        captured_layers: tuple[int, ...] = (),
        cache: list[KeyValue | None] | None = None,
        start: int = 0,
    ) -> tuple[Tensor, Tensor | None]:
        """Final normed states, and the joined outputs of ``captured_layers``. Updates ``cache`` in place."""
        rotation = self.rotation(start, start + ids.shape[1])
        states = self.model.embed_tokens(ids)
        captured = []
        for index, layer in enumerate(self.model.layers):
            states, pair = layer(states, rotation, None if cache is None else cache[index])
            if cache is not None:
                cache[index] = pair
            if index in captured_layers:
                captured.append(states)
        return self.model.norm(states), torch.cat(captured, -1) if captured else None


class DraftLayer(nn.Module):
    """The draft's only layer: attention reads the next token's embedding beside the hidden state."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        size, epsilon = shape.hidden_size, shape.rms_norm_eps
        self.self_attn = Attention(shape, 2 * size)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(size, epsilon)
        self.hidden_norm = RMSNorm(size, epsilon)
        self.post_attention_layernorm = RMSNorm(size, epsilon)

    def project(self, embeddings: Tensor, states: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of a row of slots."""
        joined = torch.cat([self.input_layernorm(embeddings), self.hidden_norm(states)], -1)
        return self.self_attn.project(joined, rotation)

    def finish(self, states: Tensor, mixed: Tensor) -> Tensor:
        """Residual attention output and feed-forward."""
        states = states + self.self_attn.merge(mixed)
        return states + self.mlp(self.post_attention_layernorm(states))


class EagleDraft(nn.Module):
    """A one-layer EAGLE-3 draft. The target's embedding is shared, as SGLang does when it loads the pair.

    Slot i holds embed(x[i+1]) and the target's captured states at i; it proposes x[i+2]. A further step feeds
    the draft its own output before the final norm in place of the target's states.
    """

    def __init__(self, shape: LlamaShape, captured_layers: tuple[int, ...]) -> None:
        super().__init__()
        if max(captured_layers) > shape.num_hidden_layers - 2:
            # SGLang captures before layer id + 1, so the last layer's output is never seen.
            raise ValueError("the last captured layer must be at most the last but one")
        self.shape = shape
        self.captured_layers = captured_layers
        self.fc = nn.Linear(len(captured_layers) * shape.hidden_size, shape.hidden_size, bias=False)
        self.midlayer = DraftLayer(shape)
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)

    def logits(self, states: Tensor) -> Tensor:
        """Next-token logits of pre-norm states."""
        return self.lm_head(self.norm(states))

    def to_config(self) -> dict:
        """Hugging Face configuration of the draft; its vocabulary is the target's."""
        shape = replace(self.shape, num_hidden_layers=1)
        return {
            **shape.to_config("LlamaForCausalLMEagle3"),
            "draft_vocab_size": shape.vocab_size,
            "target_hidden_size": shape.hidden_size,
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": list(self.captured_layers),
            },
        }


def save_weights(weights: dict[str, Tensor], config: dict, folder: Path) -> None:
    """Write ``config.json`` and ``model.safetensors``, floats rounded to bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    rounded = {}
    for name, tensor in weights.items():
        stored = tensor.detach().bfloat16() if tensor.is_floating_point() else tensor.detach()
        rounded[name] = stored.contiguous().clone()
    save_file(rounded, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def _read_weights(folder: Path) -> tuple[dict, dict[str, Tensor]]:
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    return config, {name: t.float() if t.is_floating_point() else t for name, t in weights.items()}


def load_target(folder: Path) -> Llama:
    """The target as served: weights rounded to bfloat16, computed in float32."""
    config, weights = _read_weights(folder)
    target = Llama(LlamaShape.from_config(config))
    target.load_state_dict(weights)
    return target.eval().requires_grad_(False)


def save_draft(draft: EagleDraft, folder: Path) -> None:
    """Save the draft with the vocabulary maps of the EAGLE-3 format (here the identity)."""
    vocabulary = draft.shape.vocab_size
    maps = {"d2t": torch.zeros(vocabulary, dtype=torch.long), "t2d": torch.ones(vocabulary, dtype=torch.bool)}
    save_weights({**draft.state_dict(), **maps}, draft.to_config(), folder)


def load_draft(folder: Path, target: Llama) -> tuple[EagleDraft, Tensor]:
    """A draft, and the target token id of each of its vocabulary entries."""
    config, weights = _read_weights(folder)
    shape = replace(
        LlamaShape.from_config(config),
        num_hidden_layers=target.shape.num_hidden_layers,
        vocab_size=config["draft_vocab_size"],
    )
    draft = EagleDraft(shape, tuple(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]))
    target_ids = weights.pop("d2t") + torch.arange(shape.vocab_size)
    weights.pop("t2d")
    draft.load_state_dict(weights)
    return draft.eval().requires_grad_(False), target_ids
