"""Triton kernels of Gemma's layers and of a serving step.

One op per file: its formula, a plain-torch reference, and a checked wrapper that the engine calls, which computes in torch where no
kernel takes its tensors. Read `launch` first, then `activation` and `linear`.

    launching   launch (every kernel starts there), precompile (before the first launch)
    shared      numerics (casts, products, online softmax), norm (RMSNorm in torch), tiles (a product's tile by shape and rows),
                packed (fp8 weights and rows), four_bits (weights of four bits)
    layers      embed, ple, linear, lora (adapters), activation, route, experts,
                fused_allreduce_norm (what ends each half of a layer)
    attention   qkv, decode and its kernel splitkv, verify (rows with drafts), prefill, paged_attention (all three in torch)
    towers      axial_rope, ragged_attention
    step        admissions (new sequences), slots (plans, decode rows), chunks (prefill rows)
    sampling    sample (formula and noise), sampling_batch (inputs), adjust, choose, candidates (small top_k), filters
    drafts      accept, clusters (a drafter's head)
    ranks       allreduce (sums on a CPU), sequence_parallel (norms of own rows, for many prompt tokens);
                inboxes are of fused_allreduce_norm and choose
    checks      selfcheck (each kernel against torch), inbox_check (over ranks), table_check (page tables of a step)
"""
