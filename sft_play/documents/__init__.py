"""Documents to clean text: an optional part (`sft-play[documents]`).

`documents.py` is `make dapt-docx`: it finds documents (`files.py`), has each one read by its kind's reader
(`docx_text.py`, `pdf_text.py`, …) in a process with limits (`reader.py`), leaves repeats out, and writes rows of clean
text (`text.py`).
"""
