"""Rotary position embedding: tables of cosines and sines by position."""

import math
from collections.abc import Mapping
from typing import Any

import torch


def rope_tables(rope: Mapping[str, Any], head_dim: int, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines for positions 0 to ``num_positions - 1``.

    Computed in float32 in the same order as in transformers, so that angles agree at large positions.

    Args:
        rope: One of ``TransformerConfig.ropes``.
        head_dim: Width of a head.
        num_positions: Rows. For type ``dynamic`` at most ``max_position_embeddings``, where the type has no effect:
            beyond it, the angles of stored keys would depend on the length of the context.

    Returns:
        Two tensors, float32, shape ``[num_positions, head_dim / 2]``, on the CPU, with the attention factor of type
        ``yarn`` multiplied in.
    """
    frequencies = 1.0 / _powers(rope["rope_theta"], head_dim)
    factor = 1.0
    if rope["rope_type"] == "linear":
        frequencies = frequencies / rope["factor"]
    elif rope["rope_type"] == "llama3":
        frequencies = _llama3(frequencies, rope)
    elif rope["rope_type"] == "yarn":
        frequencies = _yarn(rope, head_dim)
        factor = _yarn_attention_factor(rope)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
    return angles.cos() * factor, angles.sin() * factor


def _powers(theta: float, head_dim: int) -> torch.Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    powers: torch.Tensor = theta**exponents
    return powers


def _llama3(frequencies: torch.Tensor, rope: Mapping[str, Any]) -> torch.Tensor:
    """Scale long wavelengths by ``factor``, keep short ones, interpolate in between."""
    original = rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    wave_lengths = 2 * math.pi / frequencies
    stretched = frequencies / rope["factor"]
    share_kept = (original / wave_lengths - low) / (high - low)
    mixed = (1 - share_kept) * stretched + share_kept * frequencies
    return torch.where(
        wave_lengths > original / low,
        stretched,
        torch.where(wave_lengths < original / high, frequencies, mixed),
    )


def _yarn(rope: Mapping[str, Any], head_dim: int) -> torch.Tensor:
    """Keep dimensions of high frequency, scale those of low frequency, with a linear ramp in between."""
    theta, original = rope["rope_theta"], rope["original_max_position_embeddings"]

    def dimension(num_turns: float) -> float:
        return head_dim * math.log(original / (num_turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dimension(rope.get("beta_fast", 32.0)), dimension(rope.get("beta_slow", 1.0))
    if rope["truncate"]:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = (last - first) or 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    share_kept = 1 - ramp
    powers = _powers(theta, head_dim)
    return 1.0 / (rope["factor"] * powers) * (1 - share_kept) + 1.0 / powers * share_kept


def _yarn_attention_factor(rope: Mapping[str, Any]) -> float:
    if "attention_factor" in rope:
        return float(rope["attention_factor"])

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(rope["factor"]) + 1.0 if rope["factor"] > 1 else 1.0

    if "mscale" in rope and "mscale_all_dim" in rope:
        return scale(rope["mscale"]) / scale(rope["mscale_all_dim"])
    return scale(1.0)
