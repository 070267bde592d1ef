"""Documents to clean text: an optional part (`sft-play[documents]`).

`documents.py` is `make dapt-docx`: it finds documents, has each one read by MarkItDown or trafilatura in a process with
limits (`reader.py`, which cleans and cuts their text too), leaves repeats out, and writes rows.
"""
