"""What the scripts beside this folder share; `python benchmarks/SCRIPT.py` finds it as `tools`."""
