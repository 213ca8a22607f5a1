"""Rounding weights to integers: the best scale, the integers, and what a search wants to see of them.

Every function takes W fp32 [N, K], a row per output channel, and treats each row by itself: the same bits for any
number of threads. `largest` is 7 for INT4, 127 for INT8; integers lie in -largest - 1 .. largest, ties go to even.

    ssz_scale(weight, largest, steps, grid) -> fp32 [N, 1]

        The scale at which rounding loses least. For fixed integers q the best scale is s = sum(w q) / sum(q^2), and the
        squared error is then less than sum(w^2) by sum(w q)^2 / sum(q^2). Starts from the best of the refitted scales
        `grid * max|w| / largest`, then alternates integers and scale while that gain grows, at most `steps` times.
        A row of zeros has scale 1.

    round_rows(weight, scale, bits, parts) -> stored, sums, squared_error, squared_weight

        stored  int8 [N, K]; for 4 bits [N / 2, K], row 2i in the low nibble, row 2i + 1 in the high one
        sums    fp32 [N, parts]: sum of the integers in each of `parts` equal runs of columns; exact
        and the float sums of (integer * scale - w)^2 and w^2

    fake_round(weight, factor, largest, steps) -> fp32 [N, K]

        What W diag(factor) becomes: integers times scale. The scale is the min-max one; with `steps` > 0 refitted as in
        `ssz_scale`. factor fp32 [K].

Source: msModelSlim 26.1.0 (`ssz`, the alternation; `w4a8_pack_int4`, the packing); the closed form of the gain is ours.
Weights are finite: the quantizer refuses others where it reads them.
Errors: `KernelInputError` on shapes and dtypes that do not fit.
"""
