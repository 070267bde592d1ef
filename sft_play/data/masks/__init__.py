"""Conversations to token rows with a loss mask, through the chat template.

From the template to the tokens:

- `template.py` renders a conversation as transformers does, in the process of `sandbox.py`, which
  has limits;
- `fitted_template.py` learns once what the template does, by probe conversations: the form of
  messages that it takes, and what ends its turns;
- `turns.py` finds the assistant's turns of a row and verifies them, by a marked copy of the
  row, or of an earlier row of its shape;
- `render.py` makes the turns labels: `tokenizer.py` tokenises, and keeps special tokens in the
  data's texts from becoming control tokens; `token_row.py` is the result;
- `rendered_chats.py` reads texts that are rendered chats already back as messages.
"""
