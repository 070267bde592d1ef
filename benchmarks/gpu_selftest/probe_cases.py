"""The cases of attention that a probe runs and a plan predicts."""

MASKS = ("causal", "padding mask")
# Key and value heads beside the query's.
HEADS = {"grouped heads": 2, "equal heads": 8}
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
# Whether all batches have one shape.
ROWS = {"": False, ", one shape": True}
TOKENS, HEAD_DIM, QUERY_HEADS = 256, 64, 8
