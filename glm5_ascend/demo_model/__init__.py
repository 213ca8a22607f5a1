"""A small GLM-5 (`glm_moe_dsa`) that has learned something, and the code that made and measures it.

Importing this package loads neither torch nor transformers; its modules do so where they need them.
"""
