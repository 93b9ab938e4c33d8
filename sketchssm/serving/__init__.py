"""What a plugin for any serving engine needs, in PyTorch: no module imports an engine.

==============  ========================================================================================
module          content
==============  ========================================================================================
`batches`       rows of a batch that decode, that are prefilled, and that begin a request
`blocks`        the parts of a slot behind the state of a block of the engine's pool, and their size
`decoder`       the head of one layer, and its operations for the layer
`errors`        what heads measure of their sketches, as lines of the engine's log
`following`     rows that are followed while they decode, for `recording`
`inputs`        from a layer's activations to q, k, v, g and beta; `kernels` is the same on a GPU
`layer_record`  the sums of one layer, for `recording`; `updates` are those that the host does not wait for
`plans`         the plans of a model, and the plan of a layer by the engine's name of it
`recording`     calibration from the tokens that an engine serves
==============  ========================================================================================
"""
