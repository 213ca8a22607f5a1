"""The ops in C++ (kernels/csrc), by its groups: each op allocates its results and calls its function."""
