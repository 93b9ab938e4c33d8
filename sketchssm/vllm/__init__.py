"""Decoding of the recurrent layers of vLLM 0.26 with heads: the parts that know nothing of vLLM.

==========  =====================================================================================
module      content
==========  =====================================================================================
`settings`  how decoding with heads is switched on, and which engines are refused
`blocks`    the parts of a slot behind the state of a block of vLLM's pool, and their size
`plans`     the plan of a layer of vLLM
`batches`   which rows of a batch decode, which are prefilled, which begin anew
`decoder`   the head of one layer, and all that the layer asks of the head
==========  =====================================================================================

A head's slots are the blocks of vLLM's pool: a slot's ring, sketch and cursor stand behind the state, in the same
block. Nothing is mapped, and joining, leaving, preemption and reuse of blocks are vLLM's own.
"""
