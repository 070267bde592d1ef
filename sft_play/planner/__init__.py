"""Decisions before anything loads: layout, batch, precision, memory, speed. No torch. Pure but for `backend`, which
asks Unsloth's environment where Unsloth is wanted.

Read in this order: `plan.make_plan` is the whole decision; `candidates` lists the ways to run a job and chooses one;
`layout`, `batching` and `precision` are what differs between them; `memory.estimate` and `speed.throughput` predict
bytes and seconds of each; `reasons` say why; `advice` says what would fit where nothing does.

Words: a row is one sequence that is trained on, a chat, a text or several packed ones. A place is a token of a
micro-batch, padding included. A pass is one micro-batch forward and backward. A moment is a part of the step (forward,
head, backward and so on); its terms say what the bytes are for that are live then. A rank is one process, with one GPU.
"""
