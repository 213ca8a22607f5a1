"""`python -m benchmarks.training OUT`."""

from .train import main

main()
