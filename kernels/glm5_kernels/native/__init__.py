"""The ops in C++ (kernels/csrc): each module allocates the results of one op and calls its function."""
