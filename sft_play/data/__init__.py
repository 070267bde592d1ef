"""Raw files → checked conversations or text → tokens with a loss mask. Heavy libraries are imported
lazily.

`sources` reads rows, `masks` makes them tokens with labels. The modules here use both:

- a run reads rows by `build/splits.py` (train, val, test), which has `build.py` make them once in
  several processes and write them as Arrow files, counts them in `stats.py`, says
  how sources are mixed, and cuts text into blocks; chats are packed by the trainer (`packing.py`);
- `make check` reads the same counts (without a tokenizer those of `build/survey.py`) and judges
  them (`checks.py`);
- `make preview` picks rows and shows their tokens (`preview.py`);
- `make process` and `style` write files (`process.py`, through `managed_outputs.py`), and leave out
  rows that are nearly the same (`near_duplicates.py`);
- `make new` asks what a person's data are (`infer_dataset.py`);
- a plan asks for the rough size of the data (`build/survey.py`), before anything is tokenised.
"""
