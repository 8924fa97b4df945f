"""Triton kernels of Gemma's layers and of a serving step. Each file has one op: formula, plain-torch reference, checked wrapper.
Read `launch` first, then `activation` and `linear`.

    launching   launch, precompile
    shared      numerics, norm, tiles, packed (fp8), four_bits
    layers      embed, ple, linear, lora (adapters), activation, route, experts, fused_allreduce_norm
    attention   qkv, decode, splitkv, verify (draft tokens), prefill, paged_attention (torch)
    towers      axial_rope, ragged_attention
    step        admissions, slots (plans, decode rows), chunks (prefill rows)
    sampling    sample (formula), sampling_batch, adjust, choose, candidates (small top_k), filters, recheck (fp8 head)
    drafts      accept, clusters (a drafter's head)
    ranks       allreduce (CPU), sequence_parallel
    checks      selfcheck, inbox_check (ranks), table_check (page tables)
"""
