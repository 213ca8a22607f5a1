"""GPTQ: round a weight column by column, and let later columns compensate the error of earlier ones on given inputs.

A row w of the weight, its integers q and its scale s should keep the row's outputs on the inputs X [n, K]:

    cost = |X w - s X q|^2 + damping |w - s q|^2 = (w - s q)^T H (w - s q),    H = X^T X + damping I  [K, K]

First pass: columns are rounded in the order `perm`. The error e of the column just rounded is compensated by the free
columns F: w_F += X_F^T h e with h = (damping I + X_F X_F^T)^-1 x. This is GPTQ's update by Hinv, in the space of the n
inputs instead of the K x K Hessian: cheaper if n < K. Then `passes` times: the best scale for the integers (only with
`refit`), and for each column the best integer while all others stay (coordinate descent).

    gptq_inverse_factors(inputs, damping) -> fp32 [K, n]

        h of every column, if the later columns are free.

    gptq_round(weight, scale, largest, perm, inputs, hinv_factors, damping, passes, refit) -> integers, scale

        weight        fp32 [N, K]
        scale         fp32 [N, 1]  > 0
        largest       7 for INT4, 127 for INT8; integers lie in -largest - 1 .. largest, ties go to even
        perm          int64 [K]    every column once: the first one to round, the second one, ...
        inputs        fp32 [K, n]  X transposed, permuted: row k holds the inputs of column perm[k]
        hinv_factors  fp32 [K, n]  from `gptq_inverse_factors`, permuted
        returns       fp32 [N, K], whole numbers, and the scale fp32 [N, 1], changed only by `refit`

Rows do not influence each other: the same bits for any number of threads and any split into multiples of 16 rows.
Source: GPTQ (arXiv 2210.17323), LDLQ (arXiv 2307.13304); the low-rank form by the matrix inversion lemma is ours.
Errors: `KernelInputError` on shapes that do not fit, and on a `perm` that names a column twice.
"""
