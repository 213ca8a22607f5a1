"""This machine's CPU as the planner's hardware file: rates of memory and products, overheads of the served engine.

rates.py    copies, matrix products and fused ops at the model's shapes, in this process
served.py   first tokens and steps of `glm5-ascend serve`, over HTTP
describe.py both as a `Hardware`; the overheads by the planner's own arithmetic
"""
