"""Conversations to token rows with a loss mask, through the chat template.

From the template to the tokens:

- `template.py` renders a conversation as transformers does, inside `template_limits.py`;
- `probes.py` learns once what the template does: the form of messages that it takes (`fitted_template.py`) and what
  ends its turns (`turn_ends.py`);
- `turns.py` finds the assistant's turns of a row and verifies them, with a marked copy of it (`marked_copy.py`,
  `skeletons.py`), or with that of its shape;
- `render.py` makes the turns labels: `tokenizer.py` and `words.py` tokenise, `special_tokens.py` keeps special tokens
  in the data's texts from becoming control tokens, `token_row.py` is the result.
"""
