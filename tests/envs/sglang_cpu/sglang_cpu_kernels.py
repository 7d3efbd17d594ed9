"""The native kernels that n-gram speculation calls on a CPU, written out in torch; slow, and right.

For tests only. With them SGLang's own n-gram worker drafts, verifies and accepts on a machine without its kernel
package. What each has to compute is what its callers and its Triton counterparts in sglang/kernels/ops say.
"""

from __future__ import annotations

import ctypes
from typing import Any


def copy_all_layer_kv_cache_cpu(data_ptrs: Any, strides: Any, targets: Any, sources: Any) -> None:
    """In every layer's buffer, rows `sources` to rows `targets`, as if all were read before any is written."""
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(address + row * stride, stride) for row in sources.tolist()]
        for row, data in zip(targets.tolist(), rows, strict=True):
            ctypes.memmove(address + row * stride, data, stride)


def assign_extend_cache_locs_cpu(
    req_pool_indices: Any, req_to_token: Any, starts: Any, ends: Any, out_cache_loc: Any, pool_len: int
) -> None:
    """The cache slots `[start, end)` of each request, one after the other."""
    at = 0
    for row, start, end in zip(req_pool_indices.tolist(), starts.tolist(), ends.tolist(), strict=True):
        out_cache_loc[at : at + end - start] = req_to_token[row, start:end].to(out_cache_loc.dtype)
        at += end - start


def assign_req_to_token_pool_cpu(
    req_pool_indices: Any, req_to_token: Any, starts: Any, ends: Any, out_cache_loc: Any, pool_len: int
) -> None:
    """The other way round: new cache slots, one after the other, become `[start, end)` of each request."""
    at = 0
    for row, start, end in zip(req_pool_indices.tolist(), starts.tolist(), ends.tolist(), strict=True):
        req_to_token[row, start:end] = out_cache_loc[at : at + end - start].to(req_to_token.dtype)
        at += end - start


def fill_accept_out_cache_loc_cpu(accept_index: Any, out_cache_loc: Any, accept_out_cache_loc: Any) -> None:
    """The cache slots of the accepted tokens (index -1: none), packed."""
    for at, index in enumerate(index for index in accept_index.flatten().tolist() if index >= 0):
        accept_out_cache_loc[at] = out_cache_loc[index]


def verify_tree_greedy_cpu(
    *,
    predicts: Any,
    accept_index: Any,
    accept_token_num: Any,
    candidates: Any,
    retrive_index: Any,
    retrive_next_token: Any,
    retrive_next_sibling: Any,
    target_predict: Any,
) -> None:
    """Walk each request's draft tree along the tokens that the target model would have chosen."""
    chosen = target_predict.flatten()
    for b in range(candidates.shape[0]):
        node, accepted = 0, 0
        last = int(retrive_index[b, 0])
        accept_index[b, 0] = last
        while accepted + 1 < accept_index.shape[1]:
            node = int(retrive_next_token[b, node])
            while node != -1 and int(candidates[b, node]) != int(chosen[last]):
                node = int(retrive_next_sibling[b, node])
            if node == -1:
                break
            predicts[last] = chosen[last]
            accepted += 1
            last = int(retrive_index[b, node])
            accept_index[b, accepted] = last
        predicts[last] = chosen[last]
        accept_token_num[b] = accepted


def reconstruct_indices_from_tree_mask(
    tree_mask: Any,
    verified_seq_len: Any,
    positions: Any,
    retrieve_index: Any,
    retrieve_next_token: Any,
    retrieve_next_sibling: Any,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """The tree links that a mask of ancestors stands for."""
    masks = tree_mask.flatten()[: batch_size * draft_token_num**2].reshape(batch_size, draft_token_num, draft_token_num)
    for b in range(batch_size):
        mask, length = masks[b].tolist(), int(verified_seq_len[b])
        ancestors = [[other for other in range(node) if mask[node][other]] for node in range(draft_token_num)]
        children: dict[int, list[int]] = {}
        for node, above in enumerate(ancestors):
            children.setdefault(max(above, default=-1), []).append(node)
        for node, above in enumerate(ancestors):
            positions[b * draft_token_num + node] = length + len(above)
            retrieve_index[b, node] = b * draft_token_num + node
            retrieve_next_token[b, node] = next(iter(children.get(node, [])), -1)
            parent = max(above, default=-1)
            later = [other for other in children[parent] if other > node] if parent >= 0 else []
            retrieve_next_sibling[b, node] = next(iter(later), -1)


KERNELS = {
    "sgl_kernel": (
        copy_all_layer_kv_cache_cpu,
        assign_extend_cache_locs_cpu,
        assign_req_to_token_pool_cpu,
        fill_accept_out_cache_loc_cpu,
        verify_tree_greedy_cpu,
    ),
    "sgl_kernel.speculative": (reconstruct_indices_from_tree_mask,),
}
"""By the module that SGLang imports them from."""


def install() -> None:
    """Have SGLang verify drafts on a CPU, also with the overlap schedule, in this process."""
    import wrapt

    wrapt.register_post_import_hook(teach_verification, "sglang.srt.layers.attention.torch_native_backend")
    wrapt.register_post_import_hook(allow_overlap, "sglang.srt.arg_groups.speculative_hook")


def allow_overlap(module: Any) -> None:
    """SGLang turns the overlap schedule off for speculation on a CPU, where it wins nothing; it works all the same."""
    module._disable_overlap_schedule_for_cpu = lambda server_args: None


def teach_verification(module: Any) -> None:
    """SGLang's plain torch attention does not know how to verify drafts: here it takes them for the next tokens of
    each prompt, which is what a chain of drafts (no branches) is."""
    backend = module.TorchNativeAttnBackend
    extend = backend.forward_extend

    def forward_extend(self: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool = True) -> Any:
        if not batch.forward_mode.is_target_verify():
            return extend(self, q, k, v, layer, batch, save_kv_cache)
        kept = batch.seq_lens, batch.extend_prefix_lens, batch.extend_seq_lens
        drafts = q.shape[0] // len(batch.seq_lens)
        batch.extend_prefix_lens = batch.seq_lens
        batch.extend_seq_lens = batch.seq_lens.new_full(batch.seq_lens.shape, drafts)
        batch.seq_lens = batch.seq_lens + drafts
        try:
            return extend(self, q, k, v, layer, batch, save_kv_cache)
        finally:
            batch.seq_lens, batch.extend_prefix_lens, batch.extend_seq_lens = kept

    backend.forward_extend = forward_extend
