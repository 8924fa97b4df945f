"""Triton kernels of Gemma's layers and of a serving step.

Each file has one op: its formula, a plain-torch reference, and a checked wrapper. Read `launch` first,
then `activation` and `linear`.

    launching   launch, precompile
    shared      numerics, norm (in torch), tiles, packed (fp8), four_bits
    layers      embed, ple, linear, lora (adapters), activation, route, experts, fused_allreduce_norm
    attention   qkv, decode and splitkv, verify (draft tokens), prefill, paged_attention (in torch)
    towers      axial_rope, ragged_attention
    step        admissions, slots (plans, decode rows), chunks (prefill rows)
    sampling    sample (formula and noise), sampling_batch (inputs), adjust, choose, candidates (small top_k), filters
    drafts      accept, clusters (a drafter's head)
    ranks       allreduce (on a CPU), sequence_parallel (norms of own rows)
    checks      selfcheck (against torch), inbox_check (over ranks), table_check (page tables)
"""
