"""Fused verification in Triton, for chains on CUDA: one pass over the target's logits, one more over the emitted row.

One file per rule, each function beside the torch reference that defines it, with the same signature:

    rejection.rejection(draft, p, u, pick_u, warp)    block.block(draft, p, u, pick_u, warp)
    choice.greedy(draft, p)                           choice.coupled(draft, p, seed, requests, positions, warp)

`p.logits` may be bfloat16, float16 or float32 and unprocessed: `warp` is applied as it is loaded. Probabilities and
their sums are float32, masses of the draw int64. The draft's q needs all V columns (`q_ids` None).

A kernel and its reference may emit different tokens only where exp, log or a sum round differently across a decision;
the tests count these and confirm each in float64. Importing these modules needs Triton.
"""
