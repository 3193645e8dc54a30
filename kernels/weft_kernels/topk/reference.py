"""Softmax with top-k in plain torch: the CPU implementation, and the kernel's test oracle."""

import torch

_ID_BITS = 32
_LOW_WORD = (1 << _ID_BITS) - 1


def softmax_topk(x: torch.Tensor, k: int, *, log: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest probabilities of each row, best first, and their columns; the lower column on ties.

    Args:
        x: Scores, shape ``[N, V]``, float32, float16 or bfloat16. Not modified.
        k: How many, 1 to V.
        log: Whether to return log-probabilities instead.

    Returns:
        ``(probs, ids)``, both ``[N, k]``, float32 and int32. The softmax runs over the whole row, in float32.
    """
    scores = x.float()
    # One integer orders by score, then by lower column: the bits of the score, inverted for negative numbers,
    # as high bits, and the column counted from the end as low bits.
    bits = scores.contiguous().view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64) << _ID_BITS
    columns = torch.arange(x.shape[1], device=x.device)
    best = torch.topk(ordered | (_LOW_WORD - columns), k, dim=1).values
    ids = _LOW_WORD - (best & _LOW_WORD)
    logprobs = scores.gather(1, ids) - torch.logsumexp(scores, dim=1, keepdim=True)
    return (logprobs if log else logprobs.exp_()), ids.to(torch.int32)
