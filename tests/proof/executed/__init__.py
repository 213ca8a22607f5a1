"""Level 4: the program that the device's compiler made, run with numpy and watched for races.

A proof of the compiler's output for our kernels, no simulator of the chip: of the machine it has what the synchronised
program is written in (memories of bytes, pipes with queues, flags), and exactly the primitives that our kernels use.
What they do is read from the open definitions, AscendNPU-IR v1.2.0 (Apache-2.0): `HIVMSynchronizationOps.td` and
`docs/.../AutoSync.md` for flags and barriers, `bishengir/lib/Template` for each called primitive (named per table).

    text        MLIR text to operations
    places      memories as bytes, and views of them
    scalars     arith, math and affine operations of the scalar pipe
    views       memref operations
    transfers   copies between GM, UB, L1 and L0C
    vectors     primitives of the vector pipe
    cube        the matrix product: L1 to L0A and L0B, L0C
    clocks      what a pipe knows to be finished; who touched which byte when
    core        one program: the scalar pipe and the queues of the others
    block       the programs of a block side by side, in several orders
    launch      a grid of blocks on torch tensors
"""
