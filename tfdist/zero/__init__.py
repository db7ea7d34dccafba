"""ZeRO 1 to 3: shards of optimizer state, gradients and parameters over the data parallel ranks.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models".
Stage 1 splits the optimizer's state. Stage 2 also splits gradients, wherever they are stored for long.
Stage 3 splits the parameters: those of a layer are gathered just before it runs, and then freed.
"""
