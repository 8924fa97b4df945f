"""The rank: one process a GPU. It decides nothing; its state follows from the plans and its sampled
tokens.

worker                      the process: boot, then the loop around the runner
builder  load  models       a rank's model, filled with its shard of the weights; its KV cache and runner
checkpoints                 of the text model, its drafter, its encoders
shard  weight  allreduce_norm  what models are made of
runner  stages  graphs      a step: encode media, forward, sample, draft, report; replayed from CUDA graphs
step  batch                 a step's inputs, made on the device from the plan's bytes
slots  kv  adjustments      state between steps: tokens, lengths, sampling; KV pools and page tables
attention                   reads and writes the pages
sampler  prompt_logprobs    logits to tokens and logprobs
parallel                    the tensor-parallel group and its collectives
compile_ahead  start_checks  step_times                      at boot
page_check  step_clock  output_cache  upload                     helpers
"""
