"""Decisions before anything loads: layout, batch, precision, memory, speed. No torch. Pure but for
`calibration`, which remembers runs in the cache, and `backend` and `kernels`, which look for
packages.

Read in this order: `decide.make_plan` is the whole decision, and `plan` what comes of it, with the
disk that checkpoints take; `candidates` lists the ways to run a job and chooses one; `layout`,
`batching` and `precision` are what differs between them; `memory.estimate` and `speed` predict
bytes and seconds of each; `explain` says why; `advice` says what would fit where nothing does.
`kernels` says which kernels run, and `pass_work` what a pass moves and starts; `batching` also cuts
rows by tokens.

Words: a row is one sequence that is trained on, a chat, a text or several packed ones. A
micro-batch has padded tokens; a micro step is one micro-batch forward and backward. A phase is a
part of the step (forward, head, backward and so on); its terms say what the bytes are for that are
live then. A rank is one process, with one GPU.
"""
