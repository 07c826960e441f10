"""A plain reference of recovering a sibling's state, on a Llama-like checkpoint and the CPU.

Shared keys are turned from where they were computed, values kept; own tokens, and those shared
ones that deviate most at a check layer (the rule of CacheBlend), are computed anew. Weights and
arithmetic are float32; keys and values are rounded to bfloat16 before anything reads them, as in
an engine whose cache is bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM

from kmesh.kernels.rotary import Rotary

#: Up to here all tokens are computed, if some of the shared ones are to be.
CHECK_LAYER = 1


@dataclass(frozen=True)
class Computed:
    """What a prompt's prefill gave.

    Attributes:
        state: [layer, plane, head, token, dim], bits of bfloat16.
        tokens: how many were computed in all layers.
        log_probabilities: of the next token, float32.
    """

    state: npt.NDArray[np.uint16]
    tokens: int
    log_probabilities: torch.Tensor


class Reference:
    """One model.

    Args:
        causal: a language model of transformers, Llama-, Qwen2- or Qwen3-like, in float32.

    Raises:
        kmesh.errors.UnsupportedError: its keys can't be turned by a distance.
    """

    def __init__(self, causal: Any) -> None:
        self._causal = causal
        self._model: Any = causal.model
        config: Any = self._causal.config
        self.layers: int = config.num_hidden_layers
        self.heads: int = config.num_key_value_heads
        self.head_dim: int = self._model.layers[0].self_attn.head_dim
        self.rope: dict[str, Any] = dict(config.rope_parameters)
        self.rotary = Rotary.from_parameters(
            self.rope, head_dim=self.head_dim, interleaved=False, dtype="bfloat16"
        )

    @classmethod
    def load(cls, path: str) -> Reference:
        """A checkpoint's, by its path or its name in a hub."""
        return cls(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))

    def prefill(self, tokens: npt.NDArray[np.uint32]) -> Computed:
        """Everything is computed."""
        shape = (self.layers, 2, self.heads, len(tokens), self.head_dim)
        everything = np.ones(len(tokens), dtype=np.bool_)
        return self.recover(tokens, np.zeros(shape, dtype=np.uint16), everything, 0)

    def recover(
        self,
        tokens: npt.NDArray[np.uint32],
        cached: npt.NDArray[np.uint16],
        own: npt.NDArray[np.bool_],
        anew: int,
    ) -> Computed:
        """A prompt of which all but its own tokens have state already.

        Args:
            cached: as ``Computed.state``, keys turned to this prompt's positions; what it has
                for own tokens is not looked at.
            own: which tokens are. The last one has to be.
            anew: how many of the others are computed all the same.
        """
        with torch.inference_mode():
            return self._recover(tokens, cached, own, anew)

    def _recover(
        self,
        tokens: npt.NDArray[np.uint32],
        cached: npt.NDArray[np.uint16],
        own: npt.NDArray[np.bool_],
        anew: int,
    ) -> Computed:
        state = torch.from_numpy(cached.view(np.int16)).clone().view(torch.bfloat16)
        keep = torch.from_numpy(own)
        active = torch.arange(len(tokens)) if anew else keep.nonzero()[:, 0]
        ids = torch.from_numpy(tokens.astype(np.int64))
        hidden = self._model.embed_tokens(ids[active])
        angles = self._model.rotary_emb(hidden[None], torch.arange(len(tokens))[None])
        early: list[torch.Tensor] = []
        for number, layer in enumerate(self._model.layers):
            queries, keys, values = self._project(layer, hidden, active, angles)
            if anew and number == CHECK_LAYER:
                keep = self._choose(values, state[number, 1], keep, anew)
                active = keep.nonzero()[:, 0]
                queries, keys, values = (one[:, active] for one in (queries, keys, values))
                hidden = hidden[active]
                for before, whole in enumerate(early):
                    state[before][:, :, active] = whole[:, :, active]
            if anew and number < CHECK_LAYER:
                plane = torch.stack((keys, values))
                early.append(plane)
            else:
                plane = state[number]
                plane[0][:, active], plane[1][:, active] = keys, values
            hidden = self._finish(layer, hidden, self._attend(queries, plane, active))
        last = self._causal.lm_head(self._model.norm(hidden[-1:]))[0]
        bits = state.view(torch.int16).numpy().view(np.uint16)
        return Computed(bits, len(active), torch.log_softmax(last.float(), dim=-1))

    def _project(
        self, layer: Any, hidden: torch.Tensor, active: torch.Tensor, angles: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, and keys and values as a cache of bfloat16 holds them: [head, token, dim]."""
        attention = layer.self_attn
        normed = layer.input_layernorm(hidden)
        queries, keys, values = (
            getattr(attention, name)(normed).view(len(active), -1, self.head_dim)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        if hasattr(attention, "q_norm"):
            queries, keys = attention.q_norm(queries), attention.k_norm(keys)
        queries, keys, values = (one.transpose(0, 1) for one in (queries, keys, values))
        cosines, sines = (one[0, active] for one in angles)
        queries, keys = (one * cosines + _half(one) * sines for one in (queries, keys))
        return queries, keys.to(torch.bfloat16), values.to(torch.bfloat16)

    def _attend(
        self, queries: torch.Tensor, plane: torch.Tensor, active: torch.Tensor
    ) -> torch.Tensor:
        """Of the active tokens to all before them, [token, head · dim]."""
        group = len(queries) // self.heads
        keys, values = (one.float().repeat_interleave(group, dim=0) for one in plane)
        scores = queries @ keys.transpose(1, 2) * self.head_dim**-0.5
        later = torch.arange(keys.shape[1])[None, :] > active[:, None]
        weights = torch.softmax(scores.masked_fill(later, float("-inf")), dim=-1)
        return (weights @ values).transpose(0, 1).reshape(len(active), -1)

    def _finish(self, layer: Any, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        hidden = hidden + layer.self_attn.o_proj(attended)
        out: torch.Tensor = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return out

    def _choose(
        self, values: torch.Tensor, cached: torch.Tensor, own: torch.Tensor, anew: int
    ) -> torch.Tensor:
        """Own tokens and the ``anew`` others whose values deviate most."""
        deviation = (values.float() - cached.float()).square().sum(dim=(0, 2))
        deviation[own] = -1
        keep = own.clone()
        keep[deviation.topk(anew).indices] = True
        return keep


def _half(rows: torch.Tensor) -> torch.Tensor:
    """(a, b) to (-b, a), where a and b are the halves of a row."""
    a, b = rows.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def divergence(one: Computed, other: Computed) -> float:
    """Kullback-Leibler divergence of the next token, of ``other`` from ``one``, in nats."""
    difference = one.log_probabilities - other.log_probabilities
    return float((one.log_probabilities.exp() * difference).sum())
