"""Paths to conversations: files in every form that people have, read row by row.

`files.py` finds files and tells what they are, `json_rows.py` and `tables.py` read rows from the
bytes that `raw.py` gives; `formats.py` recognises what a row is by its keys, `messages.py` makes
messages of its turns, and `columns.py` says which columns are not read, and names rows that are no
supervised examples. `image_files.py` finds images, `images.py` checks and decodes them, and
`row_images.py` gives them their places in a row's text. `examples.py` is all of it for a path.
"""
