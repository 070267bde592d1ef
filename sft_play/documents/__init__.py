"""Documents to clean text: an optional part (`sft-play[documents]`).

`documents.py` is `make dapt-docx`: it finds documents (`files.py`), has each one read by MarkItDown or trafilatura in a
process with limits (`reader.py`), leaves repeats out, and writes rows of clean text (`text.py`).
"""
