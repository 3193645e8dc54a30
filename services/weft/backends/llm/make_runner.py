"""Makes a runner whose KV cache and CUDA graphs fit into the memory of its device: ``make_runner``."""

import gc
from collections.abc import Callable

import torch

from weft.llm.config import EngineConfig, TransformerConfig
from weft.llm.graphs.cache_sizing import build_shrinking
from weft.llm.graphs.policy import GraphPolicy
from weft.llm.graphs.recorder import CudaRecorder
from weft.llm.runner import ModelRunner

_TRIAL_BLOCKS = 2


def make_runner(
    make: Callable[[int], ModelRunner],
    config: EngineConfig,
    model_config: TransformerConfig,
    draft_config: TransformerConfig | None = None,
) -> ModelRunner:
    """A runner with a cache of the configured size, and with graphs if the device has them.

    Args:
        make: Makes a runner whose cache has so many blocks.
        config: Resolved, without a number of blocks where that depends on free memory.
        model_config: The model, whose weights are loaded.
        draft_config: A draft model, likewise; None: there is none.

    Raises:
        InvalidArgumentError: The free memory of the device holds no block, or not the cache that was asked for.
    """
    if config.device == "cpu":
        return make(config.num_blocks)
    device = torch.device(config.device)
    if not config.enable_cuda_graphs:
        return make(config.with_cache(model_config, lambda: _free_bytes(device), draft_config).num_blocks)
    policy = graph_policy(config)

    def build(num_blocks: int, *, only_largest: bool = False) -> ModelRunner:
        runner = make(num_blocks)
        runner.bind_thread()
        try:
            runner.capture(policy, CudaRecorder(device), only_largest=only_largest)
        except BaseException:
            runner.close()
            raise
        return runner

    def free_beside_graphs() -> int:
        """Free memory, less what the largest graph takes; the others fit into its memory."""
        _release()
        free_bytes = _free_bytes(device)
        trial = build(_TRIAL_BLOCKS, only_largest=True)
        taken_bytes = free_bytes - _free_bytes(device)
        trial.close()
        del trial
        _release()
        return _free_bytes(device) - taken_bytes

    num_blocks = config.with_cache(model_config, free_beside_graphs, draft_config).num_blocks
    return build_shrinking(num_blocks, build, out_of_memory=torch.OutOfMemoryError, release=_release)


def graph_policy(config: EngineConfig) -> GraphPolicy:
    """Shapes of the steps of an engine: one token of each sequence, and with speculation all drafts too."""
    q_lens = (1,) if config.speculation == "none" else (1, 1 + config.num_speculative_tokens)
    return GraphPolicy(config.max_num_seqs, q_lens)


def _free_bytes(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[0])


def _release() -> None:
    """Give memory that nothing uses back to the device."""
    gc.collect()
    torch.cuda.empty_cache()
