"""Documents to clean text: an optional part (`sft-play[documents]`).

`documents.py` is `make dapt-docx`: it finds documents (`files.py`), has each read in a process with limits (`reader.py`)
by the reader of its kind (`docx_text.py`, `pdf_text.py`, …), leaves repeats out and writes rows (`text.py`).
"""
