"""Multiplication by a Hadamard matrix, in place, in n log n steps.

    x[r, :] <- (x[r, :] * weight) H / sqrt(n)            dim = 1
    x[:, c] <- H^T (x[:, c] * weight) / sqrt(n)          dim = 0

H = C (x) S is the Kronecker product of a core C and Sylvester's matrix S of order 2^m: n = core * 2^m, and the core is
1 or, for an n that is no power of two, Paley's of order p + 1 with a prime p = 3 mod 4 (12 for 6144 = 12 * 512).

Arguments:

    x       fp32 [rows, columns], changed; the last dimension is contiguous
    weight  fp32 [n]  factors applied first, e.g. random signs; n divides x's size along `dim`, and each run of n
                      elements is transformed by itself
    dim     0 or 1
    returns x

Source: QuaRot (arXiv 2404.00456); R. E. A. C. Paley, On orthogonal matrices (1933), first construction.
Errors: `KernelInputError` if no Hadamard matrix of this size is known to us, or if n does not divide x's size.
"""
