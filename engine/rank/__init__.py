"""The rank: one process a GPU. It decides nothing; its state is a fold over the plans and the tokens it sampled.

    worker                      the process: boot, then the loop around the runner
    builder  load  models       a rank's model, filled with its shard of the weights; its KV cache and runner
    checkpoints                 what is loaded: of the text model, its drafter, its encoders
    shard  weight  allreduce_norm  what models are made of
    runner  stages  graphs      a step: encode media, forward, sample, draft, report; replayed from CUDA graphs
    step  batch                 a step's inputs, made on the device from the plan's bytes; what the model sees of them
    slots  kv  adjustments      what lasts between steps: tokens, lengths, sampling; KV pools and page tables; logits' adjustments
    attention                   reads and writes the pages: our own ops, or FlashInfer's
    sampler  prompt_logprobs    logits to tokens and logprobs
    parallel                    the tensor-parallel group and its collectives
    compile_ahead  start_checks  step_times                      at boot
    page_check  step_clock  output_cache  upload                     helpers
"""
