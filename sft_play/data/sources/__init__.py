"""Paths to conversations: files in every form that people have, read row by row.

`files.py` finds files, `file_kinds.py` tells what they are, `json_rows.py` and `tables.py` read their rows over the bytes
of `raw.py`; `formats.py` recognises what a row is by its keys, `messages.py` makes its turns messages, and
`other_kinds.py` names rows that are no supervised examples. `examples.py` is all of it for one path.
"""
