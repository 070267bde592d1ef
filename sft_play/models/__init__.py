"""Models: what a `config.json` means, in numbers of elements. No torch, no weights.

`config_json` finds the file and lays out its blocks by `families`, which has the fields of each;
`shape` is the result.
"""
