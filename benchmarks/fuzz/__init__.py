"""Random input of six kinds against the toolkit, with a verdict on each: `make fuzz N=1000 PART=yaml SEED=0`.

| part | what is made | what reads it |
|---|---|---|
| yaml | run YAMLs and overrides, mutated as text and as values | `load_config`; of a tenth a whole `plan` |
| rows | data files of every kind, mutated as bytes and as JSON | the readers, masks, `process` |
| words | command lines of every command, with make's variables | `sft_play.cli` |
| make | targets and variables | `make` itself, and the check that it asks |
| serve | HTTP requests, mutated as bytes and as bodies | the server of `make serve` |
| templates | chat templates | the sandbox, and the masks of a row |

Wrong is: an exception that is not of `sft_play.errors`, success where something was refused, a file that a refused
command left behind, more than MAX_CASE_SECONDS or MAX_CASE_BYTES. A case is made from (SEED, part, number) alone:
`make fuzz PART=yaml CASE=17 SEED=0` repeats it.
"""
