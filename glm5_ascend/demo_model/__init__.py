"""The small trained GLM-5 (`glm_moe_dsa`) that the package ships. `benchmarks/training/` trains it."""
