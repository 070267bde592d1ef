"""Build token rows from data files: read, count, mix, pack and split them, and cache the result.

`splits` is the way in; `build` makes the rows once, in several processes, and `stats` counts them;
`packing` joins short rows and cuts long texts; `survey` counts rows without building them, and
renders them to be shown.
"""
