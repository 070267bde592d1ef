"""`python -m sft_play COMMAND …` is the same as `sft-play COMMAND …`."""

from sft_play.entry import main

if __name__ == "__main__":
    raise SystemExit(main())
