"""Rounding a weight with error feedback: later columns make up for the error of the earlier ones on given inputs.

A row w of the weight, its integers q and its scale s should keep the row's outputs on the inputs X [n, K]:

    cost = |X w - s X q|^2 + damping |w - s q|^2

First, column by column in a given order, the error e of the column just rounded is fitted by the columns F that are
still free, w_F += X_F^T u e with u = (damping I + X_F X_F^T)^-1 x: GPTQ, written in the space of the n inputs, which
are fewer than the K columns, instead of that of a K x K Hessian. Then `passes` times: the best scale for the integers
(if `refit`), and for each column the best integer while all others stay (coordinate descent).

    feedback_gains(inputs, damping) -> fp32 [K, n]

        u of every column, as the columns behind it are the free ones.

    round_with_feedback(weight, scale, largest, order, inputs, gains, damping, passes, refit) -> integers, scale

        weight   fp32 [N, K]
        scale    fp32 [N, 1]  > 0
        largest  7 for INT4, 127 for INT8; integers lie in -largest - 1 .. largest, ties go to even
        order    int64 [K]    every column once: the one that is rounded first, second, ...
        inputs   fp32 [K, n]  X transposed, in that order: row k holds the inputs of column order[k]
        gains    fp32 [K, n]  from `feedback_gains`, in that order
        returns  fp32 [N, K], whole numbers, and the scale fp32 [N, 1], changed only by `refit`

Each row is treated by itself: the same bits for any number of threads and any split of the rows into multiples of 16.
Source: GPTQ (arXiv 2210.17323), LDLQ (arXiv 2307.13304); the low-rank form by the matrix inversion lemma is ours.
Errors: `KernelInputError` on shapes that do not fit, and on an order that names a column twice.
"""
