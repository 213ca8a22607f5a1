"""The maths of a GLM-5 forward pass in plain fp32 torch, one layer at a time."""
